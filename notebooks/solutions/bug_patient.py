"""Exercise 15: the last microbatch was added only where there was no sum yet. Add every one."""

from zerosim.grading import Flat, Strategy, Unit


class Patient(Strategy):
    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            flat = unit.flat
            flat.add_grad_whole(flat.take_grad())
            if self.last:
                own = flat.whole_grad()[flat.own.start : flat.own.stop]
                flat.grad_shard = self.comm.reduce_scatter(flat.whole_grad(), out=own)

    def publish_params(self, flat: Flat) -> None:
        self.comm.all_gather(flat.shard(), out=flat.whole_param())
