"""DeepSpeed's checkpoints beside its own converters, and its engines that go on from ours: bit for bit."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerosim.state.formats import format_of, read_whole, write_universal

from .state_files import check_same, check_tensors, torchrun

if find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)
VERSION = "0.19.8"
CASES = ["fp32-1", "fp32-2", "fp32-3", "bf16-1", "bf16-2", "bf16-3", "fp16-2"]
ROUND_ROBIN = "fp32-2"
FROZEN = {"frozen.weight", "frozen.bias"}


def test_checkpoints_of_each_stage(tmp_path: Path) -> None:
    """One test, so that the processes are started once: theirs are read, and engines go on from ours."""
    if version("deepspeed") != VERSION:
        pytest.skip(f"deepspeed {version('deepspeed')}: the formats are those of {VERSION}")
    torchrun(2, "state_deepspeed_worker", tmp_path, "save")
    for case in CASES:
        weights_are_those_of_zero_to_fp32(tmp_path, case)
        states_are_those_of_the_universal_converter(tmp_path, case)
    bf16_that_accumulates_in_fp32(tmp_path)
    engines_go_on_from_ours_as_if_nothing_had_happened(tmp_path)


def weights_are_those_of_zero_to_fp32(saved: Path, case: str) -> None:
    dtype, stage = case.split("-")
    state = read_whole(str(saved / case))
    assert (state.kind, state.version, state.step) == (f"deepspeed zero {stage}", VERSION, 3)
    assert (state.frozen, dict(state.aliases)) == (FROZEN, {"head.weight": "emb.weight"})
    trained = {name: one for name, one in state.weights.items() if name not in FROZEN}
    check_tensors(trained, torch.load(saved / f"{case}-now.pt"), case)
    if case == ROUND_ROBIN:
        return  # zero_to_fp32 takes the weights' order for that of the buffer (findings/)
    theirs = torch.load(saved / f"{case}-fp32.pt", weights_only=False)
    assert torch.equal(theirs.pop("head.weight"), theirs["emb.weight"])
    buffers = {name for name in theirs if name == "buf"}
    assert buffers <= state.others.keys()
    theirs = {name: one for name, one in theirs.items() if name not in buffers}
    kept = state.weights if stage != "1" else {name: state.weights[name] for name in theirs}  # theirs lacks frozen ones
    check_tensors(kept, theirs, case)
    has_copies = dtype != "fp32" and stage != "3"
    assert state.stored.keys() == (state.states.keys() if has_copies else set())
    for name, one in state.stored.items():
        master = torch.from_numpy(state.weights[name].read())
        assert torch.equal(torch.from_numpy(one.read().astype("float32")), master.to(getattr(torch, one.dtype)).float())


def states_are_those_of_the_universal_converter(saved: Path, case: str) -> None:
    ours, path = read_whole(str(saved / case)), str(saved / f"{case}-universal")
    assert format_of(path) == "deepspeed universal"
    theirs = read_whole(path)
    trained = ours._replace(weights={name: one for name, one in ours.weights.items() if name not in FROZEN})
    check_same(trained, theirs._replace(weights={name: theirs.weights[name] for name in trained.weights}))
    for name, own in ours.states.items():
        files = {key: torch.load(Path(path) / "tag" / "zero" / name / f"{key}.pt", weights_only=False) for key in own}
        files = {key: one["param"] if isinstance(one, dict) else one for key, one in files.items()}
        check_tensors(own, {key: one.view(own[key].shape) for key, one in files.items()}, name)


def bf16_that_accumulates_in_fp32(saved: Path) -> None:
    """DeepSpeed's BF16_Optimizer leaves no zero_stage, and zero_to_fp32 refuses it."""
    state = read_whole(str(saved / "bf16-accumulated"))
    trained = {name: one for name, one in state.weights.items() if name not in FROZEN}
    check_tensors(trained, torch.load(saved / "bf16-accumulated-now.pt"), "weights")
    assert (state.kind, state.step, state.states.keys()) == ("deepspeed zero 1", 3, trained.keys())
    other = read_whole(str(saved / "bf16-1"))
    assert {name: set(own) for name, own in state.states.items()} == {n: set(own) for n, own in other.states.items()}


def engines_go_on_from_ours_as_if_nothing_had_happened(saved: Path) -> None:
    """Each engine has the weights that were saved, and takes the step of the engine that went on by itself."""
    for case in CASES:
        (saved / f"{case}-ours").mkdir()
        write_universal(saved / f"{case}-ours", read_whole(str(saved / case)))
        check_same(read_whole(str(saved / case)), read_whole(str(saved / f"{case}-ours")))
    torchrun(2, "state_deepspeed_worker", saved, "load")
    for case in CASES:
        if case.startswith("fp16"):
            continue  # its scaler starts anew
        loaded = torch.load(saved / f"{case}-loaded.pt")
        for name, one in torch.load(saved / f"{case}-now.pt").items():
            assert torch.equal(one, loaded[name]), (case, name)
        if case == "bf16-3":
            continue  # two groups are two sub-groups, which share a count of steps (findings/)
        ours = torch.load(saved / f"{case}-ours.pt")
        for name, one in torch.load(saved / f"{case}-next.pt").items():
            assert torch.equal(one, ours[name]), (case, name)
