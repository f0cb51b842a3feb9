#!/usr/bin/env bash
# transformers 5.24.0: T5Config(tie_word_embeddings=False) makes a model whose head is the token table.
#
# One would guess that the flag decides, as in other families: T5 v1.1 was released with a head of its own, and its
# config.json says "tie_word_embeddings": false. The configuration has True afterwards, and the model shares the weight:
# T5 v1.1 XXL counts 11,003,736,064 parameters in place of the checkpoint's 11,135,332,352.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
"$work/venv/bin/python" - <<'PY'
import torch
import transformers

SIZES = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu")
config = transformers.T5Config(**SIZES, tie_word_embeddings=False)
model = transformers.T5ForConditionalGeneration(config)
shared = model.lm_head.weight is model.shared.weight
print("transformers", transformers.__version__, "asked for False, has", config.tie_word_embeddings, "shared", shared)
xxl = dict(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
with torch.device("meta"):
    whole = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**xxl, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    )
count = sum(parameter.numel() for parameter in whole.parameters())
print(f"T5 v1.1 XXL: {count:,} parameters, {count + 32128 * 4096:,} with a head of its own")
assert count == 11_003_736_064
assert config.tie_word_embeddings is True
assert shared
PY
