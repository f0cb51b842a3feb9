"""The optimizer of a DeepSpeed file: DeepSpeed's own, or the Trainer's if the file names none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.dialects.deepspeed.auto import how_of
from zerosim.dialects.reading import Notes

_OURS: Mapping[str, str] = {"adamw": "adamw", "adam": "adamw", "lion": "lion", "adagrad": "adagrad", "muon": "muon"}
"""DeepSpeed's optimizers by their names in lower case, and those here; others are not modelled."""
_OWN = (*_OURS, "lamb", "muadam", "muadamw", "musgd")
_TORCH: Mapping[str, str] = {
    "SGD": "sgd", "RMSprop": "rmsprop", "RAdam": "radam", "NAdam": "", "Adamax": "", "Adadelta": "", "ASGD": "",
    "Rprop": "", "Adafactor": "", "LBFGS": "", "SparseAdam": "",
}  # fmt: skip
"""Classes of torch.optim, which DeepSpeed takes by their names, and those here."""
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")


def read_optimizer(notes: Notes, values: dict[str, Any], launcher: str, stage: int, by: str) -> None:
    """Set recipe, optimizer and its numbers."""
    kind, params = values.get("optimizer.type"), notes.document.section("optimizer.params")
    notes.usually("DeepSpeed", recipe="deepspeed", lazy_states=True)
    offloads = stage > 0 and any(
        values.get(f"zero_optimization.{key}") in ("cpu", "nvme", True)
        for key in ("offload_optimizer.device", "cpu_offload")
    )
    asked = notes.context.flag("optimizer")
    if asked is not None and kind is not None:
        for key in notes.document.keys:
            if key == "optimizer.type" or (key.startswith("optimizer.params.") and not key.endswith((".lr", "_norm"))):
                notes.tell(key, "understood", f"--optimizer {asked} replaces it")
        values = {key: one for key, one in values.items() if notes.said.get(key) is None or key == "scheduler.type"}
    elif kind is None:
        _clients(notes, launcher, offloads, stage)
    elif isinstance(kind, str):
        _own(notes, values, kind, offloads, by)
    else:
        notes.refuse("optimizer.type", by, f"AttributeError: {kind!r} is no name")
    if launcher == "trainer":
        notes.usually("the Trainer's loss", loss="hf-5")
    for name in ("lr", "eps", "weight_decay"):
        value: Any = values.get(f"optimizer.params.{name}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            number: dict[str, Any] = {name: float(value)}
            notes.sets(f"optimizer.params.{name}", how_of(notes, f"optimizer.params.{name}"), **number)
        elif value is not None:
            notes.refuse(f"optimizer.params.{name}", f"{by}, when the optimizer is built", f"{value!r} is no number")
    if values.get("optimizer.type") in ("SGD", "RMSprop"):  # PyTorch's
        for name in ("momentum", "nesterov"):
            if (one := values.get(f"optimizer.params.{name}")) is not None:
                amount: dict[str, Any] = {name: float(one) if name == "momentum" else bool(one)}
                notes.sets(f"optimizer.params.{name}", **amount)
    betas = values.get("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2 and all(isinstance(one, int | float) for one in betas):
        key = "optimizer.params.betas"
        notes.sets(key, how_of(notes, key), betas=(float(betas[0]), float(betas[1])))
    elif betas is not None:
        notes.refuse("optimizer.params.betas", f"{by}, when the optimizer is built", f"{betas!r}: expected two numbers")
    if "max_grad_norm" in params:
        notes.refuse("optimizer.params.max_grad_norm", f"{by}, when the engine is built",
                     "ValueError: no optimizer takes it", "write gradient_clipping instead")  # fmt: skip
    for name in params:
        if (key := f"optimizer.params.{name}") not in notes.said and notes.rows.get(key) is None:
            notes.tell(
                key, "ignored", "the optimizer's own argument, which changes no bytes; an unknown one is a TypeError"
            )
    _scheduler(notes, values, by)


def _clients(notes: Notes, launcher: str, offloads: bool, stage: int) -> None:
    """Set the optimizer of a file that names none: the Trainer's, or the script's own."""
    if launcher == "trainer":
        older = notes.context.older("transformers", 5)
        fused = offloads or not older
        source = f"no optimizer: the Trainer's adamw_torch{'' if older else '_fused'}"
        notes.usually(source, recipe="hf-deepspeed", optimizer="adamw")
        notes.values["recipe"], notes.sources["recipe"] = "hf-deepspeed", source
        foreach = notes.context.given.get("foreach", not fused)
        notes.usually(source, foreach=foreach)
        if "weight_decay" not in notes.context.given:
            notes.usually("TrainingArguments' weight_decay", weight_decay=0.0)
        if offloads:
            notes.note("accelerate replaces the Trainer's AdamW by DeepSpeedCPUAdam: the step is on the CPU")
        elif stage:
            notes.note("no optimizer section: the Trainer's own AdamW steps, not DeepSpeed's FusedAdam")
    elif "optimizer" not in notes.context.given:
        notes.usually("no optimizer in the file: the script's, taken as AdamW", optimizer="adamw")


def _own(notes: Notes, values: dict[str, Any], kind: str, offloads: bool, by: str) -> None:
    plain, key = kind.lower(), "optimizer.type"
    if plain in _ONE_BIT:
        _one_bit(notes, values, plain, by)
        return
    if kind not in _TORCH and plain not in _OWN:
        notes.refuse(key, f"{by}, when the engine is built", f"AssertionError: {kind} is neither DeepSpeed's nor of "
                     "torch.optim", f"DeepSpeed has {', '.join(_OWN)}")  # fmt: skip
        return
    ours = _TORCH[kind] if kind in _TORCH else _OURS.get(plain, "")
    if not ours:
        notes.lacks(key, f"optimizer {kind}", costs=True, advice="choose AdamW, Lion, Adagrad or Muon")
        return
    if plain == "adam" and values.get("optimizer.params.adam_w_mode") is False:
        ours = "adam"
    notes.sets(key, optimizer=ours, text="adam_w_mode is on by default" if plain == "adam" and ours == "adamw" else "")
    notes.tell("optimizer.params.adam_w_mode", "understood", f"optimizer {ours}")
    if plain in ("adam", "adamw"):
        torch_adam = bool(values.get("optimizer.params.torch_adam"))
        notes.sets("optimizer.params.torch_adam" if torch_adam else key, foreach=torch_adam,
                   text="PyTorch's AdamW" if torch_adam else "")  # fmt: skip
    is_torchs = kind in _TORCH or bool(values.get("optimizer.params.torch_adam"))
    if offloads and is_torchs and values.get("zero_force_ds_cpu_optimizer", True):
        notes.refuse(key, f"{by}, when the engine is built", "ZeRORuntimeException: offload needs DeepSpeedCPUAdam",
                     "leave torch_adam out, or set zero_force_ds_cpu_optimizer to false")  # fmt: skip


def _one_bit(notes: Notes, values: dict[str, Any], plain: str, by: str) -> None:
    """1-bit Adam, which 0.19.7 removed."""
    key = "optimizer.type"
    freeze = values.get("optimizer.params.freeze_step", 100_000)
    if plain == "onebitadam":
        notes.sets(key, optimizer="adam", compress="onebit-adam", compress_warmup=int(freeze), grad_dtype="fp32")
        notes.tell("optimizer.params.freeze_step", "understood", f"compress_warmup {freeze}")
        if notes.values.get("precision") == "fp16":
            notes.note("zerosim's 1-bit Adam takes fp32 or bf16, no loss scale and no clipping: --without fp16,"
                       "gradient_clipping plans the rest")  # fmt: skip
    else:
        notes.lacks(key, f"optimizer {plain}", costs=True)
    for name in ("bias_correction", "cuda_aware", "comm_backend_name"):
        notes.tell(f"optimizer.params.{name}", "ignored", "changes no byte that is counted")
    if not notes.context.older("deepspeed", 0, 19, 7):
        notes.refuse(key, f"{by}, when the engine is built", "AssertionError: 1-bit optimizers were removed in 0.19.7",
                     "--read-as deepspeed==0.19.6 if that version reads it")  # fmt: skip


def _scheduler(notes: Notes, values: dict[str, Any], by: str) -> None:
    kind, key = values.get("scheduler.type"), "scheduler.type"
    if kind is None:
        return
    built = f"{by}, when the engine is built"
    if kind not in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        notes.refuse(key, built, f"AssertionError: {kind!r} is no scheduler of DeepSpeed", "choose WarmupLR or "
                     "WarmupDecayLR, for one")  # fmt: skip
        return
    warmup = values.get("scheduler.params.warmup_num_steps")
    is_auto = notes.document.keys.get("scheduler.params.warmup_num_steps") == "auto"
    if isinstance(warmup, int) and warmup <= 0:
        notes.refuse("scheduler.params.warmup_num_steps", built, f"ValueError: {warmup} steps; it must be above 0")
    elif isinstance(warmup, int) and not is_auto and kind.startswith("Warmup"):
        notes.sets("scheduler.params.warmup_num_steps", warmup=warmup)
    if kind == "WarmupLR":
        notes.tell(key, "understood", "a constant rate after the warm-up, which is logarithmic there and linear here")
    elif kind == "WarmupCosineLR":
        notes.sets(key, schedule="cosine")
    else:
        notes.tell(key, "lacking", f"{kind}: schedules here are constant and cosine; no byte and no second differs")
    for name in ("warmup_min_lr", "warmup_max_lr", "total_num_steps", "warmup_type"):
        notes.tell(f"scheduler.params.{name}", "ignored", "the learning rate's course; a plan has one step")
