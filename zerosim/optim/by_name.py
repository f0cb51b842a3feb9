"""The optimizers by their names in `--optimizer`."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.config.parts.optim import OptimConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.optim.adafactor import Adafactor, AdafactorHF
from zerosim.optim.adagrad import AdaGrad, RMSProp
from zerosim.optim.adam import Adam
from zerosim.optim.adam8bit import Adam8bit
from zerosim.optim.lion import Lion
from zerosim.optim.muon import Muon
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.radam import RAdam
from zerosim.optim.sage import AdamSAGE
from zerosim.optim.sgd import SGD
from zerosim.optim.sophia import SophiaG


def make_optimizer(optim: OptimConfig, tokens: int) -> Optimizer:
    """Make the optimizer. `tokens`: targets in the global batch."""
    name, betas, eps, decay = optim.optimizer, optim.betas, optim.eps, optim.weight_decay
    makes: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: Adam(*betas, eps, decay),
        "adamw": lambda: Adam(*betas, eps, decay, decoupled=True),
        "adam8bit": lambda: Adam8bit(*betas, eps, decay),
        "adam8bit-torchao": lambda: Adam8bit(*betas, eps, decay, whole_blocks=True),
        "radam": lambda: RAdam(*betas, eps, decay),
        "adam-sage": lambda: AdamSAGE(*betas, eps=eps, weight_decay=decay),
        "lion": lambda: Lion(*betas, decay),
        "sophia": lambda: SophiaG(tokens, *betas, decay, estimates_every=OPTIMIZERS[name].estimates_every),
        "adagrad": lambda: AdaGrad(eps, decay),
        "rmsprop": lambda: RMSProp(eps=eps, weight_decay=decay),
        "adafactor": lambda: Adafactor(decay),
        "adafactor-hf": lambda: AdafactorHF(
            decay, optim.momentum or None, optim.scale_parameter, relative_step=optim.relative_step
        ),
        "muon": lambda: Muon(
            optim.momentum,
            decay,
            Adam(*betas, eps, decay, decoupled=True),
            optim.aux_lr / optim.lr,
        ),
        "sgd": lambda: SGD(optim.momentum, decay, ema=optim.momentum_form == "ema", nesterov=optim.nesterov),
    }
    return makes[name]()
