"""What a run is, and its reading from a file."""

from zerosim.config.checks import CHOICES as CHOICES
from zerosim.config.files import read_scenario as read_scenario
from zerosim.config.run import PLAN_DEFAULTS as PLAN_DEFAULTS
from zerosim.config.run import RunConfig as RunConfig
from zerosim.config.run import ScheduleChoices as ScheduleChoices
from zerosim.config.run import model_notes as model_notes
from zerosim.config.run import plan_config as plan_config
