"""Optimizers by name: their titles, and the constants that each has of its own.

A row holds what is not said with `--lr`, `--betas`, `--eps` and `--weight-decay`. What they compute: `optim/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class OptimizerPreset(NamedTuple):
    """`betas` is None where it has none, `eps` too. `note` says whose constants these are."""

    title: str
    lr: float = 3e-3
    betas: tuple[float, float] | None = (0.9, 0.999)
    eps: float | None = 1e-8
    weight_decay: float = 0.0
    note: str = "PyTorch's, with a learning rate for small models"


OPTIMIZERS: Mapping[str, OptimizerPreset] = MappingProxyType(
    {
        "adam": OptimizerPreset("Adam"),
        "adamw": OptimizerPreset("AdamW", weight_decay=0.01),
        "radam": OptimizerPreset("RAdam"),
        "adam-sage": OptimizerPreset("Adam with SAGE", eps=1e-6, note="the authors' code"),
        "lion": OptimizerPreset("Lion", lr=1e-4, betas=(0.9, 0.99), eps=None, note="2302.06675"),
        "adagrad": OptimizerPreset("AdaGrad", lr=1e-2, betas=None, eps=1e-10, note="PyTorch's"),
        "rmsprop": OptimizerPreset("RMSProp", lr=1e-3, betas=None),
        "sgd": OptimizerPreset("SGD", betas=None, eps=None),
    }
)
