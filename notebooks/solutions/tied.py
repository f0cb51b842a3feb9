"""Exercise 7: the parameters go at each use, the gradient is reduced after the last one."""

from zerosim.grading import Unit, Zero3


class MyTied(Zero3):
    def post_backward(self, unit: Unit) -> None:
        unit.flat.reshard()
        if unit.reduces:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))
