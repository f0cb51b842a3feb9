"""A capability's part in the closed forms: in place of the ZeRO stage's own, or beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from zerosim import analysis
from zerosim.analysis import formulas
from zerosim.analysis.capabilities import CAPABILITIES, notes_of
from zerosim.analysis.capability import Capability, Sent
from zerosim.analysis.forms import forms, of, sent_of
from zerosim.config import RunConfig

FOLDER = Path(analysis.__path__[0])


@pytest.mark.parametrize("name", ["forms.py", "letters.py", "capability.py", "capabilities/__init__.py"])
def test_loops_over_capabilities_read_no_option(name: str) -> None:
    """Whatever depends on an option is in the file of the capability that has the option."""
    read = [node for node in ast.walk(ast.parse((FOLDER / name).read_text("utf-8"))) if isinstance(node, ast.Attribute)]
    assert not [ast.unparse(node) for node in read if "config" in ast.unparse(node.value).split(".")[-1:]]


def test_words_about_a_run_read_no_part_of_a_capability() -> None:
    nodes = ast.walk(ast.parse((FOLDER.parent / "report" / "words.py").read_text("utf-8")))
    read = {
        node.value.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }
    assert not read & {"offload", "memory", "tuning", "reduction", "grads"}


def test_every_file_of_a_capability_is_a_row_of_the_table() -> None:
    names = {path.stem for path in (FOLDER / "capabilities").glob("*.py")} - {"__init__"}
    assert len(names) == len(CAPABILITIES)


def test_what_a_capability_sends_stands_in_place_of_the_stages_own() -> None:
    config = RunConfig(model="flat", ranks=4, stage=2)
    half = Capability(sent=lambda config, step, sent: sent._replace(grads={("gossip", "states"): formulas.reduced()}))
    assert sent_of(config, capabilities=CAPABILITIES[:1]) == sent_of(config)
    assert sent_of(config, capabilities=(*CAPABILITIES, half)).params == sent_of(config).params
    assert list(sent_of(config, capabilities=(*CAPABILITIES, half)).grads) == [("gossip", "states")]
    assert sent_of(config, capabilities=(half,)) == Sent({("gossip", "states"): formulas.reduced()})


def test_rows_follow_the_table_and_words_go_from_the_outermost_axis_inwards() -> None:
    config = RunConfig(model="gpt", ranks=16, pp=2, tp=2, dp_replicate=2, stage=2)
    assert list(of(forms(config), "sent")) == [
        ("reduce_scatter", "states"),
        ("all_gather", "states"),
        ("all_reduce", "replicas"),
        ("all_reduce", "tp"),
        ("all_reduce", "pp"),
    ]
    assert [said.partition(" ")[0] for said in notes_of(config, "about")] == ["1F1B", "Linear", "ZeRO-2"]
