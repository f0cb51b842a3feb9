"""Exercise 34: slices of gradients go to the host, the CPU steps, new parameters come back tile by tile."""

from zerosim.grading import Buffer, Flat, Kind, Unit, Zero2, launch_copy


class MyCpuAdam(Zero2):
    tile = 512  # elements that go back at once

    def carry(self, source: Buffer, target: Buffer) -> None:
        """Copy from one memory to the other, and wait on both sides. dtypes may differ; source's bytes are sent."""
        copy = launch_copy(source, target, after="cpu" if source.memory == "host" else "compute")
        copy.wait("cpu")
        copy.wait()

    def cast(self, source: Buffer, target: Buffer) -> None:
        """Cast within one memory."""
        self.device.kernel(0, self.device.backend.copy, source.array, target.array)

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            own = self.comm.reduce_scatter(unit.flat.take_grad())
            there = self.device.alloc(own.shape, own.dtype, Kind.GRAD, memory="host")
            self.carry(own, there)
            unit.flat.add_grad_shard(there)

    def update(self, flat: Flat, scale: float) -> None:
        with self.device.at("host"):
            self.updater.update(flat, scale)
            for start in range(0, flat.own.size, self.tile):
                part = slice(start, start + self.tile)
                master = flat.master[part]
                rounded = self.device.alloc(master.shape, flat.dtype, Kind.TEMP)
                self.cast(master, rounded)
                self.carry(rounded, flat.shard()[part])
                del rounded

    def step(self) -> None:
        scale = self.reduce_grad_norm()
        for flat in self.flats:
            if scale is not None:
                self.update(flat, scale)
                self.publish_params(flat)
            flat.drop_grads()
