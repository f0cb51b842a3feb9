"""Fine-tuning: the rules for its options (`tuning.py`), and what other frameworks call them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerosim.config.option import Draft
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.parts.tuning import TuningConfig, are_whole, widens_norms
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong
from zerosim.placement.memories import DEVICE


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
    if tuning.frozen_fp32 and not (tuning.is_on and gathering.cast_shards and precision.has_masters):
        yield wrong("frozen_fp32", ": no frozen shard is cast; choose a lora_rank, cast_shards and precision bf16")
    elif tuning.frozen_fp32 and tuning.base is not None:
        yield wrong("frozen_fp32", f": base {tuning.base} stores codes; leave one of them out")
    if tuning.prepare_kbit and not (tuning.base and tuning.autocast):
        yield wrong("prepare_kbit", ": it is for 4-bit maps under autocast; add base nf4 and autocast bf16")
    if tuning.bnb_saves_input and (tuning.base != "nf4" or mesh.pp > 1 or mesh.tp > 1):
        yield wrong("bnb_saves_input", ": it is for base nf4, without pp or tp; add base nf4, or leave it out")
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
        "zero_quantized_nontrainable_weights zeropp_loco* quantize load_in_8bit",
        "frozen weights in int8, or error feedback for ZeRO++'s codes (LoCo)",
        "--base nf4 keeps a frozen base in 4 bits, and --compress has error feedback",
    ),
)
