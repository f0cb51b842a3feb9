"""The result of a search: the answer first, then the rows that matter, and with `all` every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import RenderableType

from zerosim.analysis.candidate import candidate
from zerosim.analysis.capabilities import context
from zerosim.analysis.left_out import given_flag
from zerosim.analysis.mesh_search import Fitting, Meshes
from zerosim.analysis.meshes import mesh_values
from zerosim.analysis.models import TriedModel
from zerosim.analysis.search import SEARCHES, Found, Tried, with_value
from zerosim.analysis.shares import is_mesh
from zerosim.analysis.step_interval import step_interval
from zerosim.comm.runtime import make_backend
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.allocators import feels_limit
from zerosim.config.parts.pipeline import schedule_given
from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Device
from zerosim.placement.memories import HOST, NVME
from zerosim.report import words
from zerosim.report.interval import band, implausible, interval_words, not_ranked, trust
from zerosim.report.look import Adaptive, Cell, Grid, Stack, prose, right, titled
from zerosim.report.names import STAGES, counted
from zerosim.report.plan import MORE
from zerosim.report.plan_tables import outside_table
from zerosim.report.tables import set_aside_text
from zerosim.report.time import speed_text, step_lines, step_values, time_table
from zerosim.report.verdict import Limit, assumed, taken_column, usual_text, verdict
from zerosim.report.warnings import warnings_of, warnings_text
from zerosim.train.build_model import build_model
from zerosim.train.result import RunResult
from zerosim.units import format_bytes, format_count

FEW = 3
"""The number of rows on the first page."""
TOO_SMALL = {"": "", HOST: "more host memory", NVME: "more NVMe"}
"""What a rank needs if its share of its node's other memories is too small."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
OF_MESH = (
    *(
        "ranks",
        "dp_replicate",
        "tp",
        "cp",
        "context",
        "ep",
        "etp",
        "pp",
        "pipeline",
        "virtual_stages",
        "stage",
        "recipe",
    ),
    *("pad_vocab", "recompute", "sequence_parallel", "overlap", "micro_batch", "accumulate"),
)
"""What a mesh search chooses, in the order of its flags."""
SAID = ("ranks", "stage", "recipe", "micro_batch", "accumulate")
"""Those that are shown even if they are the default."""
_LEFT = ("ZeRO", "SP", "schedule", "overlap", "recompute")  # columns of words


class Search(NamedTuple):
    """What is searched, for which configuration, on which device, by which clock; `all`: every row is shown."""

    find: str
    config: RunConfig
    limit: Limit
    cluster: Cluster | None = None
    all: bool = False

    def room(self, tried: RunConfig) -> int:
        """Return the device's bytes that the reserve leaves."""
        return self.limit.nbytes - self.limit.reserve(tried)

    def page(
        self,
        about: str,
        answer: str,
        best: RunConfig | None,
        lines: Sequence[str],
        *tables: RenderableType | None,
        taken: int | None = None,
    ) -> Stack:
        """Return the answer and its subject, assumptions, warnings, tables, and the device's memory outside the
        program. `taken`: bytes of the best."""
        shown = self.config if best is None else best
        style = "bold red" if best is None else "bold green"
        told = filter(None, [about, usual_text(shown), *lines])
        return Stack(
            Stack(prose(answer, style), *map(prose, told), close=True),
            prose(assumed(shown, self.limit, self.cluster), "dim"),
            set_aside_text(shown),
            prose(notes, "dim") if (notes := words.notes_of_file(shown)) else None,
            warnings_text(self.warnings(best, taken)),
            *tables,
            outside_table(shown, self.limit) if self.all else prose(MORE, "dim"),
        )

    def warnings(self, best: RunConfig | None, taken: int | None) -> list[str]:
        """Return warnings on the best, if there is one."""
        return [] if best is None else warnings_of(best, self.limit, self.cluster, taken)

    def title(self, text: str, rows: Sequence[object]) -> str:
        """Return the title of a table, which says so if rows are left out."""
        return text if self.all or len(rows) <= FEW else f"{text}: {FEW} of {len(rows)}"

    def grid(self, rows: Sequence[dict[str, Cell]]) -> Grid:
        """Return a row for each result, the best first; on the first page a few of them, with three digits."""
        grid = Grid(*(name if name in _LEFT else right(name) for name in rows[0]))
        for row in rows if self.all else rows[:FEW]:
            grid.add(*row.values(), style="bold" if row is rows[0] else "")
        return grid if self.all else grid.short()


def fit_report(search: Search, found: Found, timed: RunResult | None = None) -> Stack:
    """Return the largest value that fits, or the fewest ranks. `timed` is a plan of it, if there is a clock."""
    config, what, limit = search.config, search.find, search.limit
    on = ""
    if is_mesh(config):
        on = f" (tp {config.mesh.tp} x pp {config.mesh.pp})" if what == "ranks" else f" ({words.shape(config)})"
    device = limit.name or format_bytes(limit.nbytes)
    about = f"{words.model_name(config)}: {STAGES[config.parallel.zero_stage]} on {device}{on}, {SEARCHES[what]}"
    grid = Grid(right(what), right(taken_column(config)), right(""), "fits")
    for tried in sorted(found.tried):
        does = "yes" if tried.fits(limit.nbytes) else TOO_SMALL[tried.too_small] or "no"
        peak = (None, None) if tried.too_small else (tried.peak_bytes, format_bytes(tried.peak_bytes))
        grid.add(tried.value, *peak, does, style="bold" if tried == found.best else "")
    best = None if found.best is None else with_value(config, what.replace("-", "_"), found.best.value).sure()
    lines = [] if timed is None else step_lines(timed, search.cluster)
    tables = [titled("What was run", Adaptive(grid)), None if timed is None else time_table(timed, search.cluster)]
    taken = None if found.best is None else found.best.peak_bytes
    return search.page(about, _answer(search, found), best, lines, *(tables if search.all else []), taken=taken)


def models_report(search: Search, tried: Sequence[TriedModel], best: RunConfig | None) -> Stack:
    """Return the largest named models that fit, and those above them."""
    limit = search.limit
    grid = Grid("model", right("parameters"), right("needs"), "fits")
    shown = [*[one for one in tried if not one.fits][-FEW:], *(one for one in tried if one.fits)]
    for one in tried if search.all else shown:
        needs = TOO_SMALL[one.too_small] or format_bytes(one.peak_bytes + one.reserve_bytes)
        is_best = best is not None and one.name == best.model.name
        grid.add(one.name, one.num_parameters, needs, "yes" if one.fits else "no", style="bold" if is_best else "")
    about = f"{STAGES[search.config.parallel.zero_stage]} on {limit.name or format_bytes(limit.nbytes)}, "
    about += f"{counted(search.config.mesh.ranks, 'rank')}, {SEARCHES['model']}"
    if best is None:
        return search.page(about, "No named model fits.", None, [], titled("What was run", Adaptive(grid)))
    found = next(one for one in tried if one.fits)
    answer = f"--model {found.name}. {verdict(best, limit, found.peak_bytes)}"
    return search.page(about, answer, best, [], titled("What was run", Adaptive(grid)), taken=found.peak_bytes)


def _answer(search: Search, found: Found) -> str:
    config, what, limit, field = search.config, search.find, search.limit, search.find.replace("-", "_")
    best, beyond = found.best, found.beyond
    if best is None:
        if not (known := [tried for tried in found.tried if not tried.too_small]):
            need = TOO_SMALL[found.tried[0].too_small]
            return f"Nothing fits: every candidate needs {need} than the node has."
        least = min(known, key=lambda tried: tried.taken_bytes)
        does_not = verdict(with_value(config, field, least.value).sure(), limit, least.peak_bytes)
        return f"Nothing fits. --{what} {least.value} takes the least. {does_not}{_what_to_try(config)}"
    shown = with_value(config, field, best.value).sure()
    text = f"--{what} {best.value}. {verdict(shown, limit, best.peak_bytes)}"
    if beyond is not None:
        least_of_it = "at least " if feels_limit(config.memory) else ""  # the run ended at the refusal
        short = f"{least_of_it}{format_bytes(beyond.taken_bytes - limit.nbytes)} short"
        need = TOO_SMALL[beyond.too_small]
        text += f" --{what} {beyond.value} does not fit: {f'needs {need} than the node has' if need else short}."
    elif what == "ranks":
        one = "data rank" if is_mesh(config) else "rank per replica" if config.mesh.dp_replicate > 1 else "rank"
        text += f" One {one} is enough."
    else:
        text += f" Larger values are refused: {found.refusal}." if found.refusal else " No larger value was searched."
    if found.whole_nodes is not None and search.cluster is not None:
        text += _in_nodes(found.whole_nodes, limit, search.cluster.node_gpus)
    if what == "seq" and config.model.has_position_table and best.value > config.model.positions:
        text += (
            f" The table of {config.model.positions:,} positions was lengthened: a run needs --positions {best.value}."
        )
    if what in ("layers", "params"):
        numel = build_model(shown, Device(0, make_backend("meta"))).num_parameters
        text += f" That is a model of {numel:,} parameters ({format_count(numel)})."
    return text


def _in_nodes(whole: Tried, limit: Limit, node: int) -> str:
    """Return the fewest ranks that fill nodes, and the memory that they leave free."""
    text = f" In whole nodes of {node}: --ranks {whole.value}, {counted(whole.value // node, 'node')}, "
    free = limit.nbytes - whole.taken_bytes
    if whole.too_small:
        return f"{text}needs {TOO_SMALL[whole.too_small]} than a node has."
    return text + (f"{format_bytes(free)} free." if free >= 0 else f"does not fit: {format_bytes(-free)} short.")


def _what_to_try(config: RunConfig) -> str:
    """Return flags that were not given, need less memory and go with the other options."""
    stages = range(config.parallel.zero_stage + 1, 4)
    flags = ["a higher --stage"] if any(candidate(config, stage=stage).config for stage in stages) else []
    for name, value in (("recompute", "full"), ("attention", "flash")):
        if config.value(name) != value and candidate(config, **{name: value}).config is not None:
            flags.append(f"--{name} {value}")
    return f" Try {' or '.join(flags)}." if flags else ""


# -- meshes ---------------------------------------------------------------------------------------
def mesh_report(search: Search, batch: int, result: Meshes, given: Mapping[str, Any] = NOTHING) -> Stack:
    """Return the flags of the best, its speed and memory, then the best ten. `given`: the options that a person gave,
    of which the best may not have all."""
    config, limit, cluster = search.config, search.limit, search.cluster
    ranks = counted(config.mesh.ranks, "rank")
    on = f"{ranks} of {limit.name or format_bytes(limit.nbytes)}"
    about = f"{words.model_name(config)} on {on}, a global batch of {counted(batch, 'row')}"
    how = prose(
        f"{result.candidates:,} ways to cut model and batch, and schedules, overlap and replicas beside the best. "
        f"{counted(result.estimated, 'configuration')} were estimated by plans of few blocks, {result.planned:,} of "
        f"them planned whole; {result.too_much:,} do not fit. The others need more memory or more recompute, or longer "
        "for their kernels alone.",
        "dim",
    )
    if not result.ended:
        tried = counted(result.planned, "plan"), counted(result.estimated, "estimate")
        how = prose(f"Stopped after {tried[0]} and {tried[1]}: there may be better ones.", "bold red")
    if not result.found:
        return search.page(about, f"Nothing fits on up to {on}.", None, [], how)
    best, grid = result.found[0], search.grid([_cells(one, cluster) for one in result.found])
    grid = grid if any(one.config.mesh.cp > 1 for one in result.found) else grid.without("cp")
    grid = grid if best.config.model.has_experts else grid.without("ep")
    fewer = grid.without("SP", "overlap", *(() if cluster is None else ("exposed, s", "bubble, s")))
    shown = (grid, grid.short(), fewer, fewer.without("schedule"))
    rows = "rows: microbatch x accumulation; SP: sequence parallelism"
    lines, note, by = [verdict(best.config, limit, best.peak_bytes)], f"{rows}.", "By memory"
    values = None if cluster is None or best.time is None else step_values(best.config, best.time, cluster)
    if cluster is not None and best.time is not None and values:
        by = "By modelled time"
        note = (
            f"On {cluster.name} in nodes of {cluster.node_gpus} with {cluster.nic / 1e9:g} GB/s of NICs. "
            f"{_trust(result.found, cluster)} {rows}; exposed: what compute waits for collectives, and bubble for "
            "other ranks, on the rank that ends last."
        )
        of = step_interval(best.config, best.time, cluster)
        speed = speed_text(values, "" if of is None else interval_words(of, best.time.seconds))
        doubt = implausible(values["mfu"], cluster), _told_apart(result, cluster)
        lines = [speed, *filter(None, doubt), *lines]
    if gone := _not_of(best.config, given):
        lines = [f"Leave out {' '.join(gone)}: this mesh has no use for {'it' if len(gone) == 1 else 'them'}.", *lines]
    table = titled(search.title(by, result.found), Adaptive(*shown), note)
    more = how if search.all or not result.ended else None
    return search.page(about, mesh_flags(best.config), best.config, lines, table, more, taken=best.peak_bytes)


def mesh_flags(config: RunConfig) -> str:
    """Return the flags that run or plan it."""
    return flags_of(_chosen(config))


def flags_of(values: Mapping[str, Any]) -> str:
    """Return the flags of these values."""
    return " ".join(starmap(given_flag, values.items()))


def _chosen(config: RunConfig) -> dict[str, Any]:
    return values_of(config, OF_MESH, **schedule_given(config.parallel))


def values_of(config: RunConfig, names: Sequence[str], **instead: Any) -> dict[str, Any]:
    """Return the values of these options, without most of those that hold anyway."""

    def holds(name: str, value: Any) -> bool:
        return name not in config.given if OPTIONS[name].follows else value == OPTIONS[name].default

    values = {name: config.value(name) for name in names} | instead
    return {name: value for name, value in values.items() if name in SAID or not holds(name, value)}


def _not_of(best: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """Return the given flags that the best configuration does not have."""
    varied = mesh_values(best).keys() - {"pipeline"}  # a mesh search takes a schedule as given
    gone = (name for name, value in given.items() if name not in varied and best.given.get(name) != value)
    return [given_flag(name, given[name]) for name in gone]


def _trust(found: Sequence[Fitting], cluster: Cluster) -> str:
    return trust(cluster, *(step_interval(one.config, one.time, cluster) for one in found if one.time is not None))


def _told_apart(result: Meshes, cluster: Cluster) -> str:
    """Return how many of the best are no slower than the first, within the uncertainty."""
    bands = [band(one.config, one.time, cluster) for one in result.found if one.time is not None]
    if bands[0] is None or not (alike := not_ranked(bands)):
        return ""
    others = f"{counted(alike, 'other')} of these {len(result.found)}"
    return f"The first cannot be distinguished from {others}: their ranges overlap."


def _cells(one: Fitting, cluster: Cluster | None) -> dict[str, Cell]:
    config, time, mesh = one.config, one.time, one.config.mesh.axes
    values = None if cluster is None or time is None else step_values(config, time, cluster)
    given = _chosen(config)
    chunks = f" x {given['virtual_stages']}" if "virtual_stages" in given else ""
    replicas = f"{mesh.dp_replicate} x {mesh.dp_shard}" if mesh.dp_replicate > 1 else str(mesh.dp_shard)
    cells: dict[str, Cell] = {
        "tp": str(mesh.tp),
        "cp": f"{mesh.cp} {context.way(config)}" if mesh.cp > 1 else "-",
        "ep": f"{mesh.ep}{f' x {mesh.etp}' if mesh.etp > 1 else ''}",
        "pp": str(mesh.pp),
        "dp": replicas,
        "ZeRO": STAGES[config.parallel.zero_stage] if mesh.shards > 1 or config.offload.is_on else "-",
        "SP": "yes" if "sequence_parallel" in given else "-",
        "schedule": "-" if mesh.pp == 1 else f"{given.get('pipeline', '1f1b')}{chunks}",
        "overlap": given.get("overlap", "-"),
        "rows": f"{config.data.micro_batch} x {config.data.accumulate}",
        "recompute": given.get("recompute", "none"),
    }
    if values is None or time is None:
        return {**cells, taken_column(config): one.peak_bytes}
    return {
        **cells,
        "tokens/s": f"{values['tokens_per_s']:,.0f}",
        "MFU, %": f"{100 * values['mfu']:.1f}",
        "step, s": f"{time.seconds:.4g}",
        taken_column(config): one.peak_bytes,
        "exposed, s": f"{sum(time.exposed.values()):.3g}",
        "bubble, s": f"{time.bubble:.3g}",
    }
