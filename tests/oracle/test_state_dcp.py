"""PyTorch's distributed checkpoints, beside PyTorch's own: theirs read here, ours loaded there, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)

from zerosim.state.formats import format_of, read_whole, write_dcp, write_safetensors

from .state_files import check_same, check_tensors, torchrun
from .state_model import Tiny

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)
pytest.importorskip("safetensors")

FROZEN = {"frozen.weight", "frozen.bias"}
STATES = ("exp_avg", "exp_avg_sq")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_theirs_and_ours(ranks: int, tmp_path: Path) -> None:
    """One test, so that the processes are started once."""
    torchrun(ranks, "state_dcp_worker", tmp_path)
    for form in ("nested", "flat"):
        theirs_are_read(tmp_path, form)
    files_of_safetensors_are_read(tmp_path)
    check_same(read_whole(str(tmp_path / "whole.pt")), read_whole(str(tmp_path / "nested")))
    for name, is_flat in (("ours-nested", False), ("ours-flat", True)):
        (tmp_path / name).mkdir()
        ours_are_loaded(tmp_path, tmp_path / name, is_flat)
    (tmp_path / "ours-safetensors").mkdir()
    ours_in_safetensors_are_loaded(tmp_path, tmp_path / "ours-safetensors")


def whole(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "whole.pt", weights_only=False)


def theirs_are_read(saved: Path, form: str) -> None:
    expected, path = whole(saved), str(saved / form)
    assert format_of(path) == "dcp"
    state = read_whole(path)
    weights = {name: one for name, one in expected["model"].items() if name != "head.weight"}
    check_tensors(state.weights, weights, form)
    assert state.states.keys() == expected["optimizer"]["state"].keys()
    for name, own in state.states.items():
        theirs = expected["optimizer"]["state"][name]
        check_tensors(own, {key: theirs[key] for key in STATES}, name)
    assert (state.step, dict(state.aliases)) == (3, {"head.weight": "emb.weight"})
    assert state.frozen == {*FROZEN, "buf"}
    assert {"optim.param_groups", "train_state.step", "epoch"} <= state.others.keys()


def files_of_safetensors_are_read(saved: Path) -> None:
    expected = {name: one for name, one in whole(saved)["model"].items() if name != "head.weight"}
    for folder, kind in (("safetensors", "dcp"), ("pieces", "dcp safetensors")):
        assert format_of(str(saved / folder)) == kind
        check_tensors(read_whole(str(saved / folder)).weights, expected, folder)


def ours_are_loaded(saved: Path, folder: Path, is_flat: bool) -> None:
    expected = whole(saved)
    write_dcp(folder, read_whole(str(saved / "nested")), ranks=3, settings={"lr": 0.25})
    model = Tiny()
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    names = {id(one): name for name, one in model.named_parameters()}
    for name, one in model.state_dict().items():
        assert torch.equal(one, expected["model"][name]), name
    for one, own in optimizer.state.items():
        theirs = expected["optimizer"]["state"][names[id(one)]]
        assert all(torch.equal(own[key], theirs[key]) for key in (*STATES, "step"))
    assert optimizer.param_groups[0]["lr"] == 0.25


def ours_in_safetensors_are_loaded(saved: Path, folder: Path) -> None:
    from safetensors import safe_open

    write_safetensors(folder, read_whole(str(saved / "flat")))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_tensors(read_whole(str(saved / "nested")).weights, theirs, "safetensors")


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_dtype_and_each_stride_is_read(tmp_path: Path, protocol: int) -> None:
    raw = torch.randint(0, 127, (96,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {str(one): (raw % 2 if one is torch.bool else raw.clone()).view(one) for one in DTYPES}
    plain = torch.arange(24.0).reshape(2, 3, 4)
    strided = {"t": plain.mT, "part": plain[:, 1:, ::2], "one": plain[1, 2, 3], "none": plain[:0], "row": plain[1]}
    parameter = {"p": torch.nn.Parameter(plain * 2)}
    torch.save({**tensors, **strided, **parameter}, tmp_path / "x.pt", pickle_protocol=protocol)
    from zerosim.state.formats.archive import read_archive

    found = read_archive(str(tmp_path / "x.pt"))
    for name, one in {**tensors, **strided, **parameter}.items():
        values = found[name].read()
        assert values.shape == tuple(one.shape), name
        assert values.tobytes() == one.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(), name


def test_what_is_no_dense_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
    }
    for name, one in odd.items():
        torch.save({"fine": torch.ones(2), name: one}, path)
        with pytest.raises(ValueError, match=name):
            read_whole(str(path))
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"the format of PyTorch before 1\.6"):
        read_whole(str(path))


def test_tied_weights_of_a_file_and_numbered_states(tmp_path: Path) -> None:
    model = Tiny()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model(torch.zeros((2, 5), dtype=torch.long)).backward()
    optimizer.step()
    weights = {name: one for name, one in model.state_dict().items() if not name.startswith(("frozen", "buf"))}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    state = read_whole(str(tmp_path / "x.pt"))
    assert (state.step, dict(state.aliases)) == (1, {"head.weight": "emb.weight"})
    names = {id(one): name for name, one in model.named_parameters()}
    for one in functools.reduce(lambda all, group: all + group["params"], optimizer.param_groups, []):
        own = {key: optimizer.state[one][key] for key in STATES}
        check_tensors(state.states[names[id(one)]], own, names[id(one)])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    state = read_whole(str(tmp_path / "x.pt"))  # a frozen layer and a buffer more: nobody says which
    assert not state.states
    assert "names are not in the files" in state.others["optimizer"]
