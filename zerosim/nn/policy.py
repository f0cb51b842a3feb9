"""`ActivationPolicy` where models look for it; it is defined with the ops that follow it (`functional/policy.py`)."""

from zerosim.functional.policy import DEFAULT as DEFAULT
from zerosim.functional.policy import ActivationPolicy as ActivationPolicy
