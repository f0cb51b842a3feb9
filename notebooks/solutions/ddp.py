"""Exercise 3: sum over microbatches, reduce at the last one, update everything."""

from zerosim.grading import Flat, Slice, Strategy, Unit


class MyDDP(Strategy):
    sees_all_grads = True

    def owned(self, flat: Flat) -> Slice:
        return Slice(0, flat.numel, flat.numel)

    def padded(self, flat: Flat) -> int:
        return flat.numel

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            flat = unit.flat
            flat.add_grad_whole(flat.take_grad())
            if self.last:
                flat.grad_shard = self.comm.all_reduce(flat.whole_grad())
