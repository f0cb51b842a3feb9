"""The gradients' norm on a mesh: which rank counts which element, and which one had a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerosim.comm.groups import Groups
from zerosim.device.copies import copied_to
from zerosim.errors import NonFiniteGradient
from zerosim.optim.precision import NormRow, norm_partials, total_norm
from zerosim.parallel.blame import blame
from zerosim.parallel.shards import Shards
from zerosim.placement.axes import without
from zerosim.placement.layout import Layout
from zerosim.placement.memories import DEVICE
from zerosim.placement.mesh import DATA, MODEL
from zerosim.placement.spec import WeightSpec
from zerosim.tensor.flat import Flat


def decided(
    groups: Groups,
    layout: Layout,
    flats: Sequence[Flat],
    shards: Shards,
    decide: Callable[[float], float | None],
    *,
    seen: bool,
) -> float | None:
    """Return the decision of `decide` on the norm of all ranks' gradients.

    One exchange of one fp64 number per slice carries the norm and any overflow, as inf or nan. If they are
    `seen`, every rank of a group already has all gradients: only the first one counts them, where groups differ.

    Raises: NonFiniteGradient naming rank and unit, unless such steps are skipped; LossScaleExhausted.
    """
    trained = [flat for flat in flats if flat.spec.is_trained]
    axes = layout.trained_axes
    comm, place = groups(*axes), shards.gradients.place if trained else DEVICE
    with comm.device.at(place):  # on the host, where gradients are there
        once = seen and layout.mesh.is_folded
        rows, most = norm_rows(layout, comm.device.rank, trained, once=once), max(comm.size, layout.mesh.edp)
        partials = norm_partials(comm.device, trained, most, *rows, read=shards.gradients.grad)
    partials = copied_to(partials, DEVICE)
    others = [(one,) for one in reversed(MODEL) if layout.mesh.size(one) > 1]
    for along in [*([] if seen and not once else [axes]), *others]:
        groups(*along).all_reduce(partials, op="sum", purpose="control")
    try:
        return decide(total_norm(comm.device, copied_to(partials, place)))
    except NonFiniteGradient:
        raise blame(groups(*MODEL, *DATA), flats, list(layout.flats)) from None


def norm_rows(
    layout: Layout, rank: int, flats: Sequence[Flat], *, once: bool = False
) -> tuple[list[NormRow | None], int]:
    """Return each rank's rows in the norm's table, and the number of rows: one for each unit of the whole model and
    each rank that its weights are cut over. Rows stand in the model's order, whichever pipeline stage holds them. A
    unit's leaf modules share its one row."""
    mesh = layout.mesh
    stage, most = mesh.index(rank, "pp"), max([mesh.size(*flat.cut_axes) for flat in layout.flats.values()])
    units = dict.fromkeys(flat.unit for flat in layout.flats.values())
    places = {unit: place for place, unit in enumerate(units)}
    rows, firsts = list[NormRow | None](), dict[tuple[tuple[str, ...], ...], bool]()  # which copies count, by axes
    for flat in flats:
        held, axes = flat.held.axes, flat.spec.cut_axes
        if (held, axes) not in firsts:
            firsts[held, axes] = not mesh.index(rank, *(held if once else without(layout.trained_axes, (*held, *axes))))
        counts = firsts[held, axes] and layout.is_counted(stage, flat.name)
        row, is_cut = places[flat.spec.unit] * most + mesh.index(rank, *axes), mesh.size(*axes) > 1
        counted = partial(WeightSpec.counts, mesh=mesh, rank=rank, axes=axes) if is_cut else None
        rows.append(NormRow(row, counted, mesh.size(*held)) if counts else None)
    return rows, len(places) * most
