"""zerosim: train a real GPT over N virtual ranks with DDP and ZeRO-1, 2, 3, every byte counted.

    import zerosim

    result = zerosim.run(zerosim.RunConfig(stage=3, ranks=4, steps=20))
    print(result.mean_losses[-1], result.memory[0].peak.total_bytes)
    print(zerosim.plan(zerosim.plan_config(model="gpt2-xl", ranks=64)).memory[0].peak.total_bytes)

Names are loaded on first use: importing zerosim imports nothing heavy. For lessons on
autograd: `from zerosim.tensor.tensor import tensor`, and `zerosim.gradcheck`.
"""

import sys

TYPE_CHECKING = False  # nothing is imported here, so that Ctrl-C finds a handler as soon as possible (`__main__.py`)
if TYPE_CHECKING:
    from typing import Any

    from zerosim.analysis.advice import run as run
    from zerosim.comm.runtime import Context as Context
    from zerosim.comm.runtime import World as World
    from zerosim.comm.runtime import launch as launch
    from zerosim.config import RunConfig as RunConfig
    from zerosim.config import plan_config as plan_config
    from zerosim.device.device import Device as Device
    from zerosim.device.device import Kind as Kind
    from zerosim.errors import InputError as InputError
    from zerosim.errors import OutOfMemory as OutOfMemory
    from zerosim.errors import RankFailed as RankFailed
    from zerosim.errors import ZerosimError as ZerosimError
    from zerosim.grading import grade as grade
    from zerosim.ledger.memory import MemoryLedger as MemoryLedger
    from zerosim.ledger.traffic import CommLedger as CommLedger
    from zerosim.playback import player as player
    from zerosim.stepper import debug as debug
    from zerosim.tensor.gradcheck import gradcheck as gradcheck
    from zerosim.tensor.tensor import Tensor as Tensor
    from zerosim.tensor.tensor import cpu as cpu
    from zerosim.train.plan import plan as plan
    from zerosim.train.result import RunResult as RunResult
    from zerosim.version import __version__ as __version__


_HOMES = {
    "CommLedger": "ledger.traffic",
    "Context": "comm.runtime",
    "Device": "device.device",
    "InputError": "errors",
    "Kind": "device.device",
    "MemoryLedger": "ledger.memory",
    "OutOfMemory": "errors",
    "RankFailed": "errors",
    "RunConfig": "config",
    "RunResult": "train.result",
    "Tensor": "tensor",
    "World": "comm.runtime",
    "ZerosimError": "errors",
    "cpu": "tensor",
    "debug": "stepper",
    "grade": "grading",
    "gradcheck": "tensor.gradcheck",
    "launch": "comm.runtime",
    "plan": "train.plan",
    "plan_config": "config",
    "player": "playback",
    "run": "analysis.advice",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    home = "version" if name == "__version__" else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zerosim' has no attribute {name!r}")
    return getattr(import_module(f"zerosim.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _show_in_notebooks() -> None:
    """Show results as HTML, if IPython is already running."""
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        from zerosim.report.notebook import register

        register(shell)


_show_in_notebooks()
