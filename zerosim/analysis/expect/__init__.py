"""Scenarios that check themselves: what a source prints, read, and judged against what is counted.

expectation.py   a table [expect], as values
keys.py          the keys of a table [expect], and which go together
reading.py       the table [expect] of a file
sweeps.py        the grid of runs that a table spans
rows.py          runs that no grid spans, a line each
errors.py        how far off a list of figures is, and how well it ranks layouts
figures.py       printed figures: units, bold type, rounding
asked.py         a question about a run, and the runs that are needed
largest.py       what fits on a device, and the largest that does
counts.py        what can be counted on a run, and what the clock says of its time: a row for each
closed_forms.py  what can be computed from its values: a row for each
judging.py       whether count and formula, rounded as the source rounds, are what it prints
"""

from zerosim.analysis.expect.asked import Runs as Runs
from zerosim.analysis.expect.expectation import Expectation as Expectation
from zerosim.analysis.expect.judging import Judged as Judged
from zerosim.analysis.expect.judging import JudgedCell as JudgedCell
from zerosim.analysis.expect.judging import judge as judge
from zerosim.analysis.expect.reading import read_expectations as read_expectations
