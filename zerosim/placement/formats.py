"""Number formats: codes of a few bits, and the scale that the elements of a quantization block share.

    format       bits  block  scales                          stands for
    FP32           32                                         numbers as they are
    DYNAMIC8        8    256  fp32                            the states of 8-bit Adam
    NF4             4     64  DYNAMIC8, less their mean       a frozen weight (QLoRA): 4.127 bits an element
    GPTQ            4    128  fp16, and 4-bit zeros           a frozen weight (GPTQ): 4.156 bits, and 4 bytes an input
    blocks(b, n)    b      n  fp32                            gradients and weights that are sent; n = 0: one scale

Scales are numbers, so they have a format too. These are sizes alone. The codes themselves: `tensor/stored.py` for
weights, `parallel/compression/codecs.py` and `groups.py` for messages, `backends/numpy/quantize.py` for states.

Sources: QLoRA (arXiv 2305.14314, section 3); bitsandbytes 0.50.2, functional.quantize_4bit with compress_statistics;
AutoGPTQ 0.7.1, nn_modules/qlinear (qweight, qzeros, scales, g_idx).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from zerosim.dtypes import DType, fp16, fp32, int32, uint8


class Format(NamedTuple):
    """How numbers are stored.

    bits      of one element's code
    block     elements that share a scale; 0: all of them
    scales    the format of the scales; None: there are none
    dtype     of the array that the codes are in
    centred   the numbers' mean, stored in fp32, is subtracted from them before they become codes
    apart     how many of its arrays are cut and gathered, the others being whole on every rank; 0: all are in one run
    zeros     each block has the code of 0 too
    inputs    of a map's weight: how many there are, each with the number of its block; None: without
    """

    name: str
    bits: int
    block: int = 0
    scales: Format | None = None
    dtype: DType = uint8
    centred: bool = False
    apart: int = 0
    zeros: bool = False
    inputs: int | None = None

    def blocks(self, numel: int) -> int:
        """Return how many scales `numel` elements have."""
        return -(-numel // self.block) if self.block else 1

    def arrays(self, numel: int) -> list[tuple[int, DType]]:
        """Return the elements and the dtype of each array for `numel` elements: codes first, then what scales them."""
        codes = -(-numel * self.bits // (8 * self.dtype.itemsize)), self.dtype
        if self.scales is None:
            return [codes]
        count = self.blocks(numel)
        zeros = [(-(-count * self.bits // 8), self.dtype)] * self.zeros
        inputs = [(self.inputs, int32)] if self.inputs else []
        return [codes, *zeros, *[(1, fp32)] * self.centred, *self.scales.arrays(count), *inputs]

    def of_map(self, inputs: int) -> Format:
        """Return the format of a map's weight with so many inputs."""
        return self if self.inputs is None else self._replace(inputs=inputs)

    def places(self, numel: int) -> list[slice]:
        """Return where those arrays are in one run of bytes. The last array, which has the widest numbers, is first."""
        stop, found = 0, list[slice]()
        for count, dtype in reversed(self.arrays(numel)):
            found.append(slice(stop, stop := stop + count * dtype.itemsize))
        return found[::-1]

    def beside(self, numel: int) -> int:
        """Return how many of that run's first bytes are apart from it: its scales."""
        return self.places(numel)[self.apart - 1].start if self.apart else 0

    def nbytes(self, numel: int) -> int:
        """Return the length of that run, up to a multiple of its widest number: another one may follow. Without bytes
        that are apart."""
        total = widest = 0
        for count, dtype in self.arrays(numel):
            total += count * dtype.itemsize
            widest = dtype.itemsize if dtype.itemsize > widest else widest
        return -(-total // widest) * widest - self.beside(numel)


FP32 = Format("fp32", 32, dtype=fp32)


def blocks(bits: int, block: int) -> Format:
    """Return codes of so many bits whose blocks have fp32 scales."""
    return Format(f"int{bits}", bits, block, FP32)


DYNAMIC8 = Format("dynamic8", 8, 256, FP32)
NF4 = Format("nf4", 4, 64, DYNAMIC8._replace(centred=True))
GPTQ = Format("gptq", 4, 128, Format("fp16", 16, dtype=fp16), zeros=True, inputs=0)
WEIGHTS: Mapping[str, Format] = MappingProxyType({one.name: one for one in (NF4, GPTQ)})
"""Formats of frozen weights, by their names in `--base`. A weight is one run of bytes, placed, cut and gathered as
numbers are."""
