"""Models by name: the sizes of papers' GPTs and Llamas, and the meaning of a bare family's name. `released.toml` has
further released models.

Sizes have the names of `ModelConfig`'s fields. Where a source leaves something open, `notes` states the choice.

Sources: GPT-2's and Llama's config.json as released; GPT-3, arXiv 2005.14165, Table 2.1; ZeRO, arXiv
1910.02054, Tables 5-10; Megatron-LM, arXiv 2104.04473, Table 1; OPT, arXiv 2205.01068; BLOOM, arXiv
2211.05100; Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783, Table 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.config.numbers import NEUTRAL, Numbers
from zerosim.errors import InputError
from zerosim.placement.block import Decoder
from zerosim.placement.families import DECODERS

Size = int | float | bool
"""A size, a rate or a choice, as the field of ModelConfig of that name holds it."""

FAMILIES = (*DECODERS, "mlp", "flat")


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """One model: its family and all its sizes.

    `published` is the count as its source prints it ('124M'), `published_parameters` the exact one if the released
    weights have been counted. `notes`: details that the source leaves open, and features that are not modelled.
    `decoder`: the row of its blocks, where it differs from its family's; `numbers`: those that no size says.
    """

    name: str
    family: str
    sizes: Mapping[str, Size]
    published: str
    published_parameters: int | None
    source: str
    notes: tuple[str, ...] = ()
    decoder: Decoder | None = None
    numbers: Numbers = NEUTRAL


def family_sizes(family: str, given: Mapping[str, Size] | None = None) -> dict[str, Size]:
    """Return every size of a model of `family`: the `given` ones, and the family's defaults for the rest.

    Some sizes follow from given ones: ffn from hidden (4 times; gated ones 8/3, rounded up to a multiple of 32),
    kv_heads from heads (as many; where neighbours may share one half, if that divides), head_dim from hidden and heads,
    positions from seq, and so the tokens of a decoder beside an encoder; an expert's width from ffn.

    Raises: InputError for an unknown family.
    """
    if family not in FAMILIES:
        raise InputError(f"model family {family!r}: expected one of {', '.join(FAMILIES)}")
    flat, row = family == "flat", DECODERS.get(family)
    sizes: dict[str, Size] = {
        "layers": 1 if flat else 4,
        "hidden": 1 if flat else 64,
        "heads": 1 if flat else 4,
        "seq": 16 if flat else 64,
        "vocab": 256,
        "tie_embeddings": row is not None and row.tied,
        "dropout": 0.0,
        "norm_eps": 1e-5,
        "rope_base": 10000.0,
        "params": 1_000_000,
        "units": 8,
        **(given or {}),
    }
    hidden, heads = int(sizes["hidden"]), int(sizes["heads"])
    halved = row is not None and row.shares_keys and heads % 2 == 0
    sizes.setdefault("kv_heads", heads // 2 if halved else heads)
    sizes.setdefault("head_dim", max(1, hidden // heads))
    gated = row is not None and row.block.is_gated
    sizes.setdefault("ffn", -(-8 * hidden // (3 * 32)) * 32 if gated else hidden if flat else 4 * hidden)
    sizes.setdefault("positions", sizes["seq"])
    row_of = None if row is None else row.block.mlp.experts
    sizes.setdefault("experts", 0 if row_of is None else 8)
    some = bool(sizes["experts"])
    sizes.setdefault("top_k", min(2, int(sizes["experts"])))
    sizes.setdefault("expert_ffn", sizes["ffn"] if some else 0)
    sizes.setdefault("shared_experts", int(row_of is not None and bool(row_of.shared)))
    if row is not None and row.second is not None:
        sizes.setdefault("decoder_seq_length", sizes["seq"])
    if not flat:
        del sizes["params"], sizes["units"]
    return sizes


_DROPOUT = "dropout 0.1 is GPT-2's released configuration"


def _gpt(
    name: str, sizes: Sequence[int], published: str, source: str, *notes: str, exact: int | None = None
) -> ModelPreset:
    """Return a GPT. `sizes`: layers, hidden, heads, seq, vocab."""
    given = dict(zip(("layers", "hidden", "heads", "seq", "vocab"), sizes, strict=True))
    whole = MappingProxyType(family_sizes("gpt", {**given, "tie_embeddings": True, "dropout": 0.1}))
    return ModelPreset(name, "gpt", whole, published, exact, source, (*notes, _DROPOUT))


def _llama(name: str, sizes: Sequence[int], published: str, exact: int, *notes: str) -> ModelPreset:
    """Return a Llama. `sizes`: layers, hidden, heads, kv_heads, ffn, seq."""
    first = name.startswith("llama2")
    given = dict(zip(("layers", "hidden", "heads", "kv_heads", "ffn", "seq"), sizes, strict=True))
    rest = dict(vocab=32000 if first else 128256, rope_base=1e4 if first else 5e5, norm_eps=1e-5)
    whole = MappingProxyType(family_sizes("llama", {**given, **rest}))
    source = "arXiv 2307.09288 and the released config.json" if first else "arXiv 2407.21783, Table 3, and config.json"
    return ModelPreset(name, "llama", whole, published, exact, source, notes)


def _zero(name: str, layers: int, hidden: int, heads: int, tables: str) -> ModelPreset:
    size = name.removesuffix("-base").rpartition("-")[2].upper()
    source = f"ZeRO, arXiv 1910.02054, appendix, {tables}"
    return _gpt(f"zero-{name}", (layers, hidden, heads, 1024, 50257), size, source, _ZERO_VOCAB)


def _megatron(name: str, layers: int, hidden: int, heads: int, published: str) -> ModelPreset:
    source = "Megatron-LM, arXiv 2104.04473, Table 1"
    return _gpt(name, (layers, hidden, heads, 2048, 51200), published, source)


_ZERO_VOCAB = "the paper does not state a vocabulary: GPT-2's 50257, not padded; head tied"
_GPT2 = "GPT-2's released config.json"
_SCALED = "trained at 8192 tokens first, then stretched to 131072 by scaled rotary angles, which are not modelled"

_ALL = (
    _gpt("gpt2", (12, 768, 12, 1024, 50257), "124M", _GPT2, exact=124_439_808),
    _gpt("gpt2-medium", (24, 1024, 16, 1024, 50257), "355M", _GPT2, exact=354_823_168),
    _gpt("gpt2-large", (36, 1280, 20, 1024, 50257), "774M", _GPT2, exact=774_030_080),
    _gpt("gpt2-xl", (48, 1600, 25, 1024, 50257), "1.5B", _GPT2, exact=1_557_611_200),
    _gpt(
        "gpt3-175b", (96, 12288, 96, 2048, 50257), "175B", "GPT-3, arXiv 2005.14165, Table 2.1",
        "every attention is dense; GPT-3 alternates dense and locally banded sparse layers",
    ),
    _gpt(
        "opt-175b", (96, 12288, 96, 2048, 50272), "175B", "OPT, arXiv 2205.01068, and config.json",
        "GELU in place of OPT's ReLU, which keeps 8sbh bytes less a block; without the first two rows of positions",
    ),
    _gpt(
        "bloom-176b", (70, 14336, 112, 2048, 250880), "176B", "BLOOM, arXiv 2211.05100, and config.json",
        "a position table in place of BLOOM's ALiBi and the norm after its table: 29,331,456 parameters more than "
        "BLOOM's 176,247,271,424",
    ),
    # ZeRO's own rows, then its baseline's where the heads differ. A row of two figures appears once.
    _zero("fig2-1.5b", 48, 1600, 16, "Table 5"),
    _zero("fig2-8b", 72, 3072, 24, "Tables 5 and 10"),
    _zero("fig2-40b", 88, 6144, 32, "Table 5"),
    _zero("fig2-60b", 132, 6144, 32, "Table 5"),
    _zero("fig2-80b", 100, 8192, 64, "Table 5"),
    _zero("fig2-100b", 125, 8192, 64, "Tables 5 and 8"),
    _zero("fig2-120b", 150, 8192, 64, "Table 5"),
    _zero("fig2-140b", 175, 8192, 64, "Tables 5 and 7"),
    _zero("fig2-170b", 212, 8192, 64, "Tables 5 and 9"),
    _zero("fig2-40b-base", 88, 6144, 64, "Table 5, baseline"),
    _zero("fig2-60b-base", 132, 6144, 64, "Table 5, baseline, and Table 7"),
    _zero("fig2-80b-base", 100, 8192, 128, "Table 5, baseline"),
    _zero("fig2-100b-base", 125, 8192, 128, "Table 5, baseline"),
    _zero("fig2-120b-base", 150, 8192, 128, "Table 5, baseline"),
    _zero("fig2-140b-base", 175, 8192, 128, "Table 5, baseline"),
    _zero("fig2-170b-base", 212, 8192, 256, "Table 5, baseline"),
    _zero("fig3-60b", 75, 8192, 32, "Table 6"),
    _zero("fig6-40b", 50, 8192, 32, "Tables 7 and 8"),
    _zero("fig6-50b", 62, 8192, 32, "Table 7"),
    _zero("fig6-150b", 187, 8192, 64, "Table 7"),
    _zero("fig8-60b", 75, 8192, 64, "Table 9"),
    _zero("fig4-1.5b", 34, 1920, 16, "Table 10"),
    _zero("fig4-2.5b", 54, 1920, 16, "Table 10"),
    _zero("fig4-4b", 64, 2304, 24, "Table 10"),
    _zero("fig4-6b", 52, 3072, 24, "Table 10"),
    _zero("fig4-10b", 50, 4096, 32, "Table 10"),
    _zero("fig4-11b", 54, 4096, 32, "Table 10"),
    _zero("fig4-12b", 58, 4096, 32, "Table 10"),
    _zero("fig4-13b", 62, 4096, 32, "Table 10"),
    _zero("fig4-1.16b-base", 24, 1920, 16, "Table 10, baseline"),
    _zero("fig4-1.38b-base", 40, 1536, 16, "Table 10, baseline"),
    _megatron("megatron-1.7b", 24, 2304, 24, "1.7B"),
    _megatron("megatron-3.6b", 30, 3072, 32, "3.6B"),
    _megatron("megatron-7.5b", 36, 4096, 32, "7.5B"),
    _megatron("megatron-18.4b", 40, 6144, 48, "18.4B"),
    _megatron("megatron-39.1b", 48, 8192, 64, "39.1B"),
    _megatron("megatron-76.1b", 60, 10240, 80, "76.1B"),
    _megatron("megatron-145.6b", 80, 12288, 96, "145.6B"),
    _megatron("megatron-310.1b", 96, 16384, 128, "310.1B"),
    _megatron("megatron-529.6b", 105, 20480, 128, "529.6B"),
    _megatron("1t", 128, 25600, 160, "1008.0B"),
    _llama("llama2-7b", (32, 4096, 32, 32, 11008, 4096), "7B", 6_738_415_616),
    _llama("llama2-13b", (40, 5120, 40, 40, 13824, 4096), "13B", 13_015_864_320),
    _llama("llama2-70b", (80, 8192, 64, 8, 28672, 4096), "70B", 68_976_648_192),
    _llama("llama3-8b", (32, 4096, 32, 8, 14336, 8192), "8B", 8_030_261_248),
    _llama("llama3-70b", (80, 8192, 64, 8, 28672, 8192), "70B", 70_553_706_496),
    _llama("llama3.1-405b", (126, 16384, 128, 8, 53248, 8192), "405B", 405_853_388_800, _SCALED),
)  # fmt: skip

MODELS: Mapping[str, ModelPreset] = MappingProxyType({preset.name: preset for preset in _ALL})
