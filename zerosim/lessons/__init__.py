"""Drawings of the course's notebooks, and the moments at which they stop a run: machinery that a cell should not
show."""
