"""Exercise 16: a rank whose slice is all padding has data for its peers. It must join."""

from zerosim.grading import Flat, Strategy, Unit


class Sparing(Strategy):
    keeps_grads = False

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))

    def publish_params(self, flat: Flat) -> None:
        self.comm.all_gather(flat.shard(), out=flat.whole_param())
