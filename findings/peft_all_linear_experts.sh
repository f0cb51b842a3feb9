#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: all-linear reaches experts and routers, and passes over dense feed-forwards.
#
# One would guess that target_modules="all-linear" adapts every nn.Linear but the head, with rank r, in any model. In
# transformers 5 experts are stacked parameters and the router is a module of its own. Of models whose experts were
# nn.Linear before, PEFT adapts both, gives the stack of gate and up the rank 2r, warns that this rank was ignored, and
# then adapts neither dense blocks' gate, up and down, which are nn.Linear, nor those of shared experts. Qwen2-MoE, after
# which the table of names is called, is not one of these models.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0 peft==0.21.2
cat > "$work/adapters.py" <<'PY'
import warnings

import peft
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, RANK = 4, 2
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, moe_intermediate_size=24, num_experts_per_tok=2, pad_token_id=0)
models = {
    "qwen3_moe": dict(num_experts=EXPERTS, head_dim=8),
    "glm4_moe": dict(n_routed_experts=EXPERTS, n_shared_experts=1, first_k_dense_replace=1, head_dim=8),
    "qwen2_moe": dict(num_experts=EXPERTS, shared_expert_intermediate_size=24),
}
found, said = {}, set()
for name, own in models.items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **own))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    said |= {str(one.message)[:52] for one in heard if "rank_pattern" in str(one.message)}
    ranks = {}
    for at, one in adapted.named_parameters():
        if ".lora_A." in at and ".mlp." in at:
            key = at.partition(".layers.")[2].partition(".lora_A.")[0]
            ranks[key] = one.shape[0] // (EXPERTS if ".experts" in key else 1)
    found[name] = ranks
    print(f"{name}: rank of each adapter of the feed-forward: {ranks}")
print(f"peft {peft.__version__}, transformers {transformers.__version__}: warned {sorted(said)}")
stacks = {"mlp.gate": RANK, "mlp.experts.base_layer": 2 * RANK, "mlp.experts": RANK}
assert found["qwen3_moe"] == {f"{layer}.{name}": rank for layer in (0, 1) for name, rank in stacks.items()}
assert found["glm4_moe"] == {f"1.{name}": rank for name, rank in stacks.items()}
shared = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")] + ["mlp.shared_expert_gate"]
assert found["qwen2_moe"] == {f"{layer}.{name}": RANK for layer in (0, 1) for name in shared}
assert said == {"The following rank_pattern keys did not match any ta"}
PY
cd "$work" && "$work/venv/bin/python" "$work/adapters.py" 2>/dev/null
