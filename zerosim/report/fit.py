"""The result of a search: the answer first, then the rows that matter, and with `all` every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

from rich.console import RenderableType

from zerosim.analysis.candidate import candidate
from zerosim.analysis.capabilities import context, offload
from zerosim.analysis.left_out import given_flag
from zerosim.analysis.mesh_search import Meshes
from zerosim.analysis.meshes import NOTHING, mesh_values
from zerosim.analysis.offload_ways import has_drive_rate
from zerosim.analysis.search import SEARCHES, Devices, Found, Tried
from zerosim.analysis.shares import is_mesh
from zerosim.analysis.step_interval import step_interval
from zerosim.comm.runtime import make_backend
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.allocators import feels_limit
from zerosim.config.parts.pipeline import schedule_given
from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Device
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.report import words
from zerosim.report.interval import band, implausible, interval_words, not_ranked, trust
from zerosim.report.look import Adaptive, Cell, Grid, Stack, prose, right, titled
from zerosim.report.names import STAGES, counted, listed
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
IN_WORDS = {DEVICE: "device", HOST: "host memory", NVME: "NVMe"}
OF_MESH = ("ranks", "dp_replicate", "tp", "cp", "context", "ep", "etp", "pp", "pipeline", "virtual_stages",
           "balance_ends", "stage_layers", "stage", "recipe", "offload", "optimizer", "pad_vocab", "recompute",
           "sequence_parallel", "overlap", "loss", "micro_batch", "accumulate")  # fmt: skip
"""What a mesh search chooses, in the order of its flags."""
SAID = ("ranks", "stage", "recipe", "micro_batch", "accumulate")
"""Those that are shown even if they are the default."""
_LEFT = ("recipe", "ZeRO", "schedule", "recompute", "model", "fits", "offload")  # columns of words


class Search(NamedTuple):
    """What is searched, for which configuration, on which device, by which clock; `all`: every row is shown."""

    find: str
    config: RunConfig
    limit: Limit
    cluster: Cluster | None = None
    all: bool = False

    @property
    def devices(self) -> Devices:
        """The devices that the search tries configurations on."""
        return Devices(self.limit.nbytes, self.limit.reserve, self.cluster)

    @property
    def place(self) -> str:
        """The device's name or bytes."""
        return self.limit.name or format_bytes(self.limit.nbytes)

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

    def grid(self, rows: Sequence[dict[str, Cell]], *, every: bool = False) -> Grid:
        """Return a row for each result, the best first; on the first page a few of them, with three digits. `every`:
        all of them there too."""
        grid = Grid(*(name if name in _LEFT else right(name) for name in rows[0]))
        for row in rows if self.all or every else rows[:FEW]:
            grid.add(*row.values(), style="bold" if row is rows[0] else "")
        return grid if self.all else grid.short()


def fit_report(search: Search, found: Found, timed: RunResult | None = None) -> Stack:
    """Return the largest value that fits, or the fewest ranks. `timed` is a plan of it, if there is a clock."""
    config, what, best = search.config, search.find, found.best
    on = ""
    if is_mesh(config):
        on = f" (tp {config.mesh.tp} x pp {config.mesh.pp})" if what == "ranks" else f" ({words.shape(config)})"
    about = f"{words.model_name(config)}: {STAGES[config.parallel.zero_stage]} on {search.place}{on}, {SEARCHES[what]}"
    grid = Grid(right(what), right(taken_column(config)), right(""), "fits")
    for tried in sorted(found.tried, key=lambda tried: tried.value):
        is_best = best is not None and tried.value == best.value
        size = format_bytes(tried.peak_bytes)
        grid.add(tried.value, tried.peak_bytes, size, _does(tried), style="bold" if is_best else "")
    lines = [] if timed is None else step_lines(timed, search.cluster)
    tables = [titled("What was run", Adaptive(grid)), None if timed is None else time_table(timed, search.cluster)]
    shown, taken = (None, None) if best is None else (best.config, best.peak_bytes)
    return search.page(about, _answer(search, found), shown, lines, *(tables if search.all else []), taken=taken)


def models_report(search: Search, found: Found) -> Stack:
    """Return the largest named models that fit, and those above them."""
    tried, best = found.tried, found.best
    grid = Grid("model", right("parameters"), right("needs"), "fits")
    shown = [*[one for one in tried if not one.fits][-FEW:], *(one for one in tried if one.fits)]
    for one in tried if search.all else shown:
        style = "bold" if best is not None and one.config == best.config else ""
        grid.add(one.config.model.name, one.value, format_bytes(one.taken_bytes), _does(one), style=style)
    about = f"{STAGES[search.config.parallel.zero_stage]} on {search.place}, "
    about += f"{counted(search.config.mesh.ranks, 'rank')}, {SEARCHES['model']}"
    table = titled("What was run", Adaptive(grid))
    if best is None:
        return search.page(about, "No named model fits.", None, [], table)
    answer = f"--model {best.config.model.name}. {verdict(best.config, search.limit, best.peak_bytes)}"
    return search.page(about, answer, best.config, [], table, taken=best.peak_bytes)


def _does(tried: Tried) -> str:
    """Return whether a configuration fits, and the memory that is too small for it if that is not the device's."""
    others = [IN_WORDS[memory] for memory in tried.too_small if memory != DEVICE]
    return "yes" if tried.fits else f"no: {', '.join(others)}" if others else "no"


def _answer(search: Search, found: Found) -> str:
    config, what, limit, field = search.config, search.find, search.limit, search.find.replace("-", "_")
    best, beyond = found.best, found.beyond
    if best is None:
        least = min(found.tried, key=lambda tried: tried.taken_bytes)
        if DEVICE not in least.too_small:
            need = listed([IN_WORDS[memory] for memory in least.too_small])
            return f"Nothing fits: every candidate needs more {need} than the node has."
        does_not = verdict(least.config, limit, least.peak_bytes)
        return f"Nothing fits. --{what} {least.value} takes the least. {does_not}{_what_to_try(search, least.config)}"
    text = f"--{what} {best.value}. {verdict(best.config, limit, best.peak_bytes)}"
    if beyond is not None:
        least_of_it = "at least " if feels_limit(config.memory) else ""  # the run ended at the refusal
        short = f"{least_of_it}{format_bytes(beyond.taken_bytes - limit.nbytes)} short"
        need = listed([IN_WORDS[memory] for memory in beyond.too_small])
        short = short if DEVICE in beyond.too_small else f"needs more {need} than the node has"
        text += f" --{what} {beyond.value} does not fit: {short}."
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
    if field in ("layers", "params"):
        numel = build_model(best.config, Device(0, make_backend("meta"))).num_parameters
        text += f" That is a model of {numel:,} parameters ({format_count(numel)})."
    return text


def _in_nodes(whole: Tried, limit: Limit, node: int) -> str:
    """Return the fewest ranks that fill nodes, and the memory that they leave free."""
    text = f" In whole nodes of {node}: --ranks {whole.value}, {counted(whole.value // node, 'node')}, "
    free = limit.nbytes - whole.taken_bytes
    if others := [IN_WORDS[memory] for memory in whole.too_small if memory != DEVICE]:
        return f"{text}needs more {listed(others)} than a node has."
    return text + (f"{format_bytes(free)} free." if free >= 0 else f"does not fit: {format_bytes(-free)} short.")


def _what_to_try(search: Search, config: RunConfig) -> str:
    """Return flags that were not given and with which it fits."""
    tried: list[dict[str, Any]] = [{"stage": stage} for stage in range(config.parallel.zero_stage + 1, 4)]
    tried += [{"recompute": "full"}, {"attention": "flash"}, {"loss": "liger"}]
    flags = []
    for values in tried:
        changed = candidate(config, **values).config
        if changed is not None and changed != config and search.devices.tried(changed).fits:
            flags.append(flags_of(values))
    return f" Try {' or '.join(flags)}." if flags else ""


# -- offload --------------------------------------------------------------------------------------
def offload_report(search: Search, found: Sequence[Tried], has: Mapping[str, int | None]) -> Stack:
    """Return the fastest way that fits, beside all others. `has`: a node's bytes of its other memories."""
    config, limit, cluster = search.config, search.limit, search.cluster
    stage, ranks = STAGES[config.parallel.zero_stage], counted(config.mesh.ranks, "rank")
    node = " and ".join(f"{format_bytes(has[one] or 0)} of {IN_WORDS[one]}" for one in (HOST, NVME) if has[one])
    about = f"{words.model_name(config)}: {stage} on {ranks} of {search.place}" + (
        f", a node with {node}." * bool(node)
    )
    best, alone = found[0] if found[0].fits else None, next(one for one in found if not one.config.offload.is_on)
    least = min(found, key=lambda one: one.peak_bytes)
    if best is None:
        others = [IN_WORDS[memory] for memory in least.too_small if memory != DEVICE]
        which = offload_flags(least.config) if least.config.offload.is_on else "No offload"
        short = f"It needs more {listed(others)}." if others else verdict(least.config, limit, least.peak_bytes)
        answer = f"Nothing fits. {which} takes the least device memory. {short}"
    elif alone.fits:
        answer = f"No need to offload. {verdict(alone.config, limit, alone.peak_bytes)}"
    else:
        answer = f"{offload_flags(best.config)}. {verdict(best.config, limit, best.peak_bytes)}"
    rows = [_offload_cells(one, cluster) for one in found]
    grid = search.grid(rows, every=True)
    note = "Host memory and NVMe: the sum of a node's ranks."
    if cluster is not None:
        note += f" copies and CPU: how long compute waits for them. {trust(cluster, None)}"
    if cluster is not None and has[NVME] and not has_drive_rate(cluster):
        note += " The speed of the node's drives is unknown: states on NVMe take longer than this."
    shown = (grid, grid.short(), grid.short().without("copies, s", "CPU, s", "tokens/s"))
    table = titled("Ways to offload", Adaptive(*shown), note)
    config_of, taken = (None, None) if best is None else (best.config, best.peak_bytes)
    return search.page(about, answer, config_of, [], table, taken=taken)


def offload_flags(config: RunConfig) -> str:
    """Return the flags that run or plan it."""
    return flags_of(values_of(config, ("stage", "offload", "delayed_update")))


def _offload_cells(one: Tried, cluster: Cluster | None) -> dict[str, Cell]:
    does = "yes" if one.fits else f"no: {', '.join(IN_WORDS[memory] for memory in one.too_small)}"
    cells: dict[str, Cell] = {"offload": offload.where(one.config).replace(",", ", ") or "nothing", "fits": does}
    if cluster is not None:
        time, values = one.time, None if one.time is None else step_values(one.config, one.time, cluster)
        cells |= {
            "step, s": time and f"{time.seconds:.4g}",
            "tokens/s": None if values is None else f"{values['tokens_per_s']:,.0f}",
            "copies, s": time and f"{time.copies:.3g}",
            "CPU, s": time and f"{time.cpu:.3g}",
        }
    others = {f"{name}, bytes": one.node_bytes[memory] for name, memory in (("host", HOST), ("NVMe", NVME))}
    return {**cells, taken_column(one.config): one.peak_bytes, **others}


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
        "for their kernels or traffic alone.",
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
    fewer = grid.without(*(() if cluster is None else ("exposed, s", "bubble, s")))
    shown = (grid, grid.short(), fewer, fewer.without("schedule", "step, s"))
    rows = "rows: microbatch x accumulation"
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
        beyond = above_published(result.beyond, best, cluster)
        doubt = implausible(best.config, values["mfu"], cluster), _told_apart(result, cluster), beyond
        lines = [speed, *filter(None, doubt), *lines]
    if gone := _not_of(best.config, given):
        lines = [f"Leave out {' '.join(gone)}: this mesh has no use for {'it' if len(gone) == 1 else 'them'}.", *lines]
    table = titled(search.title(by, result.found), Adaptive(*shown), note)
    more = how if search.all or not result.ended else None
    return search.page(about, mesh_flags(best.config), best.config, lines, table, more, taken=best.peak_bytes)


def above_published(beyond: Tried | None, best: Tried, cluster: Cluster) -> str:
    """Return which plan would be faster by the clock, and why it is not the answer."""
    if beyond is None or beyond.time is None or beyond.order >= best.order or beyond.config == best.config:
        return ""
    values = step_values(beyond.config, beyond.time, cluster)
    warning = None if values is None else implausible(beyond.config, values["mfu"], cluster)
    return f"Faster by the clock: {mesh_flags(beyond.config)}. {warning}" if warning else ""


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


def _trust(found: Sequence[Tried], cluster: Cluster) -> str:
    return trust(cluster, *(step_interval(one.config, one.time, cluster) for one in found if one.time is not None))


def _told_apart(result: Meshes, cluster: Cluster) -> str:
    """Return how many of the best are no slower than the first, within the uncertainty."""
    bands = [band(one.config, one.time, cluster) for one in result.found if one.time is not None]
    if bands[0] is None or not (alike := not_ranked(bands)):
        return ""
    others = f"{counted(alike, 'other')} of these {len(result.found)}"
    return f"The first cannot be distinguished from {others}: their ranges overlap."


def _cells(one: Tried, cluster: Cluster | None) -> dict[str, Cell]:
    config, time, mesh = one.config, one.time, one.config.mesh.axes
    values = None if cluster is None or time is None else step_values(config, time, cluster)
    given = _chosen(config)
    chunks = f" x {given['virtual_stages']}" if "virtual_stages" in given else ""
    replicas = f"{mesh.dp_replicate} x {mesh.dp_shard}" if mesh.dp_replicate > 1 else str(mesh.dp_shard)
    cells: dict[str, Cell] = {
        "recipe": config.parallel.recipe,
        "tp": str(mesh.tp),
        "cp": f"{mesh.cp} {context.way(config)}" if mesh.cp > 1 else "-",
        "ep": f"{mesh.ep}{f' x {mesh.etp}' if mesh.etp > 1 else ''}",
        "pp": str(mesh.pp),
        "dp": replicas,
        "ZeRO": STAGES[config.parallel.zero_stage] if mesh.shards > 1 or config.offload.is_on else "-",
        "schedule": "-" if mesh.pp == 1 else f"{given.get('pipeline', '1f1b')}{chunks}",
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
