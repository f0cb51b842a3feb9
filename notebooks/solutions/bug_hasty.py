"""Exercise 14: lm_head's forward freed the table, and its backward did not gather it again."""

from zerosim.grading import Flat, Strategy, Unit


class Hasty(Strategy):
    keeps_params = False
    keeps_grads = False

    def gather(self, flat: Flat) -> None:
        flat.unshard(self.comm.all_gather(flat.shard()))

    def pre_forward(self, unit: Unit) -> None:
        if unit.name != "lm_head":
            self.gather(unit.flat)

    def post_forward(self, unit: Unit) -> None:
        if unit.name != "wte":
            unit.flat.reshard()

    def pre_backward(self, unit: Unit) -> None:
        self.gather(unit.flat)

    def post_backward(self, unit: Unit) -> None:
        unit.flat.reshard()
        if unit.reduces:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))
