"""Multi-token prediction: blocks after the model's own that predict further tokens in training, and what they exclude.

DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-LM's --mtp-num-layers. Layers: `nn/mtp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import Exclusion, Part, option
from zerosim.config.parts import pipeline
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.fp8 import Fp8Config
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong
from zerosim.placement.spec import is_block
from zerosim.placement.stages import number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(Part):
    """Blocks that predict further tokens."""

    group = "model"

    layers: int = option(
        0, "further tokens that training predicts, each by a block of its own after the last one (multi-token "
        "prediction)", flat="mtp_layers", low=0, high=1000, metavar="D",
        words="mtp_num_layers num_nextn_predict_layers",
    )  # fmt: skip
    loss: float = option(
        0.1, "with --mtp-layers: weight of the mean of their losses beside the model's", flat="mtp_loss", low=0,
        metavar="FACTOR", words="mtp_loss_scaling_factor",
    )  # fmt: skip

    @property
    def each(self) -> float:
        """The weight of each further token's loss."""
        return self.loss / self.layers


NO_FURTHER = MtpConfig()
EXCLUSIONS = (Exclusion("mtp_loss", "mtp_layers", needs=True),)


def is_further(model: ModelConfig, unit: str) -> bool:
    """Return whether a unit is a block that predicts a further token: its number follows those of the model's own."""
    return is_block(unit) and not model.is_second and number_of(unit) >= model.layers


def further_blocks(mtp: MtpConfig) -> int:
    """Return how many blocks predict further tokens."""
    return mtp.layers


def cut(layers: int, mesh: MeshConfig, parallel: ParallelConfig, model: ModelConfig, mtp: MtpConfig) -> list[int]:
    """Return how many of so many layers are in each chunk; the last one has blocks of further tokens, too. Raises:
    InputError."""
    if not mtp.layers:
        return pipeline.cut(layers, mesh, parallel, model)
    *before, last = pipeline.cut(model.layers, mesh, parallel, model)
    return [*before, last + mtp.layers]


def rules(
    mtp: MtpConfig,
    model: ModelConfig,
    mesh: MeshConfig,
    parallel: ParallelConfig,
    gathering: Gathering,
    memory: MemoryConfig,
    tuning: TuningConfig,
    optim: OptimConfig,
    data: DataConfig,
    fp8: Fp8Config,
) -> Iterator[InputError]:
    """Yield what multi-token prediction is not modelled with."""
    if not mtp.layers:
        return

    def error(why: str) -> InputError:
        return wrong("mtp_layers", f" {mtp.layers}: {why}")

    row = model.decoder if model.has_blocks else None
    if row is None or row.second or row.masked or row.positions != "rotary" or not row.last_norm:
        yield error(f"needs a decoder with rotary positions and a last norm; choose model llama, not {model.family}")
        return
    if mtp.layers >= model.seq:
        yield error(f"a row of {model.seq} tokens has no token so far ahead; choose {model.seq - 1} or fewer")
    kind = parallel.pipeline_schedule
    if mesh.pp > 1 and kind not in ("1f1b", "interleaved"):
        yield error(f"is not modelled with pipeline {kind}; choose 1f1b or interleaved")
    if mesh.pp > 1 and parallel.partition == "owner" and parallel.zero_stage:
        yield error("the table is on two pipeline stages, and has an owner on each of them; choose partition slices")
    if gathering.by_module:
        yield error("is not modelled with gather 'module'; choose unit")
    if tuning.is_on:
        yield error("is not modelled beside frozen weights; train all weights")
    if OPTIMIZERS[optim.optimizer].estimates_every:
        yield error(f"is not modelled with optimizer {optim.optimizer}; choose adam")
    for name in ("quantized_weights", "hierarchical_gather"):
        if getattr(gathering, name):
            yield error(f"is not modelled with {name}; leave {name} out")
    if mesh.secondary_shard:
        yield error("is not modelled with secondary_shard; leave it out")
    if data.sample is not None:
        yield error("generation with further tokens is not modelled; leave sample out")
    if fp8.kind != "none":
        yield error("is not modelled in 8 bits; leave fp8 out")
    if data.documents is not None:
        yield error("is not modelled with documents in a row; leave documents out")
    if memory.offload_activations or memory.stash_window:
        yield error("has values beside its blocks' inputs, which stay on the device; leave offload_activations out")
