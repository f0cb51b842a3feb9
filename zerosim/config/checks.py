"""Checks across several parts of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerosim.config.mesh_checks import check_kept_inputs, check_pipeline, check_tensor_parallel
from zerosim.config.node_checks import check_zeropp
from zerosim.config.parts import PURE
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.second_checks import check_second
from zerosim.config.zero import CASTS
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong
from zerosim.placement.memories import DEVICE, NVME

if TYPE_CHECKING:
    from zerosim.config.run import RunConfig


def check_together(config: RunConfig) -> None:
    """Check that the parts agree. Raises: InputError."""
    model, mesh, world = config.model, config.mesh, config.world
    for name, plain in (("recompute", "none"), ("attention", "eager")):
        value = getattr(config.memory, name)
        if not model.has_blocks and value != plain:
            raise wrong(name, f" {value!r}: model {model.family} has no blocks; leave it out")
    for name in ("stash_window", "offload_activations"):
        if (value := getattr(config.memory, name)) and world.backend == "cuda":
            raise wrong(
                name, f" {value}: backend cuda has no copy streams; leave it out, or use zerosim plan", beside="backend"
            )
    if config.memory.offload_activations and not model.has_blocks:
        raise wrong("offload_activations", f": model {model.family} has no blocks; leave it out")
    again = config.memory.again
    if again.every > model.layers and model.has_blocks:
        raise wrong(
            "recompute",
            f" {config.memory.recompute!r}: of {model.layers} layers every K-th is recomputed; choose at most "
            f"full:{model.layers}",
        )
    if config.parallel.keep_gathered and again.parts & {"layernorm", "fc1"}:
        raise wrong(
            "keep_gathered",
            f": recompute {config.memory.recompute!r} recomputes norms or linear maps, so it frees their gathered "
            "inputs; leave one out",
        )
    if config.memory.loss == "chunked" and not model.has_blocks:
        raise wrong("loss", f" 'chunked': model {model.family} has no separate head; choose in-place, or leave it out")
    _check_tuning(config)
    _check_tiles(config)
    check_tensor_parallel(model, mesh, config.parallel)
    check_kept_inputs(mesh, config.memory)
    check_pipeline(model, mesh, config.parallel, config.data, config.optim)
    _check_optimizer(config)
    _check_compression(config)
    check_zeropp(config)
    _check_offload(config)
    if world.transport == "mpi" and mesh.ranks % world.ranks_per_process:
        raise wrong(
            "ranks",
            f" {mesh.ranks}: {world.ranks_per_process} ranks run in each process; choose a multiple "
            f"of {world.ranks_per_process}, or leave ranks out",
        )
    if model.is_masked:
        _check_masked(config)
    if model.is_second:
        check_second(config)
    text = None if config.data.tokenizer else config.data.sample
    if text is not None and max(text.encode()) >= model.vocab:
        raise wrong("sample", f" {text!r} holds byte {max(text.encode())}: vocab {model.vocab} is too small, use 256")


def _check_masked(config: RunConfig) -> None:
    """Check what an encoder cannot do. Raises: InputError."""
    if config.data.sample is not None:
        raise wrong(
            "sample", f" {config.data.sample!r}: an encoder ({config.model.family}) fills in masked tokens, and "
            "continues no text; leave it out",
        )  # fmt: skip
    if OPTIMIZERS[config.optim.optimizer].estimates_every:
        raise wrong(
            "optimizer", f" {config.optim.optimizer!r}: draws a label for every token, and an encoder "
            f"({config.model.family}) predicts masked ones only; choose adam",
        )  # fmt: skip


def _check_compression(config: RunConfig) -> None:
    """Check a compression against formats, ZeRO stage, optimizer and mesh. Raises: InputError."""
    name, kept, optim = config.reduction.compress, config.precision.grad_dtype, config.optim
    if name == "none":
        return
    if name in CASTS and dtype(kept).itemsize <= dtype(name).itemsize:
        raise wrong("compress", f" {name!r}: gradients are {kept}, which is not wider; choose grad_dtype fp32")
    if name in CASTS:
        return
    if dtype(kept).is_half:
        raise wrong(
            "compress", f" {name!r}: compresses fp32 gradients, but grad_dtype is {kept}; choose grad_dtype fp32"
        )
    if config.mesh.tp > 1:
        why = "the copies of a weight would be compressed differently on each rank"
        raise wrong("compress", f" {name!r}: not with tp {config.mesh.tp}, {why}; leave one of them out", beside="tp")
    if name in ("powersgd", "onebit-adam") and config.parallel.zero_stage:
        why = "whole matrices" if name == "powersgd" else "the whole momentum on every rank"
        raise wrong("compress", f" {name!r}: needs {why}; choose stage 0, or top-k or int8")
    if name == "dgc" and (optim.optimizer != "sgd" or not optim.momentum or optim.nesterov):
        raise wrong(
            "compress", " 'dgc': works only with SGD's momentum; choose optimizer sgd with a momentum, such as 0.9"
        )
    if name == "onebit-adam" and (optim.optimizer != "adam" or optim.clip_norm is not None):
        raise wrong(
            "compress",
            " 'onebit-adam': works only with Adam, without clipping; choose optimizer adam and leave out clip_norm",
        )
    if name == "dgc" and config.parallel.zero_stage > 1 and config.data.accumulate > 1 and config.grads.sync:
        raise wrong(
            "compress",
            " 'dgc': updates its momentum once per step, not per microbatch; choose grad_sync off, or stage 1",
        )
    if name == "dgc" and optim.momentum_form != "torch":
        raise wrong("momentum_form", f" {optim.momentum_form!r}: DGC uses the form 'torch'; leave it out")
    if name not in ("int8", "int4"):
        for field, is_set in (
            ("loss_scale", config.precision.loss_scale is not None),
            ("skip_nonfinite", config.precision.skip_nonfinite),
        ):
            if is_set:
                why = "the residual waits for later steps, so it must be finite and have one scale"
                raise wrong("compress", f" {name!r}: not with {field}: {why}; choose fp32 or bf16", beside=field)


def _check_tuning(config: RunConfig) -> None:
    """Check adapters and a quantized base against the model. Raises: InputError."""
    tuning, model = config.tuning, config.model
    if tuning.lora_rank and not model.has_blocks:
        raise wrong("lora_rank", f" {tuning.lora_rank}: model {model.family} has no blocks; choose model gpt or llama")
    if tuning.lora_rank > model.hidden:
        raise wrong("lora_rank", f" {tuning.lora_rank}: more than hidden {model.hidden}; choose a smaller rank")
    if tuning.base is not None:
        if not tuning.is_on:
            raise wrong("base", f" {tuning.base!r}: nothing is frozen; choose a lora_rank, or freeze something")
        if not model.has_blocks:
            raise wrong("base", f" {tuning.base!r}: model {model.family} has no blocks; leave it out")


def _check_tiles(config: RunConfig) -> None:
    """Check tiles against the model's widths, and against options that treat a weight as a matrix. Raises:
    InputError."""
    tiles, model = config.gathering.tiles, config.model
    if tiles == 1:
        return

    def refuse(why: str) -> InputError:
        return wrong("tiles", f" {tiles}: {why}")

    if not config.gathering.by_module:
        raise refuse("a tile is gathered as a module; choose gather module")
    if not model.has_blocks:
        raise refuse(f"model {model.family} has no blocks; leave it out")
    if config.mesh.tp > 1:
        raise refuse(f"tensor parallelism over {config.mesh.tp} ranks cuts the same maps; leave one of them out")
    if config.tuning.is_on:
        raise refuse("LoRA and frozen weights need whole maps; leave it out")
    if OPTIMIZERS[config.optim.optimizer].cut not in ("elements", "blocks"):
        raise refuse(f"{config.optim.optimizer} computes with whole matrices; choose adam, or leave tiles out")
    wide, narrow = model.width("heads"), model.width("kv_heads")
    inner = () if wide == model.hidden else (("queries", wide),)
    for name, width in (("hidden", model.hidden), *inner, ("keys and values", narrow), ("ffn", model.ffn)):
        if width % tiles:
            raise refuse(f"{name} {width} does not divide into {tiles} tiles; choose a divisor of {width}")


def _check_optimizer(config: RunConfig) -> None:
    """Check an optimizer against the partition, the mesh and the precision. Raises: InputError."""
    tp, name = config.mesh.tp, config.optim.optimizer
    cut = OPTIMIZERS[name].cut
    if cut == "matrices" and config.parallel.partition == "slices":
        raise wrong("partition", f" 'slices': {name} needs whole matrices; choose owner, or leave it out")
    if cut in ("sums", "matrices") and tp > 1:
        raise wrong("tp", f" {tp}: {name} needs whole matrices, which tensor parallelism cuts; choose tp 1")
    if OPTIMIZERS[name].estimates_every and tp > 1:
        raise wrong("tp", f" {tp}: {name} draws labels from logits, which tensor parallelism cuts; choose tp 1")
    if config.precision.is_pure and cut != "elements":
        raise wrong(
            "precision", f" {PURE!r}: only for element-wise optimizers, and {name} needs fp32 masters; choose bf16"
        )


def _check_offload(config: RunConfig) -> None:
    """Check offloading against ZeRO stage, optimizer, formats and backend. Raises: InputError."""
    offload, stage, optim = config.offload, config.parallel.zero_stage, config.optim
    if (late := config.grads.late) and offload.memory_of("optimizer") == DEVICE:
        where = (
            f"offload {offload.where!r} leaves the optimizer step on the device"
            if offload.is_on
            else "the device takes the optimizer step"
        )
        raise wrong("delayed_update", f" {late}: {where}, so no update is delayed; choose offload optimizer=host")
    if not offload.is_on:
        return

    def refuse(why: str) -> InputError:
        return wrong("offload", f" {offload.where!r}: {why}")

    if offload.memory_of("params") != DEVICE and stage < 3:
        raise refuse(
            f"stage {stage} keeps whole parameters on every device (DeepSpeed takes offload_param there and ignores "
            "it without a word); choose stage 3, or leave params out"
        )
    if config.world.backend == "cuda":
        raise refuse("backend cuda runs no kernels on the host; choose backend numpy, or use zerosim plan")
    if config.parallel.partition == "owner" and offload.memory_of("optimizer") == NVME:
        raise refuse("NVMe stores slices in tiles, not whole units; choose partition slices, or optimizer=host")
    if offload.memory_of("optimizer") == DEVICE:
        if not config.precision.has_masters and offload.memory_of("params") != DEVICE:
            kind = config.precision.param_dtype
            raise refuse(f"the device updates {kind} parameters in place; offload the optimizer too, or choose bf16")
        return
    if OPTIMIZERS[optim.optimizer].cut != "elements" or OPTIMIZERS[optim.optimizer].estimates_every:
        raise refuse(
            f"the CPU updates element by element, but {optim.optimizer} needs more; choose adam, adamw or lion"
        )
    if config.precision.is_pure:
        raise refuse(f"{config.precision.param_dtype} has no masters for the CPU to update; choose precision bf16")
    if config.precision.param_dtype == "fp64":
        raise refuse("masters on the CPU are fp32, too narrow for fp64; choose precision fp32, bf16 or fp16")
    if config.reduction.is_encoded:
        raise refuse(f"compress {config.reduction.compress!r} keeps its residual on the device; leave one of them out")
    if offload.memory_of("grads") == NVME and config.grads.lasts:
        raise wrong("persistent_grads", f": gradients on NVMe ({offload.where}) have no permanent buffer; leave it out")
