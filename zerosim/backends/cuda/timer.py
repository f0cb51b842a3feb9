"""The time between two points of a lane, by the GPU's own clock.

Owns two events that hold times; the lane's own fences hold none, because that costs less. What lies between the two
points, and whether the lane waits for other lanes, is the caller's affair.

Source: CUDA Runtime API, Event Management (a resolution of about half a microsecond); CuPy, `cupy.cuda.Event`.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda.lane import CudaLane


class LaneTimer:
    """`start()`, work given to the lane, `stop()`. Any thread may call; it can be used again."""

    def __init__(self, lane: CudaLane) -> None:
        self._lane = lane
        with lane.device:
            self._started = cp.cuda.Event()
            self._stopped = cp.cuda.Event()

    def start(self) -> None:
        """What the lane is given from here on is timed. Returns at once; a lane with work left starts after it."""
        with self._lane.device:
            self._started.record(self._lane.stream)

    def stop(self) -> float:
        """Seconds on the GPU from `start` to the end of what the lane was given so far. Waits for that end."""
        with self._lane.device:
            self._stopped.record(self._lane.stream)
            self._stopped.synchronize()
            return float(cp.cuda.get_elapsed_time(self._started, self._stopped)) / 1e3
