"""What a run is, and its reading from a file."""

from zerosim.scenario.checks import CHOICES as CHOICES
from zerosim.scenario.config import PLAN_DEFAULTS as PLAN_DEFAULTS
from zerosim.scenario.config import RunConfig as RunConfig
from zerosim.scenario.config import ScheduleChoices as ScheduleChoices
from zerosim.scenario.config import model_notes as model_notes
from zerosim.scenario.config import plan_config as plan_config
from zerosim.scenario.files import read_scenario as read_scenario
