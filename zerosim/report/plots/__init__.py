"""Pictures of what runs counted: functions that return a matplotlib Figure, and one that writes it.

Everything that needs matplotlib is in this folder, which nothing imports until a picture is asked for.
"""

from zerosim.report.plots.addresses import addresses_figure
from zerosim.report.plots.by_stage import memory_figure, traffic_figure
from zerosim.report.plots.descent import descent_figure
from zerosim.report.plots.gradients import gradients_figure
from zerosim.report.plots.optimizers import optimizers_figure
from zerosim.report.plots.overlap import overlap_figure
from zerosim.report.plots.page import write_figure
from zerosim.report.plots.scaling import scaling_figure
from zerosim.report.plots.schedule import schedule_figure
from zerosim.report.plots.streams import streams_figure
from zerosim.report.plots.throughput import throughput_figure
from zerosim.report.plots.timeline import timeline_figure

__all__ = [
    "addresses_figure",
    "descent_figure",
    "gradients_figure",
    "memory_figure",
    "optimizers_figure",
    "overlap_figure",
    "scaling_figure",
    "schedule_figure",
    "streams_figure",
    "throughput_figure",
    "timeline_figure",
    "traffic_figure",
    "write_figure",
]
