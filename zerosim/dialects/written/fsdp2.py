"""A script in plain PyTorch: fully_shard, and only those parts of it that a configuration needs.

It runs under torchrun. TINY=1 makes it a trial: small sizes and two steps, on gloo without a GPU. SHARD, REPLICATE and
TP then say how many processes each axis has.
"""

from __future__ import annotations

from typing import Any

from zerosim.config import RunConfig
from zerosim.dialects.written.fsdp2_model import every_block, model, transformers, words
from zerosim.dialects.written.torchtitan_toml import OFFLOADED, shards_of
from zerosim.errors import wrong

_OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "radam": "RAdam",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
_CONVERTS = {"torchao": "torchao", "te": "Transformer Engine", "deepseek": "DeepGEMM"}
_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def written(config: RunConfig) -> str:
    """Return the script. Raises: InputError for a ZeRO stage or an axis that it cannot have."""
    _check(config)
    parts = (_top(config), model(config), _sharding(config), _training(config))
    return "\n".join(line for part in parts for line in part) + "\n"


def _check(config: RunConfig) -> None:
    stage, tp = config.value("stage"), config.value("tp")
    if stage < 2:
        raise wrong(
            "stage", f" {stage}: fully_shard is ZeRO 3, or 2 with reshard_after_forward=False; choose one of them"
        )
    for name in ("pp", "cp", "ep"):
        if (size := config.value(name)) > 1:
            raise wrong(name, f" {size}: the script has dp_replicate, dp_shard and tp alone; choose --write torchtitan")
    model_ = config.model
    if not model_.has_blocks or model_.is_masked or model_.is_second:
        raise wrong(
            "model", f" {config.value('model')!r}: the script trains a causal language model; choose gpt2 or llama3-8b"
        )
    if tp > 1 and (not model_.decoder.block.is_gated or config.value("experts") or model_.is_latent):
        raise wrong("tp", f" {tp}: the script cuts a Llama's maps, and {config.value('model')} has others; choose tp 1")
    if config.value("precision") in ("fp16", "fp64"):
        raise wrong("precision", f" {config.value('precision')!r}: the script has no loss scale; choose bf16 or fp32")


def _top(config: RunConfig) -> list[str]:
    """Return imports, sizes and the mesh."""
    axes = {"REPLICATE": ("dp_replicate", config.value("dp_replicate")), "SHARD": ("dp_shard", shards_of(config))}
    axes |= {"TP": ("tp", config.value("tp"))}
    used = {name: axis for name, axis in axes.items() if axis[1] > 1 or name == "SHARD"}
    is_offloaded = config.value("offload") in OFFLOADED
    policies = [
        name for name, on in (("CPUOffloadPolicy", is_offloaded), ("MixedPrecisionPolicy", _mixed(config))) if on
    ]
    imports = ["import math"] if config.value("schedule") == "cosine" else []
    imports += ["import os", "", "import torch", "import torch.distributed as dist"]
    if _is_torch_loss(config):
        imports.append("import torch.nn.functional as F")
    if every_block(config):
        imports.append("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper")
    imports.append("from torch.distributed.device_mesh import init_device_mesh")
    imports.append(f"from torch.distributed.fsdp import {', '.join([*policies, 'fully_shard'])}")
    if config.value("tp") > 1:
        imports.append(
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
        )
    whole = " x ".join(f"{axis} {size}" for axis, size in used.values())
    numbers = [f"{name} = int(os.environ.get({_quoted(name)}, {size}))" for name, (_, size) in used.items()]
    trial = " ".join(f"{name}=2" for name in used)
    names = ", ".join(_quoted(axis) for axis, _ in used.values())
    comma = "," if len(used) == 1 else ""
    backend = '"cpu:gloo,cuda:nccl"' if is_offloaded else '"nccl"'
    return [
        f"# Plain PyTorch on {config.value('ranks')} ranks, {whole}, for torchrun.",
        f"# A trial on a CPU: TINY=1 {trial} torchrun --nproc-per-node {2 ** len(used)} THIS",
        *_eight_bits(config),
        *imports,
        *transformers(config),
        "",
        'TINY = bool(os.environ.get("TINY"))',
        *numbers,
        f"MICRO, ACCUMULATE = {config.value('micro_batch')}, {config.value('accumulate')}",
        f"SEQ = 16 if TINY else {config.value('seq')}",
        f"STEPS = 2 if TINY else {config.given.get('steps', 1000)}",
        "",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f'dist.init_process_group({backend} if device == "cuda" else "gloo")',
        'if device == "cuda":',
        '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        f"mesh = init_device_mesh(device, ({', '.join(used)}{comma}), mesh_dim_names=({names}{comma}))",
        "",
    ]


def _eight_bits(config: RunConfig) -> list[str]:
    """Return a line about 8-bit products, which plain PyTorch has no module for."""
    fp8 = config.fp8
    if not fp8.is_on:
        return []
    return [f"# --fp8 {fp8.kind}: not in this script. {_CONVERTS[fp8.library]} would convert the blocks."]


def _quoted(text: str) -> str:
    return f'"{text}"'


def _mixed(config: RunConfig) -> bool:
    return bool(config.value("precision") == "bf16")


def _is_torch_loss(config: RunConfig) -> bool:
    return bool(config.value("loss").startswith("torch"))


def _sharding(config: RunConfig) -> list[str]:
    """Return the policy, and fully_shard of each block and of the root."""
    tp, group = config.value("tp"), config.value("secondary_shard")
    named = '"dp_replicate", "dp_shard"' if config.value("dp_replicate") > 1 else '"dp_shard"'
    whole = "mesh" if tp == 1 else f"mesh[{named}]"
    policy = [f"mesh={whole}"]
    if _mixed(config):
        sent = config.value("compress") if config.value("compress") in _DTYPES else config.value("grad_dtype")
        policy.append(f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype={_DTYPES[sent]})")
    if config.value("offload") in OFFLOADED:
        pinned = 'device == "cuda"' if config.value("pin_memory") else "False"
        policy.append(f"offload_policy=CPUOffloadPolicy(pin_memory={pinned})")
    block = root = ""
    if config.value("stage") == 2 or not config.value("reshard_after_forward"):
        block = ", reshard_after_forward=False"
    elif group:
        block = f", reshard_after_forward=min({group}, SHARD)"
    if not block and not config.value("keep_root_units"):
        root = ", reshard_after_forward=True"
    lines = [f"policy = dict({', '.join(policy)})", "for block in blocks:"]
    lines += [f"    fully_shard(block, **policy{block})", f"fully_shard(model, **policy{root})"]
    if (count := config.value("prefetch")) > 1:
        lines.append("for index, block in enumerate(blocks):")
        lines.append(f"    block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + {count}]))")
        lines.append(f"    block.set_modules_to_backward_prefetch(list(blocks[max(index - {count}, 0) : index])[::-1])")
    return lines


def _optimizer(config: RunConfig) -> list[str]:
    """Return the optimizer, with a group for each mesh and for parameters without decay."""
    optim = config.optim
    name = _OPTIMIZERS.get(optim.optimizer, "AdamW")
    given: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.optimizer not in _OPTIMIZERS:
        pass  # AdamW's own betas and epsilon
    elif name in ("Adam", "AdamW", "RAdam"):
        given |= {"betas": tuple(optim.betas), "eps": optim.eps}
    elif name == "SGD":
        given |= {"momentum": config.value("momentum"), "nesterov": config.value("nesterov")}
    else:
        given |= {"eps": optim.eps}
    how = "foreach=True" if config.value("foreach") else "foreach=False"
    if not config.value("foreach") and not config.value("for_loop") and name in ("Adam", "AdamW"):
        how = "fused=True"
    note = [] if name == _OPTIMIZERS.get(optim.optimizer) else [f"# torch.optim has no {optim.optimizer}: AdamW"]
    split = [part for part, on in (("p.device_mesh", config.value("tp") > 1), ("p.ndim > 1", _splits(config))) if on]
    if not split:
        return [*note, f"optimizer = torch.optim.{name}(model.parameters(), {words(given)}, {how})"]
    key = split[0] if len(split) == 1 else f"({', '.join(split)})"
    last = "key" if len(split) == 1 else "key[-1]"
    lines = [
        *note,
        "groups = {}" + "  # a fused or foreach kernel takes tensors of one mesh only" * (config.value("tp") > 1),
    ]
    lines += ["for p in model.parameters():", f"    groups.setdefault({key}, []).append(p)"]
    group = '{"params": group}'
    if _splits(config):
        decay = given.pop("weight_decay")
        group = f'{{"params": group, "weight_decay": {decay!r} if {last} else 0.0}}'
    lines.append(f"groups = [{group} for key, group in groups.items()]")
    return [*lines, f"optimizer = torch.optim.{name}(groups, {words(given)}, {how})"]


def _splits(config: RunConfig) -> bool:
    return bool(config.value("decay") == "matrices" and config.optim.weight_decay > 0)


def _schedule(config: RunConfig) -> list[str]:
    warmup, cosine = config.value("warmup"), config.value("schedule") == "cosine"
    if not warmup and not cosine:
        return []
    rising = f"min(1.0, (step + 1) / {warmup})" if warmup else "1.0"
    if not cosine:
        return [f"schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {rising})"]
    least = config.value("min_lr") / config.optim.lr if config.optim.lr else 0.0
    return [
        "",
        "",
        "def rate(step):",
        f"    fall = min(1.0, max(0, step - {warmup}) / max(1, STEPS - {warmup}))",
        f"    return {rising} * ({least!r} + {1 - least!r} * (1 + math.cos(math.pi * fall)) / 2)",
        "",
        "",
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
    ]


def _training(config: RunConfig) -> list[str]:
    """Return the optimizer and the loop."""
    several, last = config.value("accumulate") > 1, "micro == ACCUMULATE - 1"
    same = (
        " // TP)  # ranks along tp read the same rows"
        if config.value("tp") > 1
        else ")  # each rank reads its own rows"
    )
    loop = [f"torch.manual_seed(dist.get_rank(){same}"]
    loop += ["for step in range(STEPS):", "    for micro in range(ACCUMULATE):"]
    if several and not config.value("grad_sync"):
        loop.append(f"        model.set_requires_gradient_sync({last})")
    elif several and config.value("dp_replicate") > 1 and config.value("replica_reduction") == "step":
        loop.append(f"        model.set_requires_all_reduce({last})")
    if _is_torch_loss(config):
        cast = "" if config.value("loss").startswith("torch-half") else ".float()"
        loop += [
            "        rows = torch.randint(config.vocab_size, (MICRO, SEQ + 1), device=device)  # your batch",
            "        logits = model(input_ids=rows[:, :-1], use_cache=False).logits",
            f"        loss = F.cross_entropy(logits.flatten(0, 1){cast}, rows[:, 1:].flatten())",
        ]
    else:
        loop += [
            "        rows = torch.randint(config.vocab_size, (MICRO, SEQ), device=device)  # your batch",
            "        loss = model(input_ids=rows, labels=rows, use_cache=False).loss",
        ]
    loop.append("        (loss / ACCUMULATE).backward()")
    clip = config.value("clip_norm")
    if clip and config.value("tp") > 1:
        loop.append("    norm = torch.stack([p.grad.norm().full_tensor() for p in model.parameters()]).norm()")
        loop.append(f"    torch.nn.utils.clip_grads_with_norm_(model.parameters(), {clip!r}, norm, foreach=False)")
    elif clip:
        loop.append(f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {clip!r})")
    loop.append("    optimizer.step()")
    if schedule := _schedule(config):
        loop.append("    schedule.step()")
    loop += ["    optimizer.zero_grad()", "    if dist.get_rank() == 0:", '        print("step", step, loss.item())']
    return [*_optimizer(config), *schedule, *loop, "dist.destroy_process_group()"]
