"""Exercise on files: "auto" in a ds_config, filled as Hugging Face's Trainer fills it, and the numbers it refuses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_ZERO = "zero_optimization"


def _rules(hidden: int, micro: int, accumulate: int, ranks: int) -> dict[str, int]:
    width = (hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden)
    return dict(zip((*_BATCH, *_WIDTH), (micro * accumulate * ranks, micro, accumulate, *width), strict=True))


def files(seed: int) -> list[tuple[Any, ...]]:
    draw, found = random.Random(21 + seed), []
    for words, own in (
        ("all is auto", {}),
        ("numbers in zero_optimization", {"reduce_bucket_size": 500_000_000, _WIDTH[2]: 100_000}),
        ("a batch without its ranks", {_BATCH[0]: -1, _WIDTH[1]: 0}),
        ("the Trainer's own micro batch, another accumulation", {_BATCH[1]: None, _BATCH[2]: -1}),
        ("another micro batch", {_BATCH[1]: -1}),
    ):
        hidden, micro, ranks = draw.choice((2048, 3072, 8192)), draw.choice((2, 4)), draw.choice((4, 8, 16))
        accumulate = draw.choice((3, 5, 6))
        rules = _rules(hidden, micro, accumulate, ranks)
        other = {_BATCH[0]: micro * accumulate, _BATCH[1]: micro + 1, _BATCH[2]: 2 * accumulate}
        values: dict[str, Any] = dict.fromkeys(rules, "auto")
        for key, value in own.items():
            values[key] = rules[key] if value is None else other[key] if value == -1 else value
        if own:
            del values[_BATCH[0] if _BATCH[0] not in own else _BATCH[1]]
        zero = {"stage": 3, "overlap_comm": True, **{key: values[key] for key in _WIDTH}}
        config = {**{key: values[key] for key in _BATCH if key in values}, _ZERO: zero}
        found.append((words, config, hidden, micro, accumulate, ranks))
    return found


def wrong_file(
    asked: str, config: Any, hidden: int, micro: int, accumulate: int, ranks: int, came: Any
) -> Wrong | None:
    asked = f"{asked}, hidden {hidden}, {micro} x {accumulate} x {ranks} rows"
    if not isinstance(came, tuple | list) or len(came) != 2:
        return f"{asked}: {shown(came)[:80]}", _PAIR
    filled, unequal = came
    if not isinstance(filled, dict) or not isinstance(filled.get(_ZERO), dict):
        return f"{asked}: the file is {shown(filled)[:80]}", "return the file with its section zero_optimization"
    if not isinstance(unequal, tuple | list) or not all(isinstance(key, str) for key in unequal):
        return f"{asked}: the keys are {shown(unequal)[:80]}", _PAIR
    rules = _rules(hidden, micro, accumulate, ranks)
    for before, after in ((config, filled), (config[_ZERO], filled[_ZERO])):
        if (wrong := _wrong_section(asked, before, after, rules)) is not None:
            return wrong
    right = sorted(key for key in _BATCH if config.get(key, "auto") not in ("auto", rules[key]))
    if sorted(unequal) == right:
        return None
    words = f"{asked}: {', '.join(sorted(unequal)) or 'no key'} contradicts, expected {', '.join(right) or 'none'}"
    if set(unequal) & set(_WIDTH):
        return words, "a number in zero_optimization is yours: the Trainer compares the batch alone"
    if any(config.get(key, "auto") == "auto" for key in unequal):
        return words, 'a key that is "auto" or not in the file contradicts nothing'
    if set(unequal) > set(right):
        return words, "a number that equals the Trainer's contradicts nothing"
    return words, "compare each number of the three batch keys with the Trainer's"


def _wrong_section(asked: str, before: Any, after: Any, rules: Mapping[str, int]) -> Wrong | None:
    for key, value in before.items():
        if isinstance(value, dict):
            continue
        if key not in after:
            return f"{asked}: {key} is not in the file", "return every key of the file, also those without auto"
        got, expected = after[key], rules[key] if value == "auto" else value
        if type(got) not in (int, float, bool) or got != expected:
            return f"{asked}: {key} is {shown(got)[:40]}, expected {expected}", _hint(key, value, got, rules)
    if more := [key for key in after if key not in before]:
        hint = "a key that is not in the file stays out: DeepSpeed's default holds"
        return f"{asked}: {shown(more[0])[:40]} is new", hint
    return None


def _hint(key: str, value: Any, got: Any, rules: Mapping[str, int]) -> str:
    if value != "auto":
        return "only auto is filled: a number stays as it is, also where it contradicts"
    if got == "auto":
        return 'replace every "auto", in zero_optimization too'
    if key == _BATCH[0]:
        return "train_batch_size counts rows of all GPUs in all microbatches of a step: micro x accumulate x ranks"
    if key in _BATCH:
        return f"it is the Trainer's own argument: {'micro' if key == _BATCH[1] else 'accumulate'}"
    if key == _WIDTH[1] and isinstance(got, int | float) and abs(got - rules[key]) <= 1:
        return "int() cuts off the fraction, it does not round"
    return {
        _WIDTH[0]: "a bucket of hidden x hidden elements, as many as a square matrix of the model",
        _WIDTH[1]: "nine tenths of hidden x hidden, as a whole number",
        _WIDTH[2]: "ten vectors of the model: 10 x hidden elements",
    }[key]


_PAIR = "return two things: the filled file, and a list of keys"
