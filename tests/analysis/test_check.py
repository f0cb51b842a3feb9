"""Scenarios that check themselves: they pass, every figure can fail, broken files are refused in one line."""

from __future__ import annotations

import copy
import json
import re
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from config_files import file
from hypothesis import given
from hypothesis import strategies as st
from memory_errors import SCENARIOS as MEMORY
from memory_errors import measure

from zerosim.analysis import formulas
from zerosim.analysis.expect import Judged, Runs, judge, read_expectations
from zerosim.analysis.expect.asked import model_of
from zerosim.analysis.expect.closed_forms import FORMULAS
from zerosim.analysis.expect.counts import COUNTS
from zerosim.analysis.expect.figures import UNITS, VERDICTS, parse_figure, printed_like
from zerosim.analysis.expect.keys import FIGURES, KEYS
from zerosim.analysis.expect.largest import edge
from zerosim.analysis.memory_interval import read_peaks
from zerosim.cli.main import main
from zerosim.config import PLAN_DEFAULTS, RunConfig, read_scenario
from zerosim.config.files import ScenarioFile, read_scenario_file
from zerosim.errors import InputError
from zerosim.units import parse_bytes, parse_count

FOLDER = Path(__file__).parents[2] / "scenarios"
FILES = sorted(path.name for path in FOLDER.glob("*.toml") if path.name != "first.toml")
SEARCHED = ("figure6.toml", "figure7.toml", "figure8.toml", "table2_measured.toml")  # models of up to 225 blocks
TIMED = tuple(
    name for name in FILES if name.startswith(("measured_time", "throughput_", "zeropp", "infinity.toml", "offload_"))
)
RATIOS = tuple(f"throughput_zero_figure{number}.toml" for number in (2, 3, 4))  # they also print ratios of speeds
LISTS = tuple(  # minutes: test_interval.py judges every figure of these
    name for name in TIMED if name not in RATIOS and not name.startswith(("zeropp", "infinity", "offload_"))
) + tuple(name for name in FILES if name.startswith("steps_"))
SLOW = (*SEARCHED, *TIMED, *LISTS, "table2.toml")
QUICK = [name for name in FILES if name not in SLOW]
SECONDS = (
    *("training.toml", "measured_megatron_peaks.toml", "activations_partitioned.toml"),
    *(
        name
        for name in FILES
        if name.startswith(("measured_adapters", "measured_finetuning", "experts_m", "experts_prime"))
    ),
)
COUNTED = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW + SECONDS else ()) for name in FILES if name not in LISTS
]
COUNTED_QUICKLY = [one for one in COUNTED if one.values[0] in QUICK]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Runs are made once for all tests of this file."""
    return Runs()


def read(name: str) -> ScenarioFile:
    return read_scenario_file(str(FOLDER / name))


def tables_of(file: ScenarioFile, runs: Runs) -> list[Judged]:
    return [judge(table, runs) for table in read_expectations(file)]


def test_the_readme_names_every_key_and_every_quantity() -> None:
    rows = [line.split("|") for line in (FOLDER / "README.md").read_text("utf-8").splitlines() if line.startswith("|")]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row[1])}
    said = {key: set(re.findall(r"`(\w+)`", row[2])) for row in rows for key in re.findall(r"`(\w+)`", row[1])}
    assert named == set(KEYS)
    assert said["quantity"] == set(COUNTS)
    assert said["formula"] == set(FORMULAS)


def test_the_readme_has_every_file_and_its_figures() -> None:
    """So that no table and no figure is lost unseen. Nothing has to be counted for that."""
    rows = [line.split("|") for line in (FOLDER / "README.md").read_text("utf-8").splitlines() if ".toml` |" in line]
    said = {row[1].strip(" `"): [int(cell.strip().replace("-", "0")) for cell in row[3:8]] for row in rows}
    for name in FILES:
        tables = read_expectations(read(name))
        kinds = [sum(len(table.cells) for table in tables if table.figures == kind) for kind in FIGURES]
        counted = sum(len(table.cells) for table in tables if table.quantity)
        assert said.pop(name) == [*kinds, counted, sum(kinds) - counted], name
    assert not said


def test_no_figure_stands_beside_a_run_in_another_number_format() -> None:
    """What was measured with products in 8 bits is no test of what is planned without."""
    for path in sorted(FOLDER.glob("*.toml")):
        text = path.read_text("utf-8")
        measured = re.search(r"^title = .*(float8|fp8)", text, re.IGNORECASE | re.MULTILINE)
        assert not measured or re.search(r'^fp8 = "', text, re.MULTILINE), path


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", COUNTED)
def test_every_scenario_passes(name: str, runs: Runs) -> None:
    for table in tables_of(read(name), runs):
        assert [failure for cell in table.cells for failure in cell.failures] == []
        assert table.failures == ()
        assert table.cells
    if (path := FOLDER / name) in MEMORY:  # the table of measured memory is what these plans miss
        assert measure(path, runs) == [row for row in read_peaks() if row.scenario == path.stem]


# Places of one figure in a table: indices into nested lists.
Place = tuple[int, ...]


def figures_in(value: Any, place: Place = ()) -> list[tuple[Place, str]]:
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in figures_in(item, (*place, i))]
    return [] if value == "-" else [(place, value)]


def put(table: dict[str, Any], key: str, place: Place, text: str) -> None:
    if not place:
        table[key] = text
        return
    row = table[key]
    for index in place[:-1]:
        row = row[index]
    row[place[-1]] = text


def next_digit(text: str) -> str:
    """The same figure with its last digit one higher, bold and unit as they were."""
    match = re.search(r"[0-9](?=[^0-9]*$)", text)
    assert match is not None
    return text[: match.start()] + str((int(match[0]) + 1) % 10) + text[match.end() :]


def another(text: str, table: dict[str, Any]) -> str:
    """A figure that is not this one: off by one in its last digit, or where it was measured, more than it was."""
    if text in VERDICTS:
        return VERDICTS[1 - VERDICTS.index(text)]
    return f"99{text}" if "within" in table else next_digit(text)


def judged_alone(file: ScenarioFile, table: dict[str, Any], runs: Runs) -> Judged:
    """Judge one table of a file. To read the other tables again for each changed figure would take most of the time."""
    (judged,) = tables_of(ScenarioFile(file.path, file.run, file.sweep, [table]), runs)
    return judged


def changed(table: dict[str, Any], key: str, place: Place, text: str) -> dict[str, Any]:
    other = copy.deepcopy(table)
    put(other, key, place, text)
    return other


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", COUNTED_QUICKLY)
def test_every_single_figure_can_fail(name: str, runs: Runs) -> None:
    """Each printed figure that is another is found, there and nowhere else."""
    file = read(name)
    for table in file.expect:
        right = dict(figures_in(table.get("instead", [])))
        own = "computed" if "computed" in table else "printed"
        if "rows" in table:
            for at, row in list(enumerate(table["rows"]))[::4]:  # rows are read alike
                column = table["columns"].index("printed")
                wrong = another(row[column], table)
                judged = judged_alone(file, changed(table, "rows", (at, column), wrong), runs)
                (failed,) = [cell for cell in judged.cells if not cell.passed]
                assert failed.printed is not None
                assert failed.printed.text == wrong
            continue
        for place, text in figures_in(table[own]):
            key, was = ("instead", right[place]) if place in right else (own, text)
            wrong = another(was, table)
            judged = judged_alone(file, changed(table, key, place, wrong), runs)
            (failed,) = [cell for cell in judged.cells if not cell.passed]
            figure = failed.printed if key == own else failed.instead
            assert figure is not None
            assert figure.text == wrong.strip("*"), f"{key} {was} at {place}"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", COUNTED)
def test_a_contradiction_that_is_none_fails(name: str, runs: Runs) -> None:
    """Where the file says that its source is wrong, printing the right figure is found too."""
    file = read(name)
    for table in file.expect:
        for place, text in figures_in(table.get("instead", [])):
            own = "computed" if "computed" in table else "printed"
            judged = judged_alone(file, changed(table, own, place, text), runs)
            (failed,) = [cell for cell in judged.cells if not cell.passed]
            assert f"equals the figure that is {own}; leave instead out" in failed.failures[0]


@pytest.mark.slow
def test_every_bold_cell_of_table_1_can_fail(runs: Runs) -> None:
    file = read("table1.toml")
    (table,) = tables_of(file, runs)
    assert (len(table.cells), table.num_bold) == (54, 5)
    for place, text in figures_in(file.expect[0]["printed"]):
        other = text.strip("*") if text.startswith("*") else f"**{text}**"
        judged = judged_alone(file, changed(file.expect[0], "printed", place, other), runs)
        (failed,) = [cell for cell in judged.cells if not cell.passed]
        assert "bold" in failed.failures[0]
        assert "by the rule (smallest ranks with at most 32.0 GB)" in failed.failures[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_dtype": "fp32"}, "printed 120 GB, counted 135 GB, difference +15 GB (half-up gives 135)"),
        ({"optimizer": "sgd"}, "printed 31.4 GB, counted 30.46875 GB, difference -0.9313 GB (half-up gives 30.5)"),
        ({"ranks": 32}, "printed 1.9 GB, formula 3.75 GB, difference +1.85 GB (half-up gives 3.8)"),
    ],
)
def test_another_run_fails_as_count_and_as_formula(change: dict[str, Any], message: str, runs: Runs) -> None:
    file = read("figure1.toml")
    (table,) = tables_of(ScenarioFile(file.path, {**file.run, **change}, file.sweep, file.expect), runs)
    failures = [failure for cell in table.cells for failure in cell.failures]
    assert message in failures
    assert sum(", counted" in failure for failure in failures) == sum(", formula" in failure for failure in failures)


@pytest.mark.slow
def test_training_counts_are_counts_of_training(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone are not asked."""

    def refuse(config: RunConfig) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("zerosim.analysis.expect.asked.plan", refuse)
    first = read_expectations(read("training.toml"))[0]
    assert first.counted_on == "training"
    assert judge(first, Runs()).passed


# ---------------------------------------------------------------------------------------------- figures


@pytest.mark.slow
@given(st.fractions(0, 20_000, max_denominator=10**6), st.integers(0, 3))
def test_rounding_is_that_of_decimals(value: Fraction, decimals: int) -> None:
    digits = "0." + "0" * decimals if decimals else "0"
    exact, step = Decimal(value.numerator) / Decimal(value.denominator), Decimal(1).scaleb(-decimals)
    if Fraction(exact) == value:
        assert printed_like(value, digits, "half-up") == str(exact.quantize(step, ROUND_HALF_UP))
        assert printed_like(value, digits, "truncate") == str(exact.quantize(step, ROUND_DOWN))
    assert printed_like(value, digits, "truncate-from-100") == formulas.printed(value, digits)


def test_rounding_at_its_edges() -> None:
    assert printed_like(Fraction("0.125"), "0.12", "half-up") == "0.13"
    assert printed_like(Fraction("0.9996"), "0.12", "half-up") == "1.00"
    assert printed_like(Fraction("513.5"), "513", "truncate-from-100") == "513"
    assert printed_like(Fraction("99.5"), "99", "truncate-from-100") == "100"
    assert printed_like(Fraction(85), "80", "tens") == "90"
    assert printed_like(Fraction(1, 3), "0.333", "exact") != "0.333"
    assert printed_like(Fraction("0.50"), "0.5", "exact") == "0.5"


def test_figures_are_read_as_they_are_printed() -> None:
    bold = parse_figure("**31.4**", "bytes", "GB")
    assert bold is not None
    assert (bold.text, bold.digits, bold.unit, bold.scale, bold.is_bold) == ("31.4", "31.4", "GB", 10**9, True)
    own = parse_figure("0.5T", "count", "B")
    assert own is not None
    assert own.measured(Fraction(512 * 10**9)) == Fraction("0.512")
    commas = parse_figure("1,557,611,200", "count", "")
    assert commas is not None
    assert commas.value == 1_557_611_200
    assert parse_figure("-", "bytes", "GB") is None
    for dimension, flag in (("bytes", parse_bytes), ("count", parse_count)):  # a unit means what it means in a flag
        for unit, size in UNITS[dimension].items():
            assert size == flag(f"1{unit}")


# -------------------------------------------------------------------------------------------- the command

RUN = 'model = "flat"\nparams = 1000\nunits = 1\nranks = 4\n'
SWEEP = "[sweep]\nstage = [0, 3]\n"
GOOD = 'source = "s"\nquantity = "model_states_bytes"\nunit = "KB"\nrounding = "exact"\nprinted = ["16", "4"]\n'


def scenario(tmp_path: Path, expect: str = GOOD, run: str = RUN, sweep: str = SWEEP) -> str:
    path = tmp_path / "own.toml"
    path.write_text(f"{run}{sweep}[expect]\n{expect}", "utf-8")
    return str(path)


def replaced(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", scenario(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 printed figures in 1 scenario: 2 compared with a count, 0 with a formula. All agree." in said
    assert "Count (on shapes alone)" in said
    assert "Formula" not in said


def test_a_wrong_figure_ends_with_1_and_names_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path, replaced('"4"', '"4.1"'))
    for words in ([path], [path, str(FOLDER / "figure1.toml")], [str(tmp_path)]):
        assert main(["check", *words]) == 1
        said = capsys.readouterr().out
        expected = f"{path}: stage=3: printed 4.1 KB, counted 4 KB, difference -0.1 KB (exact gives 4)"
        assert expected in said.splitlines()[-3]
        assert "1 does not agree." in said


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_parameters_by_formula_know_the_columns_of_a_head(family: str, tmp_path: Path) -> None:
    run = f'model = "{family}"\nlayers = 2\nhidden = 64\nheads = 4\nhead_dim = 32\nranks = 1\n'
    psi = {"gpt": "153,728", "llama": "155,968"}[family]
    expect = f'source = "s"\nquantity = "parameters"\nformula = "parameters"\nrounding = "exact"\nprinted = ["{psi}"]\n'
    assert main(["check", scenario(tmp_path, expect, run, "")]) == 0


def test_parameters_by_formula_know_a_files_biases(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    values = file("llama2-7b", **sizes, num_key_value_heads=2, vocab_size=300, attention_bias=True, mlp_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(values), "utf-8")
    expect = (
        'source = "s"\nquantity = "parameters"\nformula = "parameters"\nrounding = "exact"\nprinted = ["101,056"]\n'
    )
    assert main(["check", scenario(tmp_path, expect, f'model = "{tmp_path.as_posix()}"\nranks = 1\n', "")]) == 0


def test_what_was_measured_is_a_count_and_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = replaced('"exact"', '"5%"').replace("rounding", "within").replace('"16", "4"', '"18.4", "6.4"')
    expect = f'{measured}outside = {{ "a library" = "2KB" }}\n'
    assert main(["check", scenario(tmp_path, expect)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    failure = "stage=3: measured 6.4 KB, counted 4 KB and 2 KB outside of it, difference -0.4 KB (more than 5 %)"
    assert failure in said
    assert "1 does not agree." in said
    assert "a library (2.00 KB)" in said


SMALL_GPT = 'model = "gpt"\nlayers = 1\nranks = 2\nstage = 2\n'


def test_what_fits_is_a_verdict_and_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest fits, one more does not, and what is off by more than the tolerance fails in both directions."""
    head = 'source = "s"\nmemory = "2MB"\n'

    def check_largest(quantity: str, within: str, printed: int) -> int:
        text = f'{head}quantity = "{quantity}"\nwithin = "{within}"\nprinted = "{printed}"\n'
        return main(["check", scenario(tmp_path, text, SMALL_GPT, ""), "--json", "-"])

    found = {}
    for quantity in ("largest_batch", "largest_model"):
        assert check_largest(quantity, "1%", 1) == 1
        (cell,) = json.loads(capsys.readouterr().out)["scenarios"][0]["tables"][0]["cells"]
        found[quantity] = cell["counted"]
    rows = found["largest_batch"]
    assert [check_largest("largest_batch", "300%", printed) for printed in (4 * rows, 4 * rows + 1)] == [0, 1]
    assert [check_largest("largest_batch", "99%", printed) for printed in (2 * rows, 100 * rows + 1)] == [0, 1]
    capsys.readouterr()
    verdict = f'{head}quantity = "fits"\nrounding = "exact"\nprinted = ["fits", "{{}}"]\n'
    sweep = f"[sweep]\nmicro_batch = [{rows}, {rows + 1}]\n"
    assert main(["check", scenario(tmp_path, verdict.format("OOM"), SMALL_GPT, sweep)]) == 0
    assert main(["check", scenario(tmp_path, verdict.format("fits"), SMALL_GPT, sweep)]) == 1
    assert f"micro_batch={rows + 1}: printed fits, counted OOM" in capsys.readouterr().out
    layers = [
        RunConfig.from_dict({"model": "gpt", "layers": layers, "micro_batch": 1, "ranks": 2, "stage": 2})
        for layers in range(1, 40)
    ]
    runs = Runs()
    assert found["largest_model"] in [runs.once(model_of, config).num_parameters for config in layers]


TIMED_GPT = """model = "gpt"
layers = 2
hidden = 64
heads = 4
seq = 32
vocab = 128
ranks = 32
stage = 3
recompute = "full"
"""


def test_throughputs_are_of_the_clocks_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flops are those of arXiv 2104.04473, equation 3, and without what is computed again 3/4 of a block's."""

    def modelled(quantity: str, unit: str) -> list[float]:
        text = f'source = "s"\nquantity = "{quantity}"\ngpu = "v100-32"\nunit = "{unit}"\nwithin = "1%"\n'
        text += 'printed = ["9", "9"]\nsweep = { bandwidth = ["1GB", "100GB"] }\n'
        main(["check", scenario(tmp_path, text, TIMED_GPT, ""), "--json", "-"])
        return [cell["counted"] for cell in json.loads(capsys.readouterr().out)["scenarios"][0]["tables"][0]["cells"]]

    rows = RunConfig.from_dict({**PLAN_DEFAULTS, "ranks": 32}).data.micro_batch
    blocks, head = 96 * 2 * 32 * 64**2 * (1 + 32 / (6 * 64)), 6 * 32 * 64 * 128
    seconds = modelled("step_seconds", "s")
    assert seconds[0] > seconds[1]
    for quantity, unit, of_a_row in (
        ("hardware_flops_per_s", "TFLOP/s", blocks + head),
        ("model_flops_per_s", "TFLOP/s", blocks * 3 / 4 + head),
        ("tokens_per_s", "tokens/s", 32),
    ):
        assert modelled(quantity, unit) == pytest.approx([rows * of_a_row / step for step in seconds])
    shares = modelled("compute_share", "%")
    assert shares[0] * seconds[0] == pytest.approx(shares[1] * seconds[1])


def test_a_ratio_is_of_two_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratio = replaced('unit = "KB"\n', "").replace('["16", "4"]', '["-", "0.25"]') + 'over = { "3" = "0" }\n'
    assert main(["check", scenario(tmp_path, ratio)]) == 0
    assert "Divided: 3 by 0." in " ".join(capsys.readouterr().out.split())
    assert main(["check", scenario(tmp_path, ratio.replace("0.25", "0.26"))]) == 1


@pytest.mark.parametrize("guess", [-5, 0, 1, 6, 7, 8, 100])
@pytest.mark.parametrize("largest", [0, 1, 7, 64])
def test_an_edge_is_found_from_any_guess(largest: int, guess: int) -> None:
    asked: list[int] = []
    assert edge(lambda value: asked.append(value) or value <= largest, guess) == largest  # type: ignore[func-returns-value]
    assert largest + 1 in asked
    assert len(set(asked)) == len(asked)


def test_several_files_and_folders_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = str(FOLDER / "figure1.toml")
    assert main(["check", one, str(FOLDER / "trillion.toml"), one]) == 0
    said = capsys.readouterr().out
    assert said.count("figure1.toml") == 1
    assert "6 printed figures in 2 scenarios" in said


def test_a_folder_says_what_it_does_not_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario(tmp_path)
    (tmp_path / "plain.toml").write_text(f"{RUN}expect = []\n", "utf-8")
    assert main(["check", str(tmp_path)]) == 0
    assert f"Not checked, because they expect nothing: {tmp_path}/plain.toml." in capsys.readouterr().out


@pytest.mark.parametrize("text", ["# a comment\n", RUN, RUN + SWEEP])
def test_a_file_that_lost_what_it_expects_fails(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder, beside one that is whole."""
    scenario(tmp_path)
    (tmp_path / "lost.toml").write_text(text, "utf-8")
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"scenario {tmp_path}/lost.toml: it has no [expect], so there is nothing to check" in said


@pytest.mark.parametrize("right", ['["15", "-"]', '["-", "-"]', '["17", "-"]', '["16", "5"]'])
def test_an_instead_that_no_longer_matches_fails(
    right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_to = replaced('["16", "4"]', '["17", "4"]') + f'instead = {right}\nnote = "n"\n'
    assert main(["check", scenario(tmp_path, changed_to)]) == 1
    assert capsys.readouterr().out.count("≠ ") == 2  # in the table, and in words


def test_a_figure_is_counted_or_says_that_it_is_a_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect = replaced("quantity =", 'formula_only = "no moment has it."\nformula =')
    path = scenario(tmp_path, expect)
    assert main(["check", path, str(FOLDER / "figure1.toml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Formula only, because nothing counts these figures: {path}: no moment has it." in said
    assert "6 printed figures in 2 scenarios: 4 compared with a count, 6 with a formula, 2 with that alone." in said
    assert main(["check", scenario(tmp_path, expect.replace("printed =", "computed =")), "--json", "-"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["scenarios"][0]["tables"]
    assert (table["figures"], table["quantity"], table["formula_only"]) == ("computed", None, "no moment has it.")


def test_json_holds_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["check", str(FOLDER / "table1.toml"), "--json", str(out)]) == 0
    capsys.readouterr()
    values = json.loads(out.read_text("utf-8"))
    assert (values["schema"], values["passed"]) == (1, True)
    (table,) = values["scenarios"][0]["tables"]
    assert len(table["cells"]) == 54
    cell = next(c for c in table["cells"] if c["at"] == {"ranks": "64", "params": "7.5B", "stage": "2"})
    assert cell["printed"] == "16.6"
    assert cell["counted"] == cell["formula"] == 16_640_625_000  # 2 * 7.5e9 + 14 * 7.5e9 / 64
    assert cell["difference"] == pytest.approx(0.040625)
    assert main(["check", str(FOLDER / "table1.toml"), "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == values
    assert "All agree." in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_every_table_fits_its_width(
    name: str, runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerosim.analysis.expect.Runs", lambda: runs)
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        main(["check", str(FOLDER / name)])
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= width
        assert "…" not in said  # nothing is cut off
        assert re.search("^(Count|Formula)", said, re.MULTILINE)


# ------------------------------------------------------------------------------------------- broken files

BAD_EXPECT = [
    (replaced('source = "s"\n', ""), "source is missing: name the paper"),
    (replaced('source = "s"', 'source = " "'), "source ' ': expected text"),
    (replaced('rounding = "exact"\n', ""), "rounding is missing: one of half-up"),
    (replaced('"exact"', '"half-down"'), "rounding 'half-down' is not known; did you mean 'half-up'?"),
    (replaced("quantity =", "quantitie ="), "unknown key 'quantitie'; did you mean 'quantity'?"),
    (replaced('"model_states_bytes"', '"model_state_bytes"'), "did you mean 'model_states_bytes'?"),
    (replaced('quantity = "model_states_bytes"\n', ""), "quantity or formula is missing"),
    (replaced('unit = "KB"\n', ""), "printed at stage=0: '16': its unit is missing; expected one of B, KB"),
    (replaced('"KB"', '"kB"'), "its unit is kB; expected one of B, KB"),
    (replaced('["16", "4"]', '["16"]'), "printed has 1 rows, expected 2: one for each stage"),
    (replaced('["16", "4"]', '["16", "4", "1"]'), "printed has 3 rows, expected 2"),
    (replaced('["16", "4"]', '["-", "-"]'), "printed contains no figure, so nothing could fail"),
    (replaced('"16"', "16"), "printed at stage=0: 16: expected a string, with the digits that are printed"),
    (replaced('"16"', '"about 16"'), "'about 16' is not a printed figure"),
    (replaced('"16"', '"**16"'), "'**16' is not a printed figure"),
    (replaced('"16"', '"**16**"'), "bold is missing: **figures** need a rule"),
    (GOOD + 'bold = { smallest = "stage" }\n', "expected { smallest = one of stage, at_most"),
    (GOOD + 'bold = { smallest = "ranks", at_most = "1GB" }\n', "expected { smallest = one of stage, at_most"),
    (GOOD + 'instead = ["17", "-"]\n', "note is missing: say why"),
    (GOOD + 'beside = "peak_bytes"\n', "beside and why go together"),
    (GOOD + 'beside = "parameters"\nwhy = "w"\n', "have different dimensions"),
    (GOOD + 'memory = "32GB"\n', "memory '32GB': nothing here uses it; leave it out"),
    (GOOD + 'at = "end_of_backwards"\n', "did you mean 'end_of_backward'?"),
    (GOOD + 'counted_on = "cuda"\n', "counted_on 'cuda' is not known; expected one of shapes, training"),
    (GOOD + "with = { rank = 2 }\n", "unknown key 'rank'; did you mean 'ranks'?"),
    (GOOD + "sweep = { stages = [1] }\n", "sweep: unknown field 'stages'; did you mean 'stage'?"),
    (GOOD + "sweep = { stage = [1, 1] }\n", "sweep: stage holds 1 twice"),
    (GOOD + "sweep = { stage = [0, 4] }\n", "at stage=4: stage 4: expected at least 0"),
    (GOOD + "sweep = { mp = [1, 2] }\n", "sweep: mp does not use quantity 'model_states_bytes'"),
    (GOOD + "with = { stage = 1 }\n", "sweep: stage is also set outside the sweep"),
    (replaced('"exact"', '"multiples-of-first-row"'), "the first axis of [sweep] must be mp"),
    (replaced('"model_states_bytes"', '"largest_model"'), "memory is missing: largest_model needs it"),
    (
        replaced("quantity =", "formula ="),
        "quantity is missing: name the count of these figures, or say in formula_only",
    ),
    (GOOD + 'formula_only = "f"\n', "formula_only: model_states_bytes is counted; leave it out"),
    (GOOD + 'computed = ["16", "4"]\n', "computed and printed: a figure is either computed here, or printed"),
    (replaced('"model_states_bytes"', '"peak_bytes"'), "within is missing: peak_bytes is a measurement of one program"),
    (replaced('"model_states_bytes"', '"fits"') + 'memory = "1KB"\n', "'16': expected OOM or fits, or - for none"),
    (
        replaced('"model_states_bytes"', '"largest_model"').replace('"KB"', '"K"') + 'memory = "v10"\n',
        "unknown hardware 'v10': did you mean v100-32?",
    ),
    (GOOD + 'within = "5%"\n', "or within for what was measured, not both"),
    (replaced('rounding = "exact"', 'within = "a little"'), "within 'a little': expected a share of what is"),
    (
        GOOD + 'outside = { "a buffer" = "1KB" }\n',
        "outside: names causes that a count of a measured quantity leaves out",
    ),
    (replaced('rounding = "exact"', 'within = "5%"\noutside = { a = "grad_byte" }'), "did you mean 'grad_bytes'?"),
    (replaced('rounding = "exact"', 'within = "5%"\noutside = { a = "-1KB" }'), "a size in bytes"),
    (GOOD + "sweep = { pipeline_stage = [0, 1] }\n", "pipeline_stage 1: expected 0 to 0, for pp is 1"),
    (GOOD + 'sweep = { bandwidth = ["1GB", "2GB"] }\n', "bandwidth does not use quantity 'model_states_bytes'"),
    (GOOD + 'over = { "3" = "1" }\n', "over '1' is not a place of the sweep"),
    (GOOD + "over = {}\n", "over {}: expected places"),
    (replaced('unit = "KB"\n', "") + 'over = { "3" = "0" }\n', "over: stage=0: not there; name only places"),
]


@pytest.mark.parametrize(("expect", "message"), BAD_EXPECT, ids=[message for _, message in BAD_EXPECT])
def test_a_broken_table_is_one_line_with_its_file(
    expect: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scenario(tmp_path, expect)
    assert main(["check", path]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"zerosim: error: scenario {path}: expect: ")
    assert message in printed.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks = = 2\n", "is not valid TOML"),
        (f"{RUN}[expects]\n{GOOD}", "unknown table [expects]; did you mean [expect]?"),
        (f"{RUN}[sweeps]\nstage = [0]\n[expect]\n{GOOD}", "unknown table [sweeps]; did you mean [sweep]?"),
        (f"{RUN}sweep = 3\n", "sweep 3: expected a table, [sweep]"),
        (f"{RUN}expect = 3\n", "expect 3: expected a table, [expect], or several"),
        (f"{RUN}{SWEEP}[[expect]]\n{GOOD}[[expect]]\n{GOOD}", "each of several [[expect]] needs its own title"),
        (RUN, "it has no [expect], so there is nothing to check"),
        (f"rank = 2\n{SWEEP}[expect]\n{GOOD}", "unknown key 'rank'; did you mean 'ranks'?"),
    ],
)
def test_a_broken_file_is_one_line(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, "utf-8")
    assert main(["check", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert str(path) in printed.err
    assert message in printed.err


def test_nothing_to_check_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "contains no scenario" in capsys.readouterr().err
    (tmp_path / "plain.toml").write_text(f"{RUN}expect = []\n", "utf-8")
    assert main(["check", str(tmp_path)]) == 2
    assert "nothing to check" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "missing.toml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_every_file_is_read_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: RunConfig) -> None:
        raise AssertionError("a run was made")

    monkeypatch.setattr("zerosim.analysis.expect.asked.plan", refuse)
    broken = scenario(tmp_path, replaced('source = "s"\n', ""))
    assert main(["check", str(FOLDER / "figure1.toml"), broken]) == 2


def test_what_is_found_while_counting_names_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect = 'source = "s"\nquantity = "sent_over_psi"\nrounding = "exact"\nprinted = ["2Ψ", "2Ψ"]\n'
    path = scenario(tmp_path, expect, RUN.replace("ranks = 4\n", ""), "[sweep]\nranks = [2, 1]\n")
    assert main(["check", path]) == 2
    assert f"scenario {path}: expect ranks=1: ranks 1: one rank sends nothing" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- files as runs


@pytest.mark.parametrize("name", [*FILES, "first.toml"])
def test_the_run_of_every_file_is_a_run(name: str) -> None:
    values = read_scenario(str(FOLDER / name))
    assert not {"expect", "sweep"} & set(values)
    RunConfig.from_dict(values)


def test_a_file_with_expectations_still_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path)
    assert main(["run", path, "--steps", "1", "--quiet"]) == 0
    with pytest.raises(InputError, match="source is missing"):
        read_expectations(read_scenario_file(scenario(tmp_path, "")))
    assert main(["run", path, "--steps", "1", "--quiet"]) == 0  # what is expected is not read by a run


def test_first_is_the_default_run() -> None:
    assert RunConfig.from_dict(read_scenario(str(FOLDER / "first.toml"))) == RunConfig(steps=60, lr=3e-3)
    assert RunConfig().optim.lr == 3e-3
