"""Figures of whole processes, from start to end: start-up, plans, and training against FSDP2.

Every process gets its own process group. It is killed with its children at its time limit, or when
the benchmark ends for any reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.bench import pytorch
from zerosim.bench.contest import Budget, Contestant, Progress, Rounds, Timing, interleave, timed
from zerosim.bench.figures import Figure, difference, ratio, same_losses
from zerosim.bench.training import RANKS, initial_weights, over_ranks, text_tokens
from zerosim.config import RunConfig
from zerosim.errors import OutOfMemory, ZerosimError
from zerosim.train.processes import end, start

START_UP_LIMIT_S = 30.0
START_UP_GOAL_S = 0.15

PLANS = {"gpt3-175b": "16GB", "1t": "32GB"}
"""Models, and limits per device that they exceed."""
PLAN_GOAL_S = 1.5
RANKS_GOAL = 1.1

TRAINING_LIMIT_S = 240.0
FSDP_STEPS = 20
FSDP_GOALS = {"0.8M": 0.25, "10.7M": 0.5}
SAME_LOSS = 1e-3
FLAGS = ("stage", "ranks", "layers", "hidden", "heads", "seq", "vocab", "micro_batch", "precision", "lr", "parallel")


class ProcessFailed(ZerosimError):
    """A contestant's process failed or exceeded its time limit, so this figure is missing."""


class Processes(Contestant):
    """A contestant: commands started together. A step ends when all of them have ended.

    exit_code: the expected exit code of each; store: a file for their rendezvous, which must not exist yet.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        limit_s: float = START_UP_LIMIT_S,
        environment: Mapping[str, str] | None = None,
        *,
        exit_code: int = 0,
        store: Path | None = None,
    ) -> None:
        self._commands = commands
        self._limit_s = limit_s
        self._environment = {**os.environ, **(environment or {})}
        self._exit_code = exit_code
        self._store = store

    def step(self) -> Timing:
        """Run the commands. Raises: ProcessFailed, with the last line of a failed one."""
        if self._store is not None:
            self._store.unlink(missing_ok=True)
        return timed(self._run)

    def _run(self) -> None:
        deadline = time.perf_counter() + self._limit_s
        running: list[subprocess.Popen[str]] = []
        try:
            for command in self._commands:
                running.append(start(command, self._environment))
            for process in running:
                _, errors = process.communicate(timeout=max(0.1, deadline - time.perf_counter()))
                if process.returncode != self._exit_code:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    raise ProcessFailed(f"{_shown(process.args)} ended with {process.returncode}: {last}")
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"{_shown(self._commands[0])} took more than {self._limit_s:g} s") from None
        finally:
            for process in running:
                end(process)


def _shown(command: Any) -> str:
    return " ".join(str(word) for word in command[1:4])


def cold_starts(budget: Budget, progress: Progress) -> Iterator[Figure]:
    """Time `zerosim --help` and plans from a cold start, minus Python's own start, and a plan of 1,000 ranks over one
    of eight.

    The plans use ZeRO-3 with full recompute, without a device or on one that is too small. On the latter the plan also
    searches for a change that fits.
    """

    def over_python(title: str, name: str, goal: float, contestants: dict[str, Processes]) -> Figure:
        first = next(iter(contestants))
        contestants["python -c pass"] = Processes([[sys.executable, "-c", "pass"]])
        try:
            measured.update(interleave(contestants, budget, progress, title))
        except ProcessFailed as error:
            return Figure("", name, None, "s", goal, note=str(error))
        return difference("", name, measured, first, "python -c pass", goal)

    def plan(model: str, ranks: int, *device: str, exit_code: int = 0) -> Processes:
        flags = ["--model", model, "--stage", "3", "--ranks", str(ranks), "--recompute", "full", *device]
        return Processes([_zerosim("plan", *flags)], exit_code=exit_code)

    measured: dict[str, Rounds] = {}
    help_only = {"zerosim --help": Processes([_zerosim("--help")])}
    yield over_python("start-up", "zerosim --help, start-up over bare Python", START_UP_GOAL_S, help_only)
    for model, limit in PLANS.items():
        contestants = {
            "1,024 ranks, devices too small": plan(model, 1024, "--limit", limit, exit_code=OutOfMemory.exit_code),
            "1,024 ranks": plan(model, 1024),
            "8 ranks": plan(model, 8),
        }
        name = f"zerosim plan, {model} on 1,024 ranks that do not hold it, over bare Python"
        figure = over_python(f"plan of {model}", name, PLAN_GOAL_S, contestants)
        yield figure
        if figure.value is None:
            return
    yield ratio("", "zerosim plan, 1,024 ranks / 8 ranks", measured, "1,024 ranks", "8 ranks", RANKS_GOAL)


def against_fsdp(model: str, config: RunConfig, budget: Budget, progress: Progress) -> Figure:
    """Time 20 steps from process start to process end: `zerosim run` and four processes of FSDP2 on gloo.

    Both train alike: same weights, tokens (steps, rows, seq + 1), Adam and ranks.
    """
    name, goal = f"{FSDP_STEPS} steps start to finish / FSDP2, 4 processes", FSDP_GOALS.get(model)
    if why := pytorch.unusable("cpu"):
        return Figure(model, name, None, goal=goal, note=why)
    sharded = over_ranks(config).replace(parallel=2)
    with tempfile.TemporaryDirectory(prefix="zerosim-bench-") as place:
        folder = Path(place)
        np.savez(folder / "weights.npz", **initial_weights(config))
        batches = [text_tokens(sharded.replace(seed=step)) for step in range(FSDP_STEPS)]
        np.savez(folder / "tokens.npz", tokens=np.stack(batches))
        (folder / "config.json").write_text(json.dumps(sharded.to_dict()), "utf-8")
        run = _zerosim("run", "--steps", str(FSDP_STEPS))
        for flag in FLAGS:
            run += [f"--{flag.replace('_', '-')}", str(sharded.to_dict()[flag])]
        run += ["--weights", str(folder / "weights.npz"), "--tokens", str(folder / "tokens.npz")]
        run += ["--json", str(folder / "zerosim.json")]
        worker = [sys.executable, "-m", "zerosim.bench.pytorch"]
        workers = [[*worker, str(rank), str(RANKS), str(folder)] for rank in range(RANKS)]
        contestants = {
            "zerosim": Processes([run], TRAINING_LIMIT_S),
            "FSDP2": Processes(workers, TRAINING_LIMIT_S, {"OMP_NUM_THREADS": "1"}, store=folder / "store"),
        }
        try:
            measured = interleave(contestants, budget, progress, f"{model}, start to finish")
        except ProcessFailed as error:
            return Figure(model, name, None, goal=goal, note=str(error))
        ours = json.loads((folder / "zerosim.json").read_text("utf-8"))["losses_by_data_rank"][0]
        theirs = [json.loads((folder / f"losses{rank}.json").read_text("utf-8"))[0] for rank in range(RANKS)]
    return ratio(model, name, measured, "zerosim", "FSDP2", goal, same_losses(ours, theirs, SAME_LOSS))


def _zerosim(*words: str) -> list[str]:
    return [sys.executable, "-m", "zerosim", *words]
