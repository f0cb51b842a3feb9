"""Read a launch script that zerosim wrote beside another framework's file: its line `# zerosim: FLAGS`."""

from __future__ import annotations

from typing import Any

from zerosim.config import OPTIONS
from zerosim.config.option import Option
from zerosim.dialects.reading import Context, Document, Notes, Reading
from zerosim.errors import InputError, did_you_mean


def read(document: Document, context: Context) -> Reading:
    """Read the flags. Raises: InputError for an unknown one, and for a value that it does not take."""
    key = next(iter(document.keys))
    words, notes = [*document.keys[key]], Notes(document, context, {})
    while words:
        flag = words.pop(0)
        name = flag.removeprefix("--").replace("-", "_")
        is_off = name not in OPTIONS and name.startswith("no_")
        name = name.removeprefix("no_") if is_off else name
        if not flag.startswith("--") or name not in OPTIONS:
            hint = did_you_mean(name, OPTIONS, "no flag is near")
            raise InputError(f"{document.path}: {flag}: is no flag of a run; {hint}")
        option = OPTIONS[name]
        value: Any = not is_off
        if option.kinds[0] != "bool":
            count = 2 if isinstance(option.metavar, tuple) else 1
            if len(words) < count:
                raise InputError(f"{document.path}: {flag}: expected a value behind it")
            value = _value(option, [words.pop(0) for _ in range(count)], f"{document.path}: {flag}")
        notes.values[name], notes.sources[name] = value, f"{document.path}, {flag}"
    notes.tell(key, "understood", f"{len(notes.values)} options")
    return notes.reading("zerosim wrote it")


def _value(option: Option, words: list[str], where: str) -> Any:
    """Return a value as its option takes it from Python."""
    try:
        if len(words) == 2:
            return tuple(float(word) for word in words)
        word = words[0]
        if word == "none" and "None" in option.kinds:
            return None
        if option.kinds[0] == "int" and option.parse is None:
            return int(word)
        is_number = option.kinds[0] == "float" or ("float" in option.kinds and word.replace(".", "").isdigit())
        return float(word) if is_number else word
    except ValueError:
        raise InputError(f"{where} {' '.join(words)}: expected a number") from None
