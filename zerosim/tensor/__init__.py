"""Tensors and their autograd."""

from zerosim.tensor import ops
from zerosim.tensor.tensor import Tensor as Tensor
from zerosim.tensor.tensor import cpu as cpu
from zerosim.tensor.tensor import tensor as tensor

Tensor.primitives = ops
