"""Exercise 9: squares are summed over ranks, then comes the root."""

from zerosim.grading import Zero2, norm_partials, total_norm


class MyClipping(Zero2):
    def reduce_grad_norm(self) -> float | None:
        squares = norm_partials(self.device, self.flats, self.comm.size)
        self.comm.all_reduce(squares, op="sum", purpose="control")
        return self.updater.decide(total_norm(self.device, squares))
