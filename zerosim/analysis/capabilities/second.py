"""A decoder beside an encoder: its blocks and the tokens of its text. Their forms: `tensor.py`."""

from __future__ import annotations

from collections.abc import Mapping

from zerosim.analysis.capability import Asked, Capability
from zerosim.analysis.recompute import is_wrapped
from zerosim.placement.spec import is_block


def _letters(asked: Asked) -> Mapping[str, int]:
    config, model = asked.placed.config, asked.placed.config.model
    if not model.is_second:
        return {}
    own = [unit for unit in asked.share.units if is_block(unit) and model.block_of(unit).cross is not None]
    tokens = config.data.micro_batch * model.decoder_tokens
    wrapped = sum(is_wrapped(config, unit) for unit in own)
    return {"l_d": len(own), "r_d": wrapped, "bs_d": tokens, "bsh_d": tokens * model.hidden}


CAPABILITY = Capability(letters=_letters)
