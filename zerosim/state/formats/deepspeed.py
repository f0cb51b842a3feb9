"""Read DeepSpeed's checkpoints of ZeRO 0 to 3, of any number of data ranks: a folder, or one with `latest` in it.

    latest                                                  the tag: global_step500
    TAG/mp_rank_00_model_states.pt                          ZeRO 0 to 2: weights, shapes, frozen ones, tied names
    TAG/zero_pp_rank_0_mp_rank_00_model_states.pt           ZeRO 3: the same, without weights
    TAG/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    each rank's fp32 weights and states, flat

Several parameter groups, sub-groups, parameter_alignment, round_robin_gradients and fp16 are read. Checkpoints of
tensor or pipeline parallelism and of experts are refused.

Source: DeepSpeed 0.19.8, deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from zerosim.config.inputs import read_file
from zerosim.errors import InputError, printable
from zerosim.state.formats.archive import Stored, read_archive
from zerosim.state.formats.flat import of_group, of_ranks, of_slices
from zerosim.state.formats.numbered import numbered
from zerosim.state.formats.plain import Object
from zerosim.state.formats.sorting import step_of
from zerosim.state.formats.whole import Tensor, WholeState, described, joined

OPTIM_FILES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(r"(layer_.*expert_\d+|expp_rank_\d+).*\.pt")
_KNOWN = """module buffer_names param_shapes frozen_param_shapes shared_params frozen_param_fragments skipped_steps
global_steps ds_version"""


class ModelFile(NamedTuple):
    """What a model_states file says of the weights: shapes by group, frozen ones, tied names."""

    path: str
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of trained weights, by parameter group or sub-group."""
        groups = self.get("param_shapes")
        return [shapes_of(group, self.path) for group in groups] if isinstance(groups, list) else []

    @property
    def frozen(self) -> dict[str, tuple[int, ...]]:
        return shapes_of(self.get("frozen_param_shapes") or {}, self.path)

    @property
    def shared(self) -> dict[str, str]:
        """Tied names, and the name of which the weight is stored."""
        pairs = self.get("shared_params")
        pairs = pairs.items() if isinstance(pairs, dict) else pairs if isinstance(pairs, list) else ()
        return {str(name): str(first) for name, first in pairs}

    @property
    def module(self) -> dict[str, Stored]:
        """The model's own copies; at stage 3 they have no elements."""
        module = self.get("module")
        found = module if isinstance(module, dict) else {}
        return {str(name): one for name, one in found.items() if isinstance(one, Stored)}

    @property
    def others(self) -> dict[str, str]:
        """What else is in the file, in words."""
        told = {
            name: described(one) for name, one in self.values.items() if name not in _KNOWN.split() and one is not None
        }
        buffers = [name for name in self.get("buffer_names") or () if name in self.module]
        told |= {name: f"a buffer, {self.module[name].dtype} {self.module[name].shape}" for name in buffers}
        return told


def shapes_of(values: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return shapes by name. Raises: InputError for anything else."""
    found: dict[Any, Any] = values if isinstance(values, dict) else {"": None}
    for name, shape in found.items():
        if not isinstance(shape, tuple | list) or any(type(n) is not int or n < 0 for n in shape):
            raise InputError(f"{where}: {printable(str(name)[:200])!r} has no shape: expected DeepSpeed's param_shapes")
    return {str(name): tuple(shape) for name, shape in found.items()}


def tagged(folder: str, latest: str) -> str:
    """Return the folder that a file `latest` names, or the folder itself without such a file.

    Raises: InputError for a tag that leaves the folder or is not there.
    """
    path = os.path.join(folder, latest)
    if not os.path.isfile(path):
        return folder
    tag = read_file(path, "", 4096).decode("utf-8", "replace").strip()
    inner = os.path.join(folder, tag)
    if os.path.basename(tag) != tag or tag in ("", ".", "..") or not os.path.isdir(inner):
        raise InputError(
            f"{path} names {printable(tag[:100])!r}, and {folder} has no such folder: pass one that is there"
        )
    return inner


def read_model_file(path: str) -> ModelFile:
    """Return a model_states file. Raises: InputError if it is none."""
    values = read_archive(path)
    if not isinstance(values, dict) or "module" not in values:
        raise InputError(f"{path} has no module: expected a model_states file of DeepSpeed")
    return ModelFile(path, {str(key): one for key, one in values.items()})


def files_of(folder: str, pattern: re.Pattern[str]) -> dict[int, str]:
    """Return a folder's files by data rank. Raises: InputError for other parallelism, and for a missing rank."""
    found, mp = dict[int, str](), 0
    for name in sorted(os.listdir(folder)):
        if match := pattern.fullmatch(name):
            mp = max(mp, int(match[2]))
            found.setdefault(int(match[1] or 0), os.path.join(folder, name))
        elif _EXPERT.fullmatch(name):
            raise InputError(f"{folder} has experts of their own files ({name}): consolidate it with DeepSpeed first")
    if mp:
        raise InputError(
            f"{folder} is of {mp + 1} tensor- or pipeline-parallel ranks, and zerosim reads those of data parallelism: "
            "convert it with deepspeed.checkpoint.ds_to_universal"
        )
    if missing := set(range(max(found, default=-1) + 1)) - found.keys():
        raise InputError(f"{folder} lacks the file of rank {min(missing)}: get the files of all ranks")
    return dict(sorted(found.items()))


def read_deepspeed(folder: str) -> WholeState:
    """Return a DeepSpeed checkpoint: fp32 masters and states of each weight, frozen weights as they are stored.

    Raises: InputError, in one line, for a missing rank's file, files of two checkpoints, and other parallelism.
    """
    folder = tagged(folder, "latest")
    models, optims = files_of(folder, MODEL_FILES), files_of(folder, OPTIM_FILES)
    if 0 not in models:
        raise InputError(f"{folder} has no model_states file: expected DeepSpeed's mp_rank_00_model_states.pt in it")
    model = read_model_file(models[0])
    version = str(model.get("ds_version") or "")
    if not optims:
        return _without_zero(model, version)
    ranks = [_optim_of(path) for path in optims.values()]
    stage = _number(ranks[0].get("zero_stage", 1))  # bf16 that accumulates in fp32 does not say it
    counts = ranks[0].get("partition_count")
    count = max(counts) if isinstance(counts, list) and counts else counts
    if count != len(ranks):
        raise InputError(f"{folder} has optimizer files of {len(ranks)} ranks, and they say {count}: get all of them")
    read = _at_stage_3 if stage == 3 else _up_to_stage_2
    masters, states, steps = read(model, ranks, folder)
    weights, stored, others = dict(masters), dict[str, Tensor](), model.others
    shared, buffers = model.shared, set(model.get("buffer_names") or ())
    every = [model, *(read_model_file(path) for rank, path in models.items() if rank)] if stage == 3 else [model]
    frozen = frozen_weights(every, folder)
    for name, one in model.module.items():
        if name in masters and one.numel and one.dtype != masters[name].dtype:
            stored[name] = one.named(name)
        elif one.numel and name not in {*masters, *shared, *buffers, *frozen}:
            frozen[name] = one.named(name)  # stage 1 has no fragments of frozen weights
    scaler = ranks[0].get("loss_scaler")
    others |= {"loss_scaler": described(scaler)} if isinstance(scaler, Object) else {}
    step = step_of(steps) if steps else _steps_of(model)
    return WholeState(
        f"deepspeed zero {stage}", version, weights | frozen, stored, states, step, frozenset(frozen), shared, others
    )


def frozen_weights(models: Sequence[ModelFile], folder: str) -> dict[str, Tensor]:
    """Return the frozen weights, whole at stages 0 to 2, in each rank's fragment at stage 3."""
    found = dict[str, Tensor]()
    for name, shape in models[0].frozen.items():
        parts = [(one.get("frozen_param_fragments") or {}).get(name) for one in models]
        if all(isinstance(part, Stored) for part in parts):
            found[name] = _cut_to([part for part in parts if isinstance(part, Stored)], name, shape, folder)
    return found


def _cut_to(parts: list[Stored], name: str, shape: tuple[int, ...], folder: str) -> Tensor:
    if len(parts) == 1:
        return joined([parts[0].named(name)], name, shape)
    return of_group(parts, {name: shape}, (), folder)[name]


def _optim_of(path: str) -> dict[str, Any]:
    values = read_archive(path)
    found = values.get("optimizer_state_dict") if isinstance(values, dict) else None
    if not isinstance(found, dict) or not {"zero_stage", "single_partition_of_fp32_groups"} & found.keys():
        raise InputError(f"{path} has no zero_stage: expected an optim_states file of DeepSpeed's ZeRO")
    return found


def _number(value: Any) -> int:
    """Return a stage: a number, or a member of an enumeration."""
    value = value.args[0] if isinstance(value, Object) and value.args else value
    return value if type(value) is int else 0


Read = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[Any]]


def _up_to_stage_2(model: ModelFile, ranks: Sequence[Mapping[str, Any]], folder: str) -> Read:
    masters, states, steps = dict[str, Tensor](), dict[str, dict[str, Tensor]](), list[Any]()
    paddings = ranks[0].get("param_alignment_paddings") or []
    for number, shapes in enumerate(model.shapes):
        padding = paddings[number] if number < len(paddings) else []
        slices = [slices_of(_at(one.get("param_slice_mappings"), number)) for one in ranks]
        parts = _parts([_at(one.get("single_partition_of_fp32_groups"), number) for one in ranks], folder)
        if {name for one in slices for name in one} >= shapes.keys():
            cut = partial(of_slices, slices=slices, shapes=shapes, where=folder)
        else:  # an old version's
            cut = partial(of_group, shapes=shapes, paddings=padding, where=folder)
        masters |= cut(parts)
        base = [_states_at(one.get("base_optimizer_state"), number) for one in ranks]
        steps += [one["step"] for one in base[:1] if "step" in one]
        for key in base[0]:
            if key != "step" and all(_is_flat(one.get(key), part) for one, part in zip(base, parts, strict=True)):
                _add_states(states, key, cut(_as_long([one[key] for one in base], parts)))
    return masters, states, steps


def slices_of(values: Any) -> dict[str, tuple[int, int]]:
    """Return the first element and the count of each weight's slice in a rank's part, empty if the file has none."""
    found = dict[str, tuple[int, int]]()
    for name, one in values.items() if isinstance(values, dict) else ():
        start, count = (one.field("start"), one.field("numel")) if isinstance(one, Object) else (None, None)
        if type(start) is not int or type(count) is not int:
            return {}
        found[str(name)] = start, count
    return found


def _at_stage_3(model: ModelFile, ranks: Sequence[Mapping[str, Any]], folder: str) -> Read:
    if any(isinstance(one, dict) for one in ranks[0].get("ds_zero_partition_groups") or ()):
        raise InputError(f"{folder} has weights of several partition groups (experts): consolidate it with DeepSpeed")
    shapes = {name: shape for group in model.shapes for name, shape in group.items()}
    flat = [_parts(one.get("fp32_flat_groups") or [], folder) for one in ranks]
    masters = of_ranks(flat, shapes, folder)
    base = [[_states_at(one.get("optimizer_state_dict"), at) for at in range(len(flat[0]))] for one in ranks]
    states, keys = dict[str, dict[str, Tensor]](), base[0][0] if base[0] else {}
    for key in keys:
        found: list[list[Any]] = [[sub.get(key) for sub in one] for one in base]
        pairs = [pair for one, own in zip(found, flat, strict=True) for pair in zip(one, own, strict=True)]
        if key != "step" and all(_is_flat(*pair) for pair in pairs):
            cut = [_as_long(one, own) for one, own in zip(found, flat, strict=True)]
            _add_states(states, key, of_ranks(cut, shapes, folder))
    return masters, states, [keys["step"]] if "step" in keys else []


def _add_states(states: dict[str, dict[str, Tensor]], key: str, found: Mapping[str, Tensor]) -> None:
    for name, one in found.items():
        states.setdefault(name, {})[key] = one


def _parts(values: Sequence[Any], folder: str) -> list[Stored]:
    if not all(isinstance(one, Stored) and len(one.shape) == 1 for one in values):
        raise InputError(f"{folder}: an optimizer file lacks a flat group of fp32 weights: get the files of one save")
    return list(values)


def _at(values: Any, number: int) -> Any:
    return values[number] if isinstance(values, list) and number < len(values) else None


def _states_at(values: Any, number: int) -> dict[str, Any]:
    """Return the optimizer's states of a flat group: DeepSpeed's elastic checkpoints have a list of them."""
    states = values.get("state") if isinstance(values, dict) else dict(enumerate(values or ()))
    found = states.get(number) if isinstance(states, dict) else None
    return found if isinstance(found, dict) else {}


def _is_flat(value: Any, beside: Stored) -> bool:
    """Return whether a state fits a flat group. The state keeps the padding that the group loses."""
    return isinstance(value, Stored) and len(value.shape) == 1 and value.numel >= beside.numel


def _as_long(values: Sequence[Stored], beside: Sequence[Stored]) -> list[Stored]:
    return [one.narrow(0, part.numel) for one, part in zip(values, beside, strict=True)]


def _steps_of(model: ModelFile) -> int | None:
    steps, skipped = model.get("global_steps"), model.get("skipped_steps") or 0
    return steps - skipped if type(steps) is int and type(skipped) is int else None


def _without_zero(model: ModelFile, version: str) -> WholeState:
    """Return a checkpoint without ZeRO: the module's weights, and the optimizer's states if their order is known."""
    buffers, shared, frozen = set(model.get("buffer_names") or ()), model.shared, frozenset(model.frozen)
    module = {name: one.named(name) for name, one in model.module.items() if name not in buffers and name not in shared}
    trained = {name: one.shape for name, one in module.items() if name not in frozen}
    optimizer = model.get("optimizer")
    states, steps, why = numbered(optimizer, trained) if isinstance(optimizer, dict) else ({}, [], "")
    others = {**model.others, "optimizer": why} if why else model.others
    step = step_of(steps) if steps else _steps_of(model)
    return WholeState("deepspeed zero 0", version, module, {}, states, step, frozen, shared, others)
