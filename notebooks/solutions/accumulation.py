"""Exercise 8: every microbatch is reduced, and added onto the slice."""

from zerosim.grading import Buffer, Unit, Zero2


class MyAccumulation(Zero2):
    def add(self, total: Buffer, more: Buffer) -> None:
        self.device.kernel(more.numel, self.device.backend.add, total.array, more.array, total.array)

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            flat, shard = unit.flat, self.comm.reduce_scatter(unit.flat.take_grad())
            if flat.grad_shard is None:
                flat.grad_shard = shard
            else:
                self.add(flat.grad_shard, shard)
