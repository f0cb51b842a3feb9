"""Fine-tuning: frozen parameters, adapters (LoRA), the base's format.

A pattern names parameters by a run of the dotted parts of their names, with shell wildcards in each part: `h.0` is a
block, `c_attn` a map of every block, `*.bias` every bias. Of several patterns the last matching one decides, and
`!pattern` takes back: '*,!bias' freezes everything but biases (BitFit).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zerosim.config.option import OF_RECIPE, Draft, Part, option
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong
from zerosim.placement.block import Block
from zerosim.placement.formats import WEIGHTS, Format
from zerosim.placement.memories import DEVICE
from zerosim.placement.spec import FlatSpec, WeightSpec

ADAPTERS = ("lora_A", "lora_B")
"""The last parts but one of an adapter's two parameters, as PEFT names them."""
ALL_LINEAR = "all-linear"
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
    lora_rank: int = option(
        0, "train adapters of this rank beside frozen linear maps (LoRA); 0: none", low=0, high=10**5, metavar="R",
        also=("--lora-r",),
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "scale the adapters' output by A/R", above=0, metavar="A", shown="R, which scales by 1"
    )
    lora_target: str | None = option(
        None, "linear maps that get adapters: q, k, v (for gpt: columns of its fused map), o, gate, up, down or fc; or "
        "a map's name, a pattern, or all-linear", metavar="q,v|all-linear|PATTERN,...", shown="q,v",
        also=("--lora-target-modules",),
    )  # fmt: skip
    lora_dropout: float = option(0.0, "probability of dropping an element of an adapter's input", below=1, metavar="P")
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
        for name in ("fused_lora", "prepare_kbit", "bnb_saves_input"):
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


def rules(tuning: TuningConfig, model: ModelConfig) -> Iterator[InputError]:
    """Yield what is wrong with adapters and a quantized base of this model."""
    if tuning.lora_rank and not model.has_blocks:
        yield wrong("lora_rank", f" {tuning.lora_rank}: model {model.family} has no blocks; choose model gpt or llama")
    if tuning.lora_rank > model.hidden:
        yield wrong("lora_rank", f" {tuning.lora_rank}: more than hidden {model.hidden}; choose a smaller rank")
    if tuning.casts_weights and (not model.has_blocks or model.decoder.second is not None):
        yield wrong("autocast", f" {tuning.autocast!r}: model {model.family} is no stack of blocks alone; leave it out")
    if tuning.prepare_kbit and model.has_blocks:
        row = model.decoder
        if row.second is not None or row.block.parallel or not row.block.norm.startswith("rms"):
            yield wrong("prepare_kbit", f": blocks of model {model.family} are not like Llama's; leave it out")
    if tuning.base is not None:
        if not tuning.is_on:
            yield wrong("base", f" {tuning.base!r}: nothing is frozen; choose a lora_rank, or freeze something")
        if not model.has_blocks:
            yield wrong("base", f" {tuning.base!r}: model {model.family} has no blocks; leave it out")
        elif tuning.base == "gptq" and model.decoder.block.attention.columns.layout == "in_out":
            yield wrong(
                "base", f" 'gptq': model {model.family} stores maps by inputs first, as no GPTQ file does; choose nf4"
            )


def dtype_rules(
    tuning: TuningConfig, precision: PrecisionConfig, mesh: MeshConfig, gathering: Gathering, grads: GradMemory,
    offload: OffloadConfig, model: ModelConfig,
) -> Iterator[InputError]:  # fmt: skip
    """Yield what is wrong with adapters in a dtype of their own."""
    name, stored = tuning.adapter_dtype, precision.stored
    if tuning.casts_weights:
        for beside, is_there in (("precision", stored != "fp32"), ("tp", mesh.tp > 1), ("pp", mesh.pp > 1)):
            if is_there:
                right = "choose precision fp32" if beside == "precision" else f"leave out {beside}"
                yield wrong(
                    "autocast",
                    f" {tuning.autocast!r}: without adapters it casts whole fp32 weights; {right}",
                    beside=beside,
                )
    elif tuning.autocast is not None and not tuning.is_wide:
        yield wrong("autocast", f" {tuning.autocast!r}: only fp32 adapters are cast; add adapter_dtype fp32")
    elif tuning.autocast not in (None, stored):
        yield wrong("autocast", f" {tuning.autocast!r}: the base is {stored}; choose {stored}", beside="precision")
    if tuning.prepare_kbit and not (tuning.base and tuning.autocast):
        yield wrong("prepare_kbit", ": it is for 4-bit maps under autocast; add base nf4 and autocast bf16")
    if tuning.bnb_saves_input and (tuning.base is None or mesh.pp > 1 or mesh.tp > 1):
        yield wrong("bnb_saves_input", ": it is for a 4-bit base, without pp or tp; add base nf4, or leave it out")
    if tuning.prepare_kbit and (tuning.fused_lora or mesh.pp > 1):
        other = "fused_lora" if tuning.fused_lora else "pp"
        yield wrong("prepare_kbit", f": activations between blocks would be fp32; leave out {other}", beside=other)
    elif mesh.pp > 1 and model.has_blocks and widens_norms(tuning, model.decoder.block):
        why = "activations between blocks would be fp32; leave out pp"
        yield wrong("autocast", f" {tuning.autocast!r}: {why}", beside="pp")
    if name is None:
        if tuning.fused_lora:
            yield wrong("fused_lora", ": its kernels are for PEFT's adapters; add adapter_dtype fp32 or bf16")
        return

    def refused(why: str, beside: str = "") -> InputError:
        return wrong("adapter_dtype", f" {name!r}: {why}", beside=beside)

    if name != stored and not (tuning.is_wide and dtype(stored).is_half):
        yield refused(f"the base is {stored}; PEFT's adapters are {stored} or, beside a half type, fp32; leave it out")
    if tuning.is_wide and precision.is_pure:
        yield refused("fp32 adapters have no masters at any precision; choose precision bf16")
    if tuning.freeze is not None:
        yield refused("only adapters are trained, all of them; leave out freeze", "freeze")
    if mesh.tp > 1:
        yield refused(f"PEFT does not cut adapters over tp {mesh.tp}; leave one of them out", "tp")
    if tuning.is_wide and not offload.cpu_steps and offload.memory_of("params") != DEVICE:
        yield refused("the device updates fp32 parameters in place; offload the optimizer too", "offload")
    if tuning.is_wide and gathering.cast_shards:
        yield refused("cast_shards keeps fp32 shards already, and computes in the base's dtype; leave one of them out")
    if tuning.is_wide and grads.upcast:
        yield refused("upcast_grads is DeepSpeed's, which casts adapters to the base's dtype; leave one of them out")


def whole_rules(
    tuning: TuningConfig, precision: PrecisionConfig, mesh: MeshConfig, parallel: ParallelConfig,
    optim: OptimConfig, offload: OffloadConfig,
) -> Iterator[InputError]:  # fmt: skip
    """Yield what adapters that are whole on every rank do not have."""
    if not are_whole(tuning):
        return
    if (
        (parallel.recipe, parallel.zero_stage) != ("fsdp1", 3)
        or tuning.adapter_dtype is None
        or not (tuning.is_wide or precision.is_pure)
    ):
        why = "only FSDP1 leaves modules alone, here adapters without masters: choose recipe fsdp1 at stage 3 and "
        yield wrong("adapter_shards", f" 'whole': {why}adapter_dtype fp32, or bf16 with precision bf16-pure")
    elif mesh.tp * mesh.pp * mesh.dp_replicate > 1 or offload.is_on or OPTIMIZERS[optim.optimizer].cut == "sums":
        yield wrong("adapter_shards", " 'whole': leave out tp, pp, dp_replicate, offload and adafactor")


def settles(draft: Draft) -> Mapping[str, str]:
    """Store and send gradients of fp32 adapters in fp32, as autograd makes them; they need no cast. Take out what a
    recipe does with adapters, where there are none. Raises: InputError."""
    values, given = draft.values, draft.given
    cut = next((name for name in ("secondary_shard", "quantized_weights") if values.get(name)), "")
    cut = "partition" if values.get("partition") == "owner" else cut
    if cut and given.get("adapter_shards", "unit") != "unit":
        raise wrong(
            "adapter_shards", f" {given['adapter_shards']!r}: {cut} cuts whole units; leave one of them out", beside=cut
        )
    if cut or not values.get("lora_rank"):
        draft.without("adapter_shards", "")
    if not draft.values.get("base"):
        draft.without("whole_scales", "")
    if draft.values.get("adapter_dtype") == "fp32":
        if (given := draft.given.get("grad_dtype", "fp32")) != "fp32":
            raise wrong("grad_dtype", f" {given!r}: fp32 adapters have fp32 gradients; leave it out")
        draft.values["grad_dtype"] = "fp32"
        for name in ("cast_shards", "compress"):
            draft.without(name, "")
    return {}


WORDS = (
    ("qlora", "--lora-rank R --base nf4"),
    ("lora use_lora use_peft adapter finetuning_type", "--lora-rank R for LoRA, with --base nf4 for QLoRA"),
    ("quantization quantization_* bnb_4bit_* double_quantization", "--base nf4 for 4 bits, with --lora-rank R"),
    ("use_rslora", "--lora-alpha, times the root of --lora-rank: rsLoRA changes the scale alone"),
    ("lora_target_linear", "--lora-target all-linear"),
    ("freeze_* unfrozen_parameters", "--freeze PATTERN,..., where !PATTERN is trained"),
)


LACKING = (
    (
        "peft* *dora use_galore *pissa loftq* init_lora_weights use_apollo use_badam adalora* adaption_prompt* boft* "
        "bone* c3a* fourierft* hra* ia3* ln_tuning* loha* lokr* miss* oft* p_tuning* prefix_tuning* prompt_tuning* "
        "randlora* road* shira* trainable_tokens* vblora* vera* waveft* xlora*",
        "PEFT's other methods",
        "--lora-rank trains adapters, and --base nf4 keeps the frozen base in 4 bits",
    ),
    (
        "zero_quantized_nontrainable_weights zeropp_loco* quantiz* load_in_8bit",
        "frozen weights in int8, or error feedback for ZeRO++'s codes (LoCo)",
        "--base nf4 keeps a frozen base in 4 bits, and --compress has error feedback",
    ),
)
