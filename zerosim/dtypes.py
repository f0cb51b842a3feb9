"""Number formats: bytes per element, compute format, and limits.

A backend maps these names to its library's types. The limits are those of IEEE 754 (fp16, fp32, fp64) and of bfloat16,
fp32's upper half.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.errors import InputError


@dataclass(frozen=True, slots=True)
class DType:
    """A number format. `compute` names the format that arithmetic on it runs in."""

    name: str
    itemsize: int
    compute: str
    floating: bool = True
    max: float = 0.0
    eps: float = 0.0
    min_normal: float = 0.0

    @property
    def is_half(self) -> bool:
        """True for the 2-byte formats: stored in 16 bits, computed in fp32, with fp32 masters."""
        return self.floating and self.itemsize == 2

    def __str__(self) -> str:
        return self.name


fp64 = DType("fp64", 8, "fp64", max=1.7976931348623157e308, eps=2.0**-52, min_normal=2.0**-1022)
fp32 = DType("fp32", 4, "fp32", max=3.4028234663852886e38, eps=2.0**-23, min_normal=2.0**-126)
bf16 = DType("bf16", 2, "fp32", max=3.3895313892515355e38, eps=2.0**-7, min_normal=2.0**-126)
fp16 = DType("fp16", 2, "fp32", max=65504.0, eps=2.0**-10, min_normal=2.0**-14)
int64 = DType("int64", 8, "int64", floating=False)
int32 = DType("int32", 4, "int32", floating=False)
uint8 = DType("uint8", 1, "uint8", floating=False)

FLOATING = (fp64, fp32, bf16, fp16)
_BY_NAME = {d.name: d for d in (*FLOATING, int64, int32, uint8)}


def dtype(name: str | DType) -> DType:
    """Return the format of that name.

    Raises: InputError for an unknown name.
    """
    if isinstance(name, DType):
        return name
    found = _BY_NAME.get(name)
    if found is None:
        raise InputError(f"unknown number format {name!r}: expected one of {', '.join(_BY_NAME)}")
    return found


def compute_dtype(stored: DType) -> DType:
    """Return the format in which arithmetic on `stored` runs: fp32 for the half types."""
    return _BY_NAME[stored.compute]
