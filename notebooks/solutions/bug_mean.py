"""Exercise 12: all_reduce averages unless it is told otherwise; dividing once more was one time too many."""

from zerosim.grading import Buffer, Flat, Slice, Strategy, Unit


class Mean(Strategy):
    sees_all_grads = True

    def owned(self, flat: Flat) -> Slice:
        return Slice(0, flat.numel, flat.numel)

    def padded(self, flat: Flat) -> int:
        return flat.numel

    def mean(self, grad: Buffer) -> None:
        self.comm.all_reduce(grad)

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            unit.flat.add_grad_whole(unit.flat.take_grad())
            if self.last:
                self.mean(unit.flat.whole_grad())
                unit.flat.grad_shard = unit.flat.grad_whole
