"""Small moving pictures: SVG files with CSS animations, of counted runs. They stand still where a reader asks for less
motion. No script, nothing outside of the file."""

from zerosim.report.moving.film import Moving as Moving
from zerosim.report.moving.ring import Hop as Hop
from zerosim.report.moving.ring import moving_ring as moving_ring
from zerosim.report.moving.staircase import moving_staircase as moving_staircase
