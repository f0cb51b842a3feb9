"""Tables of collectives: made of measurements, and refused in one line where something is wrong with them."""

from __future__ import annotations

from pathlib import Path

import collective_tables
import pytest

from zerosim.cli.main import main
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import InputError

CARD = """
name = "my-card"
memory_bytes = "24GB"
peak_flops = 165e12
hbm_bytes_per_s = 1008000000000
"""
LINK = 'link_bytes_per_s = "32GB"\n'
TABLE = """
[collectives]
gpu = "mine"
source = "nccl-tests on my machine"
[collectives.all_reduce]
2 = [[65536, 20.0], [1048576, 100.0]]
4 = [[65536, 30.0]]
[collectives.strided]
all_gather = {2 = 4.0}
"""


def card(folder: Path, text: str) -> str:
    path = folder / "card.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_the_tables_are_made_of_what_was_measured() -> None:
    made = collective_tables.tables()
    assert {path.name for path in collective_tables.TABLES.iterdir()} == set(made)
    for name, text in made.items():
        assert (collective_tables.TABLES / name).read_text("utf-8") == text


def test_a_card_of_ones_own_may_have_a_table(tmp_path: Path) -> None:
    cluster = cluster_of(find_hardware(card(tmp_path, CARD + LINK + TABLE)))
    assert cluster.collectives is not None
    assert cluster.collectives.link == cluster.link == 32e9
    assert cluster.collectives.calls["all_reduce"][2].seconds(65536) == pytest.approx(20e-6)
    assert cluster.collectives.strided == {"all_gather": {2: 4e9}}
    assert cluster_of(find_hardware(card(tmp_path, CARD + LINK))).collectives is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("collectives.all_reduce", "collectives.all_reduc"), "unknown key all_reduc: did you mean 'all_reduce'?"),
        (("collectives.all_reduce", "collectives.send"), "missing all_reduce: at least one of all_reduce, all_gather"),
        (('gpu = "mine"', ""), "missing gpu: name the machine and the source"),
        (('"nccl-tests on my machine"', '" "'), "source ' ': expected text"),
        (("2 = [[65", "1 = [[65"), "all_reduce.1: expected a number of ranks, at least 2"),
        (("2 = [[65", "two = [[65"), "all_reduce.two: expected a number of ranks, at least 2"),
        (("4 = [[65536, 30.0]]", "4 = []"), "all_reduce.4: expected a list of [bytes, microseconds], such as"),
        (("4 = [[65536, 30.0]]", "4 = [[65536]]"), "all_reduce.4: expected a list of [bytes, microseconds], such as"),
        (("[65536, 30.0]", "[65536, nan]"), "all_reduce.4: expected a list of [bytes, microseconds], such as"),
        (("[65536, 30.0]", "[65536, -30.0]"), "all_reduce.4: [65536, -30]: expected two numbers more than 0"),
        (("[1048576, 100.0]", "[1048576, 10.0]"),
         "all_reduce.2: [1.04858e+06, 10] after [65536, 20]: work must ascend"),
        (("[1048576, 100.0]", "[65536, 100.0]"), "all_reduce.2: [65536, 100] after [65536, 20]: work must ascend"),
        (("all_gather = {2 = 4.0}", "all_gather = {2 = 0}"), "strided.all_gather.2 0: expected GB/s, more than 0"),
        (("all_gather = {2", "all_to_all = {2"), "unknown key strided.all_to_all: "),
        (("all_gather = {2 = 4.0}", "all_gather = {1 = 4.0}"), "strided.all_gather.1: expected how far apart"),
        (("all_gather = {2 = 4.0}", "all_gather = 4.0"), "strided.all_gather: expected a table"),
    ],
)  # fmt: skip
def test_what_a_table_may_not_say(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in TABLE
    path = card(tmp_path, CARD + LINK + TABLE.replace(*change))
    with pytest.raises(InputError) as caught:
        find_hardware(path)
    assert str(caught.value).startswith(f"hardware {path}, collectives: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("link", ["", "link_bytes_per_s = 0\n"])
def test_a_gpu_without_links_runs_alone(tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = card(tmp_path, CARD + link)
    plan = ["plan", "--model", "gpt2", "--layers", "2", "--gpu", path, "--quiet"]
    assert main([*plan, "--ranks", "1"]) == 0
    assert main([*plan, "--ranks", "2", "--node-gpus", "1"]) == 0
    capsys.readouterr()
    assert main([*plan, "--ranks", "2"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith(
        'my-card has no links between GPUs, and 2 ranks need them: give its file link_bytes_per_s, such as "24GB", '
        "or pass --node-gpus 1, or --ranks 1"
    )
    assert "\n" not in said
