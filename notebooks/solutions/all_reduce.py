"""Exercise 2: each rank sums its own slice, in place; then the slices go round."""

from zerosim.grading import Buffer, Comm


def all_reduce(comm: Comm, grad: Buffer) -> None:
    size = grad.numel // comm.size
    own = grad[comm.rank * size : (comm.rank + 1) * size]
    comm.reduce_scatter(grad, out=own)
    comm.all_gather(own, out=grad)
