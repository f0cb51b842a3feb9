#!/usr/bin/env bash
# transformers 5.24.0: a Mistral's config.json without the key sliding_window has a window of 4,096 tokens.
#
# One would guess that a key that is not there switches nothing on: in Llama, Qwen2, Phi-3 and StarCoder2 no key is no
# window. MistralConfig's default is 4096, so that "sliding_window": null and no such key are two models. A file that was
# cleaned of its null values attends to 4,096 keys, and says so nowhere.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json

import transformers

SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)


def window(kind, **more):
    with open("config.json", "w") as file:
        json.dump({"model_type": kind, **SIZES, **more}, file)
    return getattr(transformers.AutoConfig.from_pretrained("."), "sliding_window", None)


found = {
    "mistral, no key": window("mistral"),
    "mistral, null": window("mistral", sliding_window=None),
    **{f"{kind}, no key": window(kind) for kind in ("llama", "qwen2", "starcoder2")},
}
print("transformers", transformers.__version__, found)
assert found.pop("mistral, no key") == 4096
assert set(found.values()) == {None}
PY
