"""Known models by the names of their repositories. A copy elsewhere under the same name has the same sizes."""

from __future__ import annotations

import re

from zerosim.config.known import known_models

_MIRRORS = ("nousresearch", "unsloth")
_TUNED = re.compile(r"-(instruct|chat|it|hf|base|pt)(?=-|$)")
_PAPERS = {
    "meta-llama/meta-llama-3-8b": "llama3-8b",
    "meta-llama/meta-llama-3-70b": "llama3-70b",
    "meta-llama/llama-3.1-405b": "llama3.1-405b",
    "meta-llama/llama-2-7b": "llama2-7b",
    "meta-llama/llama-2-13b": "llama2-13b",
    "meta-llama/llama-2-70b": "llama2-70b",
    **{f"openai-community/gpt2{size}": f"gpt2{size}" for size in ("", "-medium", "-large", "-xl")},
}
"""Repositories of models that are read from papers."""


def model_of_repository(name: str) -> str | None:
    """Return the known model of this very repository or its instruct sibling, whose sizes are the same; else None."""
    wanted = _plain(name)
    repositories = {_plain(one.source.removeprefix("config.json of ")): one.name for one in known_models().values()
                    if one.source.startswith("config.json of ")} | _PAPERS  # fmt: skip
    if wanted in repositories:
        return repositories[wanted]
    owner, _, own = wanted.partition("/")
    if owner not in _MIRRORS:
        return None
    return next((model for one, model in repositories.items() if _own(one) == own.removeprefix("meta-")), None)


def _own(repository: str) -> str:
    return repository.partition("/")[2].removeprefix("meta-")


def _plain(name: str) -> str:
    return _TUNED.sub("", name.lower().strip("/"))
