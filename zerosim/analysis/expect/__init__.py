"""Scenarios that check themselves: read a source's printed figures and judge them against counts.

expectation.py   a table [expect], as values
keys.py          the keys of a table [expect], and their valid combinations
reading.py       the table [expect] of a file
sweeps.py        the grid of runs in a table
rows.py          runs without a grid, a line each
errors.py        the errors of a list of figures, and its ranking of layouts
figures.py       printed figures: units, bold type, rounding
asked.py         a question about a run, and the cache of runs
largest.py       the largest value that fits on a device
counts.py        counts of a run, and the clock's times: a row for each
closed_forms.py  formulas of a run's values: a row for each
judging.py       compare count and formula, rounded as the source rounds, with the printed figure
"""

from zerosim.analysis.expect.asked import Runs as Runs
from zerosim.analysis.expect.expectation import Expectation as Expectation
from zerosim.analysis.expect.judging import Judged as Judged
from zerosim.analysis.expect.judging import JudgedCell as JudgedCell
from zerosim.analysis.expect.judging import judge as judge
from zerosim.analysis.expect.reading import read_expectations as read_expectations
