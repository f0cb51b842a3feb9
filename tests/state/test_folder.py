"""A folder of saved steps is never half a checkpoint: kills, full drives, signals, two runs at once, and damage."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import SECONDS, ended, finished, posix, started
from saved import opened, resumed, saved, states_of

from zerosim.config import RunConfig
from zerosim.errors import InputError, OutputError
from zerosim.state import folder as folders
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.folder import LOCK, StateFolder, damaged_after, newest, saved_steps, step_folder
from zerosim.state.manifest import MANIFEST, own_checksum, read_manifest
from zerosim.train.run import run

pytestmark = posix
TESTS = Path(__file__).parent
TINY: dict[str, Any] = dict(
    ranks=2, stage=2, layers=1, hidden=4, heads=1, seq=4, micro_batch=1, vocab=256, steps=3, save_every=1
)


def config_in(folder: Path, **fields: Any) -> RunConfig:
    return RunConfig(**{**TINY, "save_state": str(folder), **fields})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- kills --------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_whenever_a_run_is_killed_its_newest_step_is_whole(kills: int, tmp_path: Path) -> None:
    """`python tests/state/kills.py FOLDER 200 SEED` kills as often as one likes."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), str(TESTS.parent.parent)])
    words = [sys.executable, str(TESTS / "kills.py"), str(tmp_path), str(kills), "1"]
    done = finished(words, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["none"] + len(found["found"]) == kills
    assert len(set(found["found"])) > 1


# -- drives that fail -----------------------------------------------------------------------------------
CALLS = ("fsync", "rename", "mkdir", "unlink", "open")


@contextmanager
def failing_at(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, at: int) -> Iterator[list[int]]:
    """Let the `at`th call that changes files in `folder`, or flushes any, fail. Yields how many there were."""
    count = [0]

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            if name == "fsync" or str(words[0]).startswith(str(folder)):
                count[0] += 1
                if count[0] == at:
                    raise OSError(number, os.strerror(number))
            return real(*words, **named)

        return call

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, wrapped(name, getattr(os, name)))
        yield count


def assert_steps_are_whole(folder: Path, expected: Mapping[int, Any]) -> list[int]:
    """Every step that has its name has the numbers of a run on a drive that does not fail."""
    steps = saved_steps(folder)
    for step in steps:
        assert folders.damage_of(step_folder(folder, step)) == ""
        found = states_of(opened(folder, step))
        assert found.keys() == expected[step].keys()
        assert all(found[key].tobytes() == values.tobytes() for key, values in expected[step].items())
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(("number", "keep"), [(errno.ENOSPC, None), (errno.EIO, 1)], ids=["full", "broken"])
def test_a_drive_that_fails_at_any_call_leaves_whole_steps(
    number: int, keep: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call in turn: the run ends with an error of one line, or does not need that call."""
    whole = tmp_path / "whole"
    run(config_in(whole))
    expected, ends, at = {step: states_of(opened(whole, step)) for step in (1, 2, 3)}, list[str](), 0
    while True:
        at += 1
        folder = tmp_path / f"fails-{at}"
        with failing_at(monkeypatch, folder, number, at) as count, refusals_of_one_line(os.strerror(number)) as how:
            run(config_in(folder, save_keep=keep))
        ends += how or [""]
        steps = assert_steps_are_whole(folder, expected) if folder.exists() else []
        if count[0] < at:
            break
        if steps:
            assert newest(str(folder)) == step_folder(folder, steps[-1])
        if not ends[-1]:
            assert steps[-1] == 3
        elif folder.exists():
            again = config_in(folder, save_keep=keep, **(dict(resume=str(folder)) if steps else {}))
            if steps[-1:] != [3]:
                run(again)
            assert not [name for name in names(folder) if name.startswith(".") and name.endswith(".writing")]
        shutil.rmtree(folder, ignore_errors=True)
    assert ends.count("OutputError") >= 3 * 7
    assert ends[-1] == ""


def test_a_full_drive_is_an_output_error_and_the_step_before_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, [20]

    def fsync(file: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OutputError, match=r"^--save-state .*: No space left on device: this step was not saved; "):
        run(config_in(tmp_path))
    assert names(tmp_path) == [LOCK, *(f"step-{step:08}" for step in range(1, len(saved_steps(tmp_path)) + 1))]
    assert newest(str(tmp_path)) == step_folder(tmp_path, saved_steps(tmp_path)[-1])


def test_an_older_step_that_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(there: Any, here: Any, *words: Any, **named: Any) -> None:
        if str(here).endswith(".removed"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(there, here, *words, **named)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OutputError, match=r"Input/output error: step 2 is saved, but older ones could not be removed$"):
        run(config_in(tmp_path, save_keep=1))
    assert saved_steps(tmp_path) == [1, 2]


def test_a_folder_that_vanishes_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def gone(rank: int, step: int, loss: float) -> None:
        if step == 1:
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(OutputError, match="No such file or directory"):
        run(config_in(folder), progress=gone)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(path: Any, *words: Any, **named: Any) -> int:
        if Path(path).name == LOCK:  # the tests' user may be root, who may
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *words, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(InputError, match=r"^save_state .*: cannot be written: Read-only file system; choose another"):
        run(config_in(tmp_path))


@pytest.mark.parametrize("path", ["file", "file/within", "a\0b", "x" * 300])
def test_a_path_that_no_folder_can_have_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"^save_state ") as caught:
        run(config_in(tmp_path / path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"^resume ") as caught:
        run(config_in(tmp_path / "saved", resume=str(tmp_path / path)))
    assert "\n" not in str(caught.value)


WORDS = ["--ranks", "2", "--layers", "1", "--hidden", "4", "--heads", "1", "--seq", "4", "-q", "--every", "1"]


@pytest.mark.slow
def test_a_file_that_may_not_grow_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """The shell's limit of a file's size, which a drive's quota is like."""
    words = [sys.executable, "-m", "zerosim", "run", *WORDS, "--steps", "2", "--save-state", str(tmp_path)]
    done = finished(["sh", "-c", f"ulimit -f 4; exec {' '.join(words)}"])
    assert done.returncode == 5
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == [LOCK]


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_run_that_saves_and_leaves_whole_steps(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "zerosim", "run", *WORDS, "--steps", "1000000", "--save-state", str(tmp_path)]
    words += ["--keep", "2"]
    with ended(started(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)) as process:
        while len(saved_steps(tmp_path)) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(SECONDS) == 128 + number
    assert all(name == LOCK or name.startswith("step-") for name in names(tmp_path))
    steps = saved_steps(tmp_path)
    assert newest(str(tmp_path)) == step_folder(tmp_path, steps[-1])
    assert damaged_after(step_folder(tmp_path, steps[0])) == []


# -- several runs ---------------------------------------------------------------------------------------
def test_another_run_cannot_save_into_a_folder_that_is_held(tmp_path: Path) -> None:
    with (
        StateFolder(str(tmp_path)).held(),
        pytest.raises(InputError, match=r"^save_state .*: another run saves there; choose another folder$"),
    ):
        run(config_in(tmp_path))
    run(config_in(tmp_path))
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_a_drive_without_locks_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match=r"^save_state .*: No locks available"):
        run(config_in(tmp_path))


def test_later_steps_of_another_run_are_not_overwritten(tmp_path: Path) -> None:
    run(config_in(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"has step 3 of an earlier run; go on from there with --resume"):
        run(config_in(tmp_path))
    with pytest.raises(InputError, match=r"has step 3 of an earlier run"):
        run(config_in(tmp_path, resume=str(step_folder(tmp_path, 1))))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_saves_into_the_folder_that_it_goes_on_from(tmp_path: Path) -> None:
    run(config_in(tmp_path))
    run(config_in(tmp_path, steps=5, resume=str(tmp_path), save_keep=3))
    assert saved_steps(tmp_path) == [3, 4, 5]


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    others = ["notes.txt", ".step-1.writing", "step-00000009.old", ".step-00000001.writing.txt"]
    for name in others:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    (tmp_path / "step-1").mkdir()
    for left in (".step-00000001.writing", ".step-00000004.removed"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "rank-00000.safetensors").write_bytes(b"half")
    run(config_in(tmp_path, save_keep=1))
    assert names(tmp_path) == sorted([*others, "step-1", LOCK, "step-00000003"])


# -- damage ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(config_in(folder))
    return folder


@pytest.fixture
def steps(three_steps: Path, tmp_path: Path) -> Path:
    """A folder of three saved steps to damage."""
    return Path(shutil.copytree(three_steps, tmp_path / "steps"))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def change_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": cut_short,
    "changed": change_a_byte,
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "a folder": become_a_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.json", MANIFEST])
def test_a_damaged_newest_step_is_left_for_the_one_before(name: str, damage: str, steps: Path) -> None:
    DAMAGES[damage](step_folder(steps, 3) / name)
    assert newest(str(steps)) == step_folder(steps, 2)
    [why] = damaged_after(step_folder(steps, 2))
    assert "step-00000003" in why
    assert "\n" not in why
    with pytest.raises(InputError) as caught:
        newest(str(step_folder(steps, 3)))
    assert "\n" not in str(caught.value)
    result = run(RunConfig(**{**TINY, "save_every": None}, resume=str(steps)))
    assert len(result.losses) == 1


def test_if_no_step_is_whole_the_newest_ones_damage_is_said(steps: Path) -> None:
    for step in (1, 2, 3):
        cut_short(step_folder(steps, step) / "rank-00001.safetensors")
    with pytest.raises(InputError, match=r"no saved step is whole: .*step-00000003/rank-00001.safetensors: has "):
        newest(str(steps))


def test_a_run_that_goes_on_before_a_damaged_step_is_told_to_remove_it(steps: Path) -> None:
    change_a_byte(step_folder(steps, 3) / "rank-00000.safetensors")
    with pytest.raises(InputError, match=r"has step 3, which is damaged: .*; remove .*step-00000003"):
        run(config_in(steps, resume=str(steps)))
    shutil.rmtree(step_folder(steps, 3))
    run(config_in(steps, resume=str(steps)))
    assert saved_steps(steps) == [1, 2, 3]


def rewritten(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = step / MANIFEST
    values = json.loads(path.read_text("utf-8"))
    change(values)
    path.write_text(json.dumps({**values, "sha256": own_checksum(values)}), "utf-8")


def test_a_changed_byte_of_a_manifest_is_found_wherever_it_is(steps: Path) -> None:
    """It has every other file's checksum, and its own."""
    path = step_folder(steps, 3) / MANIFEST
    raw = path.read_bytes()
    for at in range(0, len(raw) - 1, 3):  # the last ends its line
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(InputError):
            read_manifest(step_folder(steps, 3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(format="other"), "is no manifest of zerosim"),
        (dict(schema=2, version="9.0"), "schema 2 is newer than this zerosim's, 1: it was written by zerosim 9.0"),
        (dict(schema="1"), "is newer|is damaged"),
        (dict(step=-1), "is damaged"),
        (dict(step=True), "is damaged"),
        (dict(step=1e400), "is damaged"),
        (dict(ranks="two"), "is damaged"),
        (dict(config=[1]), "is damaged"),
        (dict(numbers={}), "is damaged"),
        (dict(numbers={"control": {"steps": -1, "updates": 0, "lr": 0.1}, "scaler": None}), "is damaged"),
        (dict(numbers={"control": {"steps": 1, "updates": 1, "lr": "x"}, "scaler": None}), "is damaged"),
        (dict(numbers={"control": {"steps": 1, "updates": 1, "lr": 1}, "scaler": {"scale": 1}}), "is damaged"),
        (dict(files={}), "is damaged|has no files"),
        (dict(files=[{"name": "../../etc/passwd", "nbytes": 1, "sha256": ""}]), "is damaged"),
        (dict(files=[{"name": "a/b", "nbytes": 1, "sha256": ""}]), "is damaged"),
        (dict(files=[{"name": "..", "nbytes": 1, "sha256": ""}]), "is damaged"),
        (dict(files=[{"name": "a\0b", "nbytes": 1, "sha256": ""}]), "is damaged"),
        (dict(files=[{"name": "x", "nbytes": -1, "sha256": ""}]), "is damaged"),
        (dict(files=[{"name": "x", "nbytes": 1e400, "sha256": ""}]), "is damaged"),
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused_in_a_line(change: dict[str, Any], said: str, steps: Path) -> None:
    rewritten(step_folder(steps, 3), lambda values: values.update(change))
    with pytest.raises(InputError, match=said) as caught:
        Checkpoint(step_folder(steps, 3))
    assert "\n" not in str(caught.value)
    assert newest(str(steps)) == step_folder(steps, 2)


def is_read_or_refused(step: Path) -> None:
    """Open and read all of a step: its numbers, or an InputError in one line. Nothing else."""
    with refusals_of_one_line():
        checkpoint = Checkpoint(step)
        for key in checkpoint.names:
            if checkpoint.follows(*key) == "elements":
                checkpoint.whole(*key)
        run(RunConfig(**{**TINY, "save_every": None}, resume=str(step)))


@contextmanager
def refusals_of_one_line(*says: str) -> Iterator[list[str]]:
    """Catch an InputError or OutputError, if one is raised, and hold it to one line, with these words. Yields its
    class's name in a list."""
    caught: list[str] = []
    try:
        yield caught
    except (InputError, OutputError) as error:
        said = str(error)
        caught.append(type(error).__name__)
        if "\n" in said or any(words not in said for words in says):
            raise


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from([2**63, 10**30, -(2**70)]), st.floats(),
    st.text(max_size=5), st.lists(st.integers(-2, 9), max_size=3), st.dictionaries(st.text(max_size=3), st.none()),
)  # fmt: skip


def places_in(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, outermost first."""
    yield at
    if isinstance(values, dict):
        for key in values:
            yield from places_in(values[key], (*at, key))
    elif isinstance(values, list):
        for number in range(min(len(values), 3)):
            yield from places_in(values[number], (*at, number))


def changed(values: Any, at: tuple[Any, ...], to: Any) -> Any:
    if not at:
        return to
    inner = values
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = to
    return values


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.json"])
@pytest.mark.parametrize("examples", [25, pytest.param(600, marks=pytest.mark.slow)])
def test_whatever_stands_in_a_json_file_is_read_or_refused_in_a_line(
    name: str, examples: int, three_steps: Path, tmp_path: Path
) -> None:
    """A value at any place becomes an odd one. The index's checksum is made to fit: it is hostile, not damaged."""
    step = Path(shutil.copytree(step_folder(three_steps, 3), tmp_path / "step-00000003"))
    whole = {path: path.read_text("utf-8") for path in (step / name, step / MANIFEST)}

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        for path, text in whole.items():
            path.write_text(text, "utf-8")
        values = json.loads(whole[step / name])
        at = data.draw(st.sampled_from([*places_in(values)]))
        (step / name).write_text(json.dumps(changed(values, at, data.draw(ODD))), "utf-8")
        with contextlib.suppress(AttributeError, TypeError):  # odd text is no manifest
            rewritten(step, lambda values: None) if name == MANIFEST else fits(step, name)
        is_read_or_refused(step)

    check()


def fits(step: Path, name: str) -> None:
    """Write a changed file's size and checksum into the manifest."""
    entry = folders.checksum(step / name)._asdict()

    def change(values: dict[str, Any]) -> None:
        values["files"] = [entry if one["name"] == name else one for one in values["files"]]

    rewritten(step, change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(start=-4), "does not describe its tensors"),
        (dict(stop=10**30), "does not describe its tensors"),
        (dict(shape=[4, 10**9]), "does not describe its tensors|has shape"),
        (dict(follows="nothing"), "does not describe its tensors"),
        (dict(rank=-1), "does not describe its tensors"),
        (dict(weight=""), "do not fit the model"),
        (
            dict(cuts=[dict(shape=[256, 4], dim=0, pieces=0, parts=1, padding=0, axis="tp", piece=0)]),
            "does not describe",
        ),
        (
            dict(cuts=[dict(shape=[256, 4], dim=7, pieces=2, parts=1, padding=0, axis="tp", piece=0)]),
            "does not describe",
        ),
        (
            dict(cuts=[dict(shape=[256, 4], dim=0, pieces=2, parts=1, padding=0, axis="tp", piece=9)]),
            "does not describe",
        ),
        (dict(cuts=[dict(shape=[9, 9], dim=0, pieces=3, parts=1, padding=0, axis="tp", piece=0)]), "does not describe"),
        (
            dict(cuts=[dict(shape=[256, 4], dim=0, pieces=2, parts=0, padding=0, axis="tp", piece=0)]),
            "does not describe",
        ),
        (
            dict(cuts=[dict(shape=[256, 4], dim=0, pieces=2, parts=1, padding=10**12, axis="tp", piece=0)]),
            "does not describe|has a hole|a hole",
        ),
    ],
    ids=str,
)
def test_cuts_that_do_not_fit_are_refused_in_a_line(change: dict[str, Any], said: str, steps: Path) -> None:
    step, name = step_folder(steps, 3), "rank-00000.json"
    runs = json.loads((step / name).read_text("utf-8"))
    at = next(number for number, one in enumerate(runs) if (one["weight"], one["state"]) == ("wte.weight", "param"))
    runs[at].update(change)
    (step / name).write_text(json.dumps(runs), "utf-8")
    fits(step, name)
    with pytest.raises(InputError, match=said) as caught:
        run(RunConfig(**{**TINY, "save_every": None, "steps": 4}, resume=str(step)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(hidden=8), r"wte\.weight"),
        (dict(layers=2), r"h\.1\."),
        (dict(optimizer="lion"), r" has exp_avg, exp_avg_sq, and this run's optimizer needs exp_avg; "),
        (dict(tie_embeddings=False), "head"),
    ],
    ids=str,
)
def test_a_step_of_another_model_or_optimizer_is_refused_by_a_tensor_s_name(
    change: dict[str, Any], said: str, steps: Path
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        run(RunConfig(**{**TINY, "save_every": None, "steps": 4, **change}, resume=str(steps)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("there", "here"), [("h.0", None), (None, "h.0")])
def test_other_frozen_weights_go_on_where_their_states_are_saved(
    there: str | None, here: str | None, tmp_path: Path
) -> None:
    """A weight may be frozen later; one that was frozen has no states to go on with."""
    fields = {**TINY, "save_every": None, "steps": 4}
    saved(RunConfig(**fields, freeze=there), tmp_path, 2)
    if here is not None:
        assert len(resumed(RunConfig(**fields, freeze=here), tmp_path, 2).losses) == 2
        return
    with pytest.raises(InputError, match=r"h\.0\..* has no states, and this run's optimizer needs exp_avg"):
        resumed(RunConfig(**fields), tmp_path, 2)


@pytest.mark.parametrize("name", ["weights", "adapters"])
def test_there_is_one_place_to_start_from(name: str, steps: Path) -> None:
    with pytest.raises(InputError, match=rf"^{name} 'x.npz': the {name} are those of resume "):
        RunConfig(**{**TINY, "lora_rank": 1, name: "x.npz", "save_every": None}, resume=str(steps))


def test_no_step_is_left_to_do(steps: Path) -> None:
    with pytest.raises(InputError, match=r"^steps 3: .*step-00000003 has done 3; pass more, in all"):
        run(RunConfig(**{**TINY, "save_every": None}, resume=str(steps)))


def test_an_update_that_waits_needs_a_run_that_delays_updates(tmp_path: Path) -> None:
    fields = dict(TINY, save_every=None, offload="optimizer=host", steps=4)
    saved(RunConfig(**fields, delayed_update=1), tmp_path, 2)
    with pytest.raises(InputError, match="resume with --delayed-update"):
        resumed(RunConfig(**fields), tmp_path, 2)
