"""What `accelerate launch` makes of the sections of its file: FSDP, DeepSpeed and Megatron-LM."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.accelerate.keys import BESIDE_A_FILE
from zerosim.dialects.fsdp import Fsdp, shard
from zerosim.dialects.reading import Notes

BY = "accelerate 1.15"
PLAIN = "the plugin writes no bucket keys: DeepSpeed's own defaults hold (5e8, 5e7, 1e5), not multiples of the width"


def fsdp(notes: Notes, half: str | None, *, tuned: bool) -> None:
    """Read `fsdp_config`, whose prefix fsdp_ may be left out."""
    keys = {key.partition(".")[2].removeprefix("fsdp_"): key for key in notes.document.keys if "fsdp_config." in key}

    def value(name: str, otherwise: Any) -> Any:
        found = notes.checked(keys[name], BY) if name in keys else None
        return otherwise if found is None else found

    version = int(value("version", 1))
    if "version" not in keys:
        notes.note("without fsdp_version accelerate takes FSDP1 (TrainingArguments take FSDP2)")
    first, synced = value("cpu_ram_efficient_loading", True), value("sync_module_states", True)
    if first and not synced and keys.keys() & {"sync_module_states"}:
        why = "ValueError: When using `--fsdp_cpu_ram_efficient_loading` set `--fsdp_sync_module_states` to `True`"
        notes.refuse(keys["sync_module_states"], BY, why, "set fsdp_cpu_ram_efficient_loading: false too")
    early, wrap = value("backward_prefetch", "NO_PREFETCH"), value("auto_wrap_policy", "NO_WRAP")
    for name in ("use_orig_params",) * (version == 1) + ("min_num_params",) * (wrap == "SIZE_BASED_WRAP"):
        value(name, None)
    recompute, moved = value("activation_checkpointing", False), value("activation_checkpointing_offload", False)
    if moved and not (recompute and version == 2):
        needs = "activation_checkpointing=True" if version == 2 else "fsdp_version=2"
        why = f"ValueError: `activation_checkpointing_offload=True` requires `{needs}`"
        notes.refuse(keys["activation_checkpointing_offload"], BY, why, f"write {needs.replace('=', ': ')}")
        moved = False
    if value("state_dict_type", "") == "LOCAL_STATE_DICT" and version == 2:
        notes.refuse(keys["state_dict_type"], BY, "ValueError: FSDP2 does not support LOCAL_STATE_DICT",
                     "write SHARDED_STATE_DICT")  # fmt: skip
    if version == 2:
        for name in ("sharding_strategy", "backward_prefetch", "forward_prefetch", "sync_module_states"):
            notes.tell(keys.get(name, ""), "ignored", "version 2 does not read it")
        for name in ("use_orig_params",):
            notes.tell(keys.get(name, ""), "ignored", "version 2 always does")
    elif "reshard_after_forward" in keys:
        notes.tell(
            keys["reshard_after_forward"], "ignored",
            "in version 1 the launcher always sets fsdp_sharding_strategy (FULL_SHARD unless it is given), which wins",
        )  # fmt: skip
    read = Fsdp(
        version=version,
        strategy=value("sharding_strategy", "FULL_SHARD") if version == 1 else "",
        reshard=value("reshard_after_forward", True) if version == 2 else True,
        wrap=wrap,
        offload=value("offload_params", False),
        early=early if version == 1 else "NO_PREFETCH",
        forward=version == 1 and value("forward_prefetch", False),
        recompute=recompute,
        recompute_offload=moved,
        first=first if "cpu_ram_efficient_loading" in keys else None,
    )
    spelled = {**keys, "offload": keys.get("offload_params", ""), "half": "mixed_precision"}
    shard(notes, spelled, read, half, tuned=tuned)
    if read.wrap == "TRANSFORMER_BASED_WRAP" and version == 2:
        notes.note("accelerate wraps the table alone, and the last norm with the head as one unit that stays gathered")
    for name, words in (("offload_params", "all states stay on the device"),
                        ("activation_checkpointing", "nothing is recomputed"),
                        ("activation_checkpointing_offload", "nothing moves"),
                        ("forward_prefetch", "forward gathers each unit at its turn"),
                        ("min_num_params", "only SIZE_BASED_WRAP reads it")):  # fmt: skip
        if keys.get(name, "") not in notes.said:
            notes.tell(keys.get(name, ""), "understood" if name != "min_num_params" else "ignored", words)


def names_a_file(notes: Notes) -> bool:
    """Return whether DeepSpeed's own file says the rest."""
    name = notes.document.keys.get("deepspeed_config.deepspeed_config_file")
    return notes.document.keys.get("distributed_type") == "DEEPSPEED" and name not in (None, "none")


def deepspeed(notes: Notes) -> None:
    """Read `deepspeed_config`: a file's name, or the values that DeepSpeedPlugin writes."""
    keys = notes.document.keys
    if names_a_file(notes):
        notes.tell("deepspeed_config.deepspeed_config_file", "understood", "DeepSpeed's own file says the rest")
        beside = [f"deepspeed_config.{name}" for name in BESIDE_A_FILE if f"deepspeed_config.{name}" in keys]
        if keys.get("mixed_precision") is not None:
            beside.append("mixed_precision")
        if beside:
            why = "ValueError: When using `deepspeed_config_file`, the following accelerate config variables will be "
            notes.refuse(", ".join(beside), BY, f"{why}ignored; DeepSpeed's file says them", "leave them out here")
        return

    def value(name: str, otherwise: Any) -> Any:
        key = f"deepspeed_config.{name}"
        by = "deepspeed 0.19.8" if name == "gradient_accumulation_steps" else BY
        found = notes.checked(key, by) if keys.get(key) is not None else None
        return otherwise if found is None else found

    stage = value("zero_stage", 2)
    if stage > 3:
        why = f"{stage}: Input should be less than or equal to 3"
        notes.refuse("deepspeed_config.zero_stage", "deepspeed 0.19.8", why, "write 0, 1, 2 or 3")
        return
    trainers = notes.context.before is not None
    notes.sets("deepspeed_config.zero_stage", stage=stage)
    notes.sets("distributed_type", recipe="hf-deepspeed" if trainers else "deepspeed")
    notes.usually("PyTorch makes states in the first step", lazy_states=True)
    _batch(notes, value("gradient_accumulation_steps", "auto"), value("gradient_clipping", "auto"))
    where = {name: value(f"offload_{name}_device", "NONE").lower() for name in ("optimizer", "param")}
    said = []
    for name, place in where.items():
        key, least = f"deepspeed_config.offload_{name}_device", 1 if name == "optimizer" else 3
        if place == "none":
            notes.tell(key, "understood", "on the device")
        elif stage < least:
            notes.tell(key, "ignored", f"stage {stage} does not offload them")
        else:
            option = {"optimizer": "optimizer", "param": "params"}[name]
            said.append(f"{option}={'host' if place == 'cpu' else 'nvme'}")
            notes.tell(key, "understood", f"offload {said[-1]}")
    if said:
        notes.sets("deepspeed_config.offload_optimizer_device", offload=",".join(said))
    for name in where:
        notes.tell(f"deepspeed_config.offload_{name}_nvme_path", "understood", "the drive's folder")
    if stage == 3 and keys.get("deepspeed_config.zero3_init_flag") is not None:
        shards = value("zero3_init_flag", True)
        if shards:
            notes.tell("deepspeed_config.zero3_init_flag", "understood", "weights are sharded while they are made")
        else:
            notes.sets("deepspeed_config.zero3_init_flag", host_load="device")
    elif value("zero3_init_flag", False):
        notes.tell("deepspeed_config.zero3_init_flag", "ignored", f"stage {stage} does not shard weights (a warning)")
    notes.note(PLAIN)


def _batch(notes: Notes, accumulate: Any, clip: Any) -> None:
    given = notes.context.given
    key, norm = "deepspeed_config.gradient_accumulation_steps", "deepspeed_config.gradient_clipping"
    if accumulate == "auto":
        notes.tell(key, "auto", f"accumulate {given.get('accumulate', 1)}: the Accelerator's")
        notes.note("gradient_accumulation_steps is auto: the Accelerator's, here --accumulate")
    else:
        notes.sets(key, "understood", "DeepSpeed's number wins over the Accelerator's", accumulate=accumulate)
    trainers = given.get("clip_norm") if notes.context.before is not None else None
    if clip == "auto" or clip == 0:
        usual = 1.0 if trainers is None else trainers
        words = "0 is left out, and DeepSpeed's own default holds" if clip == 0 else "from auto"
        notes.sets(norm, "auto" if clip == "auto" else "understood", words, clip_norm=1.0 if clip == 0 else usual)
        if clip == "auto":
            notes.note(f"gradient_clipping is auto and becomes {usual}")
    else:
        notes.sets(norm, clip_norm=clip)


def megatron(notes: Notes) -> None:
    """Read `megatron_lm_config`."""
    section = "megatron_lm_config.megatron_lm_"

    def value(name: str, otherwise: Any) -> Any:
        key = f"{section}{name}"
        found = notes.checked(key, BY) if notes.document.keys.get(key) is not None else None
        return otherwise if found is None else found

    notes.sets("distributed_type", recipe="megatron")
    notes.sets(f"{section}use_distributed_optimizer", stage=int(value("use_distributed_optimizer", False)))
    notes.sets(f"{section}tp_degree", tp=value("tp_degree", 1))
    notes.sets(f"{section}pp_degree", pp=value("pp_degree", 1))
    notes.sets(f"{section}gradient_clipping", clip_norm=value("gradient_clipping", 1.0))
    if (number := value("num_micro_batches", None)) is not None:
        notes.sets(f"{section}num_micro_batches", accumulate=number)
    if value("sequence_parallelism", False) and notes.values["tp"] > 1:
        notes.sets(f"{section}sequence_parallelism", sequence_parallel=True)
    form = value("recompute_granularity", "selective" if value("recompute_activations", False) else None)
    if form is not None:
        known = f"{section}recompute_granularity" in notes.document.keys
        name = "recompute_granularity" if known else "recompute_activations"
        notes.sets(f"{section}{name}", recompute=form.lower())
