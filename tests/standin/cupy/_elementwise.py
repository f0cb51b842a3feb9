"""cupy.ElementwiseKernel: types resolved, broadcast and compiled as CuPy does it, then run on the CPU.

Source: cupy/_core/_kernel.pyx (ParameterInfo, _decide_params_type_core, ElementwiseKernel.__call__).
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from cupy._array import ndarray, on_device
from cupy._clock import StreamClock, current_stream, launch, submit
from cupy._compile import library
from cupy._parameters import TYPENAMES, CIndexer, carray, parameters, scalar, sixteen
from cupy._segments import touch
from cupy._state import LOCK, StandinError


class ElementwiseKernel:
    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        **kwargs: Any,
    ) -> None:
        if not name.isidentifier():
            raise ValueError(f'Invalid kernel name: "{name}"')
        if unknown := set(kwargs) - {"options"}:
            raise TypeError(f"ElementwiseKernel takes no {sorted(unknown)}")
        self._inputs, self._outputs = parameters(in_params), parameters(out_params)
        if any(parameter.name == "i" for parameter in self._inputs + self._outputs):
            raise ValueError("Can not use 'i' as a parameter name")
        self._operation, self.name, self.__name__, self._preamble = operation, name, name, preamble
        self._built: dict[Any, Any] = {}
        self.reduce_dims, self.no_return, self.return_tuple = reduce_dims, no_return, return_tuple

    def __call__(self, *args: Any, size: int = -1, **kwargs: Any) -> Any:
        if kwargs.pop("block_size", 128) <= 0 or kwargs:
            raise TypeError(f"{self.name}: Wrong arguments {kwargs}")
        counts = (len(self._inputs), len(self._inputs) + len(self._outputs))
        if len(args) not in counts:
            raise TypeError(
                f"Wrong number of arguments for {self.name!r}. It must be either {counts}, but given {len(args)}."
            )
        for arg in args:
            if isinstance(arg, ndarray):
                on_device(arg)
            elif not isinstance(arg, bool | int | float | np.generic):
                raise TypeError(f"{self.name}: Unsupported type {type(arg)}; arrays must be cupy's")
        inputs, outputs = list(args[: counts[0]]), list(args[counts[0] :])
        if any(not isinstance(out, ndarray) for out in outputs):
            raise TypeError("Output arguments type must be cupy.ndarray")
        shape = self._shape(inputs, outputs, size)
        types = self._types(inputs, outputs)
        if not outputs:
            if any(parameter.raw for parameter in self._outputs) and size == -1:
                raise ValueError("Output array size is Undecided")
            outputs = [ndarray(shape, types[parameter.name]) for parameter in self._outputs]
        for parameter, out in zip(self._outputs, outputs, strict=True):
            if not parameter.raw and out.shape != shape:
                raise ValueError("Out shape is mismatched")
        if 0 not in shape:
            self._run(inputs, outputs, shape, types)
        if self.no_return:
            return None
        return outputs[0] if len(outputs) == 1 and not self.return_tuple else tuple(outputs)

    def _shape(self, inputs: list[Any], outputs: list[Any], size: int) -> tuple[int, ...]:
        every = zip(self._inputs + self._outputs, inputs + outputs, strict=False)
        shapes = [arg.shape for parameter, arg in every if not parameter.raw and isinstance(arg, ndarray)]
        if size != -1:
            if shapes:
                raise ValueError("Specified 'size' can be used only if all of the ndarray are 'raw'.")
            return (size,)
        if not shapes:
            raise ValueError("Loop size is undecided.")
        return tuple(np.broadcast_shapes(*shapes))

    def _types(self, inputs: list[Any], outputs: list[Any]) -> dict[str, np.dtype]:
        """The dtype of every placeholder and parameter; arrays decide, outputs first, scalars follow."""
        decided: dict[str, np.dtype] = {}
        for parameter, arg in [
            *zip(self._outputs, outputs or [None] * len(self._outputs), strict=True),
            *zip(self._inputs, inputs, strict=True),
        ]:
            if isinstance(arg, ndarray):
                expected = parameter.dtype or decided.setdefault(parameter.ctype, arg.dtype)
                if expected != arg.dtype:
                    raise TypeError(f"Type is mismatched. {self.name}: {parameter.name} {arg.dtype} {expected}")
        types = dict(decided)
        for parameter in self._inputs + self._outputs:
            if parameter.dtype is None and parameter.ctype not in decided:
                raise TypeError(f"{self.name}: no array decides the type {parameter.ctype} of {parameter.name}")
            types[parameter.name] = parameter.dtype or decided[parameter.ctype]
        return types

    def _source(self, types: dict[str, np.dtype], arrays: tuple[bool, ...]) -> str:
        every = self._inputs + self._outputs
        placeholders = sorted({parameter.ctype for parameter in every if parameter.dtype is None})
        typedefs = "\n".join(
            f"typedef {TYPENAMES[next(types[p.name] for p in every if p.ctype == ctype)]} {ctype};"
            for ctype in placeholders
        )
        declare, bind, bounds = [], [], []
        for k, (parameter, is_array) in enumerate(zip(every, arrays, strict=True)):
            ctype, const = TYPENAMES[types[parameter.name]], "const " if k < len(self._inputs) else ""
            if is_array:
                name = parameter.name if parameter.raw else f"_raw_{parameter.name}"
                declare.append(f"{const}CArray<{ctype}>& {name} = *(CArray<{ctype}>*)args[{k}];")
                bounds.append(f"CArray<{ctype}>::standin_out_of_bounds")
                if not parameter.raw:
                    bind.append(f"{const}{parameter.ctype} &{parameter.name} = {name}[_ind.get()];")
            else:
                declare.append(f"const {ctype} {parameter.name} = *(const {ctype}*)args[{k}];")
        newline = "\n    "
        return f"""#include "cuda_emulation.h"
#include "carray.h"
{typedefs}
{self._preamble}
extern "C" int standin_elementwise(void** args, CIndexer* indexer) {{
    CIndexer& _ind = *indexer;
    {newline.join(declare)}
    {" ".join(f"{flag} = false;" for flag in bounds)}
    for (ptrdiff_t i = 0; i < _ind.size(); ++i) {{
        _ind.set(i);
        {newline.join(bind)}
        {self._operation};
    }}
    return {" || ".join(bounds)};
}}
"""

    def _run(self, inputs: list[Any], outputs: list[Any], shape: tuple[int, ...], types: dict[str, np.dtype]) -> None:
        every = self._inputs + self._outputs
        args = inputs + outputs
        arrays = tuple(isinstance(arg, ndarray) for arg in args)
        key = (arrays, *(types[parameter.name] for parameter in every))
        if key not in self._built:
            self._built[key] = library(self._source(types, arrays), self.name).standin_elementwise
        run = self._built[key]
        flat = all(
            parameter.raw or not isinstance(arg, ndarray) or (arg.shape == shape and arg.flags.c_contiguous)
            for parameter, arg in zip(every, args, strict=True)
        )
        loop = (math.prod(shape),) if flat and self.reduce_dims else shape
        held = [
            carray(arg, None if parameter.raw else shape, loop)
            if isinstance(arg, ndarray)
            else scalar(arg, types[parameter.name], f"{self.name}: {parameter.name}")
            for parameter, arg in zip(every, args, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        indexer = CIndexer(math.prod(shape), len(loop), sixteen(loop), sixteen(()))
        read = [
            (arg.data.ptr, arg.shape, arg.strides, arg.itemsize, k >= len(inputs))
            for k, arg in enumerate(args)
            if isinstance(arg, ndarray)
        ]

        def launched(stream: StreamClock, held: list[Any] = held) -> None:  # what the pointers lead to
            with LOCK:
                work = launch(stream, self.name)
                for place in read:
                    touch(work, *place)
            if run(pointers, ctypes.byref(indexer)):
                raise StandinError(f"{self.name}: an index into a raw array is out of its bounds")

        submit(current_stream(), launched)
