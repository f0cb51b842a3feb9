"""Random configurations of all options together on a device that is too small: a command says so, and what would fit.

No advice is refused, and no refusal of a tried change ends a search: the exit code is 3, never 2. What is advised
fits. `python tests/analysis/test_too_small.py COUNT [FIRST]` plans as many as one likes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":  # as a program it finds its neighbours by itself
    sys.path.insert(0, str(Path(__file__).parents[1]))

from random_configs import drawn, words_of

from zerosim.cli.main import main
from zerosim.cli.options import run_config
from zerosim.cli.parser import Parser
from zerosim.cli.plan import planned_config
from zerosim.comm.runtime import make_backend
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.config.parts.clock import CLOCK
from zerosim.device.device import Device
from zerosim.train.build_model import build_model
from zerosim.train.check_model import check_model
from zerosim.train.plan import check_plan_of, peak_of

SHARES = (0, 0.2, 0.5, 0.8, 0.95, 1)
GPU = ["--gpu", "v100-32", "--reserve", "0"]
NOT_SEARCHED: Mapping[str, Sequence[str]] = {
    "mesh": (
        *("tp", "pp", "dp_replicate", "stage", "stage_layers", "recompute", "sequence_parallel", "keep_gathered"),
        *("pad_vocab", "balance_ends", "partition_activations", "cpu_checkpointing", "pipeline", "virtual_stages"),
        *("micro_batch_group", "secondary_shard", "quantized_weights", "quantized_gradients", "hierarchical_gather"),
        *("cp", "context", "context_order"),
    ),
    "ranks": ("ranks", "hierarchical_gather"),  # whose gathers list every node: minutes at 32,768 ranks
    "model": ("model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "params", "units", "freeze"),
    "offload": ("offload", "delayed_update"),
    "lora-rank": ("lora_rank", "freeze"),
}
"""The options that a search varies, or that go only with one of these."""


def valid(seed: object, gone: Collection[str] = (), **fixed: Any) -> dict[str, Any]:
    """The values of a plan that nothing refuses before it starts, without those that are `gone`."""

    def made(values: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in _of_plans(values).items() if name not in gone}
        config = RunConfig(**{**PLAN_DEFAULTS, **values})
        model = build_model(config, Device(0, make_backend("meta")))
        check_model(config, model)
        check_plan_of(config)
        return values

    return drawn(random.Random(f"too small {seed}"), made, **fixed)[1]


def _of_plans(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what limits memory or is a run's, and without one step: a plan takes as many as it needs."""
    kept = {name: value for name, value in values.items() if name not in ("capacity", "parallel")}
    return {name: value for name, value in kept.items() if (name, value) != ("steps", 1)}


def too_few(seed: object, verb: str, flags: Sequence[str]) -> str:
    """Bytes of a device that are too few, by one or by many: less than what is live at the peak."""
    parser = Parser(f"zerosim {verb}", "")
    importlib.import_module(f"zerosim.cli.{verb}").add_arguments(parser)
    args = parser.parse([*flags, *(["--limit", "1"] if verb == "plan" else [])])
    config = planned_config(args) if verb == "plan" else run_config(args)
    live = peak_of(config.replace(allocator="exact", allocator_conf=None))
    return str(max(1, int(random.Random(f"limit {seed}").choice(SHARES) * live) - 1))


def ended(*given: str) -> tuple[int, str, str]:
    """The exit code of a command, what it printed, and what it said on one line of stderr."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(list(given))
    return code, out.getvalue(), " ".join(err.getvalue().split())


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Its flags, on a GPU if an option of the clock needs one."""
    return [*words_of(values), *(GPU if values.keys() & set(CLOCK) else [])]


def check_plan(seed: int) -> Counter[str]:
    """Plan a draw on too small a device, then every change that would fit. Return how many were planned. Every tenth
    has one contiguous region of memory."""
    flags = flags_of(valid(seed, **({"allocator": "arena"} if seed % 10 == 9 else {})))
    limit = ["--limit", too_few(seed, "plan", flags)]
    code, out, err = ended("plan", *flags, *limit, "--quiet", "--json", "-")
    assert code == 3, (seed, err, " ".join([*flags, *limit]))
    tips = [tip.split(" would fit")[0] for tip in json.loads(out)["advice"].split("; ") if " would fit" in tip]
    for tip in tips:
        code, _, err = ended("plan", *with_tip(flags, tip), *limit, "--quiet")
        assert code == 0, (seed, tip, err, " ".join([*flags, *limit]))
    return Counter(plans=1, tips=len(tips), left_out=sum("leaving out" in tip or "without" in tip for tip in tips))


def with_tip(flags: Sequence[str], tip: str) -> list[str]:
    """The flags of a command after '--stage 3', 'leaving out --no-grad-sync' or '--stage 3 without --foreach'."""
    added, gone, *_ = [*re.split("leaving out|without", tip), ""]
    kept = f" {' '.join(flags)} "
    for flag in re.findall(r"--\S+(?: [^-]\S*)?", gone):
        assert f" {flag} " in kept, (flag, kept)
        kept = kept.replace(f" {flag} ", " ", 1)
    return [*kept.split(), *added.split()]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (4, 27))])
def test_a_plan_ends_with_3_and_what_it_advises_fits(first: int) -> None:
    for seed in range(first, first + (23 if first else 4)):
        check_plan(seed)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("verb", ["run", "step"])
def test_a_run_and_a_stepped_run_end_with_3_and_advice(verb: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        values = valid(seed, vocab=256, steps=2)
        flags = words_of({name: value for name, value in values.items() if name not in CLOCK})
        flags += ["--nvme", str(tmp_path)] if "nvme" in values.get("offload", "") else []
        capacity = too_few(seed, verb, flags)
        code, _, err = ended(verb, *flags, "--capacity", capacity)
        assert code == 3, (seed, err, " ".join([*flags, "--capacity", capacity]))
        assert "Tried for you" in err


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("find", "draws"),
    [
        *((find, 12) for find in ("micro-batch", "layers", "seq", "params", "lora-rank", "offload")),
        *[
            ("mesh", 3),
            pytest.param("mesh", 8, marks=pytest.mark.slow),
            pytest.param("ranks", 2, marks=pytest.mark.slow),
        ],
    ],
)
def test_a_search_that_finds_nothing_ends_with_3(find: str, draws: int) -> None:
    """On a device of one byte."""
    fixed: dict[str, Any] = {"params": dict(model="flat"), "lora-rank": dict(model="gpt", lora_rank=1)}.get(find, {})
    fixed |= dict(host_memory=10**12) if find == "offload" else {}
    gone, seed, found = NOT_SEARCHED.get(find, (find.replace("-", "_"),)), 0, 0
    while found < draws:
        values, seed = valid(f"{find} {seed}", {*gone} - {"ranks", "model", *fixed}, **fixed), seed + 1
        is_flat = values["model"] in ("flat", "mlp")
        if (is_flat and find in ("layers", "seq", "mesh", "lora-rank")) or (find == "offload" and not values["stage"]):
            continue
        found += 1
        flags = flags_of({name: value for name, value in values.items() if name not in gone})
        code, _, err = ended("fit", "--find", find, *flags, "--limit", "1", "--quiet")
        assert code == 3, (seed, err, " ".join(flags))


def plan_many(count: int, first: int) -> None:
    done = Counter[str]()
    for seed in range(first, first + count):
        try:
            done += check_plan(seed)
        except Exception as error:
            done["failed"] += 1
            print(seed, type(error).__name__, error, *getattr(error, "__notes__", ()), flush=True)
    print(dict(done))


if __name__ == "__main__":
    plan_many(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
