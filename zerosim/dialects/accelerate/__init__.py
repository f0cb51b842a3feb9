"""accelerate's YAML or JSON, as `accelerate launch` 1.15 reads it. Its keys are in `keys.py`."""

from __future__ import annotations

from zerosim.dialects.accelerate import plugins
from zerosim.dialects.accelerate.fp8 import eight_bits
from zerosim.dialects.accelerate.keys import SECTIONS, TABLE, TOP, TYPES
from zerosim.dialects.accelerate.mesh import parallelism
from zerosim.dialects.fp8 import check_codes
from zerosim.dialects.fsdp import HALVES, formats, half_of
from zerosim.dialects.reading import Context, Document, Notes, Reading
from zerosim.dialects.rows import Row, by_key
from zerosim.errors import did_you_mean

BY = "accelerate 1.15"
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""By section, what the launcher puts before a key without it."""
_OTHERS = {
    "FSDP": ("deepspeed_config", "megatron_lm_config"),
    "DEEPSPEED": ("fsdp_config", "megatron_lm_config"),
    "MEGATRON_LM": ("fsdp_config", "deepspeed_config"),
}


def read(document: Document, context: Context) -> Reading:
    """Read the document. What TrainingArguments said before counts: format, batch, adapters."""
    notes = Notes(document, context, _rows(document))
    kind = _top(notes)
    half = _half(notes, kind)
    tuned = bool(context.given.get("lora_rank"))
    way = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "fsdp"}.get(kind, "ddp")
    by_trainer = context.before is not None and str(context.given.get("recipe")).startswith("fsdp")
    if by_trainer and kind not in ("FSDP", "MULTI_GPU", "NO"):
        why = f"ValueError: fsdp in the training arguments and {kind} exclude one another"
        notes.refuse("distributed_type", "transformers 5.24", why, "write FSDP, or leave fsdp out of the arguments")
    elif by_trainer:
        _of_trainer(notes)
    elif kind == "FSDP":
        plugins.fsdp(notes, half, tuned=tuned)
    elif kind == "DEEPSPEED":
        plugins.deepspeed(notes)
    elif kind == "MEGATRON_LM":
        plugins.megatron(notes)
    elif kind:
        notes.sets("distributed_type", stage=0, recipe="ddp")
        notes.usually("PyTorch makes states in the first step", lazy_states=True)
    if not plugins.names_a_file(notes) and not by_trainer:
        formats(notes, "mixed_precision", half, way, tuned=tuned)
    if kind:
        parallelism(notes, kind)
    check_codes(notes)
    _compiled(notes)
    _unused(notes, kind)
    notes.walk_rows()
    return notes.reading(BY)


def _rows(document: Document) -> dict[str, Row]:
    """Return the table with the spellings of this document, such as fsdp_config.version."""
    rows = dict(by_key(TABLE))
    for key in document.keys:
        section, _, name = key.partition(".")
        if section in _PREFIXES and (row := rows.get(f"{section}.{_PREFIXES[section]}{name}")) is not None:
            rows.setdefault(key, row)
    return rows


def _top(notes: Notes) -> str:
    """Read the top level; return the distributed type, '' where it is refused."""
    keys = notes.document.keys
    for key in keys:
        top = key.partition(".")[0]
        if top not in TOP:
            hint = did_you_mean(top, TOP, "remove it")
            notes.refuse(key, BY, f"ValueError: the config file had unknown keys ({top})", f"{hint}")
    if keys.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        notes.refuse("compute_environment", "zerosim", "SageMaker starts the job: not read", "write LOCAL_MACHINE")
    kind = keys.get("distributed_type")
    if kind is None:
        why = "ValueError: A `distributed_type` must be specified in the config file."
        notes.refuse("distributed_type", BY, why, f"add one of {', '.join(TYPES)}")
        return ""
    if kind not in TYPES:
        hint = did_you_mean(kind, TYPES, f"expected one of {', '.join(TYPES)}")
        notes.refuse("distributed_type", BY, f"ValueError: {kind!r} is not a valid DistributedType", hint)
        return ""
    if kind not in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"):
        notes.refuse("distributed_type", "zerosim", f"{kind} runs on no CUDA GPU: not modelled", "write MULTI_GPU")
        return ""
    _ranks(notes, kind)
    notes.tell("distributed_type", "understood", f"{kind}")
    return str(kind)


def _ranks(notes: Notes, kind: str) -> None:
    keys = notes.document.keys
    if keys.get("num_processes", -1 if kind != "NO" else 1) == -1 and "ranks" not in notes.context.given:
        why = "ValueError: You need to manually pass in `--num_processes` using this config yaml."
        notes.refuse("num_processes", BY, why, "pass --ranks N")
        return
    if kind == "NO":
        notes.sets("distributed_type", ranks=1)
        notes.tell("num_processes", "ignored", "NO starts one process, whatever this says")
        notes.tell("num_machines", "understood", "NO starts one process")
        if (keys.get("num_machines") or 1) != 1 and not keys.get("main_process_ip"):
            why = "AssertionError: When using multiple machines, you need to specify the main process IP."
            notes.refuse("num_machines", BY, why, "write num_machines: 1")
        return
    if keys.get("num_processes", -1) in (None, -1):
        if "ranks" not in notes.context.given:
            why = "ValueError: Unsupported nproc_per_node value: None"
            notes.refuse("num_processes", "torchrun", why, "pass --ranks N")
        return
    ranks, machines = notes.checked("num_processes", BY), 1
    if ranks is None:
        return
    if keys.get("num_machines") is not None:
        machines = notes.checked("num_machines", BY) or 1
    notes.sets("num_processes", ranks=ranks)
    if machines > 1:
        if ranks % machines:
            started = ranks // machines * machines
            why = (
                f"{ranks} // {machines} on each of {machines} machines are {started} processes, and {ranks} are awaited"
            )
            notes.refuse("num_processes", BY, why, f"write {started} or {started + machines}")
            return
        notes.sets("num_machines", ranks_per_node=ranks // machines)
        notes.note(f"num_processes counts all machines: {ranks // machines} a node")
    else:
        notes.tell("num_machines", "understood", "one node")


def _half(notes: Notes, kind: str) -> str | None:
    """Return the half type of compute. TrainingArguments' wins over the file's."""
    before, name = half_of(notes.context), str(notes.checked("mixed_precision", BY)) if _has(notes) else None
    if name == "fp8":
        eight_bits(notes, kind, before if notes.context.before is not None else None)
        return before or "bf16"
    if notes.document.keys.get("fp16") is True and name is None and "mixed_precision" not in notes.document.keys:
        name = "fp16"
    if name in HALVES and before is None:
        return name
    if before is not None and name != before:
        notes.tell("mixed_precision", "ignored", f"{before} was said before it")
    return before


def _has(notes: Notes) -> bool:
    return notes.document.keys.get("mixed_precision") is not None


def _of_trainer(notes: Notes) -> None:
    """Let TrainingArguments' FSDP win. Only the environment that this file sets moves states to the host."""
    for key in notes.document.keys:
        if key.startswith("fsdp_config."):
            moves = key.endswith("offload_params") and notes.checked(key, BY)
            if moves:
                notes.sets(key, offload="optimizer=host,params=host", pin_memory=True)
            else:
                notes.tell(key, "ignored", "fsdp in the training arguments wins")
    if (said := notes.document.keys.get("mixed_precision")) is not None:
        notes.tell("mixed_precision", "understood", str(said))


def _compiled(notes: Notes) -> None:
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if notes.document.keys.get(key) is not None and (name := notes.checked(key, BY)) is not None:
            if name in ("NO", "EAGER"):
                notes.tell(key, "understood", "nothing is compiled")
            else:
                notes.sets(key, kernels="compiled")


def _unused(notes: Notes, kind: str) -> None:
    """Tell of sections that this type does not read, and of keys that the launcher drops."""
    for key, value in notes.document.keys.items():
        section, dot, name = key.partition(".")
        if section not in SECTIONS or key in notes.said:
            continue
        if not dot:
            notes.tell(key, "ignored", "is empty" if not value else "expected a section")
        elif section in _OTHERS.get(kind, ("fsdp_config", "deepspeed_config", "megatron_lm_config")):
            notes.tell(key, "ignored", f"only {_type_of(section)} reads it, and distributed_type is {kind}")
        elif section == "fp8_config":
            notes.tell(key, "ignored", "only mixed_precision fp8 reads it")
        elif key not in notes.rows:
            known = [one.partition(".")[2] for one in notes.rows if one.startswith(f"{section}.")]
            hint = did_you_mean(name, known, "no such key")
            notes.tell(key, "ignored", f"the launcher drops it without a word; {hint}")


def _type_of(section: str) -> str:
    return next(kind for kind, others in _OTHERS.items() if section not in others)
