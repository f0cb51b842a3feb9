"""What each rank writes: every element once over all ranks, never padding; how many bytes; and files for others."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved import OF_ELEMENTS, WAYS, opened, saved

from zerosim.config import RunConfig
from zerosim.device.device import Phase
from zerosim.device.events import Copy, Event
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.placement.split import Cut, take
from zerosim.state import folder as folders
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.folder import StateFolder, step_folder
from zerosim.state.manifest import MANIFEST
from zerosim.state.runs import share
from zerosim.train.run import run

TINY: dict[str, Any] = dict(ranks=3, stage=2, layers=2, hidden=8, heads=2, seq=6, micro_batch=1, steps=2)
LLAMA: dict[str, Any] = dict(model="llama", heads=4, kv_heads=2, hidden=16, seq=8)
EXPERTS: dict[str, Any] = dict(LLAMA, experts=4, top_k=2, expert_ffn=12)
MESHES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": dict(stage=stage) for stage in range(4)},
    "owner": dict(partition="owner", stage=3),
    "replicas": dict(ranks=4, dp_replicate=2, stage=3),
    "more copies than elements": dict(ranks=12, stage=0, layers=1, hidden=2, heads=1),
    "tp": dict(ranks=4, tp=2, stage=3),
    "tp of few key heads": dict(LLAMA, ranks=8, tp=4, stage=1),
    "tp of a padded table": dict(ranks=2, tp=2, vocab=257, pad_vocab=True),
    "pp and a tied table": dict(ranks=4, pp=2, accumulate=2, stage=1),
    "tp, pp and a tied table": dict(ranks=8, pp=2, tp=2, accumulate=2, stage=3),
    "cp": dict(LLAMA, ranks=4, cp=2, stage=3),
    "ep": dict(EXPERTS, ranks=4, ep=2, stage=3),
    "ep and tp": dict(EXPERTS, ranks=4, ep=2, tp=2, etp=1, sequence_parallel=True, stage=1),
    "tiles": dict(stage=3, gather="module", tiles=2),
    "small parameters resident": dict(stage=3, persistent_numel=100),
    "hpZ": dict(ranks=4, ranks_per_node=2, stage=3, secondary_shard=2),
}
OTHERS: dict[str, dict[str, Any]] = {
    "adapters": dict(lora_rank=2, lora_target="all-linear", ranks=4, tp=2),
    "codes": dict(LLAMA, hidden=32, lora_rank=2, base="nf4", stage=3),
    "whole scales": dict(LLAMA, lora_rank=2, base="nf4", stage=3, whole_scales=True),
    "whole scales on owners": dict(LLAMA, lora_rank=2, base="nf4", stage=3, whole_scales=True, partition="owner"),
    "blocks": dict(layers=1, hidden=64, optimizer="adam8bit", stage=1),
    "rows and columns": dict(optimizer="adafactor", stage=3),
    "rows and columns of replicas": dict(optimizer="adafactor", stage=1, ranks=4, dp_replicate=2),
    "muon": dict(optimizer="muon", ranks=4),
    "frozen block": dict(freeze="h.0", stage=3),
    "delayed update": dict(offload="optimizer=host", delayed_update=1),
}


def counted(checkpoint: Checkpoint) -> dict[tuple[str, str], Any]:
    """How often each number of each state is in a file. Padding of a cut is number 0, and not counted."""
    found: dict[tuple[str, str], Any] = {}
    of_piece: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for one, stored in checkpoint.runs():
        assert stored.shape == (one.numel,)
        assert one.numel > 0, one
        if one.follows == "elements":
            numel = int(np.prod(one.shape))
            numbers = np.arange(1, numel + 1).reshape(one.shape)
            local = take(numbers, [Cut(split, piece, split.pieces) for split, piece in one.cuts]).reshape(-1)
            assert one.stop <= local.size
            times = found.setdefault((one.weight, one.state), np.zeros(numel + 1, int))
            np.add.at(times, local[one.start : one.stop], 1)
        elif one.follows in OF_ELEMENTS:
            of_piece[one.weight, one.state, one.cuts].append((one.start, one.stop))
    for key, runs in of_piece.items():
        at = 0
        for start, stop in sorted(runs):
            assert start == at, key
            at = stop
    return {key: times[1:] for key, times in found.items()}


@pytest.mark.quick(6)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("mesh", [*MESHES, *OTHERS])
def test_every_element_is_written_once(mesh: str, how: str, tmp_path: Path) -> None:
    """Copies and tied tables too: over all ranks once. Shards are padded, and what is written is not."""
    fields = {**MESHES, **OTHERS}[mesh]
    if how == "gathered" and "offload" in fields:
        pytest.skip("nothing is gathered outside the device")
    result = saved(RunConfig(**{**TINY, **fields}), tmp_path, 2, how)
    checkpoint = opened(tmp_path, 2)
    for key, times in counted(checkpoint).items():
        assert (times == 1).all(), (key, times)
    wanted = result.weights.keys()
    assert {weight for weight, state in counted(checkpoint) if state == "param"} | {
        weight for weight, state in checkpoint._runs if state == "codes"
    } == wanted


@pytest.mark.quick(4)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("mesh", MESHES)
def test_mixed_precision_adam_is_twelve_bytes_a_parameter(mesh: str, how: str, tmp_path: Path) -> None:
    """The fp32 master and two moments. bf16 weights are the rounded masters, and are not saved."""
    config = RunConfig(**{**TINY, **MESHES[mesh], "bias_rate": 0.0})
    result = saved(config, tmp_path, 2, how)
    stored = [one for _, one in opened(tmp_path, 2).runs()]
    padding = 255 * 8 * 12 if mesh == "tp of a padded table" else 0  # of 512 rows: they are trained as the others are
    assert sum(one.stop - one.start for one in stored) == 12 * result.num_parameters + padding
    assert {one.dtype for one in stored} == {"F32"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["sharded", "async"])
def test_ranks_write_equal_parts(how: str, tmp_path: Path) -> None:
    """Replicas of a shard write a part each; no rank has more than another by more than an element a tensor."""
    saved(RunConfig(**{**TINY, "ranks": 4, "dp_replicate": 2, "stage": 3}), tmp_path, 2, how)
    checkpoint = opened(tmp_path, 2)
    sizes = {rank: sum(run.numel for run, _ in runs) for rank, runs in checkpoint.by_rank.items()}
    assert sorted(sizes) == [0, 1, 2, 3]
    assert max(sizes.values()) - min(sizes.values()) <= len({run.tensor for run, _ in checkpoint.runs()}) * 3


@pytest.mark.quick(2)
@pytest.mark.parametrize("mesh", [dict(), dict(ranks=4, dp_replicate=2), dict(ranks=4, tp=2), dict(partition="owner")])
def test_one_rank_of_each_group_writes_all_that_is_gathered(mesh: dict[str, Any], tmp_path: Path) -> None:
    saved(RunConfig(**{**TINY, **mesh}), tmp_path, 2, "gathered")
    ranks = sorted(opened(tmp_path, 2).by_rank)
    assert ranks == ([0, 1] if "tp" in mesh else [0])


@pytest.mark.parametrize("numel", [0, 1, 5, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 11])
def test_shares_of_copies_are_equal_within_one_element(numel: int, count: int) -> None:
    shares = [share(numel, number, count) for number in range(count)]
    assert [number for start, stop in shares for number in range(start, stop)] == [*range(numel)]
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


# -- files for others ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def on_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    result = saved(RunConfig(**TINY), folder, 2)
    return step_folder(folder, 2), result


def test_files_carry_names_of_weights(on_three_ranks: tuple[Path, Any]) -> None:
    """A rank's index is plain JSON: a list of runs, each with its tensor's name in the file beside it."""
    folder, result = on_three_ranks
    names = sorted(path.name for path in folder.iterdir())
    ranks = [f"rank-{rank:05}{ending}" for rank in range(3) for ending in (".json", ".safetensors")]
    assert names == [MANIFEST, *ranks]
    seen = set()
    for rank in range(3):
        runs = json.loads((folder / f"rank-{rank:05}.json").read_text("utf-8"))
        raw = (folder / f"rank-{rank:05}.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert header.pop("__metadata__") == {"format": "pt"}
        at = [one["tensor"] + "." + one["state"] + (f"@{one['start']}" if one["start"] else "") for one in runs]
        assert list(header) == at
        assert [header[name]["shape"] for name in at] == [[one["stop"] - one["start"]] for one in runs]
        seen |= {one["weight"] for one in runs}
    assert seen == result.weights.keys()
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    assert manifest["format"] == "zerosim state"
    assert (manifest["step"], manifest["ranks"], manifest["config"]["layers"]) == (2, 3, 2)
    assert {entry["name"]: entry["nbytes"] for entry in manifest["files"]} == {
        name: (folder / name).stat().st_size for name in ranks
    }


def test_the_safetensors_library_reads_them(on_three_ranks: tuple[Path, Any]) -> None:
    library = pytest.importorskip("safetensors.numpy")
    folder, result = on_three_ranks
    found: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for rank in range(3):
        tensors = library.load_file(folder / f"rank-{rank:05}.safetensors")
        for one in json.loads((folder / f"rank-{rank:05}.json").read_text("utf-8")):
            if one["state"] == "param":
                name = f"{one['weight']}.param" + (f"@{one['start']}" if one["start"] else "")
                found[one["weight"]].append((one["start"], tensors[name]))
    for name, values in result.weights.items():
        whole = np.concatenate([part for _, part in sorted(found[name], key=lambda one: one[0])])
        assert whole.tobytes() == values.tobytes(), name


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step has its name only then."""
    writes, seen = folders.write_json, list[list[str]]()

    def written(path: Path, values: Any) -> None:
        if path.name == MANIFEST:
            assert not saved_names(tmp_path)
            seen.append(sorted(one.name for one in path.parent.iterdir()))
        writes(path, values)

    monkeypatch.setattr(folders, "write_json", written)
    saved(RunConfig(**TINY), tmp_path, 2)
    ranks = [f"rank-{rank:05}{ending}" for rank in range(3) for ending in (".json", ".safetensors")]
    assert seen == [ranks]
    assert saved_names(tmp_path) == ["step-00000002"]


def saved_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


# -- the record ---------------------------------------------------------------------------------------
NUMBERED = ("id", "work", "sequence")


def events_of(events: list[Event]) -> Iterator[Any]:
    """All events but those of saves, with buffers, work and each group's calls numbered in the order of events."""
    numbers: dict[Any, int] = {}
    for event in events:
        if event.scope.phase == Phase.SAVE:
            continue
        values = event._asdict()
        for name in NUMBERED:
            if values.get(name) is not None:
                key = name, values[name], values.get("group") if name == "sequence" else None
                values[name] = numbers.setdefault(key, len(numbers))
        yield type(event), values


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("fields", [dict(stage=3), dict(ranks=4, tp=2, stage=1, dropout=0.1)], ids=["3", "tp"])
def test_a_save_leaves_records_in_its_own_phase_and_nowhere_else(
    fields: dict[str, Any], how: str, tmp_path: Path
) -> None:
    config = RunConfig(**{**TINY, **fields})
    plain = run(config, keep_events=True)
    asked = config.replace(save_state=str(tmp_path), save_every=1, save_as=how)
    saving = run(asked, keep_events=True)
    assert all(event.scope.phase != Phase.SAVE for events in plain.events for event in events)
    for with_saves, without in zip(saving.events, plain.events, strict=True):
        assert list(events_of(with_saves)) == list(events_of(without))
    assert saving.losses == plain.losses


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", WAYS)
def test_a_save_copies_each_byte_once_to_the_host_and_once_to_a_drive(how: str, tmp_path: Path) -> None:
    config = RunConfig(**{**TINY, "ranks": 4}, save_state=str(tmp_path), save_every=1, save_as=how)
    result = run(config, keep_events=True)
    copies = [
        one for events in result.events for one in events if isinstance(one, Copy) and one.purpose == "checkpoint"
    ]
    for step in range(2):
        for source, target in ((DEVICE, HOST), (HOST, NVME)):
            moved = [one.nbytes for one in copies if (one.scope.step, one.source, one.target) == (step, source, target)]
            assert sum(moved) == 12 * result.num_parameters


def test_a_folder_keeps_as_many_steps_as_asked_for(tmp_path: Path) -> None:
    run(RunConfig(**{**TINY, "steps": 5}, save_state=str(tmp_path), save_every=1, save_keep=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-00000004", "step-00000005"]
    assert StateFolder(str(tmp_path)).keep is None


def test_the_last_step_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    run(RunConfig(**{**TINY, "steps": 5}, save_state=str(tmp_path), save_every=2))
    assert saved_names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
