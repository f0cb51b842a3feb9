"""Fine-tuning: frozen parameters, adapters (LoRA), the base's format.

A pattern names parameters by a run of the dotted parts of their names, with shell wildcards in each part: `h.0` is a
block, `c_attn` a map of every block, `*.bias` every bias. Of several patterns the last matching one decides, and
`!pattern` takes back: '*,!bias' freezes everything but biases (BitFit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.errors import wrong
from zerosim.placement.block import LORA_WORDS, Block
from zerosim.placement.formats import WEIGHTS, Format
from zerosim.placement.spec import FlatSpec, WeightSpec

ADAPTERS = ("lora_A", "lora_B")
"""The last parts but one of an adapter's two parameters, as PEFT names them."""
NOT_CUT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningConfig(Part):
    """Which parameters are trained, and the adapters trained beside them."""

    group = "what is trained"

    freeze: str | None = option(
        None, "parameters that are not trained: a block (h.0), a map (c_attn), all biases (*.bias). Put commas between "
        "several patterns; '!PATTERN' trains the parameters after all. With --lora-rank all parameters except adapters "
        "are frozen from the start", metavar="PATTERN,...", shown="none",
    )  # fmt: skip
    frozen_fp32: bool = option(
        False, "with --cast-shards: shards of frozen parameters are fp32 too, and are cast at each gather (FSDP2's "
        "mixed precision over a model of fp32)", stages=(3,),
    )  # fmt: skip
    lora_rank: int = option(
        0, "train adapters of this rank beside frozen linear maps (LoRA); 0: none", low=0, high=10**5, metavar="R",
        also=("--lora-r",),
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "scale the adapters' output by A/R", above=0, metavar="A", shown="R, which scales by 1"
    )
    lora_target: str | None = option(
        None, "linear maps that get adapters: q, k, v (for gpt: columns of its fused map), o, gate, up, down or fc; a "
        "map's name or a pattern; experts, router; all-linear (PEFT's), or all (the names of all linear modules)",
        metavar="q,v|all-linear|PATTERN,...", shown="q,v",
        also=("--lora-target-modules",),
    )  # fmt: skip
    lora_dropout: float = option(0.0, "probability of dropping an element of an adapter's input", below=1, metavar="P")
    lora_by_rows: bool = option(
        False, "adapters of experts' stacks are two narrow products more of each row, grouped by expert (prime-rl). "
        "Without it they are added to a copy of the stack, as PEFT's target_parameters are"
    )  # fmt: skip
    adapter_dtype: str | None = option(
        None, "compute adapters as PEFT does, in this dtype. fp32 (PEFT's default beside a half-precision base) has no "
        "masters, and keeps an fp32 copy of each target's input", choices=("fp32", "bf16", "fp16"),
        shown="the parameters', with one shared input", switches={"autocast_adapter_dtype": "fp32"},
    )  # fmt: skip
    autocast: str | None = option(
        None, "linear maps run under torch.autocast of this dtype (bf16=True of transformers' Trainer). fp32 adapters, "
        "or with --precision fp32 all weights, are cast for each product, and inputs are kept in this dtype",
        choices=("bf16", "fp16"), shown="off",
    )  # fmt: skip
    fused_lora: bool = option(
        False, "adapters of maps with one input are one op, as in unsloth and fms-acceleration: it keeps the input and "
        "each dropped copy, and backward recomputes the rest", also=("--fast-lora",),
    )  # fmt: skip
    adapter_shards: str = option(
        "unit", "the buffer that is cut and gathered: a unit's adapters together, each of their tensors (FSDP1's "
        "units), or each of them cut along dimension 0 and padded to a row on every rank (FSDP2). whole: none is cut "
        "(FSDP1's ignored_modules)", choices=("unit", "tensor", "rows", "whole"), stages=(1, 2, 3), follows=OF_RECIPE,
    )  # fmt: skip
    prepare_kbit: bool = option(
        False, "store norms in fp32 beside a 4-bit base, as PEFT's prepare_model_for_kbit_training does: activations "
        "between blocks are fp32 then. The table and the head stay as they are (TRL's peft_module_casting_to_bf16)",
        also=("--prepare-model-for-kbit-training",),
    )  # fmt: skip
    bnb_saves_input: bool = option(
        False, "the products of a 4-bit base hold their input until backward ends, as in bitsandbytes to 0.41"
    )
    base: str | None = option(
        None, "format of the blocks' frozen linear maps: nf4 stores 4-bit codes in quantization blocks of 64 (QLoRA), "
        "gptq 4-bit codes and zeros in groups of 128",
        choices=tuple(WEIGHTS), shown="as parameters are", switches={"load_in_4bit": "nf4"},
    )  # fmt: skip
    whole_scales: bool = option(
        False, "with --base: every rank holds the scales of the codes whole, and only codes are cut and gathered "
        "(bitsandbytes' absmax under FSDP)", stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    adapters: str | None = option(
        None, "adapters to start from, by name, in a file from --save-adapters; or a folder that PEFT wrote",
        metavar="IN.npz|DIR", shown="A normal, B 0",
    )  # fmt: skip

    def _check(self) -> None:
        for name, value in (("freeze", self.freeze), ("lora_target", self.lora_target)):
            if value is not None and not all(pattern.strip("! ") for pattern in value.split(",")):
                raise wrong(name, f" {value!r}: a pattern is empty; expected names of parameters such as h.0,wte")
        if self.whole_scales and self.base is None:
            raise wrong("whole_scales", ": no weights are stored as codes; choose a base, or leave it out")
        if self.lora_rank:
            return
        if self.adapter_shards != "unit":
            raise wrong("adapter_shards", f" {self.adapter_shards!r}: there are no adapters; choose a lora_rank")
        for name in ("lora_alpha", "lora_target", "adapter_dtype", "adapters"):
            if (value := getattr(self, name)) is not None:
                raise wrong(name, f" {value!r}: no adapters without a lora_rank; choose one, or leave it out")
        if self.lora_dropout:
            raise wrong("lora_dropout", f" {self.lora_dropout}: there are no adapters; choose a lora_rank")
        for name in ("lora_by_rows", "fused_lora", "prepare_kbit", "bnb_saves_input"):
            if getattr(self, name):
                raise wrong(name, ": there are no adapters; choose a lora_rank")

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts all weights of linear maps: there are no adapters."""
        return self.autocast is not None and not self.lora_rank

    @property
    def is_on(self) -> bool:
        """Whether anything is frozen."""
        return self.freeze is not None or self.lora_rank > 0

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `freeze`."""
        return tuple(pattern.strip() for pattern in (self.freeze or "").split(",") if pattern.strip())

    @property
    def targets(self) -> tuple[str, ...]:
        """The patterns of `lora_target`; none without adapters."""
        words = (self.lora_target or "q,v") if self.lora_rank else ""
        return tuple(word.strip() for word in words.split(",") if word.strip())

    @property
    def is_wide(self) -> bool:
        """Whether adapters are stored in fp32, whatever the base is: without masters, with fp32 gradients."""
        return self.adapter_dtype == "fp32"

    @property
    def scale(self) -> float:
        """The factor of adapters' output: alpha / rank."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def trains(self, name: str) -> bool:
        """Return whether the parameter of this name is trained."""
        trained = not self.lora_rank or is_adapter(name)
        for pattern in self.patterns:
            if matches(pattern.removeprefix("!"), name):
                trained = pattern.startswith("!")
        return trained


ALL_TRAINED = TuningConfig()


def stores_codes(tuning: TuningConfig) -> bool | None:
    """Return whether frozen weights are stored as codes; None if all are trained."""
    return tuning.base is not None if tuning.is_on else None


def casts_frozen(tuning: TuningConfig) -> bool:
    """Return whether shards of frozen parameters are fp32, and are cast at each gather."""
    return tuning.frozen_fp32


def tells_apart(tuning: TuningConfig) -> bool:
    """Return whether parameters of the same place in two blocks may differ: names decide what is trained."""
    return tuning.is_on


def are_units(tuning: TuningConfig) -> bool:
    """Return whether each tensor of an adapter is a unit of its own (FSDP1)."""
    return tuning.lora_rank > 0 and tuning.adapter_shards == "tensor"


def has_whole_scales(tuning: TuningConfig) -> bool:
    """Return whether scales of codes are whole on every rank."""
    return tuning.whole_scales


def format_of(tuning: TuningConfig, kind: str) -> Format | None:
    """Return the format of weights of a kind that is stored as codes; None for other kinds."""
    stored = WEIGHTS.get(kind)
    return stored._replace(apart=1 + stored.zeros) if stored is not None and tuning.whole_scales else stored


def are_whole(tuning: TuningConfig) -> bool:
    """Return whether every rank holds adapters whole, with their gradients and states."""
    return tuning.lora_rank > 0 and tuning.adapter_shards == "whole"


def row_of(tuning: TuningConfig, flat: FlatSpec) -> int:
    """Return the elements of a row of a buffer that is cut between rows; NOT_CUT, or 0 for other buffers."""
    if are_whole(tuning):
        return NOT_CUT
    if tuning.adapter_shards != "rows" or flat.block > 1 or not is_adapter(flat.weights[0].name):
        return 0
    return math.prod(flat.weights[0].shape[1:])


def stored_fp32(tuning: TuningConfig, weights: Sequence[WeightSpec]) -> bool:
    """Return whether a buffer of these weights is frozen and stored in fp32: norms, with `prepare_kbit`."""
    return tuning.prepare_kbit and all(len(weight.shape) == 1 for weight in weights)


def widens_norms(tuning: TuningConfig, block: Block) -> bool:
    """Return whether norms give fp32, and so activations between blocks are fp32: bitsandbytes' maps return the dtype
    of their input. `prepare_kbit` stores norms so; autocast computes torch's layer norm so, but no RMS norm, which is
    several ops."""
    is_4bit = tuning.autocast is not None and tuning.base == "nf4" and not tuning.fused_lora
    return tuning.prepare_kbit or (is_4bit and block.norm == "layer" and not block.parallel and not block.norms_sum)


def trained_dtype(tuning: TuningConfig, stored: str) -> str:
    """Return the format of trained parameters, where others are `stored`: adapters may be wider than their base."""
    return "fp32" if tuning.is_wide else stored


def is_adapter(name: str) -> bool:
    """Return whether a parameter is an adapter's."""
    return any(part in ADAPTERS for part in name.split("."))


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a run of the dotted parts of a parameter's name."""
    wanted, parts = pattern.split("."), name.split(".")
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in range(len(parts) - len(wanted) + 1))


def is_target(word: str, name: str, words: Sequence[str]) -> bool:
    """Return whether a word of `lora_target` means the map of this name, which these words mean, or a pattern does."""
    return word in words if word in LORA_WORDS else matches(word, name)


def renames(block: Block, tuning: TuningConfig) -> bool:
    """Return whether words of feed-forward maps mean experts (`Block.renames`). prime-rl adapts modules by name."""
    return block.renames and not tuning.lora_by_rows


def adapts_bare(tuning: TuningConfig, block: Block) -> bool:
    """Return whether weights of no nn.Linear get adapters: experts' stacks, or the router's."""
    return any(
        one.is_bare and is_target(word, name, one.words)
        for word in tuning.targets
        for name, one in block.targets(by_module=tuning.lora_by_rows)
    )
