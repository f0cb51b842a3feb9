"""Optimizers by name: their titles, and each one's own constants.

A row holds the defaults of `--lr`, `--betas`, `--eps` and `--weight-decay`. The arithmetic is in `optim/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.placement.formats import DYNAMIC8


class OptimizerPreset(NamedTuple):
    """`betas` is None if it has none, and so are `eps`, `momentum` and `aux_lr`.

    `aux_lr` is the learning rate of AdamW, which then has the betas, eps and all weights but the blocks' matrices.
    `note` names the constants' source, `cut` how its states may be cut, `block` at multiples of how many elements of a
    tensor, `estimates_every` after how many steps curvature is estimated, 0: never (`optim/optimizer.py`). With
    `relative_step` its steps shrink unless a learning rate is given.
    """

    title: str
    lr: float = 3e-3
    betas: tuple[float, float] | None = (0.9, 0.999)
    eps: float | None = 1e-8
    weight_decay: float = 0.0
    momentum: float | None = None
    aux_lr: float | None = None
    cut: str = "elements"
    block: int = 1
    estimates_every: int = 0
    relative_step: bool = False
    note: str = "PyTorch's, with a learning rate for small models"

    def row(self, *, follows_lr: bool) -> dict[str, Any]:
        """Return its defaults for a run, by flat name; 0 for constants that it does not have."""
        row = {
            "lr": self.lr,
            "relative_step": self.relative_step and follows_lr,
            "betas": self.betas or (0.0, 0.0),
            "eps": self.eps or 0.0,
            "momentum": self.momentum or 0.0,
            "aux_lr": self.aux_lr or 0.0,
            "weight_decay": self.weight_decay,
        }
        # Owners hold single tensors, which balances better than units.
        return row | ({"partition": "owner", "gather": "module"} if self.cut == "matrices" else {})


OPTIMIZERS: Mapping[str, OptimizerPreset] = MappingProxyType(
    {
        "adam": OptimizerPreset("Adam"),
        "adamw": OptimizerPreset("AdamW", weight_decay=0.01),
        "adam8bit": OptimizerPreset(
            "8-bit Adam", cut="blocks", block=DYNAMIC8.block, note="bitsandbytes', with such a rate"
        ),
        "adam8bit-torchao": OptimizerPreset(
            "8-bit Adam (torchao)", cut="blocks", block=DYNAMIC8.block, note="torchao's, with such a rate"
        ),
        "radam": OptimizerPreset("RAdam"),
        "adam-sage": OptimizerPreset("Adam with SAGE", eps=1e-6, note="the authors' code"),
        "lion": OptimizerPreset("Lion", lr=1e-4, betas=(0.9, 0.99), eps=None, note="2302.06675"),
        "sophia": OptimizerPreset(
            "Sophia-G",
            lr=1e-4,
            betas=(0.965, 0.99),
            eps=None,
            weight_decay=0.1,
            estimates_every=10,
            note="the authors' code",
        ),
        "adagrad": OptimizerPreset("AdaGrad", lr=1e-2, betas=None, eps=1e-10, note="PyTorch's"),
        "rmsprop": OptimizerPreset("RMSProp", lr=1e-3, betas=None),
        "adafactor": OptimizerPreset("Adafactor", lr=1e-2, betas=None, eps=None, cut="sums", note="PyTorch's"),
        "adafactor-hf": OptimizerPreset(
            "Adafactor (HF)",
            lr=1e-2,
            betas=None,
            eps=None,
            momentum=0.0,
            cut="sums",
            relative_step=True,
            note="transformers'",
        ),
        "muon": OptimizerPreset(
            "Muon",
            lr=0.02,
            betas=(0.9, 0.95),
            eps=1e-10,
            momentum=0.95,
            aux_lr=3e-3,
            cut="matrices",
            note="its author's, with AdamW's learning rate for small models",
        ),
        "sgd": OptimizerPreset("SGD", betas=None, eps=None, momentum=0.0),
    }
)
SECOND_MOMENTS = ("adam", "adamw", "radam")
"""Optimizers whose last state is an average of squares."""
