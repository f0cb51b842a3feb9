"""What is measured becomes a file, the file becomes a clock. Nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zerosim.bench import alone, calibrate, suite
from zerosim.bench.predict import Compared, said_error, steps_of
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import CPU_RATE, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.machine_file import Machine, Measured, machine_text
from zerosim.config.run import plan_config
from zerosim.device.events import Kernel
from zerosim.errors import InputError
from zerosim.ledger.costs_of import costs_of
from zerosim.train.plan import plan
from zerosim.verbs import MEASURED

ALWAYS = 1e30
"""More work than any kernel has: below their first point, curves are flat."""


def flat(seconds: float) -> Measured:
    return Measured(((ALWAYS, seconds),))


MACHINE = Machine(
    precision="fp32", transport="threads", ranks=2, cores=2, kernel_s=0.25, known_error="none",
    product=flat(2.0), memory=flat(1.0), kernels={"gelu": Measured(((1e3, 0.5), (1e6, 0.5), (1e9, 3.0)))},
    collectives=dict.fromkeys(MEASURED, flat(8.0)),
)  # fmt: skip
DEVICE = dict(name="here", memory_bytes=10**9, peak_flops=10**11, hbm_bytes_per_s=10**10, link_bytes_per_s=10**9)
SMALL: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=8, vocab=64, ranks=2, stage=3, precision="fp32")


def written(folder: Path, text: str) -> str:
    path = folder / "machine.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_a_machine_comes_out_of_its_file_as_it_went_in(tmp_path: Path) -> None:
    assert find_hardware(written(tmp_path, machine_text(MACHINE, DEVICE))).machine == MACHINE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("kernel_s = 0.25", "kernel_s = -1"), "machine.kernel_s -1: expected seconds, at least 0"),
        (("kernel_s = 0.25", "kernels_s = 1"), "unknown key machine.kernels_s: did you mean 'kernel_s'?"),
        (("kernel_s = 0.25\n", ""), "missing machine.kernel_s: measure again with zerosim calibrate"),
        (("ranks = 2", "ranks = 1"), "machine.ranks 1: expected a whole number, at least 2"),
        (("version = 1\n", ""), "missing machine.version: measure again with zerosim calibrate"),
        (
            ("version = 1", "version = 2"),
            "machine.version 2: written by a newer zerosim; this one reads version 1: measure again",
        ),
        (("version = 1", "version = 0"), "machine.version 0: expected 1: measure again with zerosim calibrate"),
        (("version = 1", 'version = "1"'), "machine.version '1': expected 1: measure again"),
        (("send = ", "sent = "), "missing machine.collectives.send: measure again"),
        (("[1e+06, 0.5]", "[1e+06, 0.4]"), "machine.kernels.gelu: [1e+06, 0.4] after [1000, 0.5]: work must ascend"),
        (("[1e+06, 0.5]", "1e+06"), "machine.kernels.gelu: expected a list of [work, seconds]"),
        (("[1e+06, 0.5]", "[nan, 0.5]"), "machine.kernels.gelu: expected a list of [work, seconds]"),
        (("[machine]", "[machines]"), "missing machine.version, machine.precision"),
    ],
)
def test_what_a_machines_file_may_not_say(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = machine_text(MACHINE, DEVICE)
    assert change[0] in text
    with pytest.raises(InputError) as caught:
        find_hardware(written(tmp_path, text.replace(*change)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_more_never_ends_sooner() -> None:
    draw = random.Random(0)
    for _ in range(50):
        samples = {("linear", 10 ** draw.uniform(2, 9)): [10 ** draw.uniform(-6, 0)] for _ in range(12)}
        curve = calibrate._curve(samples)
        works = sorted(10 ** draw.uniform(1, 10) for _ in range(100))
        seconds = [curve.seconds(work) for work in works]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(seconds))


def test_the_clock_takes_the_seconds_of_the_file(tmp_path: Path) -> None:
    """Kernels take what the file says, and the host's time; stage 3 waits for each collective."""
    cluster = cluster_of(find_hardware(written(tmp_path, machine_text(MACHINE, DEVICE))))
    result = plan(plan_config(**SMALL), cluster=cluster, keep_events=True)
    time = result.time
    assert time is not None
    calls = sum(row.calls for row in result.traffic[0] if row.step == 0 and row.payload_bytes)
    names = [event.name for event in result.events[0] if type(event).__name__ == "Kernel" and event.scope.step == 0]
    products = sum(1 for e in result.events[0] if type(e).__name__ == "Kernel" and e.engine == "matmul" and e.flops)
    assert names.count("gelu") == 1
    assert sum(time.exposed.values()) == 8.0 * calls
    assert time.compute == pytest.approx(0.25 * time.kernels + 2.0 * products + 0.5 + (time.kernels - products - 1))


def test_the_clock_takes_the_hosts_adam_of_the_file(tmp_path: Path) -> None:
    """A rank's part of the rate of those that were measured, and the host's time. Without it the curves stay."""
    offloaded = plan_config(**SMALL, offload="optimizer=host")
    without, known = (
        cluster_of(find_hardware(written(tmp_path, machine_text(MACHINE, device))))
        for device in (DEVICE, DEVICE | dict(cpu_bytes_per_s=10**6))
    )
    result = plan(offloaded, cluster=known, keep_events=True)
    adam = [event for event in result.events[0] if isinstance(event, Kernel) and event.name == "adam"]
    assert adam
    for kernel in adam:
        seconds = (kernel.bytes_read + kernel.bytes_written) / (10**6 / MACHINE.ranks)
        assert costs_of(offloaded, known).kernel(kernel) == pytest.approx(seconds + MACHINE.kernel_s)
        assert costs_of(offloaded, without).kernel(kernel) == 1.0 + MACHINE.kernel_s
    first, second = plan(offloaded, cluster=without).time, result.time
    assert first is not None
    assert second is not None
    assert first.cpu != second.cpu


def test_a_gpus_file_may_have_its_hosts_adam(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in DEVICE.items()), "utf-8")
    assert cluster_of(find_hardware(str(path))).cpu_rate == CPU_RATE
    path.write_text(path.read_text("utf-8") + 'cpu_bytes_per_s = "50GB"\n', "utf-8")
    cluster = cluster_of(find_hardware(str(path)))
    assert (cluster.cpu_rate, cluster.cpu_known) == (50e9, True)
    assert cluster_of(find_hardware("v100-32")).cpu_rate == CPU_RATE


def test_adam_on_the_host_is_counted_as_a_run_counts_it() -> None:
    """Seconds of 1,000 parameters at that rate are those of 28 bytes each: four fp32 arrays read, three written."""
    seen: list[float] = []

    def clock(run: Any, *arrays: Any) -> float:
        run(*arrays)
        seen.append(0.5)
        return 0.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone, "_cpu", clock)
        assert alone.adam_rate(1000, 3) == 28 * 1000 / 0.5
    assert len(seen) == 3


def test_calibrate_writes_what_a_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "machine.toml")
    assert main(["calibrate", "--quick", "--steps", "none", "-o", path, "--json", "-"]) == 0
    shown = capsys.readouterr()
    figures = json.loads(shown.out)
    assert figures["machine"]["kernel_s"] > 0
    assert find_hardware(path).cpu_bytes_per_s == figures["device"]["cpu_bytes_per_s"] > 0
    assert "products and copies of one rank" in shown.err
    assert "Adam of all ranks on the host" in shown.err
    flags = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    assert main(["plan", "--gpu", path, *flags, "--json", "-"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert time["step_s"] > 0
    assert time["known_error"] == "not checked against measured steps of this machine"


def test_interrupted_it_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "old")

    def interrupted(*args: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure_machine", interrupted)
    assert main(["calibrate", "--quick", "--steps", "none", "-o", path, "--quiet"]) == 130
    assert [one.read_text("utf-8") for one in tmp_path.iterdir()] == ["old"]


def test_the_bench_holds_the_clock_against_its_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_hardware(written(tmp_path, machine_text(MACHINE, DEVICE)))
    steps = [Compared("0.8M", stage, 2, 1.0 + stage, 2.0, 1.0, 1.0, 3, 6, 0.5) for stage in (1, 2)]
    monkeypatch.setattr(suite, "measure_machine", lambda *args: device)
    monkeypatch.setattr(suite, "compare", lambda *args: steps)
    first, second = suite.modelled(calibrate.QUICK, print).figures
    assert (first.value, first.verdict, second.value, second.verdict) == (0.0, "met", 50.0, "missed")
    assert second.note == "+50.0 %, of a rank's CPU time +0.0 %"
    assert said_error(steps) == (
        "+0 to +50 % of 2 measured steps of 2 ranks, while others took up to 50 % of the cores; +0 to +0 % of a rank's "
        "CPU time"
    )


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--ranks", "1"]) == 2
    assert "--ranks 1: expected at least 2" in capsys.readouterr().err


def test_a_step_is_taken_on_the_wall_clock_and_in_cpu_time() -> None:
    steps = steps_of(RunConfig(**SMALL, parallel=2), 2)
    assert len(steps) == 2
    assert all(step.seconds > 0 and step.cpu_s > 0 for step in steps)
