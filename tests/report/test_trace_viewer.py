"""An exported trace in a viewer: speedscope, in a headless Chromium, imports what was written and nothing else.

What it imported is read from the file that it exports itself. Needs node, npm with its registry, and Chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.train.plan import plan

pytestmark = pytest.mark.slow

PACKAGES = ("speedscope@1.25.0", "puppeteer-core@24.43.1")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SMALL: dict[str, Any] = dict(layers=4, hidden=64, heads=4, seq=64, ranks=8, tp=2, pp=2, accumulate=3, stage=1)
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of node's packages, and the browser."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing or browser is None:
        pytest.skip(f"not installed: {', '.join([*missing, *(['Chromium'] if browser is None else [])])}")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry did not answer within three minutes")
    if done.returncode:
        pytest.skip(f"npm could not install {' and '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules", browser


def test_speedscope_imports_what_was_written(viewer: tuple[Path, str], tmp_path: Path) -> None:
    modules, browser = viewer
    file = tmp_path / "trace.json"
    assert main(["export", "trace", "--gpu", "a100-80", "-o", str(file), *FLAGS]) == 0
    script = Path(__file__).parent / "speedscope.js"
    done = subprocess.run(
        ["node", str(script), str(modules), browser, str(file), str(tmp_path)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "Importing as Trace Event Format" in done.stdout
    assert "warn" not in done.stdout.lower()  # of slices that do not nest
    assert "page error" not in done.stderr
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    imported = json.loads((tmp_path / "imported.json").read_text("utf-8"))
    profiles = {profile["name"]: profile for profile in imported["profiles"]}
    assert len(profiles) == len(imported["profiles"])

    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    written: dict[str, list[tuple[str, str, float]]] = {}
    for event in events:
        if event["ph"] in ("B", "E"):
            rank, number = event["pid"], event["tid"]
            name = f"{process[rank]} (pid {rank}), {thread[rank, number]} (tid {number})"
            written.setdefault(name, []).append((event["ph"], _shown(event), event["ts"]))
    assert profiles.keys() == written.keys()  # a profile is a rank's stream
    frames = [frame["name"] for frame in imported["shared"]["frames"]]
    for name, own in written.items():
        seen = [("B" if e["type"] == "O" else "E", frames[e["frame"]], e["at"]) for e in profiles[name]["events"]]
        assert _stacks(seen) == _stacks(own), name

    step = plan(
        plan_config(**SMALL, attention="flash", recipe="usual"), cluster=cluster_of(find_hardware("a100-80"))
    ).time
    assert step is not None
    longest = max(profiles.values(), key=lambda profile: profile["endValue"])
    assert longest["name"] == f"rank {step.rank} (pid {step.rank}), compute (tid 0)"
    assert longest["unit"] == "microseconds"
    assert _ns(longest["endValue"] - longest["startValue"]) == round(step.seconds * 1e9)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1e3)


def _shown(event: dict[str, Any]) -> str:
    """speedscope adds a slice's arguments to its name."""
    return event["name"] + (f" {json.dumps(event['args'], separators=(',', ':'))}" if "args" in event else "")


def _stacks(events: list[tuple[str, str, float]]) -> list[tuple[int, int, tuple[str, ...]]]:
    """From when to when which slices lie in each other. speedscope counts from a thread's first slice, and makes two
    that touch and look alike one."""
    found: list[tuple[int, int, tuple[str, ...]]] = []
    stack: list[str] = []
    first = before = events[0][2]
    for kind, name, at in events:
        now = _ns(at - first)
        if stack and at > before:
            start = _ns(before - first)
            if found and found[-1][1:] == (start, tuple(stack)):
                start = found.pop()[0]
            found.append((start, now, tuple(stack)))
        before = at
        if kind == "B":
            stack.append(name)
        else:
            assert stack.pop().startswith(name)  # an end as it was written has no arguments
    assert not stack
    return found
