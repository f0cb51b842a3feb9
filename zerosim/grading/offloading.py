"""The checks of CPU Adam's exercise: bytes over PCIe, the updating processor, the size of each copy back, where states
lie, and who waits for a copy."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.analysis.checks import checks
from zerosim.analysis.copies import PURPOSE
from zerosim.device.events import COMPUTE, CPU, Alloc, Copy, Event, Kernel, Launch, Wait
from zerosim.grading.checks import psi_of
from zerosim.grading.exercise import Comparison
from zerosim.grading.given.skeletons import MyCpuAdam
from zerosim.grading.record import peak, where
from zerosim.grading.trial import result_of
from zerosim.grading.verdict import Check
from zerosim.placement.memories import DEVICE, HOST

OUT, BACK = f"{DEVICE} to {HOST}", f"{HOST} to {DEVICE}"
_STATES = ("optim", "grad")
_SIDES = {DEVICE: COMPUTE, HOST: CPU}
"""Who works in a memory, and must wait for copies into it."""


def pcie(run: Comparison) -> Check:
    """Check that each rank copies 2Ψ/N bytes in each step, each way, and nothing in any other direction."""
    config = run.case.config
    share = 2 * psi_of(result_of(run.mine), run.exercise.stage) // config.mesh.ranks
    expected = f"2Ψ/N = {share:,} B {OUT} and as many back, per rank and step"
    wanted = {OUT: share, BACK: share}
    for rank, record in enumerate(run.mine.records):
        for step in run.steps:
            found = _copied(record, step)
            if found == wanted:
                continue
            at = next(n for n, event in enumerate(record) if event.scope.step == step and _is_off(event, wanted, found))
            words = ", ".join(f"{found.get(way, 0):,} B {way}" for way in dict.fromkeys((*wanted, *found)))
            counted = f"{words}, on rank {rank} in step {step}"
            spot = where(rank, record, at).only()
            return Check("pcie", False, expected, counted, hint=_hint(found, share), where=spot)
    return Check("pcie", True, expected, f"{share:,} B each way")


def _copied(record: Sequence[Event], step: int) -> dict[str, int]:
    """Return the bytes copied from one memory to another in a step, by direction."""
    found: dict[str, int] = {}
    for event in record:
        if isinstance(event, Copy) and event.scope.step == step and event.purpose == PURPOSE:
            way = f"{event.source} to {event.target}"
            found[way] = found.get(way, 0) + event.nbytes
    return found


def _is_off(event: Event, wanted: dict[str, int], found: dict[str, int]) -> bool:
    """Return a copy of a direction with the wrong bytes or, without one of that direction, any event of the step."""
    off = [way for way in (*wanted, *found) if found.get(way) != wanted.get(way)]
    missing = [way for way in off if way not in found]
    return bool(missing) or (isinstance(event, Copy) and f"{event.source} to {event.target}" in off)


def _hint(found: dict[str, int], share: int) -> str:
    if found.get(BACK, 0) == 2 * share:
        return "masters are fp32, parameters half as large: cast on the host, then copy"
    if share < found.get(OUT, 0) < 2 * share:
        return "some bytes leave twice: which gradient does the optimizer still find on the device?"
    if found.get(OUT, 0) > share:
        return "reduce_scatter first: then only your slice remains to be copied"
    if not found.get(BACK):
        return "the device still has the old parameters: copy the new ones into flat.shard()"
    return "each gradient goes out once, each new parameter comes back once"


def cpu(run: Comparison) -> Check:
    """Check that every kernel of the optimizer ran on the host's CPU."""
    expected = "Adam runs on the host's CPU"
    for rank, record in enumerate(run.mine.records):
        for number, event in enumerate(record):
            if isinstance(event, Kernel) and event.name == "adam" and event.place != HOST:
                at, hint = where(rank, record, number).only(), "with self.device.at('host'): kernels run on the CPU"
                return Check("cpu", False, expected, f"on the device of rank {rank}", hint=hint, where=at)
    return Check("cpu", True, expected, "it does")


def tiles(run: Comparison) -> Check:
    """Check that at most one tile goes back at once, and that the host holds no more than one beside the states and
    gradients."""
    most = MyCpuAdam.tile * 2
    expected = f"at most a tile of {MyCpuAdam.tile} elements = {most:,} B at once, on the host and on its way back"
    for rank, record in enumerate(run.mine.records):
        for number, event in enumerate(record):
            if isinstance(event, Copy) and (event.source, event.purpose) == (HOST, PURPOSE) and event.nbytes > most:
                at = where(rank, record, number).only()
                hint = "copy self.tile elements of the slice, then the next tile"
                return Check("tiles", False, expected, f"{event.nbytes:,} B on rank {rank}", hint=hint, where=at)
        held = peak(record, lambda buffer: buffer.nbytes if buffer.memory == HOST and buffer.kind not in _STATES else 0)
        if held.amount > most:
            at = where(rank, record, held.number).only("temp", "param")
            hint = "free a tile before you allocate the next one"
            return Check("tiles", False, expected, f"{held.amount:,} B held on rank {rank}", hint=hint, where=at)
    return Check("tiles", True, expected, "they are")


def held(run: Comparison) -> Check:
    """Check that the bytes in each memory when backward ends are the closed form's, and the device's peak at most the
    reference's."""
    mine = checks(result_of(run.mine))[0].memories
    expected = ", ".join(f"{one.label} {one.text}" for one in mine)
    wrong = next((one for one in mine if not one.agrees), None)
    if wrong is not None:
        counted = f"{wrong.label} {max(wrong.counted):,} B, expected {int(wrong.formula or 0):,} B"
        hint = "the slice stays on the host until the step, in a buffer of Kind.GRAD: flat.add_grad_shard stores it"
        return Check("held", False, expected, counted, hint=hint)
    for rank, (record, theirs) in enumerate(zip(run.mine.records, run.reference.records, strict=True)):
        most, found = peak(theirs, _on_device).amount, peak(record, _on_device)
        if found.amount > most:
            hint = "copy a gradient in post_backward, and keep no name on the device's buffer"
            counted = f"a peak of {found.amount:,} B on the device of rank {rank}, the reference's is {most:,} B"
            return Check("held", False, expected, counted, hint=hint, where=where(rank, record, found.number))
    return Check("held", True, expected, "they do")


def waits(run: Comparison) -> Check:
    """Check that each copy follows the work that made its source, that its target is waited for before it is used, and
    that the source's side waits, too, before it frees the source."""
    expected = "each copy launched after the work that made its source, and waited for on both sides"
    for rank, record in enumerate(run.mine.records):
        for number, event in enumerate(record):
            if isinstance(event, Copy) and event.purpose == PURPOSE and (wrong := _unordered(record, number, event)):
                counted = f"the copy of {event.nbytes:,} B {event.source} to {event.target} on rank {rank} {wrong[0]}"
                return Check("waits", False, expected, counted, hint=wrong[1], where=where(rank, record, number).only())
    return Check("waits", True, expected, "they are")


def _unordered(record: Sequence[Event], number: int, copy: Copy) -> tuple[str, str] | None:
    """Return what is wrong with the order of a copy and the work on both sides, and a hint."""
    made, used = _SIDES[copy.source], _SIDES[copy.target]
    if copy.after != made:
        return f"is launched after {copy.after!r}", f"what made its source? launch_copy(source, target, after={made!r})"
    of_copy = [(at, event) for at, event in enumerate(record) if isinstance(event, Wait) and event.work == copy.work]
    waits = {event.by: at for at, event in reversed(of_copy)}  # the first of each side
    if used not in waits:
        return f"is never waited for by {used!r}", f"copy.wait({used!r}): else it is used before the bytes have arrived"
    if made not in waits:
        return f"is never waited for by {made!r}", f"copy.wait({made!r}): else its source is overwritten too early"
    if any(_uses(event, copy.target) for event in record[number : waits[used]]):
        return f"is used before {used!r} waits for it", f"copy.wait({used!r}) before the copied bytes are used"
    return None


def _uses(event: Event, memory: str) -> bool:
    """Return whether an event may read what was copied: a kernel on the host, a collective of the device."""
    return isinstance(event, Kernel) and event.place == HOST if memory == HOST else isinstance(event, Launch)


def _on_device(buffer: Alloc) -> int:
    return buffer.nbytes if buffer.memory == DEVICE else 0
