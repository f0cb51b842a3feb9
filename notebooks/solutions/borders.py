"""Exercise 17: a share of a sum becomes the whole where it leaves the cut part, in either direction."""

from zerosim.grading import Borders, Buffer, Comm


class MyBorders(Borders):
    """f and g. `comm` is the group of ranks that a layer is cut over."""

    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        return x

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return comm.all_reduce(dx, op="sum", purpose="activations")

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return comm.all_reduce(y, op="sum", purpose="activations")

    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        return dy
