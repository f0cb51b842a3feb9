"""Layers, and `Unit`, the element of a model's list."""

from zerosim.functional.policy import ActivationPolicy as ActivationPolicy
from zerosim.nn.group import Group as Group
from zerosim.nn.kept_inputs import StoredInputs as StoredInputs
from zerosim.nn.layers import Dropout as Dropout
from zerosim.nn.layers import Linear as Linear
from zerosim.nn.layers import TokenTable as TokenTable
from zerosim.nn.leaf import Tensors as Tensors
from zerosim.nn.leaf import led_by as led_by
from zerosim.nn.recompute import Recompute as Recompute
from zerosim.nn.retained import Retained as Retained
from zerosim.nn.saves_on_host import OffloadsSaves as OffloadsSaves
from zerosim.nn.saves_on_host import SavesOnHost as SavesOnHost
from zerosim.nn.unit import Unit as Unit
