"""Names of models as a hub has them, such as meta-llama/Llama-3.1-8B. zerosim downloads nothing."""

from __future__ import annotations

import difflib
import os
import re

from zerosim.config.known import known_models

_ADDRESS = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/", re.IGNORECASE)
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_NO_SIZES = re.compile(r"hf|instruct|chat|base|meta|v\d+(\.\d+)?")
"""Words of a name that do not describe a model's sizes."""


def is_of_hub(name: str) -> bool:
    """Return whether a model's name is one of a hub: an address, or 'owner/name' if there is no such file or folder."""
    if _ADDRESS.match(name):
        return True
    is_path = name.endswith((".json", ".toml")) or os.path.exists(name) or os.path.isdir(name.split("/")[0])
    return not is_path and _NAME.fullmatch(name) is not None


def hub_words(name: str) -> str:
    """Return, to follow the word model, why nothing is read under a hub's name, and what to type: a model here, or a
    file."""
    here, repository = model_called(name), _ADDRESS.sub("", name).strip("/")
    own = f"choose {here}, the nearest model here, or " if here else ""
    return (
        f" {name!r}: zerosim downloads nothing from a hub; {own}download config.json of {repository} and give its "
        "path, such as ./config.json"
    )


def model_called(name: str) -> str | None:
    """Return the known model that a hub's name means: of this repository, or of the same family and size; None if none
    has."""
    wanted, known = _plain(name.rstrip("/").rpartition("/")[2]), known_models()
    plain = {_plain(one): one for one in known}
    for one in known.values():  # a repository's own name, without the model's, wins
        plain[_plain(one.source.rpartition("/")[2])] = one.name
    if wanted in plain:
        return plain[wanted]
    near = difflib.get_close_matches(wanted, list(plain), 3, 0.8)
    sizes = re.findall(r"(?:\d+x)?\d+(?:\.\d+)?[bm]$", wanted)
    return next((plain[one] for one in near if not sizes or one.endswith(sizes[0])), None)


def _plain(name: str) -> str:
    """Return 'Llama-3.1-8B-Instruct' as 'llama3.1-8b'."""
    words = [word for word in re.split(r"[-_\s]+", name.lower()) if not _NO_SIZES.fullmatch(word)]
    return re.sub(r"^([a-z]+)-(?=\d)", r"\1", "-".join(words))
