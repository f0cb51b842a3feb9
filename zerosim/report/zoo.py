"""Tables of named things: models with their counted parameters, devices, nodes, recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import RenderableType

from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets import hardware, models, nodes, recipes
from zerosim.device.device import Device
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.verdict import Limit
from zerosim.train.build import build_model
from zerosim.train.plan import peak_of
from zerosim.units import format_bytes

TUNED = ("llama2-7b", "llama3-8b", "llama2-13b", "llama2-70b", "llama3.1-405b")
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "all of it": {},
        "LoRA": {"lora_rank": 16, "lora_target": "all-linear"},
        "QLoRA": {"lora_rank": 16, "lora_target": "all-linear", "base": "nf4"},
    }
)
"""The trained parts, by their usual names."""


def zoo_report(rooms: Sequence[str]) -> Stack:
    """Return the tables of `rooms`: models, gpus, nodes, recipes."""
    tables = {"models": models_table, "gpus": gpus_table, "nodes": nodes_table, "recipes": recipes_list}
    tables["fine-tuning"] = fine_tuning_table
    return Stack(*(tables[room]() for room in rooms))


def models_table() -> RenderableType:
    """Return every preset with its sizes and its parameters, counted on its layout."""
    device = Device(0, make_backend("meta"))
    sizes = {
        "layers": "layers", "hidden": "hidden", "heads": "heads", "kv": "kv_heads", "ffn": "ffn", "context": "seq",
        "vocab": "vocab",
    }  # fmt: skip
    grid = Grid("model", *(right(name) for name in (*sizes, "parameters", "published")))
    for preset in map(models.find_model, models.model_names()):
        numel = build_model(RunConfig(model=preset.name), device).num_parameters
        grid.add(preset.name, *(f"{preset.sizes[name]:,}" for name in sizes.values()), numel, preset.published)
    note = "Or gpt, llama, mlp and flat with sizes of your own, or a Hugging Face config.json. Sources: --json -."
    return titled("Models", Adaptive(grid, grid.without(*sizes)), note)


def gpus_table() -> RenderableType:
    """Return every device with the figures that a plan and a clock need."""
    grid = Grid("gpu", *(right(name) for name in ("memory", "peak, 16 bit", "formats", "memory/s", "links/s, one way")))
    for device in hardware.presets():
        peak = f"{device.peak_flops / 1e12:,.5g} TFLOP/s"
        links = format_bytes(device.link_bytes_per_s)
        links += f" (pair {format_bytes(device.pair_bytes_per_s)})" if device.pair_bytes_per_s else ""
        speeds = format_bytes(device.hbm_bytes_per_s), links
        grid.add(device.name, format_bytes(device.memory_bytes), peak, ", ".join(device.formats), *speeds)
    note = "Memory is the drivers' figure, except for the 32 GB V100, where it is the ZeRO paper's. "
    note += "Peaks are dense, with fp32 accumulation. Or a TOML file of your own. Sources: --json -."
    return titled("GPUs", Adaptive(grid, grid.without("formats")), note)


def nodes_table() -> RenderableType:
    """Return every node with its GPUs, and what they share."""
    grid = Grid("node", "gpus", *(right(name) for name in ("NICs/s", "host", "NVMe", "NVMe/s")))
    for node in nodes.nodes():
        gpus = f"{node.gpus} x {node.gpu}" + (", bridged in pairs" if node.bridged else "")
        host = (node.host_bytes, node.nvme_bytes, node.nvme_bytes_per_s)
        sizes = ("" if size is None else format_bytes(size) for size in host)
        grid.add(node.name, gpus, format_bytes(round(node.nic)), *sizes)
    note = "NICs as NCCL counts them, 12 GB/s for each 100 Gb/s. Empty where no source is known. --node-gpus and --nic "
    note += "override --node. Sources: --json -."
    return titled("Nodes", Adaptive(grid), note)


def recipes_list() -> RenderableType:
    """Return every recipe: what it models, its source, and where it only comes close."""
    parts = []
    for recipe in recipes.recipes():
        close = "" if recipe.approximations == "none" else f" {recipe.approximations}"
        parts.append(prose(f"{recipe.name}: {recipe.models}{close} Source: {recipe.source}."))
    return titled("Recipes", Stack(*parts))


def fine_tuning_table() -> RenderableType:
    """Return what one GPU needs to fine-tune a model, and the smallest GPU that has it; each figure was counted in a
    plan."""
    grid = Grid("model", *(name for method in METHODS for name in (right(method), "smallest GPU")))
    narrow = Grid("model", "trained", right("needs"), "smallest GPU")
    devices = [device for device in hardware.presets() if "bf16" in device.formats]
    devices.sort(key=lambda device: device.memory_bytes)
    for name in TUNED:
        cells: list[str] = []
        for method, how in METHODS.items():
            config = plan_config(
                model=name, ranks=1, stage=3, micro_batch=1, seq=2048, recompute="full", attention="flash",
                loss="chunked", recipe="usual", **how,
            )  # fmt: skip
            peak = peak_of(config)
            fitting = (d for d in devices if peak + Limit(d.name, d.memory_bytes, d).reserve(config) <= d.memory_bytes)
            cells += [format_bytes(peak), next((device.name for device in fitting), "none")]
            narrow.add(name if len(cells) == 2 else "", method, *cells[-2:])
        grid.add(name, *cells)
    note = "One row of 2,048 tokens on one GPU, bf16, Adam, flash attention, --recompute full, --loss chunked. LoRA "
    note += "and QLoRA have adapters of rank 16 on all linear maps. The smallest GPU also has room for CUDA and its "
    note += "libraries."
    return titled("Fine-tuning", Adaptive(grid, narrow), note)
