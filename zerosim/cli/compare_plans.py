"""The comparisons that `zerosim compare` plans: ZeRO stages of a model on shapes alone, and two plans."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import training_config
from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import flag_of
from zerosim.cli.plan import device_cluster, device_limit, plan_on, plan_values, planned_config
from zerosim.config import WITH_VALUES, RunConfig
from zerosim.errors import InputError, OutOfMemory

if TYPE_CHECKING:
    from zerosim.report.changes import Changes
    from zerosim.report.stages import StagePlans

_NEEDS_TRAINING = [name for name in WITH_VALUES.split() if name != "capacity"]


def goes_by_shapes(args: argparse.Namespace) -> bool:
    """Return whether to plan the stages: as --shapes says, else if the run is too large to train here.

    Raises: InputError for --shapes beside a flag of a run that trains, and as `training_config` does.
    """
    training = [name for name in _NEEDS_TRAINING if hasattr(args, name)]
    if args.shapes and training:
        raise InputError(
            f"{flag_of(training[0])}: works only in training, and --shapes computes no values; leave one of them out"
        )
    if args.shapes is not None or training:
        return bool(args.shapes)
    from zerosim.train.machine import is_too_large
    from zerosim.train.run import DEFAULT_STEPS

    run = at_a_stage(args, training_config)
    return is_too_large(run, (run.optim.steps or DEFAULT_STEPS) * len(args.stages or (0, 1, 2, 3)))


def at_a_stage(args: argparse.Namespace, make: Callable[[argparse.Namespace], RunConfig]) -> RunConfig:
    """Return the configuration of the flags at the last ZeRO stage that accepts them; the default stage is tried first.
    A refused stage gets its error in its place. Raises: the first stage's InputError, if all are refused."""
    errors = []
    for stage in (None, *reversed(args.stages or (0, 1, 2, 3))):
        try:
            return make(argparse.Namespace(**vars(args), **({} if stage is None else {"stage": stage})))
        except InputError as error:
            errors.append(error)
    raise errors[0]


def compare_stages(args: argparse.Namespace) -> int:
    """Plan the stages. Return 0 if one fits or no device is named, 3 if none fits."""
    args.limit = getattr(args, "capacity", None)  # in a plan it is the device's memory
    base = at_a_stage(args, partial(planned_config, one_recipe=True))
    limit, figures = device_limit(args, base.memory.capacity), output(args, "json", base)
    page = _planned_stages(args, base.replace(capacity=None), limit, device_cluster(args, limit))
    leave(args, figures, lambda: stages_values(page), lambda: page)
    return 0 if page.fitting else OutOfMemory.exit_code


def _planned_stages(args: argparse.Namespace, base: RunConfig, limit: Any, cluster: Any) -> StagePlans:
    """Plan each stage. Raises: InputError if no stage can be planned."""
    from zerosim.report.stages import StagePlans
    from zerosim.report.verdict import Planned

    outcomes: dict[int, Planned | InputError] = {}
    for stage in args.stages or (0, 1, 2, 3):
        try:
            outcomes[stage] = plan_on(base.at_stage(stage), limit, cluster=cluster)
        except InputError as error:
            outcomes[stage] = error
    refused = [out for out in outcomes.values() if isinstance(out, InputError)]
    if len(refused) == len(outcomes):
        raise refused[0]
    why = (
        f"To train {base.model.name} here would take too long or too much memory: its stages were run on tensor shapes "
        "only."
    )
    return StagePlans(outcomes, limit, cluster, "" if args.shapes else why)


def compare_files(args: argparse.Namespace) -> int:
    """Plan both files, with the given flags over both."""
    for name in ("stages", "optimizers", "precisions", "shapes"):
        if getattr(args, name) is not None:
            raise InputError(
                f"{flag_of(name)}: works only with one scenario, and two were given, {args.scenario} and {args.other}"
            )
    from zerosim.analysis.changes import each_alone, settings, totals
    from zerosim.report.changes import Changes, Side

    args.limit = getattr(args, "capacity", None)
    values = {name: value for name, value in vars(args).items() if name != "reading"}
    configs = [planned_config(argparse.Namespace(**{**values, "scenario": p})) for p in (args.scenario, args.other)]
    limits = [device_limit(args, config.memory.capacity) for config in configs]
    cluster, figures = device_cluster(args, limits[0]), output(args, "json", *configs, also=[args.other])
    a, b = (config.replace(capacity=None) for config in configs)
    sides = [
        Side(name, path, plan_on(config, limit, cluster=cluster), limit)
        for name, path, config, limit in zip("AB", (args.scenario, args.other), (a, b), limits, strict=True)
    ]
    found = settings(a, b)
    each = each_alone(a, b, found, lambda config: totals(plan_on(config, limits[0], cluster=cluster).result))
    page = Changes(sides[0], sides[1], found, each, cluster)
    leave(args, figures, lambda: changes_values(page), lambda: page)
    return 0


def changes_values(page: Changes) -> dict[str, Any]:
    """Return the JSON form: for both files the values of `zerosim plan --json`, then the changes."""
    plans = {
        side.name.lower(): plan_values(side.plan.result, side.limit, side.plan.fits(side.limit), None, page.cluster)
        for side in (page.a, page.b)
    }
    return {"schema": 1, **plans, **page.changes()}


def stages_values(page: StagePlans) -> dict[str, Any]:
    """Return the JSON form: for every ZeRO stage the values of `zerosim plan --json`, or the error in its place."""
    plans: dict[str, Any] = {}
    for stage, out in page.outcomes.items():
        if isinstance(out, InputError):
            plans[str(stage)] = {"error": str(out)}
        else:
            plans[str(stage)] = plan_values(out.result, page.limit, stage in page.fitting, None, page.cluster)
    return {"schema": 1, "plans": plans}
