"""Values for the letters of a run's closed forms (`formulas/letters.py`): numbers of its configuration and layout.

What one pipeline stage's ranks hold, of the layout alone: no count of a run is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType

from zerosim.analysis import forms, formulas
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.letters import COUNTS
from zerosim.analysis.shares import Placed, Share, itemsizes, share_of, shared_grads
from zerosim.config import RunConfig
from zerosim.dtypes import compute_dtype, dtype
from zerosim.parallel.pipeline import Pipeline, schedule_of
from zerosim.placement.spec import is_block, unit_of
from zerosim.train.result import RunResult

PART_OF_LEAF: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("ln_1", "ln_2", "input_layernorm", "post_attention_layernorm"), "layernorm"),
        **dict.fromkeys(("attn.c_proj", "self_attn.o_proj"), "attn_proj"),
        **dict.fromkeys(("mlp.c_fc", "mlp.gate_up_proj"), "fc1"),
    }
)
"""Which part of a block that may run again (`config/recompute.py`) a leaf module is."""


def letters_of(placed: Placed, stage: int = 0, *, padded: bool = False) -> dict[str, int]:
    """Values for the letters on the ranks of a pipeline stage, in elements with their padding or without."""
    share = share_of(placed, stage)
    return sizes(placed.config) | _place(placed.config, share) | _of_weights(placed, share, padded=padded)


def shown(form: Form, held: Mapping[str, int]) -> Form:
    """The elements of a form in the letters that are printed: what is 0 is gone, and counts are numbers."""
    return form.elements.where({x: value for x, value in held.items() if value == 0 or x in COUNTS})


def passes_of(result: RunResult, step: int) -> int:
    """How often forward and backward ran in a step: twice where an estimate of curvature followed it."""
    return 2 if result.steps[step].estimated else 1


def exchanged(placed: Placed, stage: int = 0) -> list[int]:
    """Numbers in each all-reduce of an optimizer's sums, over the flat buffers of a pipeline stage that are sliced."""
    config, flats = placed.config, placed.layout.flats
    if not forms.is_sliced(config):
        return []
    shapes = [[weight.shape for weight in flats[name].weights] for name in placed.layout.stages[stage]]
    return [numel for of_flat in shapes for numel in formulas.exchanged(config.optim.optimizer, of_flat)]


def sizes(config: RunConfig) -> dict[str, int]:
    """What the configuration says."""
    model, tokens = config.model, config.data.micro_batch * config.model.seq
    of_blocks = {"h": model.hidden, "f": model.ffn, "a": model.heads} if model.has_blocks else {}
    return {
        **of_blocks,
        "s": model.seq,
        "b": config.data.micro_batch,
        "bs": tokens,
        "bsh": tokens * (model.hidden if model.has_blocks else model.vocab),
        "V": model.vocab,
        "m": config.data.accumulate,
        "t": config.mesh.tp,
        "p": config.mesh.pp,
        "v": config.parallel.num_chunks,
        "N": config.mesh.shards,
        **dict(zip("wg", itemsizes(config), strict=True)),
        **({} if (sent := config.reduction.compress) == "none" else {"q": dtype(sent).itemsize}),
        "c": compute_dtype(dtype(config.precision.stored)).itemsize,
    }


def _place(config: RunConfig, share: Share) -> dict[str, int]:
    """Where the stage is in the pipeline, and how many blocks it holds."""
    return {
        "i": share.stage,
        "first": int(share.stage == 0),
        "last": int(share.stage == config.chunks.last_stage),
        "start": int(share.stage == 0),
        "end": int(share.stage == config.mesh.pp - 1),
        "l": share.layers,
        "r": sum(_is_wrapped(config, unit) for unit in share.units),
    }


def _of_weights(placed: Placed, share: Share, *, padded: bool) -> dict[str, int]:
    """What the weights of the stage are, in elements.

    U is the last unit or, in a pipeline, all that is saved in a step by units that stay gathered for the next use.
    """
    config, gathering, flats = placed.config, placed.config.gathering, placed.layout.flats
    freed = {name for name, numel in share.numels.items() if not gathering.stays(numel)}
    numels = share.whole if padded else share.numels

    def total(names: Iterable[str]) -> int:
        return sum(numels[name] for name in names if name in freed)

    def of_unit(unit: str) -> list[str]:
        """The buffers of a unit's last turn: by module, those of its last leaf."""
        names = [name for name in share.numels if flats[name].unit == unit]
        return [name for name in names if flats[name].module == flats[names[-1]].module]

    last = _used_twice(config, share, placed) if config.mesh.pp > 1 else [share.chunks[-1][-1]]
    last = [unit for unit in last if is_block(unit) or not gathering.keep_root_units]
    sharers = shared_grads((flats[name] for name in share.numels), config.mesh.tp)
    of_all = sharers.pop(config.mesh.tp, 0)
    return {
        "Ψ": sum(numels.values()),
        "VD": total([share.tied]),
        "U": total(name for unit in last for name in of_unit(unit)),
        "R": total(name for name in freed if not is_block(flats[name].unit)),
        "P": sum(numels[name] for name in share.numels if name not in freed),
        "M": total(name for name in share.numels if runs_again(config, flats[name].module)),
        "S": of_all,
        "C": sum(sharers.values()),
        "E": numels.get(share.ends, 0),
        "F": sum(exchanged(placed, share.stage)),
    }


def runs_again(config: RunConfig, module: str) -> bool:
    """Whether backward runs a leaf module's forward a second time, beside its own turn."""
    if config.gathering.gather == "unit":
        return False
    unit = unit_of(module)
    part = PART_OF_LEAF.get(module.removeprefix(f"{unit}."))
    return _is_wrapped(config, unit) or part in config.memory.again.parts


def _is_wrapped(config: RunConfig, unit: str) -> bool:
    """Whether backward runs this unit again whole."""
    return config.model.has_blocks and is_block(unit) and config.memory.again.wraps(int(unit.rpartition(".")[2]))


def live_micro_batches(config: RunConfig) -> Form:
    """Those of the configuration's schedule, with its groups of micro-batches where they are not of p."""
    together = config.micro_batch_group
    return formulas.live_micro_batches(config.parallel.pipeline_schedule, 0 if together == config.mesh.pp else together)


def _used_twice(config: RunConfig, share: Share, placed: Placed) -> list[str]:
    """The unit of each forward whose last unit is used next once more, as the stage's schedule has it."""
    order = schedule_of(config.parallel)
    actions = Pipeline(config.chunks, share.stage, order=order).actions(config.data.accumulate)
    actions = [action for action in actions if share.chunks[action.chunk]]  # the others use none
    by_module, flats, found = config.gathering.by_module, placed.layout.flats, []
    for action, following in pairwise(actions):
        units = share.chunks[action.chunk]
        modules = {flats[name].module for name in share.numels if flats[name].unit in units}
        turns = following.sends < 0 or len(modules) == 1  # or forward begins again where it ended
        if by_module and _is_wrapped(config, units[-1]):
            continue  # its second forward comes first
        if action.sends > 0 and following.gathers and following.chunk == action.chunk and turns:
            found.append(units[-1])
    return found
