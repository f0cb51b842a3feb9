"""The player: a moving page of a ZeRO step, for a browser or a notebook.

    result = zerosim.run(zerosim.RunConfig(stage=3, ranks=4, steps=1), keep_events=True)
    zerosim.player(result)

The page shows only what was recorded while the program ran. `record.py` runs and records, `order.py` merges the ranks'
records into one order, `encode.py` turns them into the page's data, `decode.py` reads the data back, `html.py` makes
the page.
"""

from zerosim.playback.decode import decode as decode
from zerosim.playback.encode import Data as Data
from zerosim.playback.encode import encode as encode
from zerosim.playback.html import page as page
from zerosim.playback.notebook import Player as Player
from zerosim.playback.notebook import player as player
from zerosim.playback.record import Recorded as Recorded
from zerosim.playback.record import record as record
