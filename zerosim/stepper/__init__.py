"""The stepper: stop a run before any event, inspect any rank, go on, or go back.

    with zerosim.debug(zerosim.RunConfig(stage=3, ranks=4)) as world:
        world.until("all_gather", rank=2)
        print(world.ranks[2].live())

The program is that of `zerosim.run`: a stepped run is bit-identical, in whatever order ranks are stepped.
"""

from zerosim.stepper.match import Match as Match
from zerosim.stepper.match import Moment as Moment
from zerosim.stepper.ownership import OwnedSlice as OwnedSlice
from zerosim.stepper.ownership import Ownership as Ownership
from zerosim.stepper.parameters import ParameterView as ParameterView
from zerosim.stepper.views import LiveBuffer as LiveBuffer
from zerosim.stepper.views import PendingCollective as PendingCollective
from zerosim.stepper.views import RankView as RankView
from zerosim.stepper.world import DebugWorld as DebugWorld
from zerosim.stepper.world import debug as debug
