"""A model's units from its row: token table, positions, blocks, last norm, head. Names and layouts are its family's.

The token table is a unit of its own, so that a tied head can share exactly it. Initial weights are normal with std
0.8 / sqrt(D), which is GPT-2's 0.02 at its largest width, 1600, and keeps narrow models from crawling; output
projections of the two branches are divided by sqrt(2L), as in GPT-2; biases are 0.

Sources: GPT-2's release; Llama, arXiv 2302.13971, section 2.2, and 2307.09288, section 2.2.
"""

from __future__ import annotations

from zerosim.models.builder import Builder
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.nn.decoder import DecoderBlock, Norm, TableNorm, Transform
from zerosim.nn.layers import Positions


def build_decoder(new: Builder) -> Model:
    """Build the units of a decoder-only model, or of an encoder. A table of positions ends at its longest context."""
    row, between = new.sizes.decoder, list[Unit]()
    norm = [new.unit(row.table_norm, TableNorm, row.prefix)] if row.table_norm else []
    between += [] if row.masked else norm
    if row.positions == "learned":
        between.append(new.unit(row.position_table, Positions, row.prefix))
    between += norm if row.masked else []
    between += new.blocks(row.blocks, DecoderBlock, row.prefix)
    if row.last_norm:
        between.append(new.unit(row.last_norm, Norm, row.prefix))
    if row.masked is not None:
        between.append(new.unit("transform", Transform))
    return new.language_model(row.table, between, row.prefix)
