"""GPU memory outside of a program of zerosim: the CUDA context, NCCL's buffers, library workspaces.

Figures from others' measurements or a library's source, added beside the counted bytes and never mixed with them.
Without a source there is no line. Memory that an allocator leaves unused between buffers has none either: it depends on
the order of requests, and on settings.

The context and NCCL were measured on a V100 and on A100s. Newer GPUs are assumed to hold as much as an A100: on 8 H100
1.06 GB were in use outside PyTorch's allocator (NVIDIA/nccl#1685), and the two lines here make 1.16 GB.

NCCL reserves memory for each communicator, when it is first used: a group of a mesh is one, and a rank has as many as
it is a member of. That they add up rests on little evidence. One user had 1.6 GB with one and 6 GB with three or more
(NVIDIA/nccl#864); its maintainers say that more communicators take more, unless they were split off with shared
resources, and that the channels decide, not the ranks (#986). The first all-to-all on 8 H100 took 3.28 GB more, a
connection for each pair and channel (#1685). No run of zerosim sends one yet, so no line has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from zerosim.placement.mesh import Mesh

MIB = 2**20
_AS_ON_A100 = "the same as on an A100"
_PER_GROUP = "groups add up (nccl#864)"
_TWO_HANDLES = "two handles: of forward and of backward"
_TORCH = "PyTorch, CUDABlas.cpp"


@dataclass(frozen=True, slots=True)
class Outside:
    """One item of memory beside the program: its bytes, their source, and what was assumed."""

    name: str
    nbytes: int
    source: str
    assumed: str = ""


@dataclass(frozen=True, slots=True)
class OutsideMemory:
    """The memory that one generation of GPUs holds outside of programs. `nccl`: bytes of a communicator of two ranks
    and of one of more; None without a source."""

    context: Outside
    workspaces: tuple[Outside, ...]
    nccl: tuple[Outside, Outside] | None = None

    def lines(self, groups: Mapping[str, int]) -> tuple[Outside, ...]:
        """Return the items of a rank that is a member of these groups, with so many ranks each. Frameworks make more
        groups, and may share buffers among them."""
        if self.nccl is None or not groups:
            return self.context, *self.workspaces
        pair, more = self.nccl
        each = {name: (pair if size == 2 else more).nbytes for name, size in groups.items()}
        by_group = " + ".join(f"{nbytes // MIB} MiB {name} ({groups[name]:,})" for name, nbytes in each.items())
        buffers = replace(more, nbytes=sum(each.values()), assumed=f"{by_group}; {more.assumed}")
        return self.context, buffers, *self.workspaces


def communicators(mesh: Mesh, *, is_tied: bool = False) -> dict[str, int]:
    """Return the groups in which a rank communicates, by name, with their ranks: one for each axis of more than one
    rank. If a table is tied across more than two stages, the first stage and the last have one more."""
    groups = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    return groups | ({"first and last stage": 2} if is_tied and mesh.pp > 2 else {})


def _context(nbytes: int, source: str, assumed: str = "") -> Outside:
    return Outside("CUDA context", nbytes, source, assumed)


def _nccl(assumed: str) -> tuple[Outside, Outside]:
    """Return the bytes of a communicator: on four A100 with NVLink 688 MB, between two of them 544 MB; read as MiB."""
    source = "NVIDIA/nccl#964, on A100"
    pair, more = (Outside("NCCL buffers", nbytes * MIB, source, assumed) for nbytes in (544, 688))
    return pair, more


def _cublas(each: int) -> Outside:
    """Return the bytes of a workspace: PyTorch makes one for each handle and stream, and a handle for each thread."""
    return Outside("cuBLAS workspaces", 2 * each, "PyTorch, CublasHandlePool.cpp", _TWO_HANDLES)


_OLDER = (2 * 4096 + 8 * 16) * 1024  # PyTorch's CUBLAS_WORKSPACE_CONFIG, :4096:2:16:8
# On an A100 the context is measured by processes that hold nothing else there.
VOLTA = OutsideMemory(
    _context(400 * 10**6, "pytorch/pytorch#20532, on V100", "the upper end of 300 to 400 MB"),
    (_cublas(_OLDER), Outside("cuBLASLt workspace", MIB, _TORCH)),
)
AMPERE = OutsideMemory(
    _context(414 * MIB, "awslabs/keys_values#92, on A100"),
    (_cublas(_OLDER), Outside("cuBLASLt workspace", 4 * MIB, f"{_TORCH}; Transformer Engine")),
    _nccl(_PER_GROUP),
)
ADA = OutsideMemory(
    _context(414 * MIB, "awslabs/keys_values#92, on A100", _AS_ON_A100),
    (_cublas(_OLDER), Outside("cuBLASLt workspace", 4 * MIB, f"{_TORCH}; Transformer Engine")),
    _nccl(f"{_PER_GROUP}; {_AS_ON_A100}"),
)
"""Cards of Ampere, Ada and Blackwell."""
TURING = OutsideMemory(
    _context(400 * 10**6, "pytorch/pytorch#20532, on V100", "the same as on a V100"), VOLTA.workspaces
)
HOPPER = OutsideMemory(
    _context(414 * MIB, "awslabs/keys_values#92, on A100", _AS_ON_A100),
    (_cublas(32 * MIB), Outside("cuBLASLt workspace", 32 * MIB, f"{_TORCH}; Transformer Engine")),
    _nccl(f"{_PER_GROUP}; {_AS_ON_A100}"),
)
"""Hopper and Blackwell."""
HELD: Mapping[str, OutsideMemory] = MappingProxyType(
    {"volta": VOLTA, "turing": TURING, "ampere": AMPERE, "ada": ADA, "hopper": HOPPER}
)
"""By the name in a row of `gpus.toml`."""
