#!/usr/bin/env bash
# transformers 5.24.0: sliding_window=None is "no window" in six families, and an error at the first forward in four.
#
# One would guess that null turns windows off in every family that has the key. Mistral, Qwen2, Qwen3, Phi-3, StarCoder2
# and SmolLM3 then read all tokens. Ministral, Gemma 2, Gemma 3 and Command R7B accept the configuration and build the
# model; forward raises TypeError where it makes its cache, or ValueError where it makes its mask. It does so even if
# layer_types are all full_attention. With layer_types alone, and the class's own window, they run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
"$work/venv/bin/python" - <<'PY'
import torch
import transformers

SIZES = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
IDS = torch.arange(8)[None]
OFF = ("Mistral", "Qwen2", "Qwen3", "Phi3", "Starcoder2", "SmolLM3")
RAISES = {"Ministral": "", "Gemma2": "", "Gemma3Text": "Gemma3", "Cohere2": ""}


def forward(family, model="", use_cache=True, **more):
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    built = getattr(transformers, f"{model or family}ForCausalLM")(config).eval()
    try:
        with torch.no_grad():
            built(IDS, use_cache=use_cache)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return "runs"


print("transformers", transformers.__version__)
NULL, FULL = {"sliding_window": None}, {"layer_types": ["full_attention"] * 2}
off = {family: forward(family, **NULL) for family in OFF}
raises = {family: [forward(family, model, cache, **NULL) for cache in (True, False)] for family, model in RAISES.items()}
both = {family: forward(family, model, **NULL, **FULL) for family, model in RAISES.items()}
full = {family: forward(family, model, **FULL) for family, model in RAISES.items()}
print("sliding_window=None:", off)
print("the same, with a cache and without:", raises)
print("and layer_types all full_attention:", both)
print("layer_types alone:", full)
assert set(off.values()) == {"runs"} == set(full.values())
assert all(set(found) <= {"TypeError", "ValueError"} for found in raises.values())
assert set(both.values()) == {"ValueError"}
PY
