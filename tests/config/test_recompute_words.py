"""What `--recompute` may say."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.config.recompute import Recomputed, read_recompute


def test_lists_and_every_second_block_are_read() -> None:
    assert read_recompute("none") == Recomputed()
    assert read_recompute("selective") == read_recompute("selective:core_attn") == Recomputed(frozenset({"core_attn"}))
    assert read_recompute("selective:mlp,layernorm").parts == {"fc1", "mlp_act", "layernorm"}
    assert read_recompute("selective:op").parts - read_recompute("selective:op", "flash").parts == {"core_attn"}
    assert "core_attn" in read_recompute("selective:core_attn,mlp", "flash").parts
    assert read_recompute("full") == read_recompute("full:1") == Recomputed(every=1)
    assert [read_recompute("full:2").wraps(block) for block in range(5)] == [False, True, False, True, False]
    some = read_recompute("4=full+0-2=selective:mlp")
    assert [some.wraps(block) for block in range(6)] == [False] * 4 + [True, False]
    assert [some.parts_of(block) for block in (2, 3, 4)] == [{"fc1", "mlp_act"}, set(), set()]
    assert [some.of_block(block) for block in (2, 3, 4)] == ["selective:mlp", "none", "full"]
    assert RunConfig(layers=3, recompute="full:3").memory.again.every == 3
