"""The word "auto" in DeepSpeed's JSON: three readers fill it by three rules.

transformers 5.24's Trainer takes its own arguments, then leaves the rest to accelerate 1.15, which knows some keys and
refuses others. DeepSpeed alone drops the word in its strict sections, where the default then holds, and keeps it as
text elsewhere. Source: transformers integrations/deepspeed.py, accelerate utils/deepspeed.py and accelerator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerosim.dialects.reading import Context, Document, Notes

TRAINER, ACCELERATE = "transformers 5.24", "accelerate 1.15"
_ZERO = "zero_optimization"
_OF_WIDTH: Mapping[str, tuple[str, Callable[[int], int]]] = {
    f"{_ZERO}.reduce_bucket_size": ("hidden^2", lambda hidden: hidden * hidden),
    f"{_ZERO}.stage3_prefetch_bucket_size": ("int(0.9 hidden^2)", lambda hidden: int(0.9 * hidden * hidden)),
    f"{_ZERO}.stage3_param_persistence_threshold": ("10 hidden", lambda hidden: 10 * hidden),
}
_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": ("micro_batch", 8, "per_device_train_batch_size"),
    "gradient_accumulation_steps": ("accumulate", 1, "gradient_accumulation_steps"),
    "gradient_clipping": ("clip_norm", 1.0, "max_grad_norm"),
    "optimizer.params.lr": ("lr", 5e-5, "learning_rate"),
    "optimizer.params.betas": ("betas", (0.9, 0.999), "adam_beta1, adam_beta2"),
    "optimizer.params.eps": ("eps", 1e-8, "adam_epsilon"),
    "optimizer.params.weight_decay": ("weight_decay", 0.0, "weight_decay"),
    "scheduler.params.warmup_max_lr": ("lr", 5e-5, "learning_rate"),
}
"""By key, the option that says the Trainer's argument here, the argument's default and its name."""
_OF_ACCELERATE = {
    "gradient_clipping": 1.0,
    f"{_ZERO}.stage": 2,
    f"{_ZERO}.offload_optimizer.device": "none",
    f"{_ZERO}.offload_param.device": "none",
    f"{_ZERO}.offload_optimizer.nvme_path": "none",
    f"{_ZERO}.offload_param.nvme_path": "none",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": False,
}
_OF_SCHEDULER = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")


def reader_of(document: Document, context: Context) -> str:
    """Return who reads a file first: trainer, accelerate or deepspeed. An "auto" needs a launcher."""
    return context.launcher or ("trainer" if "auto" in document.keys.values() else "deepspeed")


def how_of(notes: Notes, key: str) -> str:
    """Return how a key is understood: filled in where the file says "auto"."""
    return "auto" if notes.document.keys.get(key) == "auto" else "understood"


def filled(notes: Notes, launcher: str) -> dict[str, Any]:
    """Return the document's values with each "auto" replaced as its launcher does; what it refuses is refused."""
    values = dict(notes.document.keys)
    if launcher != "deepspeed" and notes.document.is_hjson:
        by = TRAINER if launcher == "trainer" else ACCELERATE
        why = "JSONDecodeError: comments and trailing commas pass only where DeepSpeed itself opens the file"
        notes.refuse(next(iter(values)), by, why, "--launcher deepspeed if it does")
    if launcher == "trainer":
        _mismatches(notes, values)
        values = _by_rules(notes, values, _trainers(notes))
    if launcher in ("trainer", "accelerate"):
        values = _by_rules(notes, values, _accelerates(notes))
        for key, value in values.items():
            if value == "auto" and not (key in _OF_WIDTH and notes.context.hidden is None):  # refused by its own words
                notes.refuse(key, ACCELERATE, 'ValueError: "auto" not found in kwargs; it fills no such key',
                             "write a value, or leave the key out")  # fmt: skip
        values = {key: value for key, value in values.items() if value != "auto"}
    return values


def _by_rules(notes: Notes, values: Mapping[str, Any], rules: Iterator[tuple[str, Any, str]]) -> dict[str, Any]:
    """Return the values, with each "auto" that a rule names replaced; note by which rule."""
    found = dict(values)
    for key, value, words in rules:
        if found.get(key) == "auto":
            found[key] = value
            notes.tell(key, "auto", words)
    return found


def _trainers(notes: Notes) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and rule of what the Trainer fills, with its own arguments."""
    given = notes.context.given
    for key, (option, default, name) in _ARGUMENTS.items():
        value, words = given.get(option, default), f"{name} of TrainingArguments"
        if option not in given:
            words += f", by default {default}" if notes.context.before is None else ""
        yield key, list(value) if isinstance(value, tuple) else value, words
    yield from _whole_batch(notes)
    precision = given.get("precision", "bf16")
    if "precision" not in given and "auto" in (notes.document.keys.get("bf16.enabled"),):
        notes.note("bf16.enabled is auto: taken as on, as bf16=True makes it; else pass --precision fp32 or fp16")
    for name in ("fp16", "bf16"):
        yield f"{name}.enabled", precision == name, f"{name} of TrainingArguments"
    yield "scheduler.params.warmup_min_lr", 0, "0"
    for name in ("warmup_num_steps", "total_num_steps"):
        yield f"scheduler.params.{name}", 1, "the Trainer's steps"
    yield from _of_width(notes, only=None if _stage(notes) == 3 else f"{_ZERO}.reduce_bucket_size")


def _accelerates(notes: Notes) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and rule of what accelerate fills."""
    given = notes.context.given
    if "micro_batch" in given:
        yield "train_micro_batch_size_per_gpu", given["micro_batch"], "the smallest batch_size of the dataloaders"
    elif notes.document.keys.get("train_micro_batch_size_per_gpu") == "auto" and notes.context.launcher == "accelerate":
        notes.note("train_micro_batch_size_per_gpu is auto: accelerate takes the dataloader's, here --micro-batch")
        yield "train_micro_batch_size_per_gpu", 1, "the dataloader's batch_size, not given: 1"
    yield "gradient_accumulation_steps", given.get("accumulate", 1), "the Accelerator's"
    yield from _whole_batch(notes)
    for key, value in _OF_ACCELERATE.items():
        yield key, value, f"{str(value).lower()}, accelerate's own"
    precision = given.get("precision", "bf16")
    for name in ("fp16", "bf16"):
        yield f"{name}.enabled", precision == name, "mixed_precision"
    yield from _of_width(notes)
    if "lr" in given or notes.context.launcher == "accelerate":
        for name, value in (("lr", given.get("lr", 1e-3)), ("weight_decay", given.get("weight_decay", 0.0))):
            yield f"optimizer.params.{name}", value, "DummyOptim's"
        for name in _OF_SCHEDULER:
            yield f"scheduler.params.{name}", 1 if name.endswith("steps") else 0, "DummyScheduler's"


def _stage(notes: Notes) -> Any:
    stage = notes.document.keys.get(f"{_ZERO}.stage", 0)
    return 2 if stage == "auto" else int(stage) if str(stage).isdigit() else stage


def _whole_batch(notes: Notes) -> Iterator[tuple[str, Any, str]]:
    given, keys = notes.context.given, notes.document.keys
    if keys.get("train_batch_size") != "auto":
        return
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    own = [keys.get(name, "auto") for name in names]
    micro = given.get("micro_batch", 8) if own[0] == "auto" else own[0]
    each = given.get("accumulate", 1) if own[1] == "auto" else own[1]
    if "ranks" in given and all(isinstance(one, int) for one in (micro, each)):
        world = given["ranks"] // (given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1))
        yield "train_batch_size", micro * each * world, "micro batch x accumulation x ranks"
    else:
        yield "train_batch_size", None, "micro batch x accumulation x ranks"


def _of_width(notes: Notes, only: str | None = None) -> Iterator[tuple[str, Any, str]]:
    asked = [key for key in _OF_WIDTH if notes.document.keys.get(key) == "auto" and only in (None, key)]
    if not asked:
        return
    hidden = notes.context.hidden
    if hidden is None:
        for key in asked:
            if notes.said.get(key) is None or notes.said[key].how != "refused":
                notes.refuse(key, "zerosim", '"auto" is a function of the model\'s hidden_size', "pass --model too")
        return
    for key in asked:
        words, rule = _OF_WIDTH[key]
        yield key, rule(hidden), words


def _mismatches(notes: Notes, values: Mapping[str, Any]) -> None:
    """Refuse values beside a Trainer's file that says others: the Trainer lists them in one ValueError."""
    before = notes.context.before
    if before is None or before.document.dialect == "accelerate":
        return
    unequal = []
    for key, (option, default, name) in _ARGUMENTS.items():
        ours, theirs = before.values.get(option, default), values.get(key, "auto")
        theirs = tuple(theirs) if isinstance(theirs, list) else theirs
        if theirs not in ("auto", None) and theirs != ours:
            unequal.append((key, f"{key} {theirs} against {name} {ours}"))
    if unequal:
        notes.refuse(unequal[0][0], TRAINER, f"ValueError: values differ from the Trainer's: "
                     f"{'; '.join(words for _, words in unequal)}", 'write "auto" for them')  # fmt: skip
