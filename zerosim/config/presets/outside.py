"""What a GPU holds that no program of zerosim allocates: the CUDA context, NCCL's buffers, library workspaces.

Figures that others measured or that stand in a library's source, added beside what was counted and never mixed with
it. Where no source has a figure there is no line. What an allocator leaves unused between buffers has none either: it
depends on the order of requests, and on settings.

The context and NCCL were read on a V100 and on A100s. For newer GPUs they are assumed to be those of an A100: on 8 H100
1.06 GB were in use outside PyTorch's allocator (NVIDIA/nccl#1685), and the two lines here make 1.16 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerosim.placement.mesh import Mesh

MIB = 2**20
_AS_ON_A100 = "the same as on an A100"
_PER_AXIS = "one for each axis of the mesh"
_TWO_HANDLES = "two handles: of forward and of backward"
_TORCH = "PyTorch, CUDABlas.cpp"


@dataclass(frozen=True, slots=True)
class Outside:
    """One thing that takes memory beside the program: how many bytes, where that was read, and what was assumed."""

    name: str
    nbytes: int
    source: str
    assumed: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """What one generation of GPUs holds outside. `nccl` has bytes of a communicator of two ranks and of one of more;
    None where no source says."""

    context: Outside
    workspaces: tuple[Outside, ...]
    nccl: tuple[Outside, Outside] | None = None

    def lines(self, mesh: Mesh) -> tuple[Outside, ...]:
        """What a rank of this mesh holds outside, with a communicator for each axis of more than one rank. Frameworks
        make more of them, and may share buffers among them."""
        sizes = [size for size in mesh.sizes.values() if size > 1]
        if self.nccl is None or not sizes:
            return self.context, *self.workspaces
        pair, more = self.nccl
        nbytes = sum(pair.nbytes if size == 2 else more.nbytes for size in sizes)
        return self.context, replace(more, nbytes=nbytes), *self.workspaces


def _context(nbytes: int, source: str, assumed: str = "") -> Outside:
    return Outside("CUDA context", nbytes, source, assumed)


def _nccl(assumed: str) -> tuple[Outside, Outside]:
    """A communicator on four A100 with NVLink took 688 MB, one of two of them 544 MB; read as MiB."""
    source = "NVIDIA/nccl#964, on A100"
    pair, more = (Outside("NCCL buffers", nbytes * MIB, source, assumed) for nbytes in (544, 688))
    return pair, more


def _cublas(each: int) -> Outside:
    """PyTorch makes a workspace for each handle and stream, and a handle for each thread."""
    return Outside("cuBLAS workspaces", 2 * each, "PyTorch, CublasHandlePool.cpp", _TWO_HANDLES)


_OLDER = (2 * 4096 + 8 * 16) * 1024  # PyTorch's CUBLAS_WORKSPACE_CONFIG, :4096:2:16:8
# On an A100 the context is what processes hold that have nothing else there.
VOLTA = Held(
    _context(400 * 10**6, "pytorch/pytorch#20532, on V100", "the upper end of 300 to 400 MB"),
    (_cublas(_OLDER), Outside("cuBLASLt workspace", MIB, _TORCH)),
)
AMPERE = Held(
    _context(414 * MIB, "awslabs/keys_values#92, on A100"),
    (_cublas(_OLDER), Outside("cuBLASLt workspace", 4 * MIB, f"{_TORCH}; Transformer Engine")),
    _nccl(_PER_AXIS),
)
HOPPER = Held(
    _context(414 * MIB, "awslabs/keys_values#92, on A100", _AS_ON_A100),
    (_cublas(32 * MIB), Outside("cuBLASLt workspace", 32 * MIB, f"{_TORCH}; Transformer Engine")),
    _nccl(f"{_PER_AXIS}; {_AS_ON_A100}"),
)
"""Hopper and Blackwell."""
