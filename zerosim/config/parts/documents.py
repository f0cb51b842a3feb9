"""Documents that are packed into rows: an option of `data.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.parts.context import chunk_of
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong


def rules(data: DataConfig, model: ModelConfig, memory: MemoryConfig, optim: OptimConfig) -> Iterator[InputError]:
    """Yield what does not keep documents apart."""
    packing, chunk = data.packing, chunk_of(model) if model.has_blocks else 0
    if chunk and memory.attention != "flash":
        why = f"eager reads whole rows, and {model.name} keeps to chunks of {chunk} tokens"
        yield wrong("attention", f" {memory.attention!r}: {why}; choose flash, or seq {chunk} at most")
    if packing is None:
        return

    def refuse(why: str) -> InputError:
        return wrong("documents", f" {data.documents!r}: {why}")

    if not model.has_blocks or model.is_masked or model.is_second:
        yield refuse(f"model {model.family} has no causal attention over one row; choose gpt or llama")
        return
    if chunk:
        yield refuse(f"{model.name} has chunks of {chunk} tokens; choose seq {chunk} at most, or leave it out")
    if packing.length > model.seq:
        yield refuse(f"longer than a row; choose at most seq {model.seq}, or leave it out")
    if not packing.length and packing.end >= model.vocab:
        yield refuse(f"token {packing.end} is not in the vocabulary; choose one below {model.vocab}")
    if memory.attention != "flash":
        yield refuse("eager attention reads whole rows; pass --attention flash too")
    if OPTIMIZERS[optim.optimizer].estimates_every:
        yield refuse(f"{optim.optimizer} draws a label for every token; choose adam")
    if model.dropout and model.decoder.positions == "alibi":
        yield refuse("dropout in ALiBi's attention is not modelled for them; pass --dropout 0")


WORDS = (("reset_attention_mask reset_position_ids eod_mask_loss", "--documents eod:ID, with --attention flash"),)
