#!/usr/bin/env bash
# transformers 5.24.0, Falcon with alibi=True: its eager attention adds the positions' bias twice.
#
# One would guess that attn_implementation="eager" and "sdpa" are two ways to compute one function. For a Falcon without
# ALiBi they are (1.8e-07 apart). With ALiBi the mask already holds alibi / sqrt(head_dim), and the eager path adds
# alibi / sqrt(head_dim) once more: the logits of equal weights differ by 1.3e-02, of at most 0.71. With all scores 0,
# a head's slope is read off the probabilities of two neighbouring keys: eager has twice sdpa's, slope / sqrt(head_dim).
# Falcon divides the slopes by sqrt(head_dim) at all, which BLOOM does not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
"$work/venv/bin/python" - <<'PY'
import torch
import transformers

SIZES = dict(vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, multi_query=False)
IDS = torch.arange(8)[None]


def model(alibi, kind):
    torch.manual_seed(0)
    config = transformers.FalconConfig(**SIZES, alibi=alibi, attn_implementation=kind, bos_token_id=1, eos_token_id=2)
    return transformers.FalconForCausalLM(config).eval()


def apart(alibi):
    eager, sdpa = model(alibi, "eager"), model(alibi, "sdpa")
    sdpa.load_state_dict(eager.state_dict())
    with torch.no_grad():
        return float((eager(IDS).logits - sdpa(IDS).logits).abs().max())


eager = model(True, "eager")
for name, parameter in eager.named_parameters():
    if "query_key_value" in name:
        torch.nn.init.zeros_(parameter)
with torch.no_grad():
    probs = eager(IDS, output_attentions=True).attentions[0][0, 0]
slope = float(torch.log(probs[5, 5] / probs[5, 4]))
print("transformers", transformers.__version__)
print(f"largest difference of logits: without ALiBi {apart(False):.1e}, with it {apart(True):.1e}")
print(f"head 0's slope is 0.25; / sqrt(16) = 0.0625; eager's probabilities have {slope:.4f}")
assert apart(False) < 1e-5 < 1e-3 < apart(True)
assert abs(slope - 2 * 0.25 / 16**0.5) < 1e-3
PY
