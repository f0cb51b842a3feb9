"""Pictures of counted runs: functions that return a `Chart`, a value that needs no matplotlib. `draw.py` draws it."""

from zerosim.report.plots.addresses import addresses_figure as addresses_figure
from zerosim.report.plots.beside import beside_figure as beside_figure
from zerosim.report.plots.by_stage import memory_figure as memory_figure
from zerosim.report.plots.by_stage import traffic_figure as traffic_figure
from zerosim.report.plots.chart import Chart as Chart
from zerosim.report.plots.descent import descent_figure as descent_figure
from zerosim.report.plots.experts import experts_figure as experts_figure
from zerosim.report.plots.flow import flow_figure as flow_figure
from zerosim.report.plots.gradients import gradients_figure as gradients_figure
from zerosim.report.plots.operands import operands_figure as operands_figure
from zerosim.report.plots.optimizers import optimizers_figure as optimizers_figure
from zerosim.report.plots.overlap import overlap_figure as overlap_figure
from zerosim.report.plots.ownership import stage_figure as stage_figure
from zerosim.report.plots.ownership import stages_figure as stages_figure
from zerosim.report.plots.scaling import scaling_figure as scaling_figure
from zerosim.report.plots.schedule import schedule_figure as schedule_figure
from zerosim.report.plots.streams import streams_figure as streams_figure
from zerosim.report.plots.throughput import throughput_figure as throughput_figure
from zerosim.report.plots.timeline import timeline_figure as timeline_figure
