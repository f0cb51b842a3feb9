"""What the pictures of notebook 12 say of a block: which part of it a rank keeps."""

from __future__ import annotations

from typing import Any

import pytest

import zerosim
from zerosim.config import PLAN_DEFAULTS
from zerosim.errors import InputError
from zerosim.ledger.activations import SavedRow
from zerosim.lessons import cuts
from zerosim.report.plots.panel import Box

SMALL: dict[str, Any] = dict(
    layers=1, hidden=16, heads=4, seq=8, vocab=64, dropout=0.1, stage=0, steps=1, precision="bf16"
)
SBH, SCORES = 8 * 16, 5 * 4 * 8 * 8  # one row; 5as²b


def saved(tp: int, **changes: Any) -> tuple[SavedRow, ...]:
    return zerosim.plan(zerosim.RunConfig(ranks=tp, tp=tp, **SMALL, **PLAN_DEFAULTS, **changes)).saved["h.0"]


def test_parts_are_the_terms_of_the_closed_form() -> None:
    alone = saved(1)
    assert cuts.kept_parts(alone, alone) == {cuts.WHOLE: 34 * SBH, cuts.SCORES: SCORES}
    parts = cuts.kept_parts(alone, saved(4))
    assert parts == {cuts.WHOLE: 10 * SBH, cuts.CUT: 24 * SBH // 4, cuts.SCORES: SCORES // 4}
    rows_cut = cuts.kept_parts(alone, saved(4, sequence_parallel=True))
    assert rows_cut == {cuts.CUT: 34 * SBH // 4, cuts.SCORES: SCORES // 4}


def test_a_block_is_drawn_tensor_by_tensor() -> None:
    alone = saved(1)
    figure = cuts.block_figure(alone, {"one": alone, "four": saved(4)}, "title")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("whole") == len(alone) + 6
    assert words.count("1/4") == len(alone) - 6
    assert words.count("f") == words.count("g") == 2
    assert figure._repr_png_()


def test_bars_are_as_long_as_what_is_kept() -> None:
    alone = saved(1)
    figure = cuts.kept_figure({"one": cuts.kept_parts(alone, alone)}, "title")
    assert max(box.x[1] for box in next(figure.panels).of(Box)) == 34 * SBH + SCORES
    with pytest.raises(InputError, match="no bars"):
        cuts.kept_figure({}, "title")


def test_blocks_that_keep_other_tensors_are_not_compared() -> None:
    with pytest.raises(InputError, match="other tensors"):
        cuts.kept_parts(saved(1), saved(1, recompute="selective"))
