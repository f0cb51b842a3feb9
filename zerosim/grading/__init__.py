"""Write your own ZeRO: exercises, and a grader that names the rank, the event and the buffers of a mistake.

    from zerosim.grading import EXERCISES, Strategy, grade

    class MyZero2(Strategy): ...

    print(grade(MyZero2, "zero2"))

An answer runs in its own process (`process.py`), on a copy of itself (`pickling.py`). Each run is compared with the
package's own strategies (`checks.py`, `traffic.py`) and the closed forms of `analysis/formulas`.
"""

from zerosim.backends.kernels import Array as Array
from zerosim.comm.collectives import Comm as Comm
from zerosim.device.copies import launch_copy as launch_copy
from zerosim.device.device import Buffer as Buffer
from zerosim.device.device import Kind as Kind
from zerosim.grading.catalogue import EXERCISES as EXERCISES
from zerosim.grading.catalogue import find_exercise as find_exercise
from zerosim.grading.exercise import Exercise as Exercise
from zerosim.grading.judge import grade as grade
from zerosim.grading.judge import step_into as step_into
from zerosim.grading.record import LiveBytes as LiveBytes
from zerosim.grading.record import Where as Where
from zerosim.grading.report import Grade as Grade
from zerosim.grading.verdict import Check as Check
from zerosim.nn import Unit as Unit
from zerosim.optim.elementwise import Elementwise as Elementwise
from zerosim.optim.elementwise import Now as Now
from zerosim.optim.precision import norm_partials as norm_partials
from zerosim.optim.precision import total_norm as total_norm
from zerosim.parallel.base import Strategy as Strategy
from zerosim.parallel.schedule import Action as Action
from zerosim.parallel.schedule import Backward as Backward
from zerosim.parallel.schedule import Forward as Forward
from zerosim.parallel.schedule import InputGrad as InputGrad
from zerosim.parallel.schedule import WeightGrad as WeightGrad
from zerosim.parallel.tensor import Borders as Borders
from zerosim.parallel.zero2 import Zero2 as Zero2
from zerosim.parallel.zero3 import Zero3 as Zero3
from zerosim.tensor.flat import Flat as Flat
from zerosim.tensor.flat import Slice as Slice
