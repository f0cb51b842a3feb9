"""The run of `zerosim plot experts`: how tokens spread over experts, as a router chooses or as a plan assumes."""

from __future__ import annotations

import argparse

from zerosim.cli.options import training_config
from zerosim.cli.plot_run import Asked, Drawn, trained
from zerosim.config import RunConfig
from zerosim.errors import InputError


def routed(args: argparse.Namespace) -> Asked:
    """Build the run whose routing is drawn. Raises: InputError for a model without experts."""
    config = training_config(args)
    if not config.model.has_experts:
        raise InputError(f"model {config.model.family}: has no experts; pass --experts 8 --top-k 2, for one")
    return Asked(config)


def experts(args: argparse.Namespace, config: RunConfig, limit: object) -> Drawn:
    """Draw what a run's router chose or, with --routing, what is assumed."""
    from zerosim.analysis.experts_routes import assumed_routes, routes_of
    from zerosim.report.plots import experts_figure
    from zerosim.report.words import model_name

    if config.experts.routing is not None:
        routes, how = assumed_routes(config), f"one step, assumed: routing {config.experts.routing}"
    else:
        result = trained(args, config)
        routes, how = routes_of(config, result.routed.chosen), f"{len(result.steps)} steps, as the router chose"
    subtitle = f"{model_name(config)}: {config.model.choice} a token. {how.capitalize()}"
    figure = experts_figure(routes, subtitle=subtitle)
    return Drawn(figure, routes.to_dict())
