"""What files of transformers' Trainer, axolotl and LLaMA-Factory say alike: batch, optimizer, loss, model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zerosim.config.hub import hub_words, is_of_hub
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dialects.hub_names import model_of_repository
from zerosim.dialects.reading import Context, Document, Notes
from zerosim.dialects.rows import Row, by_key
from zerosim.errors import did_you_mean

ADAM = ("adamw", "adam8bit", "adam8bit-torchao")
_OTHERS = (
    "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_32bit galore_adamw "
    "galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise "
    "galore_adafactor_layerwise lomo adalomo grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd "
    "apollo_adamw apollo_adamw_layerwise stable_adamw adamw_anyprecision"
)
OPTIMS: Mapping[str, Mapping[str, Any] | str] = {
    "adamw_torch": {"optimizer": "adamw", "foreach": True},
    "adamw_torch_fused": {"optimizer": "adamw", "foreach": False},
    "adamw_torch_8bit": {"optimizer": "adam8bit-torchao"},
    "adamw_8bit": {"optimizer": "adam8bit"},
    "adamw_bnb_8bit": {"optimizer": "adam8bit"},
    "paged_adamw_8bit": {"optimizer": "adam8bit", "paged_states": True},
    "paged_adamw_32bit": {"optimizer": "adamw", "foreach": False, "paged_states": True},
    "adafactor": {"optimizer": "adafactor-hf", "scale_parameter": False, "relative_step": False},
    "sgd": {"optimizer": "sgd", "foreach": True},
    "adagrad": {"optimizer": "adagrad", "foreach": True},
    "rmsprop": {"optimizer": "rmsprop", "foreach": True},
    "lion_32bit": {"optimizer": "lion", "foreach": False},
    "paged_lion_32bit": {"optimizer": "lion", "foreach": False, "paged_states": True},
    **dict.fromkeys(("adamw_torch_4bit", "lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), "states of these bits"),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), "no GPU's optimizer"),
    **dict.fromkeys(_OTHERS.split(), "this optimizer"),
}
"""By the Trainer's names: options, or in words what is not modelled."""
OLD_OPTIMS: Mapping[str, Mapping[str, Any] | str] = {
    "adamw_hf": {"optimizer": "adamw", "foreach": False},
    "adamw_apex_fused": {"optimizer": "adamw", "foreach": False},
    "paged_adamw": {"optimizer": "adamw", "foreach": False, "paged_states": True},
    "lion": {"optimizer": "lion", "foreach": False},
    "paged_lion": {"optimizer": "lion", "foreach": False, "paged_states": True},
}
"""Names of transformers 4, and axolotl's."""


def notes_of(document: Document, context: Context, table: tuple[Row, ...], sections: Mapping[str, str]) -> Notes:
    """Return notes with the table's rows in the document's spelling. `sections`: prefixes that may stand before a
    section's keys, or be left out."""
    rows = dict(by_key(table))
    for key in document.keys:
        section, dot, name = key.partition(".")
        if dot and section in sections:
            plain = f"{section}.{name.removeprefix(sections[section])}"
            if (row := rows.get(plain)) is not None:
                rows.setdefault(key, row)
    return Notes(document, context, rows)


def value(notes: Notes, key: str, by: str, otherwise: Any = None) -> Any:
    """Return a key's value as its framework stores it; `otherwise` where it is absent, null or refused."""
    if notes.document.keys.get(key) is None:
        return otherwise
    found = notes.checked(key, by)
    return otherwise if found is None else found


def source(notes: Notes, key: str, by: str) -> str:
    """Return the key, or in words the default that holds without it."""
    return key if notes.document.keys.get(key) is not None else f"{by}'s default"


def walk_rest(notes: Notes) -> None:
    """Say of all other keys what their rows say; a default needs no words of its own."""
    for key, said in notes.document.keys.items():
        row = notes.rows.get(key)
        if key not in notes.said and row is not None and row.costs and row.is_default(said):
            notes.tell(key, "understood", "the default")
    notes.walk_rows()


def has_blocks(context: Context) -> bool:
    """Return whether --model, if it is known, is a stack of blocks."""
    return context.sizes is None or context.sizes.model.has_blocks


def optimizer(notes: Notes, key: str, by: str, names: Mapping[str, Any], usual: str) -> None:
    """Set the optimizer of a name, and its numbers: the keys of all these files are TrainingArguments'."""
    name = str(notes.document.keys.get(key) or usual)
    asked = notes.context.flag("optimizer")
    row = names.get(name)
    if row is None:
        hint = did_you_mean(name, names, f"expected one of {', '.join(names)}")
        notes.refuse(key, by, f"ValueError: {name!r} is not a valid OptimizerNames", hint)
        return
    if isinstance(row, str):
        if asked is None:
            notes.lacks(key, f"{name}: {row}", costs=True, advice="pass --optimizer too, or write adamw_torch_fused")
            return
        row = {}
    if asked is None:
        notes.sets(source(notes, key, by), **row)
    else:
        notes.tell(key, "understood", f"--optimizer {asked} replaces it")
    chosen = str(asked or row["optimizer"])
    notes.sets(source(notes, "learning_rate", by), lr=value(notes, "learning_rate", by, 5e-5))
    decay = value(notes, "weight_decay", by, 0.0)
    notes.sets(source(notes, "weight_decay", by), weight_decay=decay, **({"decay": "matrices"} if decay else {}))
    first, second = value(notes, "adam_beta1", by, 0.9), value(notes, "adam_beta2", by, 0.999)
    eps = value(notes, "adam_epsilon", by, 1e-8)
    if chosen in (*ADAM, "lion", "adam"):
        notes.sets(source(notes, "adam_beta1", by), betas=(first, second))
        notes.tell("adam_beta2", "understood", f"betas {first} {second}")
    if chosen in (*ADAM, "adam"):
        notes.sets(source(notes, "adam_epsilon", by), eps=eps)
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if name not in notes.said:
            notes.tell(name, "ignored", f"{OPTIMIZERS[chosen].title} does not take it")
    notes.usually("PyTorch makes states in the first step", lazy_states=True)


def clipping(notes: Notes, by: str, key: str = "max_grad_norm") -> None:
    """Set the norm of clipping, 1.0 by default."""
    notes.sets(source(notes, key, by), clip_norm=value(notes, key, by, 1.0))


def schedule(notes: Notes, key: str, by: str) -> None:
    """Set the schedule of the learning rate, and tell of the number of steps."""
    name = value(notes, key, by, "linear")
    nearest = {"cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if name in nearest:
        notes.sets(key, schedule=nearest[name])
    else:
        notes.tell(key, "lacking", f"{name}: read as constant, since a schedule changes no byte and no second")
    warmup = value(notes, "warmup_steps", by, 0)
    if warmup >= 1:
        notes.sets("warmup_steps", warmup=int(warmup))
    elif warmup:
        notes.tell("warmup_steps", "understood", "below 1 it is a share of all steps; a plan has one")
    for name in ("max_steps", "num_train_epochs", "num_epochs"):
        if (number := notes.document.keys.get(name)) is not None:
            unit = "steps" if name == "max_steps" else "epochs"
            shown = f"{number:,}" if isinstance(number, int | float) else number
            notes.tell(name, "understood", f"{shown} {unit}; a plan has one step")
    notes.tell("warmup_ratio", "lacking", "a share of all steps: the schedule changes no byte and no second")


def recompute(notes: Notes, key: str, is_on: bool, *, words: str = "") -> None:
    """Set whether blocks are recomputed."""
    if is_on and "recompute" not in notes.values:
        notes.sets(key, "understood", words, recompute="full")
    elif not is_on:
        notes.tell(key, "understood", words or "nothing is recomputed")


def reentrant(notes: Notes, key: str, is_on: bool) -> None:
    """Set FSDP1's reentrant checkpoints beside frozen blocks; without effect elsewhere."""
    values = notes.values
    matters = values.get("recipe") == "fsdp1" and values.get("stage") == 3 and values.get("lora_rank")
    if matters and values.get("recompute") == "full" and "use_reentrant" not in values:
        notes.sets(key, use_reentrant=is_on)
    else:
        notes.tell(key, "ignored", "matters only under FSDP1 with frozen blocks")


def kernels(notes: Notes, loss: str, *, liger: str = "", plain: tuple[str, ...] = ()) -> None:
    """Set the loss, and what transformers' own modules or Liger's save. `liger`: the key that switches Liger on;
    `plain`: what it leaves alone, of loss and blocks."""
    if not has_blocks(notes.context):
        return
    if liger and "loss" not in plain:
        notes.sets(liger, loss="liger")
    if liger and "blocks" not in plain:
        is_compiled = notes.values.get("kernels") == "compiled"
        notes.sets(liger, "understood", "", saves="liger", **({} if is_compiled else {"kernels": "fused"}))
    notes.usually("transformers' own modules", loss=loss, saves="eager")


def attention(notes: Notes, key: str, name: Any) -> None:
    """Set whether scores are stored. Without a name transformers takes SDPA."""
    if not has_blocks(notes.context):
        return
    if name in (None, "auto", True):
        notes.usually("transformers' own: SDPA", attention="flash")
        notes.tell(key, "understood", "SDPA: attention flash")
    elif name in ("eager", "disabled", "off", False):
        notes.sets(key, attention="eager")
    elif any(str(name).startswith(one) for one in ("flash", "sdpa", "fa2", "fa3", "flex", "xformers", "kernels-")):
        notes.sets(key, attention="flash")
    else:
        notes.lacks(key, f"{name}: this attention", costs=True)


def model(notes: Notes, key: str) -> None:
    """Set the model: a folder or a config.json, or the known model of a hub's name. --model wins."""
    name = notes.document.keys.get(key)
    if name is None:
        return
    if not isinstance(name, str):
        notes.refuse(key, "zerosim", f"{name!r}: expected a name or a folder", "write one in quotes")
        return
    if (asked := notes.context.given.get("model")) is not None:
        notes.tell(key, "understood", f"--model {asked} says its sizes")
        return
    for folder in ("", os.path.dirname(notes.document.path)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) or os.path.isfile(os.path.join(path, "config.json")):
            notes.sets(key, model=path)
            return
    if (known := model_of_repository(name)) is not None:
        notes.sets(key, "understood", f"{name} has its sizes", model=known)
        return
    words = hub_words(name) if is_of_hub(name) else f" {name!r}: there is no such folder here; pass --model"
    why, _, advice = words.strip().partition("; ")
    notes.refuse(key, "zerosim", why, f"pass --model: {advice}")
