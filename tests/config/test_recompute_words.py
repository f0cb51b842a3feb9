"""What `--recompute` may say."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.config.recompute import Again, read_recompute
from zerosim.errors import InputError


def test_lists_and_every_second_block_are_read() -> None:
    assert read_recompute("none") == Again()
    assert read_recompute("selective") == read_recompute("selective:core_attn") == Again(frozenset({"core_attn"}))
    assert read_recompute("selective:mlp,layernorm").parts == {"fc1", "mlp_act", "layernorm"}
    assert read_recompute("selective:op").parts - read_recompute("selective:op", "flash").parts == {"core_attn"}
    assert "core_attn" in read_recompute("selective:core_attn,mlp", "flash").parts
    assert read_recompute("full") == read_recompute("full:1") == Again(every=1)
    assert [read_recompute("full:2").wraps(block) for block in range(5)] == [False, True, False, True, False]
    assert RunConfig(layers=3, recompute="full:3").memory.again.every == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(recompute="ful"), "'ful': expected none|selective[:PART,...]|full[:K]; did you mean 'full'?"),
        (dict(recompute="mlp"), "behind a colon: selective:mlp"),
        (dict(recompute="none:2"), "expected none|selective"),
        (dict(recompute="selective:layernrom"), "no part of a block is called 'layernrom'; did you mean 'layernorm'?"),
        (dict(recompute="selective:"), "called ''; they are core_attn, attn_proj,"),
        (dict(recompute="selective:mlp,mlp"), "names 'mlp' twice; leave one out"),
        (dict(recompute="selective:mlp_act,op"), "names 'op' and 'mlp_act', which share mlp_act"),
        (dict(recompute="full:0"), "at least 1, as in full:2"),
        (dict(recompute="full:two"), "at least 1, as in full:2"),
        (dict(recompute="full:" + "9" * 5000), "at least 1, as in full:2"),
        (dict(recompute="full:5"), "of 4 layers every K-th runs again; choose at most full:4"),
        (dict(recompute="full:2", model="flat", params=100), "no blocks"),
        (dict(recompute="selective:op", model="mlp"), "no blocks"),
        (dict(recompute="selective:mlp", ranks=2, tp=2, sequence_parallel=True, keep_gathered=True), "leave one out"),
    ],
    ids=str,
)
def test_anything_else_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        RunConfig(layers=4, **changes)
    assert message in str(refused.value)
