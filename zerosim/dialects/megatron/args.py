"""A command line's words as Megatron's parser stores them, each with the option that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.dialects.megatron.keys import MANY, OF_SWIFT, switch
from zerosim.dialects.megatron.names import is_idle, is_of_swift, names
from zerosim.dialects.megatron.step_keys import GONE, TABLE
from zerosim.dialects.reading import Context, Document, Notes
from zerosim.dialects.rows import Row, by_key
from zerosim.dialects.shell.words import Open
from zerosim.errors import did_you_mean

MEGATRON = "megatron d98e8a6"
SWIFT_READER = "ms-swift 3602360"
_ROWS = by_key(TABLE)
_SWIFT_ROWS = by_key(OF_SWIFT)
FLAGS = {
    "--micro-batch-size": ("micro_batch", "--micro-batch"),
    "--global-batch-size": ("accumulate", "--accumulate"),
    "--seq-length": ("seq", "--seq"),
    "--max-length": ("seq", "--seq"),
    "--lr": ("lr", "--lr"),
    "--min-lr": ("min_lr", "--min-lr"),
    "--vocab-size": ("vocab", "--vocab"),
    "--tensor-model-parallel-size": ("tp", "--tp"),
    "--pipeline-model-parallel-size": ("pp", "--pp"),
    "--context-parallel-size": ("cp", "--cp"),
    "--expert-model-parallel-size": ("ep", "--ep"),
}
"""Arguments that one flag replaces: its option, and the flag."""
SWIFT_DEFAULTS: Mapping[str, Any] = {
    "--micro-batch-size": 1, "--global-batch-size": 16, "--bf16": True, "--use-distributed-optimizer": True,
    "--hidden-dropout": 0.0, "--attention-dropout": 0.0, "--recompute-granularity": "selective",
    "--attention-backend": "flash", "--lr-decay-style": "cosine", "--weight-decay": 0.1, "--adam-beta2": 0.95,
    "--swiglu": True, "--fp8-amax-history-len": 1024, "--fp8-amax-compute-algo": "max",
}  # fmt: skip
"""ms-swift's defaults that are not Megatron's."""
_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--num-query-groups")


@dataclass
class Arguments:
    """Arguments by their names with hyphens, and what is told of each.

    values   as argparse stores them; of an argument that is absent the default is in its row
    spelled  by name, the key of the document
    """

    notes: Notes
    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    environment: Mapping[str, str]
    is_swift: bool

    @property
    def who(self) -> str:
        return "ms-swift" if self.is_swift else "Megatron"

    @property
    def context(self) -> Context:
        return self.notes.context

    def __getitem__(self, name: str) -> Any:
        """Return an argument's value, or its default."""
        return self.values[name] if name in self.values else self.default(_ROWS[name], name)

    def default(self, row: Row, name: str) -> Any:
        """Return the launcher's default."""
        return SWIFT_DEFAULTS.get(name, row.default) if self.is_swift else row.default

    def has(self, *names: str) -> bool:
        """Return whether one of these is in the file."""
        return any(name in self.values for name in names)

    def flag(self, option: str) -> Any:
        """Return the value that a flag gave; None without one."""
        return self.context.given.get(option)

    def key(self, names: str) -> str:
        """Return names as the file spells them."""
        return ", ".join(self.spelled.get(name, name) for name in names.split(", "))

    def sets(self, name: str, text: str = "", **values: Any) -> None:
        """Set options from an argument, or from its default if it is absent."""
        if name in self.values:
            self.notes.sets(self.key(name), text=text, **values)
        else:
            self.notes.usually(f"{self.who} without {name}", **values)

    def usually(self, source: str, **values: Any) -> None:
        self.notes.usually(source, **values)

    def tell(self, name: str, how: str, text: str) -> None:
        self.notes.tell(self.key(name), how, text)

    def lacks(self, name: str, what: str, *, costs: bool | None = None, advice: str = "") -> None:
        """Say that an argument of the file is not modelled, and refuse it if it costs."""
        if name in self.values:
            self.notes.lacks(self.key(name), what, costs=costs, advice=advice)

    def refuse(self, names: str, why: str, advice: str = "", by: str = MEGATRON) -> None:
        """Refuse these arguments, as Megatron does or `by` another."""
        self.notes.refuse(self.key(names), by, why, advice)


def arguments_of(document: Document, context: Context) -> Arguments:
    """Read a document's words. What argparse refuses is told, and left out."""
    is_swift = str(document.environment.get("(command)", "")).startswith("megatron ")
    values, spelled, typed = dict[str, Any](), dict[str, str](), dict[str, Any]()
    faults = list[tuple[str, str, str, str]]()
    for key, value in document.keys.items():
        name = key.replace("_", "-") if is_swift or not is_idle(key) else key
        if not is_swift and name != key:
            faults.append((key, MEGATRON, "argparse exits 2: unrecognized arguments (no underscores)", f"write {name}"))
        row = _ROWS.get(name) if name.startswith("--") else None
        if is_of_swift(name) if is_swift else name in _SWIFT_ROWS:
            row = None
        if row is None:
            typed[key] = value
            values[name], spelled[name] = value, key
            continue
        found, fault = _typed(key, value, row, context, is_swift=is_swift)
        typed[key] = value if found is None else found
        if fault is not None:
            faults.append(fault)
        if found is not None and not (found is False and row.kind is switch):
            values[name], spelled[name] = found, key
    rows = {key: _ROWS[name] for key in document.keys if (name := key.replace("_", "-")) in _ROWS}
    rows |= {name: row for name, row in _ROWS.items() if name not in rows}
    notes = Notes(document._replace(keys=typed), context, rows)
    for fault in faults:
        notes.refuse(*fault)
    return Arguments(notes, values, spelled, document.environment, is_swift)


def _typed(
    key: str, value: Any, row: Row, context: Context, *, is_swift: bool
) -> tuple[Any, tuple[str, str, str, str] | None]:
    """Return a value as argparse stores it, and why it is refused. None: it is left out."""
    given = value if isinstance(value, list) else [] if value is True else [value]
    most = len(given) if row.kind in MANY else int(row.kind is not switch or is_swift)
    extra, given = given[most:], given[:most]
    if hidden := next((one for one in extra if isinstance(one, Open) and not one.undefined), None):
        return None, (key, "zerosim", hidden.why, "write its words in place of the variable")
    if words := [one for one in extra if not isinstance(one, Open)]:
        return None, (key, MEGATRON, f"argparse exits 2: unrecognized arguments: {' '.join(words)}", "")
    if unknown := next((one for one in given if isinstance(one, Open)), None):
        return None, _unknown(key, unknown, row, context)
    if not given and row.kind is not switch:
        return None, (key, MEGATRON, "argparse exits 2: expected one argument", "")
    try:
        return row.kind(given if row.kind in MANY else given[0] if given else "true"), None
    except ValueError as error:
        return None, (key, MEGATRON, f"argparse exits 2: {error}: {given[0]!r}", "")


def _unknown(key: str, word: Open, row: Row, context: Context) -> tuple[str, str, str, str] | None:
    """Return how an unknown value is said; None if no option needs it."""
    name = key.replace("_", "-")
    option, flag = FLAGS.get(name, ("model", "--model") if name in _SIZES else ("", ""))
    if option in context.given or (row.changes in ("", "none") and not row.option):
        return None
    return key, "zerosim", word.why, f"pass {flag}, or write the number" if flag else "write the value"


def say_rest(arguments: Arguments) -> None:
    """Say of each argument without a line what it is there: idle, gone, not modelled or unknown."""
    notes = arguments.notes
    old = [name for name in arguments.values if name in GONE]
    if old:
        why = "; ".join(f"{name}: {GONE[name]}" for name in old)
        gone = f"argparse exits 2: removed ({why})" if not set(old) & {"--checkpoint-activations"} else why
        refused = "AssertionError: " if set(old) <= {"--batch-size", "--warmup", "--model-parallel-size"} else ""
        advice = f"--without {','.join(name.lstrip('-') for name in old)} plans the rest"
        arguments.refuse(", ".join(old), f"{refused}{why}" if refused else gone, advice)
    for key, value in notes.document.keys.items():
        name = key.replace("_", "-") if arguments.is_swift else key
        if key in notes.said or (name in _ROWS and (arguments.is_swift or name not in _SWIFT_ROWS)):
            continue
        if is_idle(name) or (arguments.is_swift and is_of_swift(name)):
            notes.tell(key, "ignored", "changes neither bytes nor seconds of a step")
        elif " " in name:
            why = "argparse exits 2: one quoted word with a blank is no argument"
            notes.refuse(key, MEGATRON, why, "expand the array without quotes, or write two words")
        else:
            hint = did_you_mean(name, [*_ROWS, *names()], "argparse exits 2 for an unknown one")
            notes.refuse(key, "zerosim", f"{value!r}: none of the arguments of {MEGATRON} that are known here; {hint}")
    notes.walk_rows()
    for row in TABLE:
        default = arguments.default(row, row.key)
        is_idle_default = row.option in ("hysteresis", "min_loss_scale") and not arguments["--fp16"]
        is_idle_default = is_idle_default or (row.option == "norm_eps" and "layers" not in notes.values)
        if row.option and default is not None and not arguments.has(row.key) and not is_idle_default:
            notes.usually(f"{arguments.who} without {row.key}", **{row.option: default})
