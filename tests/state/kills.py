"""Runs that save every step are killed at random moments, and what they leave is read.

    python kills.py FOLDER COUNT SEED

Each run is a fork of this process, which is warm, and goes on from the newest step that the one before it left. It is
killed within 0.4 seconds. Prints a line of JSON: after how many kills there was no step yet, and which steps
were found; how many had left a step half written. Every step found is compared, number by number, with the same step of
a run that nobody killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from saved import assert_same_states, opened, states_of

from zerosim.config import RunConfig
from zerosim.state.folder import newest, saved_steps
from zerosim.train.run import run

STEPS = 24
TINY: dict[str, Any] = dict(
    ranks=2, layers=1, hidden=4, heads=1, seq=4, micro_batch=1, vocab=256, steps=STEPS, save_every=1, stage=2
)


def config_in(folder: Path, **fields: Any) -> RunConfig:
    return RunConfig(**TINY, save_state=str(folder), **fields)


def killed_run(folder: Path, seconds: float, how: str) -> None:
    """Fork a run that goes on from the newest step, and kill it after so many seconds."""
    child = os.fork()
    if not child:
        try:
            steps = saved_steps(folder)
            run(config_in(folder, save_keep=3, save_as=how, **(dict(resume=str(folder)) if steps else {})))
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> None:
    place, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3])
    whole, folder = place / "whole", place / "killed"
    run(config_in(whole))
    expected = {step: states_of(opened(whole, step)) for step in saved_steps(whole)}
    found, none, half = list[int](), 0, 0
    for _ in range(count):
        if folder.exists() and saved_steps(folder)[-1:] == [STEPS]:
            shutil.rmtree(folder)
        before = saved_steps(folder)[-1:]
        killed_run(folder, rng.uniform(0, 0.4), rng.choice(("sharded", "gathered", "async")))
        half += any(path.name.endswith(".writing") for path in folder.glob(".*"))
        if not saved_steps(folder):
            assert not before
            none += 1
            continue
        step = int(newest(str(folder)).name.partition("-")[2])
        assert [step] >= before
        assert step == saved_steps(folder)[-1], "the newest step is damaged"
        assert_same_states(expected[step], states_of(opened(folder, step)))
        found.append(step)
    if saved_steps(folder)[-1:] != [STEPS]:
        run(config_in(folder, **(dict(resume=str(folder)) if saved_steps(folder) else {})))
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))
    assert left == ["lock"], left
    print(json.dumps({"none": none, "found": found, "half": half}))


if __name__ == "__main__":
    main()
