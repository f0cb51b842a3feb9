"""A shell script, or a YAML file of MODEL_ARGS, as a command line's words. No shell runs.

Assignments, arrays, `+=`, `$(( ))` and `${X:-default}` are computed. A variable that a command, a condition or a loop
sets is open (`shell_words.Open`): the reader refuses it only where an argument needs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from zerosim.dialects.reading import Document
from zerosim.dialects.shell.script import LAUNCHERS, Script
from zerosim.dialects.shell.words import Open
from zerosim.dialects.tell import LAUNCH, WHOLE
from zerosim.errors import InputError

COMMAND = "(command)"
"""In a document's environment: the program, such as pretrain_gpt.py or megatron sft."""


def document_of_script(path: str, dialect: str, values: Any) -> Document:
    """Return the arguments of a script's training command, in order; switches are True, several words a list.

    Raises: InputError for a script that has none, or begins them where a shell would decide.
    """
    if dialect == "launch":
        line = next(line for line in str(values).splitlines() if line.startswith((LAUNCH, WHOLE)))
        mark = WHOLE if line.startswith(WHOLE) else LAUNCH
        try:
            return Document(path, dialect, {"flags" if mark == LAUNCH else "all flags": shlex.split(line[len(mark) :])})
        except ValueError as error:
            raise InputError(f"{path}: {mark.strip()} {error}; write flags as in a shell") from None
    if "\r" in str(values):
        raise InputError(f"{path}: its lines end as in Windows, which a shell takes for arguments: save it with LF")
    if isinstance(values, Mapping):
        return _of_yaml(path, dialect, values)
    script = Script(path)
    script.read(values)
    before, words = script.training()
    environment = {name: one for name, one in script.variables.items() if isinstance(one, str)}
    environment |= {name: str(one) for name, one in _launcher(before).items()}
    return Document(path, dialect, keys_of(path, words), environment)


def _of_yaml(path: str, dialect: str, values: Mapping[str, Any]) -> Document:
    variables = values.get("ENV_VARS") or {}
    if not isinstance(variables, Mapping):
        raise InputError(f"{path}: ENV_VARS: expected names with values")
    environment, keys = {name: str(one) for name, one in variables.items()}, dict[str, Any]()
    for name, value in values["MODEL_ARGS"].items():
        if value is None or value is True or str(value).lower() == "true":
            keys[name] = True
        elif value is False or isinstance(value, Mapping):
            raise InputError(f"{path}: MODEL_ARGS: {name}: {value!r}: leave out a switch that is off")
        else:
            words = [str(one) for one in value] if isinstance(value, list) else str(value).strip("[]").split()
            read = [_filled(word, environment) for word in words]
            keys[name] = read[0] if len(read) == 1 else read
    return Document(path, dialect, keys, environment)


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Return a word of a YAML file, whose launcher fills in variables."""
    missing = next((name for name in re.findall(r"\$\{?(\w+)", word) if name not in variables), None)
    if missing is not None:
        return Open(word, f"ENV_VARS has no {missing}", undefined=True)
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables[found[1]], word)


def keys_of(path: str, words: list[str]) -> dict[str, Any]:
    """Return argparse's view: each --name with the words behind it. `--a=b` is --a b, and the last of two wins."""
    keys, name = dict[str, Any](), ""
    for word in words:
        if word.startswith("--") and not isinstance(word, Open):
            name, sign, value = word.partition("=") if " " not in word else (word, "", "")
            keys.pop(name, None)
            keys[name] = value if sign else True
        elif not name:
            if not (isinstance(word, Open) and word.undefined):
                why = f" ({word.why})" if isinstance(word, Open) else ""
                raise InputError(f"{path}: {word!r}{why}: expected an argument such as --num-layers 32")
        elif keys[name] is True:
            keys[name] = word
        else:
            keys[name] = [*(keys[name] if isinstance(keys[name], list) else [keys[name]]), word]
    return keys


def _launcher(words: list[str]) -> dict[str, str]:
    """Return what a launcher's words say of ranks, and the program behind them."""
    found = dict[str, str]()
    for number, word in enumerate(words):
        option, sign, value = word.partition("=")
        name = next((name for name, spelled in LAUNCHERS.items() if option in spelled), None)
        if name is not None and (sign or number + 1 < len(words)):
            given = value if sign else words[number + 1]
            if not isinstance(given, Open) and not isinstance(word, Open):
                found[name] = given
    if words and words[-1].endswith(".py"):
        found[COMMAND] = words[-1].rpartition("/")[2]
    elif words[-2:-1] == ["megatron"]:
        found[COMMAND] = " ".join(words[-2:])
    return found
