"""Make the tables of collectives (`zerosim/config/presets/collectives/*.toml`) of what `measured/collectives.toml` has.

    python tests/collective_tables.py write

Every time of a table was measured, or is that of a line which SimuMax fitted to its measurements. A smaller payload
takes at most what a larger one was measured to take. A test makes the tables again and compares.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLES = HERE.parent / "zerosim/config/presets/collectives"
Calls = dict[str, dict[int, list[tuple[int, float]]]]
"""By verb and number of ranks: bytes of payload and microseconds, ascending."""
KIB, MIB = 2**10, 2**20
FITTED = [16 * KIB * 2**power for power in range(15)]
"""Payloads for which a fitted line is written out: 16 KiB to 256 MiB."""


def main() -> None:
    if sys.argv[1:] != ["write"]:
        sys.exit(__doc__)
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")


def tables() -> dict[str, str]:
    """The text of each table, by its file's name."""
    measured = tomllib.loads((HERE / "measured/collectives.toml").read_text(encoding="utf-8"))
    fits, strided = measured["fits"], measured["fits"]["strided_GBps"]
    vtrain, xla = "vTrain: nccl-tests on one node", "XLA: 8 GPUs of one node, the launch included"
    b200 = _xla(measured["b200"]) | _fitted(fits, "B200 NVLink", {"all_to_all": "all_to_all", "p2p": "send"})
    ring = {verb: verb for verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")}
    simumax = "SimuMax: lines fitted to one box of 8 without NVLink; strided: its data-parallel groups"
    return {
        "a100.toml": _text("A100 SXM", vtrain, _vtrain(measured["vtrain"], "A100"), {}),
        "dgx1-v100.toml": _text("V100 in a DGX-1", vtrain, _vtrain(measured["vtrain"], "V100"), {}),
        "h100.toml": _text("H100 SXM", xla, _xla(measured["h100"]), {}),
        "b200.toml": _text("B200", f"{xla}; all_to_all and send: lines that SimuMax fitted", b200, {}),
        "a100-pcie.toml": _text("A100 PCIe 80GB", simumax, _fitted(fits, "A100 PCIe", ring), strided),
    }


def _xla(table: Mapping[str, Any]) -> Calls:
    found: Calls = {}
    for verb, ranks, times in table["rows"]:
        found.setdefault(verb, {})[ranks] = _ascending(table["mib"], times)
    return found


def _vtrain(table: Mapping[str, Any], gpu: str) -> Calls:
    return {"all_reduce": {ranks: _ascending(table["mib"], us) for of, ranks, us, _ in table["rows"] if of == gpu}}


def _ascending(mib: list[float], times: list[float]) -> list[tuple[int, float]]:
    """Each payload with the least time that it or a larger one takes: runs differ by more than small payloads do."""
    return [(int(size * MIB), min(times[at:])) for at, size in enumerate(mib)]


def _fitted(table: Mapping[str, Any], machine: str, names: Mapping[str, str]) -> Calls:
    found: Calls = {}
    for of, n, verb, nominal, share, latency, fixed in table["rows"]:
        if of == machine and verb in names:
            sent = (2 if verb == "all_reduce" else 1) * (n - 1) / n
            line = [(size, latency + fixed + size * sent / (share * nominal * 1e3)) for size in FITTED]
            found.setdefault(names[verb], {})[n] = line
    return found


def _text(gpu: str, source: str, calls: Calls, strided: Mapping[str, Mapping[str, float]]) -> str:
    def lines() -> Iterator[str]:
        yield "# Made by tests/collective_tables.py of tests/measured/collectives.toml, which has the sources in full."
        yield f'gpu = "{gpu}"'
        yield f'source = "{source}"'
        for verb, by_ranks in calls.items():
            yield f"\n[{verb}]  # by ranks: bytes of payload and microseconds"
            for ranks, points in by_ranks.items():
                yield f"{ranks} = [{', '.join(f'[{size}, {us:.5g}]' for size, us in points)}]"
        if strided:
            yield "\n[strided]  # by how far apart neighbours of a group are: GB/s that a rank sends"
            for verb, speeds in strided.items():
                yield f"{verb} = {{{', '.join(f'{stride} = {speed}' for stride, speed in speeds.items())}}}"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    main()
