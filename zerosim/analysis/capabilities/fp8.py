"""Products in 8 bits: codes that stay, and what sequence parallelism gathers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import cast

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import zero
from zerosim.analysis.capabilities.tensor import all_reduces, divides_rows, keeps_gathered
from zerosim.analysis.capability import Asked, Beside, Capability, Forms, Kept, Key, Sent, Step
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.analysis.recompute import is_wrapped, recompute_of
from zerosim.analysis.shares import itemsizes
from zerosim.analysis.weights import numels_of
from zerosim.analysis.zero_gathers import kept_for_next
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import gathers_params
from zerosim.config.parts.zeropp import has_second_shard
from zerosim.functional.fp8_recipes import Products
from zerosim.parallel.fp8 import exact_blocks, has_codes, multiplies_in_8_bits, products_of
from zerosim.placement.spec import WeightSpec, is_block
from zerosim.placement.stages import number_of
from zerosim.units import counted

LIBRARY = {"torchao": "torchao", "te": "Transformer Engine", "deepseek": "DeepSeek-V3"}


def _sent(config: RunConfig, step: Step, sent: Sent) -> Sent:
    if not (config.fp8.is_on and products_of(config).stores_codes):
        return sent
    psi = formulas.sent_codes(itemsizes(config)[0])
    return sent._replace(
        params={operation: form.where(Ψ=psi) for operation, form in sent.params.items()},
        fetched=sent.fetched.where(Ψ=psi),
    )


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    if not (config.fp8.is_on and divides_rows(config)) or keeps_gathered(config):
        return
    products, times = products_of(config), all_reduces(config)
    if not products.gathers_codes:
        return
    recompute = recompute_of(config)
    how = {"full": recompute.partition(":")[0] == "full", "mlp": "mlp" in recompute.partition(":")[2].split(",")}
    casting = products.forward.left
    scales = Fraction(0)
    if casting.block[1]:
        scales = Fraction(1 if casting.scale == "e8m0" else 4, casting.block[1])
    yield Key("exchanged", "all_gather", "tp"), formulas.gathered_codes(scales, again=True, **how)
    if products.history is not None:
        yield Key("exchanged", "all_reduce", "tp"), formulas.shared_histories(times, products.history.length)
    elif casting.block == (0, 0):
        again = not products.saves_codes
        yield Key("exchanged", "all_reduce", "tp"), formulas.shared_amax(times, again=again, **how)


def _beside(config: RunConfig, cost: BytesPerParameter, step: Step) -> Iterator[Beside]:
    """Yield what Transformer Engine keeps from step to step, which is on the device."""
    products = products_of(config) if config.fp8.is_on else None
    if products is not None and products.stores_codes:
        divided = gathers_params(config.parallel)
        casts = zero.CAPABILITY.kept(config, Kept(0, masters=True)).casts
        secondary = has_second_shard(config.mesh)
        how = {"divided": divided, "shards": not casts, "secondary": secondary, "copies": products.caches}
        yield Beside("param", formulas.stored_codes(itemsizes(config)[0], **how), memory="")
    elif products is not None and products.caches:
        yield Beside("param", formulas.weight_codes(), memory="")
    if products is not None and products.history is not None:
        yield Beside("param", formulas.histories(), memory="")


def _letters(asked: Asked) -> dict[str, int]:
    """Return the letters of products in 8 bits."""
    config = asked.placed.config
    if not config.fp8.is_on:
        return {}
    products, exact = products_of(config), exact_blocks(config)
    blocks = [unit for unit in asked.share.units if is_block(unit) and number_of(unit) not in exact]
    weights = [
        (unit, weight)
        for name in asked.share.numels
        for unit in [asked.placed.layout.flats[name].unit]
        for weight in asked.placed.layout.flats[name].weights
        if multiplies_in_8_bits(unit, weight, exact)
    ]
    kept = dict[str, int]()
    if products.stores_codes:
        kept["Ψ_u"] = _stored(asked)
        kept["U"] = kept_for_next(asked.placed, asked.share, _sent_numels(asked))
    length = 0 if products.history is None else 4 * (products.history.length + 1)
    return {
        "Ψ_8": sum(weight.numel for _, weight in weights),
        "σ_8": sum(_scale_bytes(products, weight) for _, weight in weights),
        "η": length * _operands(weights),
        "l_8": len(blocks),
        "r_8": sum(is_wrapped(config, unit) for unit in blocks),
        **kept,
    }


def _stored(asked: Asked) -> int:
    """Return the elements of buffers of codes, with padding or without."""
    flats, share, config = asked.placed.layout.flats, asked.share, asked.placed.config
    numels = share.whole if asked.padded else share.numels
    return sum(numel for name, numel in numels.items() if has_codes(config, flats[name]))


def _sent_numels(asked: Asked) -> dict[str, int]:
    """Return the elements of each buffer as it is sent: a code counts as its fraction of one."""
    config, flats = asked.placed.config, asked.placed.layout.flats
    wide = itemsizes(config)[0]
    return {
        name: cast(int, Fraction(numel, wide)) if has_codes(config, flats[name]) else numel
        for name, numel in numels_of(asked.placed, asked.share, padded=asked.padded).items()
    }


def _scale_bytes(products: Products, weight: WeightSpec) -> int:
    """Return the bytes of a weight's scales, of both ways; of stored codes those of scales and factors."""
    rows, inner = weight.shape
    if products.stores_codes:
        down, across = products.forward.right.grid(rows, inner)
        return 4 * down * across * (1 + products.forward.right.has_factors)
    ways = products.forward.right.arrays(rows, inner), products.dgrad.right.arrays(inner, rows)
    return sum(shape[0] * shape[1] * dtype.itemsize for _, (shape, dtype) in ways)


def _operands(weights: Sequence[tuple[str, WeightSpec]]) -> int:
    """Return how many operands have a history: the input of each map, or of each of its tiles, and each weight and the
    gradient of its result."""
    maps = {(unit, weight.role.branch, weight.role.place, _tile(weight)) for unit, weight in weights if weight.role}
    return len(maps) + 2 * len(weights)


def _tile(weight: WeightSpec) -> int:
    return 0 if weight.tile is None else weight.tile.number


def _premises(config: RunConfig) -> Iterator[str]:
    if config.fp8.is_on and products_of(config).saves_codes:
        yield "linear maps save their inputs as codes of 8 bits"


def _about(config: RunConfig) -> Iterator[str]:
    """Yield which products are in 8 bits, and what that saves."""
    if not config.fp8.is_on:
        return
    fp8, products = config.fp8, products_of(config)
    exact = len(exact_blocks(config))
    blocks = f"blocks' linear maps, but those of {counted(exact, 'block')}," if exact else "blocks' linear maps"
    yield f"The products of {blocks} are in 8 bits, with {fp8.kind} scales, as in {LIBRARY[fp8.library]}."
    if products.saves_codes:
        yield "Their inputs are saved for backward as codes, a byte for each number."
    else:
        yield "Their inputs are saved as they are, so that activations take as much memory as without."
    if products.caches:
        yield "Codes of the weights stay from step to step beside the weights, one for each of two products."


def _assumed(config: RunConfig) -> Iterator[str]:
    if config.fp8.is_on:
        yield f"products in 8 bits ({config.fp8.kind}, {LIBRARY[config.fp8.library]})"


def _states(config: RunConfig) -> Iterator[str]:
    """Yield what the letters of codes that stay mean."""
    products = products_of(config) if config.fp8.is_on else None
    if products is None:
        return
    if products.stores_codes:
        yield "Ψ_u of the parameters are codes, a byte each, in place of 2 bytes; σ_8 bytes scale them."
    if products.caches:
        yield "Ψ_8 parameters have further codes for the input's gradient" + (
            "." if products.stores_codes else " and for forward; σ_8 bytes scale them."
        )
    if products.history is not None:
        yield "η bytes are amax histories."


def _activations(config: RunConfig) -> Iterator[str]:
    if config.fp8.is_on and products_of(config).saves_codes:
        yield "Inputs of linear maps are saved as codes, 1 byte each and not 2: a plan counts those."


CAPABILITY = Capability(
    sent=_sent,
    forms=_forms,
    beside=_beside,
    letters=_letters,
    measured=lambda config: not config.fp8.is_on,
    notes={
        "premises": _premises, "about": _about, "assumed": _assumed, "model_states": _states,
        "activations": _activations,
    },
)  # fmt: skip
