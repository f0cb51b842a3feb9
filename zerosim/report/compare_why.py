"""Why the weights of two runs on the same batches are bit-identical, or may differ."""

from __future__ import annotations

from collections.abc import Collection

from zerosim.analysis.capabilities.delayed import lags
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.report.names import OPTIMIZERS

IN_RANK_ORDER = ("direct", "pairs")
"""Algorithms whose sums do not depend on which rank owns a slice."""
SAME = "They add the same numbers in the same order: ZeRO changes where states are, not what is computed."
CONTRADICTION = "They should be bit-identical. Please report this as a bug, with the command line."
RING = "A ring rounds at every hop, and starts each chunk at another rank. With --collective direct the order is fixed."
RECIPES = "Recipes store and send gradients in formats of their own. With --recipe paper all follow the same rules."
LATE = "With --delayed-update a CPU's update is late by one step. A run that offloads nothing is never late."
REPLICAS = "Stage 0 adds over all ranks at once, the others within a replica and then over replicas"
SUMS = " adds up squares over rows, columns and tensors: stage 0 over whole ones, the others over slices and then ranks"
ORDER = "Stages 2 and 3 add a gradient over ranks first and then over microbatches, stages 0 and 1 the other way round"
ROUNDED = ": the same numbers are added in another order, and rounded differently."


def why_apart(a: RunConfig, b: RunConfig, stages: Collection[int]) -> str | None:
    """Return why the weights of two ZeRO `stages`, or of two memories, may differ; None if they may not."""
    if a.world.algorithm not in IN_RANK_ORDER:
        return RING if a.world.algorithm == "ring" else ""
    if a.parallel.recipe != b.parallel.recipe:
        return RECIPES
    if lags(a) != lags(b):
        return LATE
    optimizer = a.optim.optimizer
    is_cut = any(is_sliced(one.parallel) and one.mesh.shards > 1 for one in (a, b))
    has_sums, has_replicas = is_cut and PRESETS[optimizer].cut == "sums", b.mesh.dp_replicate > 1
    if a.data.accumulate > 1 and stages and min(stages) < 2 <= max(stages):
        agreeing = "stages 1, 2 and 3" if has_sums or has_replicas else "all stages"
        return f"{ORDER}{ROUNDED} With --accumulate 1 {agreeing} agree."
    if 0 in stages and (has_sums or has_replicas):
        return (REPLICAS if has_replicas else f"{OPTIMIZERS[optimizer]}{SUMS}") + ROUNDED
    return None
