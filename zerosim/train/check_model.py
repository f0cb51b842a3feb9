"""The rules that need a run's model, beside those of `config/parts`, which need only its configuration."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.models.model import Model
from zerosim.train import check_paging, check_quantized, check_trained

RULES_OF_MODEL = (check_trained.rules, check_quantized.rules, check_paging.rules)
"""The order is that of errors."""


def check_model(config: RunConfig, model: Model) -> None:
    """Check a declared model against its configuration. Raises: InputError, the first of all rules."""
    for rules in RULES_OF_MODEL:
        for error in rules(config, model):
            raise error
