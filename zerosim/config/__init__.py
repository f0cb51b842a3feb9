"""What a run is, and its reading from a file."""

from zerosim.config.files import read_scenario as read_scenario
from zerosim.config.model import ModelConfig as ModelConfig
from zerosim.config.option import Option as Option
from zerosim.config.parts import DataConfig as DataConfig
from zerosim.config.parts import MemoryConfig as MemoryConfig
from zerosim.config.parts import MeshConfig as MeshConfig
from zerosim.config.parts import OptimConfig as OptimConfig
from zerosim.config.parts import ParallelConfig as ParallelConfig
from zerosim.config.parts import PrecisionConfig as PrecisionConfig
from zerosim.config.parts import WorldConfig as WorldConfig
from zerosim.config.presets.recipes import RecipeChoices as RecipeChoices
from zerosim.config.run import OPTIONS as OPTIONS
from zerosim.config.run import PLAN_DEFAULTS as PLAN_DEFAULTS
from zerosim.config.run import RunConfig as RunConfig
from zerosim.config.run import plan_config as plan_config
