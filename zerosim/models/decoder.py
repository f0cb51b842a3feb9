"""A model's units from its row: token table, positions, blocks, last norm, head. Names and layouts are its family's.

The token table is a unit of its own, so that a tied head can share exactly it. Initial weights are normal with std
0.8 / sqrt(D), which is GPT-2's 0.02 at its largest width, 1600, and keeps narrow models from crawling; output
projections of the two branches are divided by sqrt(2L), as in GPT-2; biases are 0.

Sources: GPT-2's release; Llama, arXiv 2302.13971, section 2.2, and 2307.09288, section 2.2.
"""

from __future__ import annotations

from functools import partial

from zerosim.models.builder import Builder
from zerosim.models.model import Model
from zerosim.models.mtp import further_of
from zerosim.nn import Unit
from zerosim.nn.aside import Aside
from zerosim.nn.decoder import DecoderBlock, DroppedNorm, Transform
from zerosim.nn.layers import Positions
from zerosim.nn.norm import Norm
from zerosim.nn.two_texts import ScoreBias, Turn, TwoTexts
from zerosim.placement.block import Block


def build_decoder(new: Builder) -> Model:
    """Build the units of a decoder-only model, or of an encoder. A table of positions ends at its longest context."""
    row, between = new.sizes.decoder, list[Unit]()
    of_table = partial(DroppedNorm, op="embd") if row.masked else Norm
    norm = [new.unit(row.table_norm, of_table, row.prefix)] if row.table_norm else []
    between += [] if row.masked else norm
    if row.positions == "learned":
        between.append(new.unit(row.position_table, Positions, row.prefix))
    between += norm if row.masked else []
    between += new.blocks(row.blocks, DecoderBlock, row.prefix)
    if row.last_norm:
        between.append(new.unit(row.last_norm, Norm, row.prefix))
    if row.masked is not None:
        between.append(new.unit("transform", Transform))
    return new.language_model(row.table, between, row.prefix, further=further_of(new))


def build_encoder_decoder(new: Builder) -> Model:
    """Build the units of an encoder, then those of its decoder, which read the encoder's output. The first unit looks
    up both texts, so the table is gathered once for them."""
    row, rows, memory = new.sizes.decoder, Aside(), Aside()
    assert row.second is not None

    def stack(block: Block, names: str, own: Block | None = None) -> list[Unit]:
        bias = Aside()
        table = partial(ScoreBias, name=f"{names}.0.{block.biases}", beside=bias)
        first = new.unit(f"{names.partition('.')[0]}.bias", table, own=own, makes=(bias,))
        reads = (bias,) if own is None else (bias, memory)
        return [first, *new.blocks(names, partial(DecoderBlock, bias=bias, memory=memory), "", own, reads)]

    turn = new.unit(row.last_norm, partial(Turn, rows=rows, memory=memory), makes=(memory,))
    last = new.unit(row.second.last_norm, partial(DroppedNorm, op="last"))
    between = [*stack(row.block, row.blocks), turn, *stack(row.second.block, row.second.blocks, row.second.block), last]
    return new.language_model(row.table, between, reading=partial(TwoTexts, beside=rows), makes=(rows,))
