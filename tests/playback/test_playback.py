"""The player's data: what a ledger reads from it is what the run's own ledgers read; and what is refused."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import zerosim
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Copy, Launch, Wait
from zerosim.errors import InputError
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.playback import Recorded, decode, encode, page, record
from zerosim.playback.encode import MOST_BYTES, as_text
from zerosim.playback.html import script_text, style_text
from zerosim.playback.order import call_of
from zerosim.train.plan import plan

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, micro_batch=1, steps=1)
FLAGS = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "7", "--micro-batch", "1", "--ranks", "2"]
MESHES = (
    dict(ranks=4),
    dict(ranks=4, tp=2),
    dict(ranks=4, pp=2, accumulate=2),
    dict(ranks=4, dp_replicate=2),
    dict(ranks=8, pp=2, tp=2, accumulate=2),
)
OTHERS = (
    dict(stage=3, ranks=3, collective="ring"),
    dict(stage=3, ranks=4, recipe="usual"),
    dict(stage=2, ranks=2, accumulate=2, recompute="full"),
    dict(stage=3, ranks=2, recompute="full", cpu_checkpointing=True),
    dict(stage=1, ranks=2, compress="top-k", grad_dtype="fp32"),
    dict(stage=2, ranks=2, optimizer="adafactor"),
    dict(stage=3, ranks=2, gather="module"),
    dict(stage=3, ranks=2, model="llama"),
    dict(stage=2, ranks=2, offload="optimizer=host"),
    dict(stage=3, ranks=2, offload="params=host,optimizer=host"),
    dict(stage=3, ranks=4, cp=4, attention="flash"),
    dict(stage=1, ranks=4, cp=4, attention="flash", context="ulysses+ring", ranks_per_node=2),
)


def cases() -> Iterator[dict[str, Any]]:
    for mesh in MESHES:
        for stage in range(4):
            for partition in ("slices", "owner"):
                untied = {"tie_embeddings": False} if partition == "owner" and "pp" in mesh else {}
                if (stage or partition == "slices") and not (stage == 0 and "dp_replicate" in mesh):
                    yield dict(stage=stage, partition=partition, **mesh, **untied)


@cache
def recorded(**changes: Any) -> Recorded:
    return record(RunConfig(**{**SMALL, **changes}))


def agrees(one: Recorded, run: int = 0, *others: Recorded) -> None:
    """Whether ledgers that read the data, as JSON, are those of the run."""
    data = json.loads(as_text(encode(*others, one) if others else encode(one)))
    result = one.result
    records = decode(data)[run]
    assert list(records) == result.ran
    for rank, events in records.items():
        memory, traffic = MemoryLedger(), CommLedger()
        memory.read(events)
        traffic.read(events)
        counted = result.memory[rank]
        assert memory.marks == counted.marks
        assert memory.peak == counted.peak
        assert memory.host_peak_bytes == counted.host_peak_bytes
        assert memory.states == counted.states
        assert not counted.others or memory.others.keys() == counted.others.keys()
        assert traffic.rows() == result.traffic[rank]
        row = next(row for row in data["runs"][run]["ranks"] if row["rank"] == rank)
        assert row["marks"] == {name: dict(shot.by_kind) for name, shot in counted.marks.items()}
        assert row["others"].get("host", {"peak": 0})["peak"] == counted.host_peak_bytes
        for name, other in counted.others.items():
            assert memory.others[name].marks == other.marks
            assert memory.others[name].peak == other.peak
            assert row["others"][name]["peak"] == other.peak.total_bytes
            assert row["others"][name]["marks"] == {mark: dict(shot.by_kind) for mark, shot in other.marks.items()}


@pytest.mark.quick(2)
@pytest.mark.parametrize("changes", list(cases()), ids=lambda changes: "-".join(map(str, changes.values())))
def test_ledgers_of_the_data_are_the_runs_own(changes: dict[str, Any]) -> None:
    agrees(recorded(**changes))


@pytest.mark.quick(4)
@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_and_of_runs_with_more_in_them(changes: dict[str, Any]) -> None:
    agrees(recorded(**changes))


def test_rows_of_tokens_travel_and_experts_have_buffers_of_their_own() -> None:
    one = recorded(stage=3, ranks=4, layers=1, experts=4, top_k=2, ep=2)
    agrees(one)
    run = encode(one)["runs"][0]
    assert run["mesh"] == {"edp": 2, "ep": 2}
    assert run["groups"]["edp"] == [(0, 2), (1, 3)]
    names, row = [flat["name"] for flat in run["flats"]], 2 * SMALL["hidden"]
    assert set(run["row_of"].values()) == {row}
    sent: Counter[int] = Counter()
    for rank in one.result.ran:
        for event in one.result.events[rank]:
            if isinstance(event, Launch) and (event.op, event.purpose) == ("all_to_all", "activations"):
                assert event.sent_bytes is not None
                assert event.sent_bytes % row == 0
                sent[event.sequence] += event.payload_bytes
            if isinstance(event, Alloc) and event.kind == "optim" and event.scope.unit == "h.0":
                flat = names[run["flat_of"][f"{rank}/{event.id}"]]
                part = one.result.layout.own(rank, flat)
                assert 4 * (part.stop - part.start) == event.nbytes
    assert len(sent) == 4  # there and back, in forward and in backward


def test_and_of_a_run_on_nvme(tmp_path: Path) -> None:
    one = record(RunConfig(stage=3, ranks=2, offload="params=nvme,optimizer=nvme", nvme=str(tmp_path), **SMALL))
    agrees(one)
    assert set(one.result.memory[0].others) == {"host", "nvme"}


def test_copies_come_back_with_the_work_that_a_wait_names() -> None:
    one = recorded(stage=2, ranks=2, offload="optimizer=host")
    (records,) = decode(encode(one))
    for rank, events in records.items():
        copies = [event for event in events if isinstance(event, Copy)]
        assert copies
        assert all(copy.work is not None for copy in copies)
        waited = {event.work for event in events if isinstance(event, Wait)}
        assert {copy.work for copy in copies} <= waited
        own = [event for event in one.result.events[rank] if isinstance(event, Copy)]
        assert [copy._replace(after="") for copy in copies] == [copy._replace(after="") for copy in own]


def test_and_of_plans() -> None:
    for mesh in MESHES[:3]:
        result = plan(RunConfig(stage=3, **{**SMALL, **mesh}), keep_events=True)
        agrees(Recorded(result))


def test_recording_changes_nothing_of_a_run() -> None:
    config = RunConfig(stage=3, ranks=2, **SMALL)
    plain, seen = zerosim.run(config, keep_events=True), record(config).result
    assert seen.events == plain.events
    assert seen.losses == plain.losses


def test_the_order_lets_no_rank_go_on_before_all_have_joined() -> None:
    for changes in (dict(stage=3, ranks=4), dict(stage=1, ranks=4, pp=2, accumulate=3), dict(stage=3, ranks=4, tp=2)):
        data = encode(recorded(**changes))
        (run,) = data["runs"]
        records = {rank: iter(events) for rank, events in decode(data)[0].items()}
        joined: dict[Any, set[int]] = {}
        works: dict[Any, Any] = {}
        for _, rank, *_ in run["events"]:
            event = next(records[rank])
            if isinstance(event, Launch):
                call = works[rank, event.work] = call_of(event)
                joined.setdefault(call, set()).add(rank)
            elif isinstance(event, Wait):
                op, _, group, _ = works[rank, event.work]
                assert joined[works[rank, event.work]] >= ({group[0]} if op == "send" else set(group))


def test_a_launch_has_the_line_of_its_stage() -> None:
    (run,) = encode(recorded(stage=3, ranks=2))["runs"]
    found = set()
    for event, line in zip(run["events"], run["lines"], strict=True):
        if event[0] == 4 and run["scopes"][event[2]][1] == "forward":
            found.add(tuple(run["sources"][line][:1] + run["sources"][line][2:]))
    ((file, function, text),) = found
    assert (file, function) == ("parallel/zero3.py", "Zero3.pre_forward")
    assert text.startswith("self.gathered.unshard(unit)")


# -- the page ---------------------------------------------------------------------------------------
class Tags(HTMLParser):
    """A page's tags and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


MARKUP = "</script><img src=x onerror=alert(1)><!--"


def test_names_with_markup_stay_text() -> None:
    one = recorded(stage=3, ranks=2)
    data = encode(one)
    plain = page(data)
    data["runs"][0]["model"] = data["runs"][0]["about"] = MARKUP
    data["runs"][0]["words"][0] = MARKUP
    text = page(data)
    assert Tags(text).tags == Tags(plain).tags
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["runs"][0]["model"] == MARKUP
    assert html.escape(MARKUP) in text  # the title


def test_a_page_names_nothing_outside_itself() -> None:
    text = page(encode(recorded(stage=3, ranks=2)))
    names = [value for name, value in Tags(text).attributes if name in ("src", "href", "action")]
    assert not names
    assert "default-src 'none'" in text
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/2000/svg", "", text)
    assert len(script_text().encode()) <= 90_000
    assert len(style_text().encode()) <= 8_000


def test_a_notebook_keeps_a_frame_and_a_picture() -> None:
    shown = zerosim.player(recorded(stage=3, ranks=2).result)._repr_html_()
    tags = Tags(shown)
    assert tags.tags[:1] == ["iframe"]
    assert "img" in tags.tags
    attributes = dict(tags.attributes)
    assert attributes["sandbox"] == "allow-scripts allow-downloads"
    assert "<main id=" in (attributes["srcdoc"] or "")
    assert (attributes["src"] or "").startswith("data:image/png;base64,")


# -- the commands -------------------------------------------------------------------------------------
def test_step_writes_a_page_of_several_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.html"
    assert main(["step", "--html", str(file), "--stages", "0,3", *FLAGS]) == 0
    assert "DDP on 2 ranks beside ZeRO-3" in capsys.readouterr().out
    assert file.read_text("utf-8").startswith("<!doctype html>")


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_pages_own_model_is_small_and_a_flag_keeps_the_runs(tmp_path: Path) -> None:
    """Its gathered parameters are seen: a block's are at least a tenth of the peak."""
    file, found = tmp_path / "step.html", []
    for words in ([], ["--model", "gpt"], ["--layers", "3"], ["--collective", "direct", "--device-memory", "1MB"]):
        assert main(["step", "--html", str(file), "--ranks", "4", *words]) == 0
        found.append(data_of(file)["runs"][0])
    assert [sum(unit.startswith("h.") for unit in run["units"]) for run in found] == [2, 4, 3, 2]
    assert [{call[-1] for call in run["calls"]} for run in found] == [{"ring"}] * 3 + [{"direct"}]
    assert [run["limit"] for run in found] == [None, None, None, 10**6]
    assert any(
        events and 10 * int(what.split()[0].replace(",", "")) >= found[0]["ranks"][0]["peak"]
        for events, _, (what, *_) in found[0]["frees"]
    )
    assert found[0]["most_passing"] < found[1]["most_passing"] / 8


def test_plan_writes_a_page_beside_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", "--html", str(file), "--stage", "3", "--model", "gpt2", "--layers", "2", "--ranks", "64"]) == 0
    printed = capsys.readouterr().out
    assert "plan.html" in printed
    assert "Formulas and counts agree." in printed
    assert "rank 0" not in printed
    assert file.stat().st_size < MOST_BYTES


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "--html", "/no/such/folder/x.html"], "folder /no/such/folder does not exist; create it first"),
        (["step", "--stages", "1,2"], "pass --html OUT.html too"),
        (["step", "--html", "x.html", "--stages", "1", "--stage", "2"], "both given: choose one"),
        (["step", "--html", "x.html", "--world", "mpi"], "the player records threads"),
        (["step", "--device-memory", "1MB"], "--device-memory: pass --html OUT.html too"),
        (["step", "--html", "x.html", "--device-memory", "much"], "--device-memory"),
        (["plan", "--html", "x.html", "--model", "gpt2-xl", "--accumulate", "512"], "leave out"),
    ],
)
def test_what_is_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_too_large_says_what_to_leave_out() -> None:
    one = recorded(stage=3, ranks=2)
    less = encode(one, most=len(as_text(encode(one))) - 1)
    assert less["runs"][0]["left_out"] == ["kernel"]
    assert decode(less)[0].keys() == {0, 1}
    with pytest.raises(InputError, match="leave out ZeRO stages, ranks, layers or microbatches"):
        encode(one, most=10_000)


def test_data_of_another_schema_are_refused() -> None:
    data = encode(recorded(stage=3, ranks=2))
    with pytest.raises(InputError, match="version 1 of zerosim-player: expected version 3"):
        decode({**data, "version": 1})
    result = recorded(stage=3, ranks=2).result
    with pytest.raises(InputError, match="schema 2: expected 'zerosim-player'"):
        decode(result.to_dict())
    with pytest.raises(InputError, match="player takes results, not a dict"):
        zerosim.player(result.to_dict())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"zerosim\.run\(config, keep_events=True\)"):
        zerosim.player(zerosim.run(RunConfig(stage=3, ranks=2, **SMALL)))
