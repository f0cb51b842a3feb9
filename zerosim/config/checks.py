"""What several parts of a configuration have to agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerosim.config.mesh_checks import check_kept_inputs, check_pipeline, check_tensor_parallel
from zerosim.config.node_checks import check_zeropp
from zerosim.config.parts import PURE
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.zero import CASTS
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong
from zerosim.placement.memories import DEVICE, NVME

if TYPE_CHECKING:
    from zerosim.config.run import RunConfig


def check_together(config: RunConfig) -> None:
    """What several parts have to agree on. Raises: InputError."""
    model, mesh, world = config.model, config.mesh, config.world
    for name, plain in (("recompute", "none"), ("attention", "eager")):
        value = getattr(config.memory, name)
        if not model.has_blocks and value != plain:
            raise wrong(name, f" {value!r}: model {model.family} has no blocks; leave it out")
    for name in ("stash_window", "offload_activations"):
        if (value := getattr(config.memory, name)) and world.backend == "cuda":
            raise wrong(name, f" {value}: backend cuda copies in line; leave it out, or plan it", beside="backend")
    if config.memory.offload_activations and not model.has_blocks:
        raise wrong("offload_activations", f": model {model.family} has no blocks; leave it out")
    again = config.memory.again
    if again.every > model.layers and model.has_blocks:
        raise wrong(
            "recompute",
            f" {config.memory.recompute!r}: of {model.layers} layers every K-th runs again; choose at most "
            f"full:{model.layers}",
        )
    if config.parallel.keep_gathered and again.parts & {"layernorm", "fc1"}:
        raise wrong(
            "keep_gathered",
            f": recompute {config.memory.recompute!r} runs norms or linear maps again and drops what was "
            "gathered; leave one out",
        )
    if config.memory.loss == "chunked" and not model.has_blocks:
        raise wrong(
            "loss", f" 'chunked': model {model.family} has no head of its own; choose in-place, or leave it out"
        )
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
            f" {mesh.ranks}: {world.ranks_per_process} in each process do not make as many; choose a multiple "
            f"of {world.ranks_per_process}, or leave ranks out",
        )
    if (text := config.data.sample) is not None and max(text.encode()) >= model.vocab:
        raise wrong("sample", f" {text!r} holds byte {max(text.encode())}: vocab {model.vocab} is too small, use 256")


def _check_compression(config: RunConfig) -> None:
    """What a compression asks of formats, stage, optimizer and mesh. Raises: InputError."""
    name, kept, optim = config.reduction.compress, config.precision.grad_dtype, config.optim
    if name == "none":
        return
    if name in CASTS and dtype(kept).itemsize <= dtype(name).itemsize:
        raise wrong("compress", f" {name!r}: gradients are {kept}, which is no wider; choose grad_dtype fp32")
    if name in CASTS:
        return
    if dtype(kept).is_half:
        raise wrong("compress", f" {name!r}: works on fp32 gradients, these are {kept}; choose grad_dtype fp32")
    if config.mesh.tp > 1:
        why = "copies of a weight would choose and round apart"
        raise wrong("compress", f" {name!r}: not with tp {config.mesh.tp}, {why}; leave one of them out", beside="tp")
    if name in ("powersgd", "onebit-adam") and config.parallel.zero_stage:
        why = "whole matrices" if name == "powersgd" else "all of the momentum on every rank"
        raise wrong("compress", f" {name!r}: wants {why}; choose stage 0, or top-k or int8")
    if name == "dgc" and (optim.optimizer != "sgd" or not optim.momentum or optim.nesterov):
        raise wrong("compress", " 'dgc': corrects SGD's momentum; choose optimizer sgd with a momentum, such as 0.9")
    if name == "onebit-adam" and (optim.optimizer != "adam" or optim.clip_norm is not None):
        raise wrong("compress", " 'onebit-adam': is Adam, and clips no momentum; choose optimizer adam, no clip_norm")
    if name == "dgc" and config.parallel.zero_stage > 1 and config.data.accumulate > 1 and config.grads.sync:
        raise wrong(
            "compress", " 'dgc': its momentum is of a step, not of a micro-batch; choose grad_sync off, or stage 1"
        )
    if name == "dgc" and optim.momentum_form != "torch":
        raise wrong("momentum_form", f" {optim.momentum_form!r}: DGC's is torch's; leave it out")
    if name not in ("int8", "int4"):
        for field, is_set in (
            ("loss_scale", config.precision.loss_scale is not None),
            ("skip_nonfinite", config.precision.skip_nonfinite),
        ):
            if is_set:
                why = "what was not sent is kept for later steps, and must stay finite and in one scale"
                raise wrong("compress", f" {name!r}: not with {field}: {why}; choose fp32 or bf16", beside=field)


def _check_tuning(config: RunConfig) -> None:
    """What adapters and a quantized base ask of the model. Raises: InputError."""
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
    """What tiles ask of the model's widths and of everything that treats a weight as a matrix. Raises: InputError."""
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
    narrow = model.hidden // model.heads * model.kv_heads
    for name, width in (("hidden", model.hidden), ("keys and values", narrow), ("ffn", model.ffn)):
        if width % tiles:
            raise refuse(f"{name} {width} does not divide into {tiles} tiles; choose a divisor of {width}")


def _check_optimizer(config: RunConfig) -> None:
    """What an optimizer asks of the partition, the mesh and the precision. Raises: InputError."""
    tp, name = config.mesh.tp, config.optim.optimizer
    cut = OPTIMIZERS[name].cut
    if cut == "matrices" and config.parallel.partition == "slices":
        raise wrong("partition", f" 'slices': {name} wants whole matrices; choose owner, or leave it out")
    if cut in ("sums", "matrices") and tp > 1:
        raise wrong("tp", f" {tp}: {name} wants whole matrices, which tensor parallelism cuts; choose tp 1")
    if OPTIMIZERS[name].estimates_every and tp > 1:
        raise wrong("tp", f" {tp}: {name} draws labels from logits, which tensor parallelism cuts; choose tp 1")
    if config.precision.is_pure and cut != "elements":
        raise wrong("precision", f" {PURE!r}: of element-wise optimizers; {name} wants fp32 masters")


def _check_offload(config: RunConfig) -> None:
    """What offloading asks of stage, optimizer, formats and backend. Raises: InputError."""
    offload, stage, optim = config.offload, config.parallel.zero_stage, config.optim
    if (late := config.grads.late) and offload.memory_of("optimizer") == DEVICE:
        where = f"offload {offload.where!r} leaves the step to the device" if offload.is_on else "the device steps"
        raise wrong("delayed_update", f" {late}: {where}, and nothing is late; choose offload optimizer=host")
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
        raise refuse("backend cuda has no kernels on the host; choose backend numpy, or plan it")
    if config.parallel.partition == "owner" and offload.memory_of("optimizer") == NVME:
        raise refuse("states of whole units are no tiles; choose partition slices, or optimizer=host")
    if offload.memory_of("optimizer") == DEVICE:
        if not config.precision.has_masters and offload.memory_of("params") != DEVICE:
            kind = config.precision.param_dtype
            raise refuse(f"the device steps {kind} parameters where they are; offload optimizer too, or choose bf16")
        return
    if OPTIMIZERS[optim.optimizer].cut != "elements" or OPTIMIZERS[optim.optimizer].estimates_every:
        raise refuse(f"the CPU steps element by element, and {optim.optimizer} does not; choose adam, adamw or lion")
    if config.precision.is_pure:
        raise refuse(f"{config.precision.param_dtype} has no masters to step on the CPU; choose precision bf16")
    if config.precision.param_dtype == "fp64":
        raise refuse("masters on the CPU are fp32, and fp64 is more; choose precision fp32, bf16 or fp16")
    if config.reduction.is_encoded:
        raise refuse(f"compress {config.reduction.compress!r} keeps what it cut off on the device; leave one out")
    if offload.memory_of("grads") == NVME and config.grads.lasts:
        raise wrong("persistent_grads", f": gradients on NVMe ({offload.where}) have no such buffer; leave it out")
