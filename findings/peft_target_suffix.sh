#!/usr/bin/env bash
# PEFT 0.21.2: target_modules=["output.dense"] on BERT adapts attention.output.dense too.
#
# One would guess that a dotted name means the feed-forward's output map of each block, layer.0.output.dense. PEFT
# compares the ends of names, and attention.output.dense ends so as well: twice the maps are adapted, without a word. A
# file that should name one of the two must list whole names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0 peft==0.21.2
"$work/venv/bin/python" - <<'PY'
import peft
import transformers

SIZES = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def adapted(target):
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target]))
    names = (name for name, _ in model.named_parameters() if ".lora_A" in name)
    return sorted(name.partition("layer.0.")[2].partition(".lora_A")[0] for name in names)


short, whole = adapted("output.dense"), adapted("encoder.layer.0.output.dense")
print("peft", peft.__version__, short, whole)
assert short == ["attention.output.dense", "output.dense"]
assert whole == ["output.dense"]
PY
