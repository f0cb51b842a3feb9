"""Scenarios that check themselves: what a source prints, read, and judged against what is counted.

reading.py       the table [expect] of a file
sweeps.py        the grid of runs that a table spans
figures.py       printed figures: units, bold type, rounding
quantities.py    what can be counted on a run, what can be computed from its values, and the runs that are needed
judging.py       whether count and formula, rounded as the source rounds, are what it prints
"""

from zerosim.analysis.expect.judging import Judged as Judged
from zerosim.analysis.expect.judging import JudgedCell as JudgedCell
from zerosim.analysis.expect.judging import judge as judge
from zerosim.analysis.expect.quantities import Runs as Runs
from zerosim.analysis.expect.reading import Expectation as Expectation
from zerosim.analysis.expect.reading import read_expectations as read_expectations
