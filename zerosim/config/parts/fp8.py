"""Products of linear maps in 8 bits: scaling, the library whose arithmetic it is, and which maps stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerosim.config.option import Draft, Exclusion, Part, option
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.parts.saving import SavingConfig
from zerosim.errors import InputError, wrong

SCALINGS = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
LIBRARIES = {
    "torchao": ("tensorwise", "rowwise", "blockwise", "mxfp8"),
    "te": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "deepseek": ("blockwise",),
}
"""By library, its scalings."""
STEPS = {"blockwise": 128, "mxfp8": 32}
"""What sizes must be a multiple of, by scaling; others need 16, the step of 8-bit products on GPUs."""


_MEANT = {
    **dict.fromkeys(("nvfp4", "fp4", "e2m1"), "training in 4 bits is not modelled; mxfp8 is the smallest"),
    **dict.fromkeys(("hybrid", "e4m3"), "a format; choose scaling tensorwise with fp8_library te and fp8_format"),
    **dict.fromkeys(("fp8", "float8", "true", "on"), "expected a scaling; tensorwise is torchao's usual one"),
}


def _scaling(word: str) -> str:
    """Return a word for a scaling. Raises: InputError for words that mean something else, with what they mean."""
    if (meant := _MEANT.get(word.lower())) is not None:
        raise InputError(f"{word!r}: {meant}")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config(Part):
    """How the linear maps of blocks multiply."""

    group = "precision"

    kind: str = option(
        "none", "linear maps of blocks multiply in 8 bits, by which numbers share a scale", flat="fp8",
        choices=("none", *SCALINGS), words="fp8_recipe", parse=_scaling,
    )  # fmt: skip
    made_by: str | None = option(
        None, "with --fp8: whose arithmetic, and what is saved for backward. torchao saves inputs in 16 bits, te "
        "(Transformer Engine) and deepseek (DeepSeek-V3) their codes", flat="fp8_library", choices=tuple(LIBRARIES),
        shown="torchao for tensorwise and rowwise, else te; te for all with --recipe megatron",
    )  # fmt: skip
    formats: str | None = option(
        None, "with --fp8-library te: e4m3 alone, or hybrid, with e5m2 for gradients", flat="fp8_format",
        choices=("e4m3", "hybrid"), shown="hybrid for delayed and tensorwise, else e4m3",
    )  # fmt: skip
    mx_rounding: str | None = option(
        None, "with --fp8 mxfp8: how the scale is rounded to a power of two (torchao's ScaleCalculationMode)",
        choices=("floor", "ceil", "rceil", "even"), shown="floor; te's is rceil",
    )  # fmt: skip
    exact_wgrad: bool = option(
        False, "with --fp8: the weights' gradients are not computed in 8 bits (rowwise_with_gw_hp, no-fp8-wgrad)",
        flat="fp8_exact_wgrad", switches={"no_fp8_wgrad": True},
    )  # fmt: skip
    exact_first: int = option(
        0, "with --fp8: the first N blocks are not in 8 bits", flat="fp8_exact_first", low=0, high=10**6, metavar="N",
        words="num_layers_at_start_in_bf16",
    )  # fmt: skip
    exact_last: int = option(
        0, "with --fp8: nor are the last N", flat="fp8_exact_last", low=0, high=10**6, metavar="N",
        words="num_layers_at_end_in_bf16",
    )  # fmt: skip
    amax_history: int = option(
        1, "with --fp8 delayed: steps whose amax is kept", flat="fp8_amax_history", low=1, high=10**4, metavar="STEPS",
        words="fp8_amax_history_len amax_history_len",
    )  # fmt: skip
    amax_algo: str = option(
        "most_recent", "with --fp8 delayed: which of them gives the scale", flat="fp8_amax_algo",
        choices=("most_recent", "max"), words="fp8_amax_compute_algo amax_compute_algo",
    )  # fmt: skip
    margin: int = option(
        0, "with --fp8 delayed: powers of two left free above it", flat="fp8_margin", low=0, high=10, metavar="N",
    )  # fmt: skip

    gather: bool = option(
        False, "with --fp8 tensorwise and torchao: stage 3 gathers codes of the maps' weights", flat="fp8_gather",
        stages=(3,), switches=dict.fromkeys(
            ("enable_fsdp_float8_all_gather", "fp8_enable_fsdp_float8_all_gather",
             "quantize.linear.float8.enable_fsdp_float8_all_gather"), True,
        ),
    )  # fmt: skip
    param_gather: bool = option(
        False, "with --fp8-library te or deepseek: the maps' weights are stored and gathered as codes, beside fp32 "
        "masters",
        flat="fp8_param_gather", switches={"fp8_param": True, "fp8_primary_weights": True},
    )  # fmt: skip

    def _check(self) -> None:
        if not self.is_on:
            return
        if self.gather and (self.library, self.kind) != ("torchao", "tensorwise"):
            given = f"{self.kind} of {self.library}"
            raise wrong("fp8_gather", f": not with {given}; choose --fp8 tensorwise with --fp8-library torchao")
        if self.param_gather and (self.library == "torchao" or self.kind == "mxfp8"):
            why = "both products need codes of their own" if self.kind == "mxfp8" else "torchao has fp8_gather"
            raise wrong("fp8_param_gather", f": {why}; choose --fp8 tensorwise or blockwise with --fp8-library te")
        if self.kind not in LIBRARIES[self.library]:
            right = next(name for name, scalings in LIBRARIES.items() if self.kind in scalings)
            known = ", ".join(LIBRARIES[self.library])
            raise wrong("fp8_library", f" {self.library!r} has {known}, not {self.kind}; choose {right}")
        if self.formats is not None and self.library != "te":
            raise wrong("fp8_format", f" {self.formats!r}: {self.library} has its own; choose fp8_library te")
        if self.mx_rounding is not None and self.kind != "mxfp8":
            raise wrong("mx_rounding", f" {self.mx_rounding!r}: only mxfp8's scales are rounded so; leave it out")
        if self.mx_rounding not in (None, "rceil") and self.library == "te":
            raise wrong("mx_rounding", f" {self.mx_rounding!r}: te's is rceil; choose fp8_library torchao")
        if self.exact_wgrad and self.library == "deepseek":
            raise wrong("fp8_exact_wgrad", ": deepseek computes all three products in 8 bits; choose te or torchao")
        if self.kind != "delayed":
            for name, is_default in (
                ("fp8_amax_history", self.amax_history == 1),
                ("fp8_amax_algo", self.amax_algo == "most_recent"),
                ("fp8_margin", self.margin == 0),
            ):
                if not is_default:
                    raise wrong(name, f": only --fp8 delayed scales by an amax of former steps, not {self.kind}")

    @property
    def is_on(self) -> bool:
        """Whether any product is in 8 bits."""
        return self.kind != "none"

    @property
    def library(self) -> str:
        """Whose arithmetic it is."""
        return self.made_by or ("torchao" if self.kind in ("tensorwise", "rowwise") else "te")

    @property
    def form(self) -> str:
        """The format of gradients: e4m3, or hybrid, which is e5m2 for them."""
        return self.formats or ("hybrid" if self.kind in ("delayed", "tensorwise") else "e4m3")

    @property
    def rounding(self) -> str:
        """How scales of mxfp8 are rounded."""
        return self.mx_rounding or ("rceil" if self.library == "te" else "floor")


def is_in_8_bits(fp8: Fp8Config) -> bool:
    """Return whether any product is in 8 bits, for what measured steps and published figures of 16 bits say."""
    return fp8.is_on


def casts_by_rows(fp8: Fp8Config) -> bool:
    """Return whether a row has a scale of its own, and in the transpose a column."""
    return fp8.kind == "rowwise"


def has_own_casts(fp8: Fp8Config) -> bool:
    """Return whether casts are a library's hand-written kernels, not operators of PyTorch."""
    return fp8.is_on and (fp8.library != "torchao" or fp8.kind == "blockwise")


def check_units(fp8: Fp8Config, device: str, peak: float, *, has_mxfp8: bool, hint: str = "") -> None:
    """Check that a device, whose 8-bit units have this peak, multiplies as asked. Raises: InputError with the right
    choice, and a `hint`."""
    if not fp8.is_on:
        return
    if not peak:
        why = f"{device} has no units that multiply in 8 bits; choose h100-80 or leave fp8 out{hint}"
        raise wrong("fp8", f" {fp8.kind!r}: {why}")
    if fp8.kind == "mxfp8" and not has_mxfp8:
        choices = "tensorwise, rowwise or blockwise"
        raise wrong("fp8", f" 'mxfp8': {device} has no scales for 32 numbers; choose {choices}, or b200")


EXCLUSIONS = (
    *(
        Exclusion(name, "fp8", needs=True)
        for name in (
            *("fp8_library", "fp8_format", "mx_rounding", "fp8_exact_wgrad", "fp8_exact_first", "fp8_exact_last"),
            *("fp8_gather", "fp8_param_gather", "fp8_amax_history", "fp8_amax_algo", "fp8_margin"),
        )
    ),
    *(
        Exclusion(name, other, "weights stored as codes have no other form")
        for name in ("fp8_gather", "fp8_param_gather")
        for other in (
            *("offload", "partition", "quantized_weights", "lora_rank", "freeze", "optimizer_in_backward"),
            *("delayed_update", "tiles"),
        )
    ),
)


def settles(draft: Draft) -> Mapping[str, str]:
    """Set Transformer Engine, which Megatron's blocks are made of, with recipe megatron and a scaling that it has."""
    values = draft.values
    if values.get("recipe") == "megatron" and values.get("fp8") in LIBRARIES["te"]:
        values.setdefault("fp8_library", "te")
    return {}


def rules(
    fp8: Fp8Config,
    model: ModelConfig,
    mesh: MeshConfig,
    precision: PrecisionConfig,
    data: DataConfig,
    saving: SavingConfig,
    parallel: ParallelConfig,
    gathering: Gathering,
    memory: MemoryConfig,
) -> Iterator[InputError]:
    """Yield what 8 bits refuse of models, sizes and formats."""
    if not fp8.is_on:
        return

    def refuse(why: str) -> InputError:
        return wrong("fp8", f" {fp8.kind!r}: {why}")

    if not model.has_blocks:
        yield refuse(f"model {model.family} has no blocks with linear maps; choose gpt or llama")
        return
    if precision.stored == "fp64":
        yield refuse("codes replace values of 16 or 32 bits; choose precision bf16")
    if model.has_experts and fp8.library != "torchao":
        right = "choose --fp8 tensorwise with --fp8-library torchao, which leaves them in 16 bits"
        yield refuse(f"experts' maps in 8 bits are not modelled; {right}")
    name = "fp8_gather" if fp8.gather else "fp8_param_gather"
    stores = fp8.gather or fp8.param_gather
    if stores and gathering.by_module:
        yield wrong(name, ": leaf modules are gathered in 16 bits; choose gather unit")
    if stores and not precision.has_masters:
        yield wrong(name, f": codes are cast from fp32 masters, and {precision.param_dtype} has none; choose bf16")
    if fp8.kind == "delayed" and (saving.folder is not None or saving.resume is not None):
        yield refuse("a checkpoint has no amax histories, so that a run would not go on as it was; choose tensorwise")
    if model.is_second and (fp8.exact_first or fp8.exact_last):
        yield wrong("fp8_exact_first", ": an encoder with a decoder has two stacks of blocks; leave it out")
    if fp8.exact_first + fp8.exact_last >= model.layers:
        count = fp8.exact_first + fp8.exact_last
        yield wrong("fp8_exact_first", f" and fp8_exact_last: no block of {model.layers} is in 8 bits with {count}")
    sizes = *_widths(fp8, model, mesh, gathering), *_tokens(fp8, model, mesh, data, parallel, memory)
    for name, size, step in sizes:
        if size % step:
            other = "" if size % 16 else "; choose tensorwise, which needs 16"
            yield refuse(f"{name} is {size}, and has to be a multiple of {step}, as a product sums over it{other}")


def _steps(fp8: Fp8Config) -> tuple[int, int]:
    """Return what sizes must be a multiple of: within a rank, and where ranks put their codes together. DeepSeek's
    tiles at the end may be smaller, but not there."""
    block = STEPS.get(fp8.kind, 16)
    return 16 if fp8.library == "deepseek" else block, block


def _widths(
    fp8: Fp8Config, model: ModelConfig, mesh: MeshConfig, gathering: Gathering
) -> Iterator[tuple[str, int, int]]:
    """Yield the widths that a product sums over: the name, its size on a rank, and what that must be a multiple of. In
    tiles of maps (--tiles), the input's gradient sums over a tile's outputs."""
    (step, _), tp, tiles = _steps(fp8), mesh.tp, gathering.tiles
    cut = f" on a rank of tp {tp}" if tp > 1 else f" in each of {tiles} tiles" if tiles > 1 else ""
    parts = max(tp, tiles)
    yield f"hidden{cut if tiles > 1 else ''}", model.hidden // tiles, step
    yield f"ffn{cut}", model.ffn // parts, step
    if model.shared_experts:
        yield f"the shared experts' width{cut}", model.width("shared") // parts, step
    yield f"the width of all heads{cut}", model.width("heads") // parts, step
    if not model.is_latent:
        yield f"the width of keys{cut}", model.width("kv_heads") // (tiles * min(tp, model.kv_heads)), step
        return
    yield f"the width of all values{cut}", model.width("values") // parts, step
    yield f"the width of keys and values{cut}", model.width("pairs") // parts, step
    whole = f" in each of {tiles} tiles" if tiles > 1 else ""
    yield "the latent of queries", model.width("q_latent"), step
    yield "the latent of keys and values", model.width("latent"), step
    yield f"that latent with its rotary part{whole}", model.width("kv_latent") // tiles, step


def _tokens(
    fp8: Fp8Config,
    model: ModelConfig,
    mesh: MeshConfig,
    data: DataConfig,
    parallel: ParallelConfig,
    memory: MemoryConfig,
) -> Iterator[tuple[str, int, int]]:
    """Yield the same of tokens, which weights' gradients sum over."""
    (step, block), tp, tile = _steps(fp8), mesh.tp, memory.mlp_tile
    tokens, read = (data.micro_batch * seq // mesh.cp for seq in (model.seq, model.decoder_tokens))
    for name, count in ("tokens of a microbatch", tokens), ("its decoder's tokens", read):
        if parallel.sequence_parallel:  # each rank makes codes of its own rows
            yield f"{name} on a rank of tp {tp}", count // tp, block
        else:
            yield name, count, step
    if tile:
        yield "mlp_tile", min(tile, tokens), step


WORDS = (
    ("fp8_hybrid fp8_e4m3", "--fp8 delayed with --fp8-format hybrid or e4m3"),
    ("fp8_backend", "--fp8 with --fp8-library torchao or te"),
    ("fp8_wgrad", "--fp8-exact-wgrad, where it is false"),
    (
        "enable_fp8 float8 float8_recipe_name model.converters quantize.linear.float8.recipe_name",
        "--fp8 tensorwise or rowwise, torchao's recipes. rowwise_with_gw_hp is --fp8 rowwise --fp8-exact-wgrad",
    ),
    ("mx quantize.linear.mx.recipe_name", "--fp8 mxfp8 --fp8-library torchao, with --mx-rounding"),
    (
        "first_last_layers_bf16 quantize.linear.float8.filter_fqns quantize.linear.mx.filter_fqns",
        "--fp8-exact-first N --fp8-exact-last N",
    ),
    ("use_mxfp8_block_scaling fp8_use_mxfp8_block_scaling", "--fp8 mxfp8"),
)
LACKING = (
    ("fp4 fp4_* nvfp4*", "training in 4 bits (NVFP4)", "--fp8 mxfp8 is the smallest format for products"),
    (
        "te_fp8_mha fp8_dot_product_attention fp8_multi_head_attention",
        "attention in 8 bits",
        "--fp8 is for the linear maps",
    ),
    ("quantize.grouped_mm.*", "experts' maps in 8 bits", "--fp8 tensorwise leaves experts in 16 bits"),
)
