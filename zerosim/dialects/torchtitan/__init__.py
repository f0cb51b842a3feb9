"""torchtitan 0.2's TOML, read as a run: FSDP2 over dp_shard x cp, beside tp, pp and experts.

The rules of the mesh are in torchtitan_mesh.py, the keys in torchtitan_keys.py. From torchtitan 0.3 on a configuration
is Python code, which is never read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.dialects.fp8 import check_codes
from zerosim.dialects.reading import Context, Document, Notes, Reading
from zerosim.dialects.rows import by_key
from zerosim.dialects.torchtitan.keys import OLD, TABLE
from zerosim.dialects.torchtitan.mesh import BY, Setup, experts, mesh
from zerosim.dialects.torchtitan.models import BALANCED, FLAVORS, FLEX, MASKED, sizes_of
from zerosim.dialects.torchtitan.pipeline import batch, pipeline
from zerosim.dialects.torchtitan.quantize import quantized
from zerosim.dialects.torchtitan.training import compiler, optimizer, recompute, schedule
from zerosim.errors import did_you_mean

__all__ = ["TABLE", "read"]
READER = "torchtitan 0.2.2"
CODE = ("job.custom_config_module", "experimental.custom_args_module", "experimental.custom_import")
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


def read(document: Document, context: Context) -> Reading:
    """Return a torchtitan TOML as values of a run."""
    notes = Notes(document, context, by_key(TABLE))
    for key in CODE:
        if document.keys.get(key):
            notes.refuse(
                key,
                BY,
                f"imports {document.keys[key]!r}, Python code, while it reads the file; zerosim imports nothing",
            )
    setup = _setup(notes, _checked(notes))
    mesh(setup)
    batch(setup)
    pipeline(setup)
    experts(setup)
    _precision(setup)
    optimizer(setup)
    schedule(setup)
    recompute(setup)
    compiler(setup)
    quantized(setup)
    _others(setup)
    check_codes(notes)
    notes.walk_rows()
    return notes.reading(READER)


def _checked(notes: Notes) -> dict[str, Any]:
    """Return every key's value, or its default; refuse unknown names and values of another type."""
    values = {key: row.default for key, row in notes.rows.items()}
    sections = {key[:at] for key in notes.rows for at in range(len(key)) if key[at] == "."}
    unknown = dict[str, list[str]]()
    for key, value in notes.document.keys.items():
        if key in notes.rows:
            checked = notes.checked(key, "zerosim, where torchtitan 0.2.2 checks no type")
            values[key] = values[key] if checked is None else checked
        elif key in sections and value == {}:
            notes.tell(key, "ignored", "an empty section: torchtitan's defaults")
        elif key in sections:
            why = f"{value!r}: expected a section [{key}]; torchtitan takes it, and fails when it reads a key of it"
            notes.refuse(key, "zerosim", why)
        else:
            parts = key.split(".")
            wrong = next(
                ".".join(parts[: at + 1]) for at in range(len(parts)) if not _is_start(parts[: at + 1], sections)
            )
            unknown.setdefault(wrong, []).append(key)
    for wrong, keys in unknown.items():
        hint = f"it is {OLD[wrong]} in 0.2.2" if wrong in OLD else did_you_mean(wrong, {*sections, *notes.rows}, "")
        name = wrong.rpartition(".")[2]
        why = f"ValueError: Invalid field names in data: {{{name!r}}}"
        notes.refuse(keys[0], BY, why, f"{hint + ', or ' if hint else ''}--without {wrong} plans the rest")
        for key in keys[1:]:
            notes.tell(key, "refused", why)
    return values


def _is_start(parts: list[str], sections: set[str]) -> bool:
    return ".".join(parts) in sections


def _setup(notes: Notes, keys: Mapping[str, Any]) -> Setup:
    """Tell which model it is, and return what later rules read."""
    family, flavor, given = keys["model.name"], keys["model.flavor"], notes.context.given
    sizes = dict(sizes_of(family, flavor)) if "model.flavor" in notes.document.keys else {}
    if "model" in given:
        for key in ("model.name", "model.flavor"):
            notes.tell(key, "understood", f"--model {given['model']} replaces it")
        sizes = {name: given[name] for name in given if name in _SIZES}
    elif sizes:
        notes.sets("model.flavor", **sizes)
        if sizes["model"] == "llama":
            notes.sets("model.flavor", rope_base=5e5)
        notes.tell("model.name", "understood", f"{family} {flavor} is {sizes['model']}")
        if flavor.endswith(MASKED) or family in FLEX:
            notes.note(
                f"{family} {flavor} attends within documents (FlexAttention); zerosim counts whole rows: --documents"
            )
    elif "model.flavor" in notes.document.keys:
        known = FLAVORS.get(family)
        what = f"{family} has {', '.join(known)}" if known else f"known families: {', '.join(FLAVORS)}"
        why = f"the sizes of {family} {flavor} are in Python code, which is not read"
        notes.refuse("model.flavor", "zerosim", why, f"pass --model, such as a config.json; {what}")
    else:
        notes.note("The file has no model.flavor, for which torchtitan takes debugmodel: pass --model.")
        notes.tell("model.name", "understood", "without a flavor it names no sizes: pass --model")
    return Setup(notes, keys, family if "model.name" in notes.document.keys else "", sizes)


_SIZES = frozenset(
    {"model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "experts", "top_k", "expert_ffn"}
)


def _precision(setup: Setup) -> None:
    """Set the precision: FSDP's own, or autocast's without FSDP."""
    notes, degrees, stored = setup.notes, setup.degrees, setup.keys["training.dtype"]
    key, computed = "training.mixed_precision_param", setup.keys["training.mixed_precision_param"]
    reduced = "training.mixed_precision_reduce"
    notes.tell(reduced, "understood", "gradients are sent in it" if setup.fsdp else "no FSDP")
    if stored == "bfloat16":
        setup.sets("training.dtype", "weights and states alike, without fp32 masters", precision="bf16-pure")
        if computed == "float32" and setup.fsdp:
            notes.lacks(key, "casts bf16 weights to fp32 for compute", costs=True)
        elif setup.fsdp and setup.keys[reduced] == "float32":
            notes.note("FSDP sends gradients in fp32 and stores bf16; zerosim sends what it stores.")
        notes.tell(key, "understood", "the dtype of the weights")
        return
    notes.tell("training.dtype", "understood", "fp32 weights and states")
    if setup.fsdp or computed == "float32":
        setup.sets(key, precision=_PRECISIONS[computed])
        if setup.keys[reduced] == computed == "bfloat16":
            setup.sets(reduced, compress="bf16")
        elif setup.keys[reduced] == "bfloat16" and setup.fsdp:
            notes.lacks(reduced, "fp32 compute whose gradients are sent in bf16", costs=True)
    elif degrees.tp == degrees.pp == 1:
        setup.sets(key, "without FSDP it is torch.autocast over fp32 weights", precision="fp32", autocast="bf16")
    else:
        setup.sets(key, "tp or pp without FSDP: torchtitan warns, and mixes nothing", precision="fp32")


def _others(setup: Setup) -> None:
    """Tell of attention and fault tolerance."""
    notes, keys = setup.notes, setup.keys
    notes.usually("torchtitan's attention: PyTorch's SDPA or FlexAttention", attention="flash")
    if keys["fault_tolerance.enable"]:
        notes.lacks("fault_tolerance.enable", "torchft's replicas")
    for name in notes.document.keys:
        if name.startswith("fault_tolerance.") and name in notes.rows:
            enabled = keys["fault_tolerance.enable"]
            notes.tell(name, "lacking" if enabled else "ignored", "of torchft" if enabled else "torchft is not enabled")
    if keys["debug.moe_force_load_balance"] and setup.has_experts:
        notes.sets("debug.moe_force_load_balance", routing="even")
    if setup.has_experts and setup.family in BALANCED:
        notes.usually("torchtitan's default: load_balance_coeff 1e-3", bias_rate=1e-3)
