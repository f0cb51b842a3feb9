"""Draw sentences at random for a person to read, an equal number from each room.

python tests/english/draw.py SEED [COUNT]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sentences import Sentence, sentences

ROOMS = ("printed", "docstring", "comment", "page", "lesson")


def draw(seed: int, count: int) -> list[Sentence]:
    """Return `count` sentences, an equal number from each room, in a random order."""
    rng, found = random.Random(seed), list(sentences())
    drawn = [one for room in ROOMS for one in rng.sample([s for s in found if s.room == room], count // len(ROOMS))]
    rng.shuffle(drawn)
    return drawn


if __name__ == "__main__":
    for number, one in enumerate(draw(int(sys.argv[1]), int([*sys.argv, "200"][2])), 1):
        print(f"{number}\t{one.room}\t{one.place}\t{one.text}")
