"""A resumed run is the end of the run without a break, bit for bit, whatever is trained and however it was saved."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from family_configs import CONFIGS
from random_configs import drawn
from saved import WAYS, assert_goes_on, resumed, saved

from zerosim.config import RunConfig
from zerosim.config.parts.reduction import COMPRESSIONS
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import OutOfMemory, RankFailed
from zerosim.optim import paging
from zerosim.train.run import Experiment
from zerosim.train.world import world_of

TINY: dict[str, Any] = dict(ranks=2, stage=2, layers=2, hidden=8, heads=2, seq=6, micro_batch=1, steps=4)
LLAMA: dict[str, Any] = dict(model="llama", heads=4, kv_heads=2, hidden=16)
LARGE: dict[str, Any] = dict(layers=1, hidden=64, vocab=128)
"""Tensors of more than 4,096 elements, of which 8-bit optimizers keep codes."""
FP32: dict[str, Any] = dict(precision="bf16", grad_dtype="fp32")
OVERFLOWS: dict[str, Any] = dict(precision="fp16", initial_scale_power=17, hysteresis=1, loss_scale_window=1)
"""The first step overflows; the scale falls, and doubles again after each step that does not."""
TWO_BY_TWO: dict[str, Any] = dict(ranks=4, ranks_per_node=2, stage=3)
EXPERTS: dict[str, Any] = dict(LLAMA, seq=8, experts=4, top_k=2, expert_ffn=12)
AT = {"sophia": 5}
"""After how many steps a case is saved, if not after 2."""

OF_OPTIMIZERS: dict[str, dict[str, Any]] = {name: dict(optimizer=name, ranks=3) for name in OPTIMIZERS} | {
    "sophia": dict(optimizer="sophia", steps=12, layers=1),  # estimates at steps 1 and 11
    "adam8bit": dict(LARGE, optimizer="adam8bit", ranks=3),
    "adam8bit-torchao": dict(LARGE, optimizer="adam8bit-torchao", ranks=3),
    "sgd": dict(optimizer="sgd", momentum=0.9, nesterov=True),
}
OF_COMPRESSIONS: dict[str, dict[str, Any]] = {
    name: dict(FP32, stage=1, compress=name) for name in COMPRESSIONS if name != "none"
} | {
    "top-k": dict(FP32, compress="top-k", compress_ratio=0.1),
    "random-k": dict(FP32, compress="random-k", compress_ratio=0.1, stage=3),
    "dgc": dict(FP32, stage=1, compress="dgc", compress_ratio=0.1, compress_warmup=3, optimizer="sgd", momentum=0.9),
    "powersgd": dict(FP32, stage=0, compress="powersgd", compress_rank=2, compress_warmup=1),
    "onebit-adam": dict(FP32, stage=0, compress="onebit-adam", compress_warmup=1),
}
CASES: dict[str, dict[str, Any]] = {
    **OF_OPTIMIZERS,
    "adafactor on owners": dict(optimizer="adafactor", partition="owner", ranks=3),
    "adam8bit with tp": dict(LARGE, optimizer="adam8bit", ranks=4, tp=2),
    "muon at stage 3": dict(optimizer="muon", stage=3, ranks=3),
    "adafactor-hf with momentum": dict(optimizer="adafactor-hf", momentum=0.9),
    "lazy states": dict(lazy_states=True, stage=3),
    # precision
    "fp32": dict(precision="fp32"),
    "fp64": dict(precision="fp64", clip_norm=0.1),
    "bf16": dict(precision="bf16", master_init="exact"),
    "fp16": dict(precision="fp16"),
    "fp16 that overflows": OVERFLOWS,
    "fp16 that overflows at stage 3": dict(OVERFLOWS, stage=3, ranks=3, clip_norm=0.5),
    "nearest": dict(precision="bf16-pure"),
    "stochastic": dict(precision="bf16-pure", rounding="stochastic", stage=3),
    "kahan": dict(precision="bf16-pure", rounding="kahan", stage=1, ranks=3),
    "schedule": dict(schedule="cosine", warmup=3, min_lr=1e-5),
    # who holds what
    **{f"stage {stage}": dict(stage=stage, ranks=3, accumulate=2) for stage in range(4)},
    **{f"owner at stage {stage}": dict(stage=stage, ranks=3, partition="owner") for stage in (1, 2, 3)},
    "one rank": dict(ranks=1, stage=0),
    "buckets": dict(stage=3, bucket_bytes=64, ranks=3),
    "replicas": dict(ranks=4, dp_replicate=2, stage=3),
    "replicas of owners": dict(ranks=4, dp_replicate=2, stage=1, partition="owner"),
    "tp": dict(ranks=4, tp=2, stage=3, dropout=0.1),
    "tp of a padded table": dict(ranks=4, tp=2, stage=1, vocab=257, pad_vocab=True),
    "tp of few key heads": dict(LLAMA, ranks=4, tp=4, stage=0),
    "sequence parallel": dict(ranks=4, tp=2, stage=1, sequence_parallel=True, keep_gathered=True),
    "pp": dict(ranks=4, pp=2, accumulate=3, stage=1),
    "interleaved": dict(ranks=4, pp=2, pipeline="interleaved", accumulate=4, layers=4, tie_embeddings=False),
    "zb-h1": dict(ranks=4, pp=2, pipeline="zb-h1", accumulate=3, stage=3),
    "zb-v": dict(ranks=2, pp=2, pipeline="zb-v", accumulate=5, layers=4, stage=0),
    "tp and pp": dict(ranks=8, pp=2, tp=2, accumulate=2, stage=2),
    "cp": dict(LLAMA, ranks=4, cp=2, seq=8, stage=3),
    "cp and dropout": dict(ranks=2, cp=2, seq=8, dropout=0.2, context="allgather"),
    "ulysses": dict(LLAMA, ranks=4, cp=2, seq=8, context="ulysses", stage=1),
    "experts": dict(EXPERTS, bias_rate=0.05, aux_loss=0.01, z_loss=0.001, ranks=2),
    "ep": dict(EXPERTS, ranks=4, ep=2, bias_rate=0.05, stage=3),
    "ep and tp": dict(EXPERTS, ranks=4, ep=2, tp=2, etp=1, sequence_parallel=True, bias_rate=0.05, stage=1),
    "ep and pp": dict(EXPERTS, ranks=4, ep=2, pp=2, accumulate=3, bias_rate=0.05, stage=1),
    "experts on owners": dict(EXPERTS, ranks=4, ep=2, optimizer="muon", aux_loss=0.01),
    "by module": dict(stage=3, gather="module", prefetch=2, ranks=3),
    "tiles": dict(stage=3, gather="module", tiles=2),
    "tiles of 8-bit states": dict(LARGE, optimizer="adam8bit", stage=3, gather="module", tiles=2),
    "small parameters resident": dict(stage=3, persistent_numel=100),
    "hpZ": dict(TWO_BY_TWO, secondary_shard=2),
    "qwZ": dict(LARGE, ranks=2, stage=3, quantized_weights=True),
    "qgZ": dict(TWO_BY_TWO, quantized_gradients=True),
    "hpZ, qwZ and qgZ": dict(
        TWO_BY_TWO, hidden=64, seq=8, vocab=128, secondary_shard=2, quantized_weights=True, quantized_gradients=True
    ),
    "MiCS": dict(TWO_BY_TWO, hierarchical_gather=True),
    # what is trained
    "frozen block": dict(freeze="h.0", stage=3, ranks=3),
    "lora": dict(lora_rank=2, lora_dropout=0.2, stage=3),
    "lora with tp": dict(lora_rank=2, lora_target="all-linear", ranks=4, tp=2),
    "lora over nf4": dict(LLAMA, lora_rank=2, base="nf4", stage=3, ranks=3),
    "lora over nf4, whole scales": dict(LLAMA, lora_rank=2, base="nf4", stage=3, whole_scales=True),
    "lora over nf4 with tp": dict(LLAMA, hidden=32, lora_rank=2, lora_target="all-linear", base="nf4", ranks=4, tp=2),
    "lora over gptq": dict(LLAMA, hidden=32, lora_rank=2, base="gptq", stage=3),
    "autocast": dict(lora_rank=1, adapter_dtype="fp32", autocast="bf16", stage=3),
    "whole adapters": dict(lora_rank=2, adapter_shards="whole", adapter_dtype="fp32", recipe="fsdp1", stage=3),
    "dropout": dict(dropout=0.2, recompute="full"),
    "mlp": dict(model="mlp", heads=None, seq=2),
    "flat": dict(model="flat", layers=None, hidden=None, heads=None, params=1001, units=3, ranks=3),
    "llama": dict(LLAMA, tie_embeddings=True, stage=3),
    # gradients and where states are
    **{f"compress {name}": fields for name, fields in OF_COMPRESSIONS.items()},
    "warm-up that crosses the save": dict(OF_COMPRESSIONS["powersgd"], compress_warmup=3),
    "warm-up of 1-bit Adam that crosses the save": dict(OF_COMPRESSIONS["onebit-adam"], compress_warmup=3, ranks=3),
    "residuals at stage 3": dict(FP32, compress="int4", compress_block=4, stage=3, ranks=3),
    "residuals with pp": dict(FP32, compress="top-k", compress_ratio=0.1, ranks=4, pp=2, accumulate=2),
    "residuals of replicas": dict(FP32, compress="int8", ranks=4, dp_replicate=2),
    "states on the host": dict(offload="optimizer=host"),
    "all on the host": dict(offload="optimizer=host,params=host", stage=3, prefetch=1, ranks=3),
    "states on drives": dict(offload="optimizer=nvme", stage=1),
    "all on drives": dict(offload="optimizer=nvme,params=nvme", stage=3, ranks=3),
    "delayed update": dict(offload="optimizer=host", delayed_update=1),
    "delayed update at stage 3": dict(offload="optimizer=nvme,params=nvme", delayed_update=1, stage=3, ranks=3),
    "delayed update that begins after the save": dict(offload="optimizer=host", delayed_update=3),
    "delayed update of gradients that overflow": dict(OVERFLOWS, offload="optimizer=host", delayed_update=1, steps=5),
    "paged states": dict(optimizer="adamw", paged_states=True, stage=1, capacity=60_000),
    "optimizer in backward": dict(optimizer_in_backward=True, stage=3),
    "recipe ddp": dict(recipe="ddp", stage=0, ranks=3),
    "recipe fsdp2": dict(recipe="fsdp2", stage=3, ranks=3),
    "recipe deepspeed": dict(recipe="deepspeed", stage=2, ranks=3),
    "recipe megatron": dict(recipe="megatron", stage=1, ranks=4, tp=2),
    "arena": dict(allocator="arena", capacity=10**7, stage=3),
    # what is read
    "documents": dict(LLAMA, documents="3", attention="flash", stage=3),
    "t5": dict(model="t5", heads=None, layers=None, hidden=None, seq=8),
    "bert": dict(model="bert", heads=4, hidden=16, seq=20),
}
BITS = [
    (name, how)
    for at, (name, fields) in enumerate(CASES.items())
    for how in ("sharded", "async" if at % 2 or "offload" in fields else "gathered")
]
"""Each case is saved sharded, and in turn in one of the other ways."""


def config_of(fields: Mapping[str, Any], folder: Path) -> RunConfig:
    """The run of a case; a family's files and a node's drives are in a folder of its own."""
    fields = {**TINY, **fields}
    if fields.get("model") == "t5":
        (folder / "config.json").write_text(json.dumps(T5), "utf-8")
        fields["model"] = str(folder)
    if "nvme" in fields.get("offload", ""):
        (folder / "drives").mkdir()
        fields["nvme"] = str(folder / "drives")
    return RunConfig(**{name: value for name, value in fields.items() if value is not None})


T5 = CONFIGS["t5"] | dict(model_type="t5", d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=1)


@pytest.mark.bits
@pytest.mark.quick(10)
@pytest.mark.parametrize(("case", "how"), BITS, ids=[f"{case}-{how}" for case, how in BITS])
def test_a_resumed_run_is_the_end_of_the_run_without_a_break(
    case: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "PAGED_NUMEL", 40)
    config, at = config_of(CASES[case], tmp_path), AT.get(case, 2)
    whole = saved(config, tmp_path / "saved", at, how)
    assert_goes_on(resumed(config, tmp_path / "saved", at), whole, at, of_host=how != "async")


def test_the_overflowing_case_skips_a_step_on_each_side_of_the_save(tmp_path: Path) -> None:
    whole = saved(config_of(OVERFLOWS, tmp_path), tmp_path / "saved", 2)
    skipped = [step.skipped for step in whole.steps]
    assert any(skipped[:2])
    assert any(skipped[2:])
    assert not all(skipped)


DRAWN = 52


@pytest.mark.bits
@pytest.mark.quick(12)
@pytest.mark.parametrize("case", range(DRAWN))
def test_a_random_run_goes_on_bit_for_bit(case: int, tmp_path: Path) -> None:
    rng = random.Random(f"resume {case}")

    def made(fields: Mapping[str, Any]) -> RunConfig:
        config = RunConfig(**fields)
        Experiment(config)
        world_of(config)
        return config

    drives, folder = tmp_path / "drives", tmp_path / "saved"
    drives.mkdir()
    fixed: dict[str, Any] = dict(steps=4, nvme=str(drives), save_state=str(folder), save_every=2)
    for how in rng.sample(WAYS, len(WAYS)):
        _, config = drawn(rng, made, **fixed, save_as=how)
        try:
            whole = saved(config, folder, 2, how)
            break
        except (RankFailed, OutOfMemory):  # an unlucky loss scale, a device that is too small: not this test's
            continue
    else:
        pytest.skip("no run of three drawn ones trains to its end")
    plain = config.replace(save_state=None, save_every=None, save_as=None)
    assert_goes_on(resumed(plain, folder, 2), whole, 2, of_host=how != "async")
