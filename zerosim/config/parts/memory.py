"""Activations that are saved, recomputed or moved, and how much a device holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.allocator import NAMES as ALLOCATORS
from zerosim.config.allocator import check_knobs
from zerosim.config.option import OF_RECIPE, Exclusion, Part, option
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.world import WorldConfig
from zerosim.config.recompute import FORMS, RANGES, Recomputed, read_recompute
from zerosim.config.recompute import PARTS as PARTS_OF_BLOCK
from zerosim.errors import InputError, wrong
from zerosim.units import MOST_BYTES, parse_bytes

LOSSES = (
    *("in-place", "lean", "megatron", "megatron-fused", "megatron-compiled"),
    *("torch", "torch-kept", "torch-fp32-kept", "torch-half", "torch-half-kept"),
    *("hf-4.45", "hf-4.45-kept", "hf-4.48", "hf-4.48-kept", "hf-5", "hf-5-kept"),
    *("hf-half", "hf-half-autocast", "unsloth-half", "unsloth-half-autocast"),
    *("unsloth-4.45", "unsloth-4.48", "torchtune", "litgpt"),
    *("chunked", "liger", "liger-fp32", "liger-foak"),
)
WITH_THE_HEAD = LOSSES[LOSSES.index("chunked") :]
"""One op of the head and the loss, a few tokens at a time: logits are never whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(Part):
    """What is saved for backward, and how much a device holds."""

    group = "activations"

    recompute: str = option(
        "none", "activations that backward recomputes instead of saving: the attention core, a list of parts of every "
        f"block ({', '.join(PARTS_OF_BLOCK)}), every block or every K-th block; or these for ranges of blocks, "
        f"such as {RANGES}. auto chooses what fits a device and takes the fewest seconds", metavar=FORMS,
        parse=str.lower,
        words="recompute_granularity",
        switches={
            **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "full"),
            "recompute_activations": "selective",
        },
    )  # fmt: skip
    use_reentrant: bool = option(
        False, "with --recompute full: a frozen block keeps its input and that input's gradient until backward ends, "
        "as under FSDP1 with reentrant checkpoints, and the loss's backward prefetches no block", stages=(2, 3),
        follows=OF_RECIPE,
    )  # fmt: skip
    partition_activations: bool = option(
        False, "with --tp and --recompute full: divide the checkpointed input of a block among the ranks of tp "
        "(ZeRO-R's Pa)", also=("--distribute-saved-activations",),
    )  # fmt: skip
    cpu_checkpointing: bool = option(
        False, "with --recompute full: checkpointed inputs of blocks wait in host memory (with "
        "--partition-activations: Pa+cpu)",
    )  # fmt: skip
    offload_activations: bool = option(
        False, "copy the buffers that blocks save for backward to host memory, and back before their backward "
        "(torchtune's activation offloading, PyTorch's save_on_cpu)", also=("--enable-activation-offloading",),
    )  # fmt: skip
    stash_window: int = option(
        0, "with --cpu-checkpointing or --offload-activations: copy in streams beside compute, with at most N in "
        "flight to the host (torchtune's max_fwd_stash_size, 5 there); 0: compute waits for each copy", low=0,
        high=4096, metavar="N", also=("--max-fwd-stash-size",),
    )  # fmt: skip
    paged_states: bool = option(
        False, "optimizer states of 100,000 elements or more are paged, as in bitsandbytes' paged optimizers: a full "
        "device moves them to host memory, and back for the optimizer's step", group="training", after="lazy_states",
    )  # fmt: skip
    saves: str = option(
        "lean", "tensors saved for backward: what zerosim's own kernels need, Megatron's, transformers' own modules "
        "(eager) or Liger's. foak is fms-acceleration: fused norms beside transformers' own gate. litgpt has one "
        "adapter of q, k and v", choices=("lean", "megatron", "eager", "liger", "foak", "litgpt"),
    )  # fmt: skip
    attention: str = option(
        "eager", "eager attention stores the scores (B, H, T, T); flash attention never does",
        choices=("eager", "flash"), switches={"use_flash_attn": "flash"},
    )  # fmt: skip
    batched_flash: bool = option(
        False, "with --backend cuda and --attention flash: one strided-batched product over all sequences and heads of "
        "a tile of queries, in place of one for each sequence. No GPU has run it yet",
    )  # fmt: skip
    repeat_kv: bool = option(
        False, "repeat keys and values to all heads of queries before attention, which saves the copies: transformers' "
        "SDPA to 4.48, and Mistral's flash attention in 4.45",
    )  # fmt: skip
    use_cache: bool = option(
        False, "the model returns keys and values of all blocks, as in transformers. The caller keeps them with "
        "the logits until the next forward returns (with a loss such as hf-5-kept). With --recompute full they live "
        "until the loss is computed, with all of a fused map's result (gpt_bigcode in 4.48)",
    )  # fmt: skip
    fp32_softmax: bool = option(
        False, "eager attention keeps its softmax in fp32, beside the half-type copy that the product reads, as "
        "Megatron's does without a fused kernel", also=("--attention-softmax-in-fp32",), follows=OF_RECIPE,
    )  # fmt: skip
    loss: str = option(
        "lean", "copies that the loss makes of its logits: none (in-place), as in zerosim (lean), Megatron, PyTorch, "
        "transformers (hf-VERSION; hf-half for models that cast no logits), unsloth, torchtune or litgpt, or logits "
        "for some tokens at a time (chunked, liger)", choices=LOSSES, follows=OF_RECIPE,
        switches={"cross_entropy_loss_fusion": "megatron-fused"},
    )  # fmt: skip
    loss_tile: int = option(
        0, "with --loss chunked: logits for TOKENS at a time, however long the sequence; 0: for an eighth of all "
        "tokens (torchtune)", low=0, high=1 << 30, metavar="TOKENS",
    )  # fmt: skip
    mlp_tile: int = option(
        0, "compute the feed-forward of a block for TOKENS at a time, and recompute it tile by tile in backward "
        "(ALST's TiledMLP, whose tile is as many tokens as the model is wide); 0: for all at once", low=0, high=1 << 30,
        metavar="TOKENS",
    )  # fmt: skip
    capacity: int | None = option(
        None, "memory of each device, such as 32GB or 512MiB; exceeding it ends the run", low=1, high=MOST_BYTES,
        metavar="SIZE", shown="no limit", parse=parse_bytes, also=("--limit",), group="ranks and stage",
    )  # fmt: skip
    allocator: str = option(
        "exact", "how a device hands out memory: exactly the bytes requested, like PyTorch's caching allocator, or "
        "from one contiguous region", choices=ALLOCATORS, group="ranks and stage",
    )  # fmt: skip
    allocator_conf: str | None = option(
        None, "the allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF. For arena: fit:best|first, "
        "defragment:True|False", metavar="KNOB:VALUE,...", shown="PyTorch's; fit:best,defragment:True",
        also=("--pytorch-cuda-alloc-conf",), group="ranks and stage",
    )  # fmt: skip

    def _check(self) -> None:
        check_knobs(self.allocator, self.allocator_conf)
        read_recompute(self.recompute)

    @property
    def again(self) -> Recomputed:
        """The value of `recompute`, parsed."""
        return read_recompute(self.recompute, self.attention)

    @property
    def returns_outputs(self) -> bool:
        """Whether the caller gets keys and values of all blocks. Recomputed blocks return theirs to the model alone."""
        return self.use_cache and not self.again.is_whole


def is_loss_in_model(memory: MemoryConfig) -> bool:
    """Return whether the model's own forward computes the loss, as transformers' models do."""
    return memory.loss.startswith(("hf-", "unsloth", "liger"))


EXCLUSIONS = (Exclusion("fp32_softmax", "attention", "flash attention saves no softmax"),)


def rules(
    memory: MemoryConfig, model: ModelConfig, parallel: ParallelConfig, world: WorldConfig
) -> Iterator[InputError]:
    """Yield what a model without blocks, a backend and a recompute refuse."""
    for name, plain in (("recompute", "none"), ("attention", "eager")):
        value = getattr(memory, name)
        if not model.has_blocks and value != plain:
            yield wrong(name, f" {value!r}: model {model.family} has no blocks; leave it out")
    if memory.batched_flash and (world.backend != "cuda" or memory.attention != "flash"):
        has = f"backend {world.backend}" if world.backend != "cuda" else f"attention {memory.attention}"
        yield wrong("batched_flash", f": {has} has no such products; pass --backend cuda --attention flash too")
    if memory.repeat_kv and not (model.has_blocks and model.kv_heads < model.heads):
        yield wrong("repeat_kv", ": the model has as many heads of keys and values as of queries; leave it out")
    for name in ("stash_window", "offload_activations"):
        if (value := getattr(memory, name)) and world.backend == "cuda":
            yield wrong(
                name, f" {value}: backend cuda has no copy streams; leave it out, or use zerosim plan", beside="backend"
            )
    if memory.offload_activations and not model.has_blocks:
        yield wrong("offload_activations", f": model {model.family} has no blocks; leave it out")
    again = memory.again
    if "mla_up" in again.parts and not model.is_latent:
        yield wrong("recompute", f" {memory.recompute!r}: model {model.name} has no latents; leave mla_up_proj out")
    if again.every > model.layers and model.has_blocks:
        yield wrong(
            "recompute",
            f" {memory.recompute!r}: of {model.layers} layers every K-th is recomputed; choose at most "
            f"full:{model.layers}",
        )
    if again.ranges and model.has_blocks and (model.is_second or again.ranges[-1].last >= model.layers):
        why = "has blocks in two stacks; name no ranges" if model.is_second else f"has blocks 0 to {model.layers - 1}"
        yield wrong("recompute", f" {memory.recompute!r}: model {model.name} {why}")
    is_rms = model.has_blocks and model.decoder.block.norm.startswith("rms")
    bare = any("attn_proj" in one.parts and "layernorm" not in one.parts for one in again.kinds)
    if memory.saves in ("eager", "litgpt") and is_rms and bare:
        yield wrong(
            "saves",
            f" {memory.saves!r}: its norms keep an fp32 copy of their input, so recompute {memory.recompute!r} frees "
            "nothing by attn_proj; leave attn_proj out, or add layernorm",
        )
    if parallel.keep_gathered and again.parts & {"layernorm", "fc1", "mla_up"}:
        yield wrong(
            "keep_gathered",
            f": recompute {memory.recompute!r} recomputes norms or linear maps, so it frees their gathered "
            "inputs; leave one out",
        )
    if memory.loss in WITH_THE_HEAD and not model.has_blocks:
        yield wrong(
            "loss", f" {memory.loss!r}: model {model.family} has no separate head; choose in-place, or leave it out"
        )
    if memory.loss_tile and memory.loss != "chunked":
        yield wrong("loss_tile", f" {memory.loss_tile}: loss {memory.loss} has no tiles; pass --loss chunked too")


WORDS = (
    ("recompute_modules", "--recompute selective:PART,... with names such as core_attn, layernorm, mlp"),
    ("recompute_method recompute_num_layers", "--recompute full for uniform with 1 layer"),
    ("*checkpoint_activations activations_checkpoint*", "--recompute full"),
    (
        "activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        "--recompute full or none. Mode selective is --recompute selective:op with option op, full:K with option K",
    ),
    ("disable_gradient_checkpointing", "--recompute none, the default"),
    (
        "flash_attn* use_flash_attention* flash_attention* attn_implementation attention_backend sdp_attention",
        "--attention flash or eager; the clock's kernel is --flash-kernel",
    ),
    ("use_liger_kernel enable_liger_kernel liger_*", "--loss liger, with --kernels fused for the clock"),
    ("num_output_chunks chunked_cross_entropy*", "--loss chunked, with --loss-tile TOKENS for other than 8 chunks"),
    ("use_unsloth", "--loss chunked, with --kernels fused for the clock"),
    ("no_masked_softmax_fusion", "--fp32-softmax, with --attention eager"),
)


LACKING = (("*memory_budget", "a compiler's memory budget", "--recompute selective:op saves what a policy names"),)
