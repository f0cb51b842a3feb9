"""A run's configuration, and its reading from a file. Names are loaded on first use: `zerosim --help` needs none of
them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerosim.config.files import read_scenario as read_scenario
    from zerosim.config.option import Option as Option
    from zerosim.config.parts import OPTIONS as OPTIONS
    from zerosim.config.parts.memory import MemoryConfig as MemoryConfig
    from zerosim.config.parts.model import ModelConfig as ModelConfig
    from zerosim.config.run import PLAN_DEFAULTS as PLAN_DEFAULTS
    from zerosim.config.run import WITH_VALUES as WITH_VALUES
    from zerosim.config.run import RunConfig as RunConfig
    from zerosim.config.run import plan_config as plan_config

_NAMES = {
    "files": "read_scenario",
    "option": "Option",
    "parts": "OPTIONS",
    "parts.memory": "MemoryConfig",
    "parts.model": "ModelConfig",
    "run": "PLAN_DEFAULTS WITH_VALUES RunConfig plan_config",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zerosim.config' has no attribute {name!r}")
    return getattr(import_module(f"zerosim.config.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
