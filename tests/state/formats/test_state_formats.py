"""Each format is told apart, read back bit for bit, and refused in one line where it is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from state_samples import FROZEN, LAYERS, SHAPES, STACKED, WRITERS, check_same, deepspeed, megatron, sample, values

from zerosim.config.released import stored_tensors
from zerosim.errors import InputError
from zerosim.state.formats import format_of, read_whole, write_dcp, write_safetensors, write_universal
from zerosim.state.formats.archive import read_archive
from zerosim.state.formats.to_dcp import write_items
from zerosim.state.formats.written import Call, Made, Name, archived

EACH = pytest.mark.parametrize("kind", WRITERS)


@EACH
def test_formats_are_told_apart(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    assert format_of(str(tmp_path)) == kind
    assert read_whole(str(tmp_path)).weights


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 20])
def test_dcp_comes_back(ranks: int, tmp_path: Path) -> None:
    write_dcp(tmp_path, sample(), ranks, {"lr": 0.5})
    state = read_whole(str(tmp_path))
    check_same(state, sample())
    assert (state.kind, state.version) == ("dcp", "1.0.0")
    assert "optim.param_groups" in state.others


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_are_joined(stage: int, ranks: int, tmp_path: Path) -> None:
    deepspeed(tmp_path, stage, ranks)
    state = read_whole(str(tmp_path))
    check_same(state, sample(), copies=stage < 3)
    assert (state.kind, state.version) == (f"deepspeed zero {stage}", "0.19.8")
    check_same(read_whole(str(tmp_path / "global_step3")), sample())


def test_universal_comes_back(tmp_path: Path) -> None:
    write_universal(tmp_path, sample())
    check_same(read_whole(str(tmp_path)), sample())
    check_same(read_whole(str(tmp_path / "global_step3")), sample())


def test_megatrons_layers_are_taken_apart(tmp_path: Path) -> None:
    megatron(tmp_path)
    state = read_whole(str(tmp_path))
    assert (state.kind, state.step, len(state.weights)) == ("megatron torch_dist 1", 12, 4)
    whole, copies = values("fp32_param", STACKED), values(LAYERS, STACKED, ml_dtypes.bfloat16)
    for layer in range(3):
        name = LAYERS.replace("layers.", f"layers.{layer}.")
        assert np.array_equal(state.weights[name].read(), whole[layer])
        assert np.array_equal(state.stored[name].read(), copies[layer])
        assert np.array_equal(state.states[name]["exp_avg"].read(), values("exp_avg", STACKED)[layer])
    assert state.states.keys() == state.weights.keys()
    assert "rng_state" in state.others


def test_megatrons_buckets_are_named(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}', "utf-8")
    one = sample().weights["a.weight"]
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
    write_items(tmp_path, [(("decoder.a.weight",), one), ((bucket,), one)])
    state = read_whole(str(tmp_path))
    assert list(state.weights) == ["decoder.a.weight"]
    assert "--dist-ckpt-optim-fully-reshardable" in state.others["optimizer"]


def test_megatrons_old_format(tmp_path: Path) -> None:
    inner = tmp_path / "iter_0000007" / "mp_rank_00"
    inner.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n", "utf-8")
    weight = values("a", (2, 3))
    model = {"model": {"decoder.a.weight": weight}, "args": Made("argparse.Namespace", {"lr": 1}), "optimizer": {}}
    (inner / "model_optim_rng.pt").write_bytes(archived(model))
    state = read_whole(str(tmp_path))
    assert (state.kind, state.step, list(state.weights)) == ("megatron torch", 7, ["decoder.a.weight"])
    (tmp_path / "iter_0000007" / "mp_rank_01").mkdir()
    with pytest.raises(InputError, match="2 mp_rank folders"):
        read_whole(str(tmp_path))


def test_safetensors_keep_bf16_and_the_masters_if_asked(tmp_path: Path) -> None:
    for masters, expected in ((False, "bfloat16"), (True, "float32")):
        folder = tmp_path / expected
        folder.mkdir()
        write_safetensors(folder, sample(), masters=masters)
        state = read_whole(str(folder))
        assert state.weights["a.bias"].dtype == expected
        of = sample().weights if masters else {**sample().weights, **sample().stored}
        check_same(state, sample()._replace(weights=of, states={}, step=None, frozen=frozenset(), aliases={}))


def test_safetensors_in_shards(tmp_path: Path) -> None:
    write_safetensors(tmp_path, sample(), largest=200)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 2
    assert stored_tensors(str(tmp_path)).keys() == SHAPES.keys()
    assert read_whole(str(tmp_path / "model.safetensors.index.json")).weights.keys() == SHAPES.keys()


def optimizer(numbers: bool, *groups: list[str]) -> dict[str, Any]:
    state = sample()
    names = [name for group in groups for name in group]
    keys = {name: at if numbers else name for at, name in enumerate(names)}
    own = {
        keys[name]: {**{k: t.read() for k, t in state.states[name].items()}, "step": np.float32(STEP)} for name in names
    }
    own = {key: {**one, "step": np.array(3, np.float32)} for key, one in own.items()}
    return {"state": own, "param_groups": [{"params": [keys[name] for name in group]} for group in groups]}


STEP = 3
TRAINED = [name for name in SHAPES if name != FROZEN]
DECAYED, REST = [name for name in TRAINED if "weight" in name], [name for name in TRAINED if "bias" in name]


def plain() -> dict[str, Any]:
    return {name: sample().weights[name].read() for name in TRAINED}


@pytest.mark.parametrize(
    "made", [optimizer(False, TRAINED), optimizer(True, TRAINED), optimizer(True, DECAYED, REST)], ids=str
)
def test_single_files_and_accelerates_full_ones(made: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archived({"model": plain(), "optimizer": made}))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "pytorch_model_fsdp.bin").write_bytes(archived(plain()))
    (folder / "optimizer.bin").write_bytes(archived(made))
    (folder / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    for path in (tmp_path / "x.pt", folder):
        state = read_whole(str(path))
        assert (state.step, state.states.keys()) == (3, set(TRAINED))
        for name, own in state.states.items():
            assert np.array_equal(own["exp_avg"].read(), sample().states[name]["exp_avg"].read())
    assert state.others["random_states_0.pkl"] == "states of random generators"


def test_the_trainers_states_need_the_models_order(tmp_path: Path) -> None:
    state = sample()
    write_safetensors(tmp_path, state._replace(weights={n: state.weights[n] for n in TRAINED}), masters=True)
    (tmp_path / "optimizer.pt").write_bytes(archived(optimizer(True, DECAYED, REST)))
    (tmp_path / "trainer_state.json").write_text('{"global_step": 500}', "utf-8")
    assert format_of(str(tmp_path)) == "accelerate"
    found = read_whole(str(tmp_path))
    assert (found.kind, found.step, found.states) == ("trainer", 500, {})
    assert "names are not in the files" in found.others["optimizer"]
    found = read_whole(str(tmp_path), TRAINED)
    assert (found.step, found.states.keys()) == (500, set(TRAINED))
    other = read_whole(str(tmp_path), ["a.weight", "emb.weight", "a.bias"])  # another order, which the shapes deny
    assert not other.states
    assert "other shapes" in other.others["optimizer"]


def test_accelerates_sharded_folders(tmp_path: Path) -> None:
    state = sample()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (tmp_path / name).mkdir()
    write_items(tmp_path / "pytorch_model_fsdp_0", [(("model", n), t) for n, t in state.weights.items()], 2)
    states = [(("optimizer", "state", n, k), t) for n, own in state.states.items() for k, t in own.items()]
    write_items(tmp_path / "optimizer_0", states, 2)
    check_same(read_whole(str(tmp_path)), state._replace(step=None, aliases={}))
    shutil.rmtree(tmp_path / "optimizer_0")
    (tmp_path / "optimizer_rank0.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="only as many ranks can load"):
        read_whole(str(tmp_path))


def test_torchtitans_weights_are_at_the_root(tmp_path: Path) -> None:
    state = sample()
    items = [((name,), one) for name, one in state.weights.items()]
    items += [(("optimizer", f"state.{n}.{k}"), t) for n, own in state.states.items() for k, t in own.items()]
    inner = tmp_path / "step-10"
    inner.mkdir()
    write_items(inner, [*items, (("dataloader.dp_rank_0",), {"a": 1})])
    check_same(read_whole(str(inner)), state._replace(step=None, aliases={}))
    with pytest.raises(InputError, match=r"a folder of checkpoints: pass one of them, such as .*step-10"):
        read_whole(str(tmp_path))


def read_all(path: Path) -> None:
    """Read a checkpoint and each tensor of it."""
    state = read_whole(str(path))
    for one in [
        *state.weights.values(),
        *state.stored.values(),
        *(t for own in state.states.values() for t in own.values()),
    ]:
        one.read()


def said(path: Path) -> str:
    """What reading all of a checkpoint says, '' if it is read."""
    try:
        read_all(path)
    except InputError as error:
        return str(error)
    return ""


@EACH
def test_a_missing_file_is_one_line(kind: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    WRITERS[kind](whole)
    for number, file in enumerate(one for one in whole.rglob("*") if one.is_file()):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(whole, copy)
        (copy / file.relative_to(whole)).unlink()
        assert "\n" not in said(copy)


@EACH
def test_a_file_cut_short_is_one_line(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    suffixes = set[str]()
    for file in sorted(one for one in tmp_path.rglob("*") if one.is_file()):
        raw, suffix = file.read_bytes(), file.suffix or file.name
        most = 200 if suffix in suffixes else len(raw)
        suffixes.add(suffix)
        for length in range(0, most, 50):
            file.write_bytes(raw[:length])
            told = said(tmp_path)
            assert "\n" not in told
            is_read = suffix in (".distcp", ".safetensors", ".pt", ".metadata") and not file.name.startswith("zero_pp")
            assert told or not is_read
        file.write_bytes(raw)


def test_a_single_file_cut_short_is_one_line(tmp_path: Path) -> None:
    raw, path = archived({"model": plain(), "optimizer": optimizer(True, TRAINED)}), tmp_path / "x.pt"
    for length in range(50, len(raw), 50):
        path.write_bytes(raw[:length])
        told = said(path)
        assert told
        assert "\n" not in told


@pytest.mark.parametrize("seed", range(8))
def test_changed_bytes_are_a_value_or_one_line(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    (tmp_path / "dcp").mkdir()
    write_dcp(tmp_path / "dcp", sample())
    single = tmp_path / "x.pt"
    single.write_bytes(archived({"model": plain()}))
    for path, root in ((single, single), (tmp_path / "dcp" / ".metadata", tmp_path / "dcp")):
        whole = path.read_bytes()
        for _ in range(40):
            raw = bytearray(whole)
            for at in rng.integers(0, len(raw), 3):
                raw[at] = int(rng.integers(0, 256))
            path.write_bytes(bytes(raw))
            assert "\n" not in said(root)


ODD: list[Any] = [None, 5, "x", [], {}, [1], {"a": {"b": 1}}, (), np.zeros(3, np.float32)]


@pytest.mark.parametrize("stage", [2, 3])
def test_values_of_other_kinds_are_one_line(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of DeepSpeed's files, replaced by odd ones."""
    deepspeed(tmp_path, stage, 1)
    tag = tmp_path / "global_step3"
    for file in tag.glob("*.pt"):
        raw = file.read_bytes()
        whole: dict[str, Any] = {}
        monkeypatch.setattr("state_samples.archived", lambda value, whole=whole: whole.update(value) or b"")
        deepspeed(tmp_path / f"again{file.name}", stage, 1)
        inner = whole.get("optimizer_state_dict", {})
        mappings = [whole, inner] if "optim" in file.name else [whole]
        for mapping in mappings:
            for key in list(mapping):
                kept = mapping[key]
                for odd in ODD:
                    mapping[key] = odd
                    file.write_bytes(archived(whole))
                    assert "\n" not in said(tmp_path)
                mapping[key] = kept
        file.write_bytes(raw)


def metadata_of(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / ".metadata"
    path.write_bytes(change(path.read_bytes()))


def test_holes_and_overlaps_are_named(tmp_path: Path) -> None:
    write_dcp(tmp_path, sample(), 2)
    whole = (tmp_path / ".metadata").read_bytes()
    six = b"(J\x06\x00\x00\x00J\x00\x00\x00\x00t"  # where the second half of emb.weight begins
    assert whole.count(six) > 2
    metadata_of(tmp_path, lambda raw: raw.replace(six, six.replace(b"\x06", b"\x05", 1)))
    with pytest.raises(InputError, match=r"tensor 'model\.emb\.weight' has two pieces that overlap"):
        read_whole(str(tmp_path))
    (tmp_path / ".metadata").write_bytes(whole)
    metadata_of(tmp_path, lambda raw: raw.replace(b"(J\x0b\x00\x00\x00J\x06", b"(J\x0c\x00\x00\x00J\x06"))
    with pytest.raises(InputError, match=r"'model\.emb\.weight' has 66 of its 72 elements"):
        read_whole(str(tmp_path))
    (tmp_path / ".metadata").write_bytes(whole)
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(InputError, match=r"__1_0\.distcp is missing"):
        read_whole(str(tmp_path))
    metadata_of(tmp_path, lambda raw: raw.replace(b"__1_0.distcp", b"../../x.test"))
    with pytest.raises(InputError, match="is no file in its folder"):
        read_whole(str(tmp_path))


def test_deepspeeds_ranks_are_complete(tmp_path: Path) -> None:
    deepspeed(tmp_path, 2, 3)
    tag = tmp_path / "global_step3"
    middle, last = (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2))
    raw = middle.read_bytes()
    middle.unlink()
    with pytest.raises(InputError, match="lacks the file of rank 1"):
        read_whole(str(tmp_path))
    middle.write_bytes(raw)
    last.unlink()
    with pytest.raises(InputError, match="of 2 ranks, and they say 3"):
        read_whole(str(tmp_path))
    (tag / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(raw)
    with pytest.raises(InputError, match="2 tensor- or pipeline-parallel ranks"):
        read_whole(str(tmp_path))
    (tmp_path / "latest").write_text("../..", encoding="utf-8")
    with pytest.raises(InputError, match="has no such folder"):
        read_whole(str(tmp_path))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "it is empty"),
        (b"hello world", "no checkpoint that is known"),
        (b"\x80\x02}.", "a plain pickle"),
        (bytes.fromhex("80028a0a6cfc9c46f9206aa850192e") + b"x" * 50, r"PyTorch before 1\.6"),
        (b"PK\x03\x04" + b"x" * 100, "its archive has no end"),
        (archived([1, 2]), "a list"),
        (archived({"a": Call("torch.hub.load", ())}), r"names torch\.hub\.load"),
        (archived({"a": Name("os.system")}), r"names os\.system"),
        (archived({"a": Call("torch._utils._rebuild_sparse_tensor", ())}), "'a' is of kind sparse"),
    ],
)
def test_files_that_are_none_are_refused(raw: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=said):
        read_whole(str(path))


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint that is known"):
        read_whole(str(tmp_path))
    with pytest.raises(InputError, match="cannot read"):
        read_whole(str(tmp_path / "none"))


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    raw = archived({"a": values("a", (4, 4))})
    rows = b"(J\x04\x00\x00\x00J\x04\x00\x00\x00t"
    path.write_bytes(raw.replace(rows, rows.replace(b"\x04", b"\x40", 1)))
    with pytest.raises(InputError, match=r"needs 1,024 bytes, and its storage has 64"):
        read_archive(str(path))
    path.write_bytes(raw.replace(b"(J\x04\x00\x00\x00J\x01\x00\x00\x00t", b"(J\x00\x00\x00\x00J\x01\x00\x00\x00t"))
    with pytest.raises(InputError, match="repeats its elements"):
        read_archive(str(path))
