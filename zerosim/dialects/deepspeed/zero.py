"""The section zero_optimization of a DeepSpeed file: stage, buckets, prefetch and offload."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.deepspeed.auto import how_of
from zerosim.dialects.reading import Notes

_ZERO = "zero_optimization"
_OF_STAGE_3 = {
    "prefetch_bucket_size": "prefetch_elements",
    "param_persistence_threshold": "persistent_numel",
    "max_live_parameters": "max_live",
}


def stage_of(notes: Notes, values: dict[str, Any], by: str) -> int:
    whole = values.get(_ZERO)
    stage = int(whole) if isinstance(whole, bool) else int(values.get(f"{_ZERO}.stage") or 0)
    keys = notes.document.keys
    if values.get(f"{_ZERO}.legacy_stage1"):
        notes.refuse(f"{_ZERO}.legacy_stage1", f"{by}, when the engine is built", "an exception: it is gone")
    if values.get(f"{_ZERO}.compute_grad_norm") is False and stage not in (1, 2):
        notes.refuse(f"{_ZERO}.compute_grad_norm", by, "ValidationError: false works only with stage 1 or 2")
    if values.get(f"{_ZERO}.offload_optimizer.ratio", 1) < 1 and stage != 3:
        notes.refuse(f"{_ZERO}.offload_optimizer.ratio", by, "ValidationError: below 1 works only with stage 3")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if f"{_ZERO}.{old}" in keys and any(key.startswith(f"{_ZERO}.{new}") for key in keys):
            notes.refuse(f"{_ZERO}.{old}", by, f"AssertionError: deprecated, and {new} is given too; keep that one")
    reduction = values.get("gradient_allreduce_op", "mean")
    beside = "stage 3" if stage == 3 else "DeepCompile" if values.get("compile.deepcompile") else "ZenFlow"
    has_zenflow = any(key.startswith(f"{_ZERO}.zenflow") and values[key] is not None for key in values)
    if str(reduction).lower() not in ("mean", "sum"):
        notes.refuse("gradient_allreduce_op", by, f"ValueError: expected mean or sum; it is {reduction!r}")
    elif str(reduction).lower() == "sum" and (stage == 3 or has_zenflow or beside == "DeepCompile"):
        notes.refuse("gradient_allreduce_op", by, f"ValueError: sum does not work with {beside}")
    return stage


def read_zero(notes: Notes, values: dict[str, Any], stage: int) -> None:
    if stage == 0:
        for key in notes.document.keys:
            if key.startswith(f"{_ZERO}.") and key != f"{_ZERO}.stage":
                notes.tell(key, "ignored", "stage 0 has no buckets, no shards and no offload")
        return
    bucket = values.get(f"{_ZERO}.reduce_bucket_size")
    if bucket is not None:
        notes.sets(f"{_ZERO}.reduce_bucket_size", how_of(notes, f"{_ZERO}.reduce_bucket_size"), reduce_bucket=bucket)
    overlap = values.get(f"{_ZERO}.overlap_comm")
    key = f"{_ZERO}.overlap_comm"
    if stage == 3:
        notes.sets(key, overlap_comm=overlap is not False)
    else:
        notes.sets(key, reduce_buffers=2 if overlap else 1, text="a second bucket, and a side stream" * bool(overlap))
        notes.tell(f"{_ZERO}.reduce_scatter", "understood", "stages 1 and 2 all-reduce, whatever it says")
        if values.get(f"{_ZERO}.use_multi_rank_bucket_allreduce") is False:
            notes.sets(f"{_ZERO}.use_multi_rank_bucket_allreduce", grad_reduction="reduce_scatter",
                       text="the nearest to one reduce an owner")  # fmt: skip
        if (values.get(f"{_ZERO}.allgather_bucket_size") or 0) % 2:
            notes.refuse(f"{_ZERO}.allgather_bucket_size", "deepspeed 0.19.8, when the optimizer is built",
                         "AssertionError: an odd number")  # fmt: skip
    for key in notes.document.keys:
        plain = key.removeprefix(f"{_ZERO}.")
        of_3 = plain.startswith("stage3_") or plain in ("sub_group_size", *_OF_STAGE_3) or "zero_quantized" in plain
        if key.startswith(_ZERO) and stage < 3 and (of_3 or plain == "zero_hpz_partition_size"):
            notes.tell(key, "ignored", f"has no effect at stage {stage}")
    if stage == 3 or not any("offload" in key for key in notes.document.keys):
        why = "another order of tensors, which helps only offload's copies"
        notes.tell(f"{_ZERO}.round_robin_gradients", "ignored", why)
    if stage < 3:
        return
    for name, option in _OF_STAGE_3.items():
        key, value = _either(values, name)
        if key and value == 0 and name == "max_live_parameters":
            notes.sets(key, prefetch_elements=0, text="no room to prefetch; 0 is no limit in zerosim alone")
        elif key and not (name == "prefetch_bucket_size" and notes.values.get("prefetch_elements") == 0):
            notes.sets(key, how_of(notes, key), **{option: value})
    if (group := values.get(f"{_ZERO}.sub_group_size")) is not None:
        why = "0 makes every parameter a group" if group == 0 else ""
        notes.sets(f"{_ZERO}.sub_group_size", sub_group=max(group, 1), text=why)
    if _either(values, "allgather_sequential")[1]:
        notes.sets(_either(values, "allgather_sequential")[0], prefetch_elements=1)
    if (hpz := values.get(f"{_ZERO}.zero_hpz_partition_size")) is not None:
        notes.sets(f"{_ZERO}.zero_hpz_partition_size", secondary_shard=0 if hpz <= 1 else hpz)
    for ours in ("quantized_weights", "quantized_gradients"):
        if (coded := values.get(f"{_ZERO}.zero_{ours}")) is not None:
            notes.sets(f"{_ZERO}.zero_{ours}", **{ours: coded})
    for name in ("allgather_partitions", "allgather_bucket_size", "reduce_scatter", "use_multi_rank_bucket_allreduce"):
        notes.tell(f"{_ZERO}.{name}", "ignored", "has no effect at stage 3")
    if (ranks := notes.context.given.get("ranks")) and (mics := values.get(f"{_ZERO}.mics_shard_size")):
        notes.sets(f"{_ZERO}.mics_shard_size", dp_replicate=ranks // mics)
    if values.get(f"{_ZERO}.mics_hierarchical_params_gather"):
        notes.sets(f"{_ZERO}.mics_hierarchical_params_gather", hierarchical_gather=True)


def _either(values: dict[str, Any], name: str) -> tuple[str, Any]:
    """Return the key and value of a setting that has a short name too."""
    for key in (f"{_ZERO}.stage3_{name}", f"{_ZERO}.{name}"):
        if key in values:
            return key, values[key]
    return "", None


def read_offload(notes: Notes, values: dict[str, Any], stage: int) -> None:
    if stage == 0:
        return
    places, pinned = [], False
    for section, old, state in (
        ("offload_optimizer", "cpu_offload", "optimizer"),
        ("offload_param", "cpu_offload_param", "params"),
    ):
        device = values.get(f"{_ZERO}.{section}.device") or ("cpu" if values.get(f"{_ZERO}.{old}") else "none")
        keys = [key for key in notes.document.keys if key.startswith(f"{_ZERO}.{section}")]
        if state == "params" and stage < 3:
            for key in [*keys, f"{_ZERO}.{old}"]:
                notes.tell(key, "ignored", f"below stage 3 it is accepted and does nothing: this is stage {stage}")
            continue
        if device == "none":
            for key in [*keys, f"{_ZERO}.{old}"]:
                notes.tell(key, "ignored", "nothing is offloaded")
            continue
        places.append(f"{state}={'host' if device == 'cpu' else 'nvme'}")
        if device == "nvme" and not values.get(f"{_ZERO}.{section}.nvme_path"):
            notes.refuse(f"{_ZERO}.{section}.device", "deepspeed 0.19.8, when the engine is built",
                         "TypeError: nvme needs nvme_path")  # fmt: skip
        pinned = pinned or values.get(f"{_ZERO}.{section}.pin_memory") is not False
        notes.tell(f"{_ZERO}.{section}.nvme_path", "understood", "the drive; a plan needs no folder")
        notes.tell(f"{_ZERO}.{section}.device", "understood", f"offload {places[-1]}")
        notes.tell(f"{_ZERO}.{old}", "understood", f"deprecated: {section} with device cpu; offload {places[-1]}")
        notes.tell(f"{_ZERO}.{section}.pin_memory", "understood", f"pin_memory {pinned}")
    if places:
        source = next(iter([key for key in notes.document.keys if "offload" in key]), _ZERO)
        notes.values["offload"], notes.sources["offload"] = ",".join(places), source
        notes.values["pin_memory"], notes.sources["pin_memory"] = pinned, f"{source} (pin_memory, by default true)"
    notes.tell(f"{_ZERO}.cpu_offload_use_pin_memory", "ignored", "deprecated: it only warns")
