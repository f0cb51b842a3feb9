"""Offload where a device is too small: advice, `fit --find offload`, and searches that keep --offload. Each answer is a
plan of the same flags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerosim.cli.main import main

SIZES = ["--model", "gpt", "--layers", "8", "--hidden", "256", "--heads", "4", "--vocab", "256", "--seq", "64"]
DEVICE = ["--gpu", "v100-32", "--node", "dgx-2", "--precision", "fp16", "--recipe", "paper"]
FLAGS = [*SIZES, "--ranks", "4", *DEVICE]


def values(capsys: pytest.CaptureFixture[str], *words: str, code: int | None = None) -> dict[str, Any]:
    got = main([*words, "--quiet", "--json", "-"])
    assert code is None or got == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def offload_flags(way: dict[str, Any]) -> list[str]:
    return ["--stage", str(way["stage"]), *(["--offload", way["offload"]] if way["offload"] else [])]


@pytest.mark.quick(1)
@pytest.mark.parametrize("allocator", ["exact", "caching"])
@pytest.mark.parametrize("stage", [2, 3])
def test_each_way_is_a_plan_of_the_same_flags(stage: int, allocator: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What fits and what does not, in every memory, to the byte; seconds too."""
    reserve = "31.972GB" if (stage, allocator) == (3, "exact") else "31.965GB"
    flags = [*FLAGS, "--allocator", allocator, "--reserve", reserve, "--host-memory", "95MB"]
    found = values(capsys, "fit", "--find", "offload", "--stage", str(stage), *flags)
    assert len(found["ways"]) == {2: 3, 3: 9}[stage]
    assert {way["fits"] for way in found["ways"]} == {True, False}
    assert found["best"] == found["ways"][0]
    fitting = [way["time"]["step_s"] for way in found["ways"] if way["fits"]]
    assert fitting == sorted(fitting)
    for way in found["ways"]:
        again = ["plan", *flags, *offload_flags(way), "--quiet", "--json", "-"]
        code = main(again)
        said = capsys.readouterr()
        assert code == (0 if way["fits"] else 3), way
        if not said.out:
            assert "host" in way["too_small"]
            assert "out of host memory" in said.err
            continue
        assert ("device" in way["too_small"]) == (not way["fits"])
        planned = json.loads(said.out)
        memory = planned["ranks"][0]["memory"]
        if way["fits"]:
            assert planned["time"]["step_s"] == way["time"]["step_s"]
            assert memory["peak"].get("reserved_bytes", memory["peak"]["bytes"]) == way["peak_bytes"]
        for name in ("host", "nvme"):
            nbytes = memory.get(name, {"peak": {"bytes": 0}})["peak"]["bytes"]
            assert way[f"{name}_bytes"] == 4 * nbytes


def test_a_node_is_what_ranks_per_node_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes of two ranks each, which hold unequal parts: the fuller node decides, to the byte."""
    flags = ["--model", "mlp", "--layers", "1", "--hidden", "9", "--ranks", "4", "--ranks-per-node", "2"]
    flags += ["--capacity", "1GB"]

    def way(nbytes: str) -> dict[str, Any]:
        found = values(capsys, "fit", "--find", "offload", "--stage", "1", *flags, "--host-memory", nbytes)
        return next(one for one in found["ways"] if one["offload"] == "optimizer=host")

    most = way("1GB")["host_bytes"]
    for nbytes, too_small, code in ((most, [], 0), (most - 1, ["host"], 3)):
        assert way(str(nbytes))["too_small"] == too_small
        said = ["plan", *flags, "--stage", "1", "--offload", "optimizer=host", "--host-memory", str(nbytes), "--quiet"]
        assert main(said) == code
        capsys.readouterr()


def test_the_answer_says_whether_to_offload(capsys: pytest.CaptureFixture[str]) -> None:
    for reserve, code, words in (
        ("0GB", 0, "No need to offload. Fits"),
        ("31.985GB", 0, "--stage 3 --offload optimizer=host. Fits"),
        ("31.999GB", 3, "Nothing fits. --stage 3 --offload optimizer=host,params=host takes the least device memory."),
    ):
        assert main(["fit", "--find", "offload", *FLAGS, "--reserve", reserve]) == code
        assert " ".join(capsys.readouterr().out.split()).startswith(words)


def test_without_a_clock_the_least_that_is_offloaded_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SIZES, "--ranks", "2", "--limit", "30MB", "--host-memory", "100MB"]
    found = values(capsys, "fit", "--find", "offload", *flags, code=0)
    assert [way["offload"] for way in found["ways"] if way["fits"]] == ["optimizer=host"]
    assert {way["time"] for way in found["ways"]} == {None}
    assert not any("nvme" in way["offload"] for way in found["ways"])  # nobody said how much there is


@pytest.mark.slow
def test_drives_of_unknown_speed_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    """A DGX H100's: the clock has no limit for them, so that they would be as fast as the host's memory."""
    words = ["fit", "--find", "offload", *SIZES, "--ranks", "2", "--recipe", "paper", "--node"]
    for node, is_known in (("dgx-h100", False), ("dgx-2", True)):
        assert main([*words, node]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("The speed of the node's drives is unknown" in said) != is_known
    ways = [way["offload"] for way in values(capsys, *words, "dgx-h100")["ways"]]
    assert ways[0] == ""
    assert ["nvme" in where for where in ways] == [False] * 4 + [True] * 5


def test_a_delayed_update_goes_with_each_way_that_steps_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    plain = values(capsys, "fit", "--find", "offload", *FLAGS)
    late = values(capsys, "fit", "--find", "offload", *FLAGS, "--delayed-update", "1")
    before, after = ({way["offload"]: way["time"]["step_s"] for way in one["ways"]} for one in (plain, late))
    assert before.keys() == after.keys()
    assert all((after[where] < before[where]) == ("optimizer" in where) for where in before)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--gpu v100-32", "pass --node NAME or --host-memory SIZE"),
        ("--gpu v100-32 --node dgx-2 --stage 0", "choose stage 1, 2 or 3"),
        ("--gpu v100-32 --node dgx-2 --offload optimizer=host", "the search varies it"),
        ("--host-memory 1GB", "pass --gpu NAME or --limit SIZE"),
    ],
)
def test_refused(words: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--find", "offload", *words.split()]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert said.count("\n") == 1


def test_a_plan_that_does_not_fit_is_told_to_offload_where_there_is_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    """The tip, planned, fits. Without a node nobody knows of a host's memory."""
    flags = ["plan", *FLAGS, "--stage", "3", "--recompute", "full", "--attention", "flash", "--loss", "chunked"]
    tight = [*flags, "--reserve", "31.992GB"]
    advice = values(capsys, *tight, code=3)["advice"]
    assert advice.startswith("--offload optimizer=host would fit")
    assert values(capsys, *tight, "--offload", "optimizer=host", code=0)["fits"] is True
    assert "--offload" not in values(capsys, *(word for word in tight if word not in ("--node", "dgx-2")))["advice"]
    small = values(capsys, *tight, "--host-memory", "1MB", code=3)["advice"]
    assert "--offload" not in small


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("find", "host", "too_small"),
    [("ranks", "60MB", ["host"]), ("micro-batch", "95MB", ["device"]), ("layers", "95MB", ["host"])],
)
def test_searches_keep_what_is_offloaded_and_stop_at_the_hosts_memory(
    find: str, host: str, too_small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A node's ranks share its host: on one node no number of ranks helps, 17 and more have two."""
    words = [*FLAGS, "--stage", "3", "--offload", "optimizer=host", "--host-memory", host, "--reserve", "31.5GB"]
    if f"--{find}" in words:
        at = words.index(f"--{find}")
        del words[at : at + 2]
    found = values(capsys, "fit", "--find", find, *words, code=0)
    assert found["beyond"]["too_small"] == too_small
    for tried, code in ((found["best"], 0), (found["beyond"], 3)):
        assert main(["plan", *words, f"--{find}", str(tried["value"]), "--quiet"]) == code
    if find == "ranks":
        assert found["best"]["value"] > 16
        assert all(tried["too_small"] == ["host"] for tried in found["tried"] if tried["value"] <= 16)
    capsys.readouterr()
    assert main(["fit", "--find", find, *words]) == 0
    assert ("needs more host memory than the node has" in " ".join(capsys.readouterr().out.split())) == (
        "host" in too_small
    )


@pytest.mark.slow
def test_the_largest_named_model_is_one_whose_states_the_host_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DEVICE, "--ranks", "16", "--stage", "3", "--offload", "optimizer=host,params=host", "--recompute", "full"]
    found = values(capsys, "fit", "--find", "model", *words, code=0)
    assert main(["plan", *words, "--model", found["best"]["name"], "--quiet"]) == 0
    refused = [tried["name"] for tried in found["tried"] if tried["too_small"] == ["host"]]
    assert main(["plan", *words, "--model", refused[-1], "--quiet"]) == 3
    assert "out of host memory" in capsys.readouterr().err


@pytest.mark.slow
def test_meshes_keep_what_is_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FLAGS, "--offload", "optimizer=host,params=host"]
    found = values(capsys, "fit", "--find", "mesh", *words, code=0)
    assert {one["stage"] for one in found["meshes"]} == {3}
    best = found["meshes"][0]
    own = [f"--{name.replace('_', '-')} {best[name]}" for name in ("tp", "pp", "stage", "micro_batch", "accumulate")]
    assert main(["plan", *words, *" ".join(own).split(), "--quiet"]) == 0
