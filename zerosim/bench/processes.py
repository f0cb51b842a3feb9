"""Contestants that are processes of their own, timed from start to end: start-up, and training against FSDP2.

Every process is started in a session of its own and killed with all it started, at its time limit or when
the bench ends for whatever reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.config import RunConfig
from zerosim.errors import OutOfMemory, ZerosimError

START_UP_LIMIT_S = 30.0
TRAINING_LIMIT_S = 240.0
TOO_SMALL = "1,024 ranks, devices too small"
FLAGS = ("stage", "ranks", "layers", "hidden", "heads", "seq", "vocab", "micro_batch", "precision", "lr", "parallel")


class ProcessFailed(ZerosimError):
    """A contestant's process failed or took longer than it may: this figure cannot be had."""


class Processes:
    """A contestant: commands started together; a step ends when all have."""

    def __init__(
        self, commands: Sequence[Sequence[str]], limit_s: float, environment: dict[str, str], code: int = 0
    ) -> None:
        self._commands = commands
        self._limit_s = limit_s
        self._environment = {**os.environ, **environment}
        self._code = code  # that each of them ends with

    def step(self) -> float:
        """Raises: ProcessFailed, with the last line that a failed one wrote."""
        started = time.perf_counter()
        running: list[subprocess.Popen[str]] = []
        try:
            for command in self._commands:
                running.append(
                    subprocess.Popen(
                        command,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                        start_new_session=True,
                    )
                )
            for process in running:
                _, errors = process.communicate(timeout=max(0.1, started + self._limit_s - time.perf_counter()))
                if process.returncode != self._code:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    raise ProcessFailed(f"{_shown(process.args)} ended with {process.returncode}: {last}")
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"{_shown(self._commands[0])} took more than {self._limit_s:g} s") from None
        finally:
            for process in running:
                _kill(process)
        return time.perf_counter() - started


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)  # its session outlives it while anything that it started does
        else:
            process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _shown(command: Any) -> str:
    return " ".join(str(word) for word in command[1:4])


def start_up() -> dict[str, Processes]:
    """`zerosim --help`, and Python itself."""
    return {
        "zerosim --help": Processes([[sys.executable, "-m", "zerosim", "--help"]], START_UP_LIMIT_S, {}),
        "python -c pass": Processes([[sys.executable, "-c", "pass"]], START_UP_LIMIT_S, {}),
    }


def plans(model: str, limit: str) -> dict[str, Processes]:
    """A plan of stage 3 with full recompute on many and on few ranks, for no device and for one of `limit`
    bytes that it does not fit (where something is looked for that does), and Python itself."""

    def planned(ranks: int, *device: str, code: int = 0) -> Processes:
        flags = ["--model", model, "--stage", "3", "--ranks", str(ranks), "--recompute", "full", *device]
        return Processes([[sys.executable, "-m", "zerosim", "plan", *flags]], START_UP_LIMIT_S, {}, code)

    return {
        TOO_SMALL: planned(1024, "--limit", limit, code=OutOfMemory.exit_code),
        "1,024 ranks": planned(1024),
        "8 ranks": planned(8),
        "python -c pass": Processes([[sys.executable, "-c", "pass"]], START_UP_LIMIT_S, {}),
    }


def start_to_finish(config: RunConfig, weights: dict[str, Any], tokens: Any, folder: Path) -> dict[str, Processes]:
    """The same training by `zerosim run` and by FSDP2: same weights, tokens (steps, rows, seq + 1), Adam, ranks."""
    np.savez(folder / "weights.npz", **weights)
    np.savez(folder / "tokens.npz", tokens=tokens)
    (folder / "config.json").write_text(json.dumps(config.to_dict()), "utf-8")
    zerosim = [sys.executable, "-m", "zerosim", "run", "--steps", str(len(tokens))]
    for name in FLAGS:
        zerosim += [f"--{name.replace('_', '-')}", str(config.to_dict()[name])]
    zerosim += ["--weights", str(folder / "weights.npz"), "--tokens", str(folder / "tokens.npz")]
    zerosim += ["--json", str(folder / "zerosim.json")]
    worker = [sys.executable, "-m", "zerosim.bench.pytorch"]
    workers = [[*worker, str(rank), str(config.mesh.ranks), str(folder)] for rank in range(config.mesh.ranks)]
    return {
        "zerosim": Processes([zerosim], TRAINING_LIMIT_S, {}),
        "FSDP2": _Fresh(folder, workers, TRAINING_LIMIT_S, {"OMP_NUM_THREADS": "1"}),
    }


class _Fresh(Processes):
    """Workers that meet over a file, which must not be there yet."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]], limit_s: float, env: dict[str, str]) -> None:
        super().__init__(commands, limit_s, env)
        self._store = folder / "store"

    def step(self) -> float:
        self._store.unlink(missing_ok=True)
        return super().step()


def losses_of(folder: Path, ranks: int) -> tuple[Any, Any]:
    """Losses (steps, ranks) that the two left in `folder`."""
    ours = np.array(json.loads((folder / "zerosim.json").read_text("utf-8"))["losses_by_data_rank"])
    theirs = np.array([json.loads((folder / f"losses{rank}.json").read_text("utf-8")) for rank in range(ranks)]).T
    return ours, theirs
