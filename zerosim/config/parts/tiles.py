"""Tiles of linear maps, an option of `gathering.py`, and of the feed-forward over tokens, one of `memory.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong


def rules(
    gathering: Gathering, model: ModelConfig, mesh: MeshConfig, tuning: TuningConfig, optim: OptimConfig
) -> Iterator[InputError]:
    """Yield widths that tiles do not divide, and options that treat a weight as a matrix."""
    tiles = gathering.tiles
    if tiles == 1:
        return

    def refuse(why: str) -> InputError:
        return wrong("tiles", f" {tiles}: {why}")

    if not gathering.by_module:
        yield refuse("a tile is gathered as a module; choose gather module")
    if not model.has_blocks:
        yield refuse(f"model {model.family} has no blocks; leave it out")
        return
    if mesh.tp > 1:
        yield refuse(f"tensor parallelism over {mesh.tp} ranks cuts the same maps; leave one of them out")
    if tuning.is_on:
        yield refuse("LoRA and frozen weights need whole maps; leave it out")
    if OPTIMIZERS[optim.optimizer].cut not in ("elements", "blocks"):
        yield refuse(f"{optim.optimizer} computes with whole matrices; choose adam, or leave tiles out")
    wide, narrow = model.width("heads"), model.width("kv_heads")
    inner = [] if wide == model.hidden else [("queries", wide)]
    if model.is_latent:
        q, kv, _, turned, _ = model.latents
        inner += [("the latent of queries", q), ("the latent of keys and values", kv + turned)]
        narrow = model.width("pairs")
    for name, width in (("hidden", model.hidden), *inner, ("keys and values", narrow), ("ffn", model.ffn)):
        if width % tiles:
            yield refuse(f"{name} {width} does not divide into {tiles} tiles; choose a divisor of {width}")


def rules_of_rows(
    memory: MemoryConfig, gathering: Gathering, model: ModelConfig, tuning: TuningConfig, parallel: ParallelConfig
) -> Iterator[InputError]:
    """Yield what a feed-forward in tiles of tokens does not go with."""
    if not memory.mlp_tile:
        return

    def refuse(why: str) -> InputError:
        return wrong("mlp_tile", f" {memory.mlp_tile}: {why}")

    if not model.has_blocks or model.is_second:
        yield refuse(f"model {model.family} has no decoder alone whose blocks have tiles; leave it out")
        return
    if gathering.by_module:
        yield refuse("a module would be gathered for each tile; choose gather unit")
    if tuning.is_on:
        yield refuse("LoRA and frozen weights need all tokens at once; leave it out")
    if again := memory.again.parts & {"fc1", "mlp_act"}:
        yield refuse(f"a tile recomputes {' and '.join(sorted(again))} already; choose another recompute")
    if parallel.pipeline is not None and parallel.pipeline.startswith("zb"):
        yield refuse(f"{parallel.pipeline} would store every tile until its weights' gradients; choose 1f1b")


WORDS = (("tiled_mlp*", "--mlp-tile TOKENS, such as the model's width"),)
