"""Exercise 43: typical mistakes with "auto", and what is said of each."""

from __future__ import annotations

from typing import Any

import pytest
from forty import solution as text_of_solution
from grading_here import assert_told, grade

ZERO = "zero_optimization"


def right(*of: Any) -> tuple[dict[str, Any], list[str]]:
    """The published solution's."""
    names: dict[str, Any] = {}
    exec(text_of_solution("auto"), names)
    found: tuple[dict[str, Any], list[str]] = names["my_auto"](*of)
    return found


def top(key: str, rule: Any) -> Any:
    """A batch key with another rule, wherever the file has it as auto."""

    def answer(config: Any, hidden: int, micro: int, accumulate: int, ranks: int) -> Any:
        filled, keys = right(config, hidden, micro, accumulate, ranks)
        if config.get(key) == "auto":
            filled[key] = rule(micro, accumulate, ranks)
        return filled, keys

    return answer


def width(key: str, rule: Any) -> Any:
    def answer(config: Any, hidden: int, *more: int) -> Any:
        filled, keys = right(config, hidden, *more)
        if config[ZERO][key] == "auto":
            filled[ZERO][key] = rule(hidden)
        return filled, keys

    return answer


def other(change: Any) -> Any:
    return lambda config, *of: change(config, *right(config, *of))


def everything_replaced(config: Any, *of: int) -> Any:
    plain = {key: "auto" for key in config if key != ZERO}
    filled, _ = right({**plain, ZERO: {**config[ZERO], "reduce_bucket_size": "auto"}}, *of)
    return filled, right(config, *of)[1]


TRAIN, MICRO, EACH = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BUCKET, PREFETCH, KEPT = "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
MISTAKES = [
    (lambda config, *of: config, "all is auto, hidden", "two things"),
    (other(lambda config, filled, keys: filled), "all is auto", "two things"),
    (other(lambda config, filled, keys: (filled, 3)), "the keys are 3", "two things"),
    (other(lambda config, filled, keys: (list(filled), keys)), "the file is", "its section"),
    (other(lambda config, filled, keys: ({**filled, ZERO: config[ZERO]}, keys)), "is 'auto', expected", "too"),
    (top(TRAIN, lambda micro, each, ranks: micro * each), f"{TRAIN} is", "of all GPUs"),
    (top(MICRO, lambda micro, each, ranks: each), f"{MICRO} is", "argument: micro"),
    (top(EACH, lambda micro, each, ranks: micro), f"{EACH} is", "argument: accumulate"),
    (width(BUCKET, lambda hidden: hidden), f"{BUCKET} is", "square matrix"),
    (width(PREFETCH, lambda hidden: round(0.9 * hidden * hidden)), f"{PREFETCH} is", "does not round"),
    (width(PREFETCH, lambda hidden: 0.9 * hidden * hidden), f"{PREFETCH} is", "does not round"),
    (width(PREFETCH, lambda hidden: hidden * hidden), f"{PREFETCH} is", "nine tenths"),
    (width(KEPT, lambda hidden: 10 * hidden * hidden), f"{KEPT} is", "ten vectors"),
    (everything_replaced, f"{BUCKET} is", "a number stays"),
    (other(lambda config, filled, keys: ({ZERO: filled[ZERO]}, keys)), "is not in the file", "every key"),
    (other(lambda config, filled, keys: ({TRAIN: 1, MICRO: 1, **filled}, keys)), "is new", "stays out"),
    (other(lambda config, filled, keys: (filled, [])), f"no key contradicts, expected {TRAIN}", "compare each"),
    (other(lambda config, filled, keys: (filled, [TRAIN])), f"{TRAIN} contradicts, expected none", "nothing"),
    (other(lambda config, filled, keys: (filled, [*keys, BUCKET])), BUCKET, "is yours"),
    (
        other(lambda config, filled, keys: (filled, [key for key in (TRAIN, MICRO, EACH) if config.get(key, 0) not in
                                                     (0, "auto")])),
        f"{EACH}, {MICRO} contradicts", "equals the Trainer's",
    ),
]  # fmt: skip


@pytest.mark.quick(5)
@pytest.mark.parametrize(("answer", "words", "hint"), MISTAKES)
def test_a_typical_mistake_is_told_what_it_is(answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, "auto"), words, hint)


def test_the_solution_fills_as_zerosims_own_reader_does() -> None:
    from zerosim.dialects import Context, Document
    from zerosim.dialects.deepspeed import read
    from zerosim.dialects.reading import flat

    config = {TRAIN: "auto", MICRO: "auto", EACH: "auto", ZERO: dict.fromkeys((BUCKET, PREFETCH, KEPT), "auto")}
    config[ZERO]["stage"] = 3  # type: ignore[index]
    filled, unequal = right(config, 4096, 2, 3, 8)
    given = {"model": "llama3-8b", "micro_batch": 2, "accumulate": 3, "ranks": 8}
    values = read(Document("ds_config.json", "deepspeed", flat(config)), Context(given)).values
    assert not unequal
    assert filled[TRAIN] == 2 * 3 * 8
    assert (filled[MICRO], filled[EACH]) == (values["micro_batch"], values["accumulate"])
    options = ("reduce_bucket", "prefetch_elements", "persistent_numel")
    assert [filled[ZERO][key] for key in (BUCKET, PREFETCH, KEPT)] == [values[name] for name in options]
