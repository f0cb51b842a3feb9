"""Count what PyTorch launches: each aten op that runs on a GPU, its kernels and the bytes of its inputs and outputs.

Tensors are on the meta device: nothing is computed, and no GPU is needed. An op is one kernel that reads each input
once and writes each output once; views and allocations are none. `SEVERAL` has the ops whose CUDA implementation is
more than one kernel, or reads less than all of an input. A broadcast input has the bytes that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNEL = ("empty", "empty_like", "new_empty", "lift_fresh", "_unsafe_view", "_local_scalar_dense")


class Launched(NamedTuple):
    """One kernel of an op, and the bytes that it moves."""

    op: str
    nbytes: int


def stored(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that are in memory: of a dimension that is only repeated, one."""
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(torch.tensor(list(sizes), dtype=torch.int64).prod()) * tensor.element_size()


def _layer_norm_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Two kernels read grad and x: layer_norm_grad_input_kernel, then GammaBetaBackwardCUDAKernel.

    PyTorch, aten/src/ATen/native/cuda/layer_norm_kernel.cu at 0005c53, LayerNormBackwardKernelImplInternal.
    """
    grad, x, mean, rstd, weight, *_ = map(stored, inputs)
    dx, *dparams = map(stored, outputs)
    return [grad + x + mean + rstd + weight + dx, grad + x + mean + rstd + sum(dparams)]


def _gather(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Of the first input as much is read as is written."""
    return [sum(map(stored, inputs[1:])) + 2 * sum(map(stored, outputs))]


def _scatter(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """Of the first input as much is written as is read of the last."""
    return [sum(map(stored, inputs[1:])) + stored(inputs[-1])]


def _nll_loss_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """The whole gradient is zeroed, then each row's target is written (NLLLoss.cu, nll_loss_backward_out_cuda)."""
    return [stored(outputs[0]), 2 * stored(inputs[2])]


def _norms(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
    """lpnorm_chunk_kernel, and lpnorm_cleanup for its few sums (ForeachReduceOp.cu)."""
    return [sum(map(stored, inputs)), sum(map(stored, outputs))]


SEVERAL: Mapping[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[int]]] = {
    "native_layer_norm_backward": _layer_norm_backward,
    "index": _gather,
    "nll_loss_forward": _gather,
    "index_put_": _scatter,
    "nll_loss_backward": _nll_loss_backward,
    "_foreach_norm": _norms,
}


class Launches(TorchDispatchMode):
    """`with Launches() as seen:` collects every kernel that would run on a GPU in `seen.all`."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Launched] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        changed = [value for value, of in zip(args, op._schema.arguments, strict=False) if _is_written(of)]
        into = [kwargs[of.name] for of in op._schema.arguments if of.kwarg_only and _is_written(of)]
        read = [value for name, value in kwargs.items() if not any(value is one for one in into)]
        inputs, outputs = _tensors((args, read)), _once(_tensors((changed, into, result)))
        namespace, name = op.name().split("::")
        name = name.split(".")[0]
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in op._schema.returns)
        if namespace == "aten" and not is_view and name not in NO_KERNEL and _is_on_gpu([*inputs, *outputs]):
            several = SEVERAL.get(name)
            moved = several(inputs, outputs) if several else [sum(map(stored, [*_once(inputs), *outputs]))]
            self.all += [Launched(name, nbytes) for nbytes in moved]
        return result

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.all)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _once(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _is_on_gpu(tensors: Sequence[torch.Tensor]) -> bool:
    """Meta stands for the GPU. An optimizer's step counts are on the CPU."""
    return any(tensor.device.type == "meta" for tensor in tensors)


def counted(formula: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Launches, Launches]:
    """What forward and backward of a formula launch."""
    with Launches() as forward:
        result = formula(*inputs)
    outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
    grads = [torch.empty_like(out) for out in outputs]
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    with Launches() as backward:
        torch.autograd.grad(outputs, leaves, grads)
    return forward, backward
