"""Tables of named things: models by family with their counted parameters, devices, nodes, recipes; what fits where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import RenderableType

from zerosim.analysis.expect.closed_forms import active_of
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig, plan_config
from zerosim.config.known import PAPERS, by_family
from zerosim.config.presets import hardware, nodes, recipes
from zerosim.config.presets.models import FAMILIES, ModelPreset
from zerosim.device.device import Device
from zerosim.errors import InputError
from zerosim.placement.families import DECODERS
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.verdict import Limit
from zerosim.train.build_model import build_model
from zerosim.train.plan import peak_of
from zerosim.units import format_bytes

TUNED = (
    "smollm2-360m", "llama3.2-1b", "qwen3-4b", "mistral-7b", "llama3.1-8b", "gemma2-9b", "phi-4", "gemma3-27b",
    "qwen2.5-32b", "llama3.1-70b", "llama3.1-405b",
)  # fmt: skip
"""What `zerosim zoo fine-tuning` shows unless it is asked for others."""
_LORA: Mapping[str, Any] = {"lora_rank": 16, "lora_target": "all-linear"}
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "all of it": {},
        "LoRA": _LORA,
        "QLoRA": {**_LORA, "base": "nf4"},
        "all of it, 8 GPUs": {"ranks": 8},
        "LoRA, 8 GPUs": {"ranks": 8, **_LORA},
    }
)
"""The trained parts, by their usual names."""


def zoo_report(rooms: Sequence[str], word: str = "") -> Stack:
    """Return the tables of `rooms`: models, gpus, nodes, recipes. `word`: only models whose name or family has it."""
    tables: dict[str, Callable[[], RenderableType]] = {
        "models": lambda: models_table(word),
        "gpus": gpus_table,
        "nodes": nodes_table,
        "recipes": recipes_list,
        "fine-tuning": lambda: fine_tuning_table(word),
    }
    return Stack(*(tables[room]() for room in rooms))


def found(word: str) -> Mapping[str, Sequence[ModelPreset]]:
    """Return the models whose name or family has the word, by family. Raises: InputError if none has."""
    word, groups = word.lower(), dict[str, Sequence[ModelPreset]]()
    for title, presets in by_family().items():
        if some := [preset for preset in presets if word in preset.name or word in title.lower()]:
            groups[title] = some
    if not groups:
        raise InputError(f"{word!r}: no model's name or family has it; zerosim zoo models lists them")
    return groups


def models_table(word: str = "") -> RenderableType:
    """Return every preset with its sizes, its parameters, counted on its layout, and the smallest GPU for LoRA."""
    device = Device(0, make_backend("meta"))
    sizes = {
        "layers": "layers", "hidden": "hidden", "heads": "heads", "kv": "kv_heads", "ffn": "ffn",
        "context": "positions", "vocab": "vocab",
    }  # fmt: skip
    columns = *sizes, "parameters", "active", "published"
    grid = Grid("model", *(right(name) for name in columns), "LoRA on one")
    for title, presets in found(word).items():
        grid.add(title, *(None for _ in columns), None, style="bold")
        for preset in presets:
            config = RunConfig(model=preset.name)
            numel = build_model(config, device).num_parameters
            active = active_of(config.model) if config.model.has_experts else ""
            is_released = preset.published_parameters is not None or title not in PAPERS
            gpu = _tuned(preset, METHODS["LoRA"])[1] if is_released else ""
            grid.add(
                preset.name,
                *(f"{preset.sizes[name]:,}" for name in sizes.values()),
                numel,
                active,
                preset.published,
                gpu,
            )
    note = "active: the parameters that work for a token, where a router chooses experts. LoRA on one: the "
    note += "smallest GPU for it, of released models; zerosim zoo fine-tuning has the bytes, and other "
    note += "ways. Or a Hugging Face config.json, or a family with sizes of your own: "
    note += f"{', '.join(FAMILIES)}. Sources: --json -."
    dropped = *sizes, "published", "active"
    fewer = (grid.without(*dropped[:count]) for count in range(len(sizes), len(dropped) + 1))
    return titled("Models", Adaptive(grid, *fewer), note)


def gpus_table() -> RenderableType:
    """Return every device with the figures that a plan and a clock need."""
    grid = Grid("gpu", *(right(name) for name in ("memory", "peak, 16 bit", "formats", "memory/s", "links/s, one way")))
    for device in hardware.presets():
        peak = f"{device.peak_flops / 1e12:,.5g} TFLOP/s"
        links = format_bytes(device.link_bytes_per_s)
        links += f" (pair {format_bytes(device.pair_bytes_per_s)})" if device.pair_bytes_per_s else ""
        speeds = format_bytes(device.hbm_bytes_per_s), links
        grid.add(device.name, format_bytes(device.memory_bytes), peak, ", ".join(device.all_formats), *speeds)
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


def fine_tuning_table(word: str = "") -> RenderableType:
    """Return what each GPU needs to fine-tune a model, and the smallest GPU that has it; each figure was counted in a
    plan."""
    grid = Grid("model", *(name for method in METHODS for name in (right(method), "smallest GPU")))
    narrow = Grid("model", "trained", right("needs"), "smallest GPU")
    for preset in _asked(word):
        cells: list[str] = []
        for method, how in METHODS.items():
            cells += _tuned(preset, how)
            narrow.add(preset.name if len(cells) == 2 else "", method, *cells[-2:])
        grid.add(preset.name, *cells)
    note = (
        "What each GPU holds: one row of 2,048 tokens (or the model's most), bf16, Adam, flash attention, --recompute "
        "full, --loss chunked, on 8 GPUs --stage 3, on one --stage 0. LoRA and QLoRA have adapters of rank 16 on all "
        "linear maps. The smallest GPU also has room for CUDA and its libraries. Other models: zerosim zoo fine-tuning "
        "qwen."
    )
    note += " T5 has eager attention." if any(map(_is_second, _asked(word))) else ""
    return titled("Fine-tuning", Adaptive(grid, narrow), note)


def _asked(word: str) -> Iterator[ModelPreset]:
    for presets in found(word).values():
        yield from (preset for preset in presets if word or preset.name in TUNED)


def _is_second(preset: ModelPreset) -> bool:
    return preset.family in DECODERS and DECODERS[preset.family].second is not None


def _tuned(preset: ModelPreset, how: Mapping[str, Any]) -> tuple[str, str]:
    """Return the bytes of the fullest GPU, and the smallest GPU that has them."""
    attention = "eager" if _is_second(preset) else "flash"
    config = plan_config(
        model=preset.name, stage=3 if "ranks" in how else 0, micro_batch=1, recompute="full", attention=attention,
        seq=min(2048, int(preset.sizes["positions"])), loss="chunked", recipe="usual", **{"ranks": 1, **how},
    )  # fmt: skip
    peak = peak_of(config)
    devices = sorted((one for one in hardware.presets() if "bf16" in one.formats), key=lambda one: one.memory_bytes)
    fitting = (d for d in devices if peak + Limit(d.name, d.memory_bytes, d).reserve(config) <= d.memory_bytes)
    return format_bytes(peak), next((device.name for device in fitting), "none")
