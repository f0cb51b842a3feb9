"""Exercise 10: one gather ahead in either direction."""

from typing import Any

from zerosim.grading import Flat, Unit, Zero3


class MyPrefetch(Zero3):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.coming: dict[str, Any] = {}

    def launch(self, flat: Flat) -> None:
        if flat.name not in self.coming:
            self.coming[flat.name] = self.comm.launch_all_gather(flat.shard())

    def use(self, flat: Flat, ahead: int) -> None:
        self.launch(flat)
        index = self.flats.index(flat) + ahead
        if 0 <= index < len(self.flats):
            self.launch(self.flats[index])
        flat.unshard(self.coming.pop(flat.name).wait())

    def pre_forward(self, unit: Unit) -> None:
        self.use(unit.flat, +1)

    def pre_backward(self, unit: Unit) -> None:
        self.use(unit.flat, -1)
