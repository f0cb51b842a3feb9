"""on_a_gpu.py FOLDER [--suite] [--minutes N]: every check of one GPU, in ten minutes at most.

Doctor, the ledger beside the memory pool at every mark, `pytest -m cuda` and the benchmark. Then steps of one rank and
of four, without CUDA graphs and with them, and of four processes where there is an mpirun. `--suite` runs all tests in
place of these. The name of each test that fails is printed at once, and again at the end. What each part prints is kept
in FOLDER line by line, so a part that is stopped, or a machine that goes away, leaves what it has said. Exit code 1
where some part failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from mpi.mpirun import ENVIRONMENT, MPIRUN
from processes import SECONDS, ended

ROOT = Path(__file__).resolve().parent.parent
ZEROSIM = (sys.executable, "-m", "zerosim")
PYTEST = (sys.executable, "-u", "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short", "-o", "addopts=")
PACE = str(ROOT / "tests" / "mpi" / "cuda_pace.py")
UNFIT = re.compile(r"(?:^|\s)(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$|^(tests/\S.*?) (?:FAILED|ERROR)\b")
"""A test that failed or could not start, as pytest -v and its workers name it."""
NEEDLESS = 5
"""pytest's exit code where no test was selected."""


class Part(NamedTuple):
    """One check: its name, its command, and the most seconds that it takes."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def parts(folder: Path, suite: bool, seconds: float) -> list[Part]:
    """Return the checks in order: what costs least and says most comes first."""
    doctor = Part("doctor", (*ZEROSIM, "doctor"), 60)
    if suite:
        workers = ("-n", str(min(os.cpu_count() or 1, 15)), "--dist", "loadfile") if _has_xdist() else ()
        return [doctor, Part("suite", (*PYTEST, "-m", "not slow", *workers, "tests"), seconds)]
    on_gpu = ("--backend", "cuda")
    verify = (*ZEROSIM, "run", "--stage", "3", "--ranks", "4", *on_gpu, "--verify-memory")
    found = [
        doctor,
        Part("verify-memory", verify, 60),
        Part("verify-graphs", (*verify, "--capture-graphs"), 60),
        Part("cuda", (*PYTEST, "-m", "cuda", "tests/backends"), 180),
        Part("bench", (*ZEROSIM, "bench", *on_gpu, "--json", str(folder / "bench.json")), 240),
        *(Part(way, (sys.executable, PACE, way), 60) for way in ("one", "one-graphs", "four", "four-graphs")),
    ]
    if MPIRUN is not None:
        found.append(Part("four-processes", (MPIRUN, "-n", "4", sys.executable, PACE, "four-processes"), 60))
    return found


def _has_xdist() -> bool:
    command = [sys.executable, "-c", "import xdist"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def unfit(line: str) -> str | None:
    """Return the test that a line of pytest says has failed, or could not start."""
    match = UNFIT.search(line.rstrip())
    return None if match is None else match[1] or match[2]


def keep(part: Part, folder: Path, limit_s: float) -> tuple[int | None, float, list[str]]:
    """Run a part, print and keep its lines as they come. Return its exit code (None: stopped), seconds and failures."""
    failed: dict[str, None] = {}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    job = subprocess.Popen(
        part.command, cwd=ROOT, env=environment, encoding="utf-8", errors="replace", stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    with ended(job, limit_s), (folder / f"{part.name}.txt").open("w", encoding="utf-8", buffering=1) as kept:
        assert job.stdout is not None
        for line in job.stdout:
            kept.write(line)
            name = unfit(line)
            if name is not None and name not in failed:
                failed[name] = None
                print(f"failed: {name}", flush=True)
        code = job.wait(timeout=SECONDS)
    seconds = time.monotonic() - began
    return None if code < 0 and seconds >= limit_s else code, seconds, list(failed)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="receives a file for each part, and bench.json")
    parser.add_argument("--suite", action="store_true", help="run the whole suite in place of the device's checks")
    parser.add_argument("--minutes", type=float, default=10.0, help="the most minutes for all parts together")
    args = parser.parse_args(words)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    lines, is_well = [], True
    for part in parts(folder, args.suite, 60 * args.minutes):
        left_s = ends - time.monotonic()
        if left_s < 5:
            lines.append(f"{part.name}: not started, no time was left")
            is_well = False
        else:
            limit_s = min(part.limit_s, left_s)
            code, seconds, failed = keep(part, folder, limit_s)
            passed = code in (0, NEEDLESS)
            said = "passed" if passed else f"stopped after {limit_s:.0f} s" if code is None else f"exit code {code}"
            lines += [f"{part.name}: {said}, {seconds:.0f} s", *(f"    failed: {name}" for name in failed)]
            is_well = is_well and passed and not failed
        print(lines[-1] if lines[-1].startswith(part.name) else lines[-1 - len(failed)], flush=True)
        (folder / "summary.txt").write_text("\n".join(lines) + "\n", "utf-8")
    print((folder / "summary.txt").read_text("utf-8"), end="")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
