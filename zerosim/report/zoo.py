"""Tables of what has a name: models with their counted parameters, devices, recipes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.presets import hardware, models, recipes
from zerosim.device.device import Device
from zerosim.report.look import Adaptive, Look, Stack, prose, titled
from zerosim.train.build import build_model
from zerosim.units import format_bytes


def zoo_report(rooms: Sequence[str]) -> Stack:
    """The tables of `rooms`: models, gpus, recipes."""
    tables = {"models": models_table, "gpus": gpus_table, "recipes": recipes_list}
    return Stack(*(tables[room]() for room in rooms))


def models_table() -> RenderableType:
    """Every preset with its sizes and its parameters, counted on its layout."""
    presets = [models.find_model(name) for name in models.model_names()]
    device = Device(0, make_backend("meta"))
    counts = {preset.name: build_model(RunConfig(model=preset.name), device).num_parameters for preset in presets}

    def build(look: Look, sizes: bool) -> Table:
        table = look.table()
        table.add_column("model")
        for name in ("layers", "hidden", "heads", "kv", "ffn", "context", "vocab") if sizes else ():
            table.add_column(name, justify="right")
        table.add_column("parameters", justify="right")
        table.add_column("published", justify="right")
        for preset in presets:
            given = [preset.sizes[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "seq", "vocab")]
            shown = [f"{value:,}" for value in given] if sizes else []
            table.add_row(preset.name, *shown, f"{counts[preset.name]:,}", preset.published)
        return table

    note = "Or gpt, llama, mlp and flat with sizes of your own, or a Hugging Face config.json. Sources: --json -."
    return titled("Models", Adaptive(lambda look: build(look, True), lambda look: build(look, False)), note)


def gpus_table() -> RenderableType:
    """Every device with the figures that a plan and a clock need."""

    def build(look: Look) -> Table:
        table = look.table()
        table.add_column("gpu")
        for name in ("memory", "peak, 16 bit", "memory/s", "links/s, one way"):
            table.add_column(name, justify="right")
        for device in hardware.presets():
            table.add_row(
                device.name,
                format_bytes(device.memory_bytes),
                f"{device.peak_flops / 1e12:,.5g} TFLOP/s",
                format_bytes(device.hbm_bytes_per_s),
                format_bytes(device.link_bytes_per_s),
            )
        return table

    return titled("GPUs", Adaptive(build), "Or a TOML file of your own. Sources: --json -.")


def recipes_list() -> RenderableType:
    """Every recipe: what it models, from where, and where it comes close only."""
    parts = []
    for recipe in recipes.recipes():
        close = "" if recipe.approximations == "none" else f" {recipe.approximations}"
        parts.append(prose(f"{recipe.name}: {recipe.models}{close} Source: {recipe.source}."))
    return titled("Recipes", Stack(*parts))
