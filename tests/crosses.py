"""Draws from all options of a run together. `python tests/crosses.py COUNT [FIRST [families]]` checks as many cases as
one likes.

A case is drawn by its number. Any option may be given, on a tiny mesh and model. What is then refused, in one line, is
left out again, until the rest is a run. Then the run on NumPy, the plan that simulates each block of each rank, and the
plan that users get must leave the same record, and the commands must end with the right code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from random_configs import drawn, words_of

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.huggingface.families import FAMILIES
from zerosim.config.huggingface.rope import REQUIRED, read_rope
from zerosim.config.huggingface.rows import BETWEEN, NUMBERS
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.events import Event, Launch, Message
from zerosim.errors import InputError, LossScaleExhausted, NonFiniteGradient
from zerosim.placement.families import DECODERS
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SEED = 45
SECONDS = 120  # of one case, on a machine that has much else to do
GPU = "a100-80"
CLUSTER = cluster_of(find_hardware(GPU)).without_limits()


class Drawn(NamedTuple):
    """A run, its plan, and the fields that were refused on the way."""

    config: RunConfig
    plan: RunResult
    refused: Sequence[Mapping[str, Any]]


def drawn_case(case: int, **fixed: Any) -> Drawn:
    refused: list[Mapping[str, Any]] = []

    def made(fields: Mapping[str, Any]) -> tuple[RunConfig, RunResult]:
        config = RunConfig(**fields)
        return config, plan(config, cluster=CLUSTER)

    _, (config, planned) = drawn(random.Random(f"{SEED} {case}"), made, refused, **fixed)
    return Drawn(config, planned, refused)


def check(config: RunConfig, few: RunResult) -> str:
    """Compare a run with its plans, and return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            real = run(config.replace(nvme=folder) if config.offload.uses_nvme else config, keep_events=True)
        except (NonFiniteGradient, LossScaleExhausted) as error:
            return type(error).__name__
    skipped = [step for step, report in enumerate(real.steps) if report.skipped]
    how: dict[str, Any] = dict(skipped=skipped, keep_events=True)
    every, kept = plan(config, every_rank=True, every_block=True, **how), plan(config, cluster=CLUSTER, **how)
    if skipped:
        few = plan(config, skipped=skipped, cluster=CLUSTER)
    ranks = range(config.mesh.ranks)
    assert real.live_bytes_after == [0 for _ in ranks]
    for rank in ranks:
        assert_same_events(real.events[rank], every.events[rank], f"rank {rank}, run and plan")
        assert every.memory[rank] == real.memory[rank], f"memory of rank {rank}"
        assert every.traffic[rank] == real.traffic[rank], f"traffic of rank {rank}"
    for rank in kept.ran:
        assert_same_events(every.events[rank], kept.events[rank], f"rank {rank}, every block and repeated ones")
    for shapes, what in ((kept, "by its class"), (few, "in short")):
        for rank in ranks:  # of many microbatches few are planned, which do not say in which one the peak is
            assert shapes.memory[rank].to_dict() == real.memory[rank].to_dict(), f"memory of rank {rank}, {what}"
            assert shapes.traffic[rank] == real.traffic[rank], f"traffic of rank {rank}, {what}"
        assert shapes.live_bytes_after == real.live_bytes_after
        told, seen = ([(report.skipped, report.estimated) for report in one.steps] for one in (shapes, real))
        assert told == seen
    assert formulas_agree(checks(few))
    assert few.time is not None
    assert kept.time is not None
    assert math.isclose(few.time.seconds, kept.time.seconds, rel_tol=1e-9)
    check_classes(every, kept.stands_for)
    return "well"


def check_classes(every: RunResult, stands_for: Sequence[int]) -> None:
    """Ranks of a pipeline stage with equal records share a class. Unlike tensors may have equal states by chance."""
    first, mesh = dict[Any, int](), every.config.mesh.axes
    by_tensor = OPTIMIZERS[every.config.optim.optimizer].cut in ("blocks", "sums")
    for rank in () if by_tensor else range(mesh.world_size):
        like = first.setdefault((mesh.index(rank, "pp"), *map(_plain, every.events[rank])), rank)
        assert stands_for[rank] == stands_for[like], f"rank {rank} is like rank {like}: {stands_for}"


def _plain(event: Event) -> Event:
    """Return an event without the numbers of other ranks."""
    if isinstance(event, Launch):
        return event._replace(group=(len(event.group),))
    return event._replace(peer=0) if isinstance(event, Message) else event


def assert_same_events(expected: Sequence[Event], found: Sequence[Event], what: str) -> None:
    for at, (one, other) in enumerate(zip(expected, found, strict=False)):
        assert one == other, f"{what}: event {at}"
    assert len(expected) == len(found), what


def check_commands(config: RunConfig, few: RunResult, refused: Sequence[Mapping[str, Any]]) -> None:
    """A plan ends with 0 and has the same peak; what was refused ends with 2, in one line."""
    left_out = {"parallel", "capacity"}
    asked = {name: config.value(name) for name in ("recipe", "attention", "saves", "bucket_bytes")} | dict(config.given)
    words = words_of({name: value for name, value in asked.items() if name not in left_out})
    code, out, err = ended(["plan", *words, "--gpu", GPU, "--json", "-"])
    assert code == 0, (err, words)
    if config.memory.allocator == "exact":
        assert json.loads(out)["peak_bytes"] == max(memory.reserved_bytes for memory in few.memory), words
    for verb, fields in zip(("run", "plan"), refused[:2], strict=False):
        words = words_of({name: value for name, value in fields.items() if verb == "run" or name not in left_out})
        code, out, err = ended([verb, *words])
        assert (code, out, err.count("\n")) == (2, "", 1), (code, err, words)


def ended(words: Sequence[str]) -> tuple[int, str, str]:
    """Return a command's exit code and its outputs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def of_family(case: int, folder: Path) -> dict[str, Any]:
    """Return a family for a case, or a config.json in `folder`, in place of the model that is drawn for it."""
    rng = random.Random(f"family {case}")
    if case % 2:
        return dict(model=rng.choice(list(DECODERS)), head_dim=rng.choice((2, 2, 4)))
    path = str(folder / "config.json")
    while True:
        values, sizes = _config_json(rng)
        Path(path).write_text(json.dumps(values), encoding="utf-8")
        with contextlib.suppress(InputError):
            plan(RunConfig(model=path, seq=1, **sizes))
            return {"model": path, **sizes}


def _config_json(rng: random.Random) -> tuple[dict[str, Any], dict[str, int]]:
    """Draw a config.json of any family with a value for most keys that its rules know, and return the sizes that a run
    has of it."""
    kind = rng.choice(list(FAMILIES))
    family, known = FAMILIES[kind], FAMILIES[kind].defaults
    heads, layers, head_dim = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4)), rng.choice((2, 4, 4))
    sizes = {"layers": layers, "hidden": heads * head_dim, "heads": heads, "kv_heads": rng.choice((1, heads)),
             "head_dim": head_dim, "ffn": rng.choice((2, 6)), "positions": 16, "vocab": 256}  # fmt: skip
    values = {"model_type": kind} | {
        names[0]: sizes[size] for size, names in family.names.items() if names and size in sizes
    }
    for key, value in known.items():
        if isinstance(value, bool) and rng.random() < 0.3:
            values[key] = not value
        elif key in NUMBERS and rng.random() < 0.7:
            values[key] = rng.choice((0.5, 2.0, 3.0))
        elif key in ("hidden_act", "hidden_activation", "activation_function", "activation"):
            values[key] = rng.choice(list({**BETWEEN[False], **BETWEEN[True]}))
        elif key.startswith("sliding_window") and key != "sliding_window":
            values[key] = rng.choice((1, 2, 3))
    values |= {key: rng.choice(choices) for key, choices in _OF_FILES.items() if key in known}
    if read_rope in family.rules and rng.random() < 0.6:
        pairs = head_dim // 2
        many = {"short_factor": [1.5] * pairs, "long_factor": [4.0] * pairs}
        scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **many}
        rope = rng.choice(list(REQUIRED))
        values["rope_scaling"] = {"rope_type": rope} | {key: scaling.get(key, 4) for key in REQUIRED[rope]}
    return values, {size: sizes[size] for size in ("layers", "hidden", "heads", "head_dim", "ffn")}


_OF_FILES: Mapping[str, Sequence[Any]] = {
    "sliding_window": (None, 1, 2, 3),
    "max_window_layers": (0, 1),
    "no_rope_layer_interval": (1, 2, 3),
    "partial_rotary_factor": (1.0, 0.5),
    "rotary_pct": (1.0, 0.5),
    "rotary_dim": (2, 4),
    "rope_local_base_freq": (100.0,),
    "use_sliding_window": (True, False),
    "original_max_position_embeddings": (4, 16),
}
"""Values of keys that config.json files have."""


def check_case(case: int, **fixed: Any) -> tuple[RunConfig, str]:
    """Check a case; its configuration is a note of any error."""
    config, few, refused = drawn_case(case, **fixed)
    try:
        how = check(config, few)
        check_commands(config, few, refused)
    except Exception as error:
        error.add_note(f"{config!r}")
        raise
    return config, how


def run_cases(count: int, first: int, families: bool) -> int:
    """Check many cases, and print those that fail and how often each option was given."""
    seen, num_failed, began = Counter[str](), 0, time.monotonic()
    for case in range(first, first + count):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                config, how = check_case(case, **(of_family(case, Path(folder)) if families else {}))
            seen.update([how, *config.given])
        except Exception as error:
            num_failed += 1
            at, text = error.__traceback__, str(error).partition("\n")[0]
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            where = "" if at is None else f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
            print(f"case {case}: {type(error).__name__}: {text[:300]} ({where})", *error.__notes__, flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(dict(sorted(seen.items()))))
    print(f"{num_failed} of {count} failed, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(run_cases(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, sys.argv[3:] == ["families"]))
