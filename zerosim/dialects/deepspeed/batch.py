"""Rows and microbatches of a DeepSpeed file, by DeepSpeed's own arithmetic."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.deepspeed.auto import how_of
from zerosim.dialects.reading import Notes


def read_batch(notes: Notes, values: dict[str, Any], by: str) -> None:
    """Set rows and microbatches by DeepSpeed's own arithmetic, which divides with floors and then compares."""
    given, keys = notes.context.given, ("train_batch_size", "train_micro_batch_size_per_gpu")
    train: Any = values.get(keys[0])
    micro: Any = values.get(keys[1])
    accumulate: Any = values.get("gradient_accumulation_steps")
    ranks = given.get("ranks")
    if train is not None and train != "auto":  # flags are over the file's, whose rows of a step stay
        asked = notes.context.flag("micro_batch"), notes.context.flag("accumulate")
        if asked != (None, None):
            micro, accumulate = asked
    if train is None and micro is None:
        if any(key in notes.document.keys for key in keys):
            return  # already refused, or left to a launcher
        if "micro_batch" in given:
            notes.note("no batch size in the file: --micro-batch says it")
            return
        notes.refuse(keys[1], by, "AssertionError: either train_batch_size or train_micro_batch_size_per_gpu is needed",
                     "pass --micro-batch B too")  # fmt: skip
        return
    cp = values.get("sequence_parallel_size") or 1
    shared = given.get("tp", 1) * given.get("pp", 1) * (cp if isinstance(cp, int) else 1)
    try:
        if ranks is None and None not in (train, micro, accumulate):
            ranks = train // (micro * accumulate) * shared
            notes.sets(keys[0], ranks=ranks)
        world = None if ranks is None and train is None else (ranks or 1) // shared
        micro, accumulate, whole = _divided(train, micro, accumulate, world)
        if not whole > 0 or not micro > 0 or not accumulate > 0:
            counts = {"Train batch size": whole, "Micro batch size per gpu": micro}
            counts["Gradient accumulation steps"] = accumulate
            name, zero = next((name, count) for name, count in counts.items() if not count > 0)
            notes.refuse(keys[0] if train is not None else keys[1], by,
                         f"AssertionError: {name}: {zero} has to be greater than 0")  # fmt: skip
            return
        if world is not None and whole != micro * accumulate * world:
            notes.refuse(keys[0], by, f"AssertionError: {whole} != {micro} * {accumulate} * {world} (micro batch x "
                         f"accumulation x ranks)", "mend one of the three, or pass another --ranks")  # fmt: skip
            return
    except TypeError:
        names = (*keys, "gradient_accumulation_steps")
        wrong = [key for key in names if isinstance(values.get(key), str)] or [key for key in names if key in values][
            :1
        ]
        for key in wrong:
            notes.refuse(key, by, f"TypeError: {values[key]!r} is no whole number, and no launcher fills it")
        return
    except ZeroDivisionError:
        notes.refuse(keys[1], by, "ZeroDivisionError: a micro batch of 0 rows")
        return
    source = keys[1] if keys[1] in notes.document.keys else keys[0]
    notes.sets(source, how_of(notes, source), micro_batch=int(micro))
    key = "gradient_accumulation_steps"
    notes.sets(key if key in notes.document.keys else source, how_of(notes, key), accumulate=int(accumulate))
    if keys[0] in notes.document.keys and world is not None:
        notes.tell(keys[0], how_of(notes, keys[0]), f"{int(whole)} rows = {int(micro)} x {int(accumulate)} x {world}")


def _divided(train: Any, micro: Any, accumulate: Any, world: int | None) -> tuple[Any, Any, Any]:
    """Return rows, microbatches and the rows of a step, the absent ones derived with floors. `world`: the data ranks;
    None where nothing says them."""
    if world is None and not (micro > 0 and (accumulate is None or accumulate > 0)):
        raise ZeroDivisionError
    if train is not None and micro is not None and accumulate is None:
        accumulate = train // micro // world
    elif train is not None and micro is None:
        accumulate = accumulate or 1
        micro = train // world // accumulate
    accumulate = 1 if accumulate is None else accumulate
    return micro, accumulate, train if train is not None else micro * accumulate * (world or 1)
