"""The closed forms of a run, chosen by its configuration. Every table and every comparison reads them here.

    forms(config)[Key("sent", "all_gather", "states")]    # ring(N) · w · Ψ, and so on

Each capability brings its own (`capabilities/`). `letters.letters_of` has values for the letters. Forms with the same
key add up: an optimizer's sums go with the operation that reduces gradients. Padding, owners and unequal costs depend
on the layout. They are numbers of the layout, not forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import CAPABILITIES
from zerosim.analysis.capability import ONCE, Beside, Capability, Forms, Key, Sent, Step
from zerosim.analysis.formulas import BytesPerParameter, Form
from zerosim.config import RunConfig


def forms(config: RunConfig, cost: BytesPerParameter | None = None, step: Step = ONCE) -> dict[Key, Form]:
    """Return every closed form of a run, in bytes per rank. `cost` is the bytes per parameter, needed for states."""
    sent = sent_of(config, step)
    found = [
        (Key("sent", *operation), form) for forms in (sent.grads, sent.params) for operation, form in forms.items()
    ]
    for capability in CAPABILITIES:
        found += capability.forms(config, step, sent)
    if cost is not None:
        found += _states(config, cost, step)
    return {key: divided(config, form) for key, form in _added(found).items()}


def divided(config: RunConfig, form: Form) -> Form:
    """Return a form as capabilities divide weights."""
    for capability in CAPABILITIES:
        form = capability.divided(config, form)
    return form


def of(found: Mapping[Key, Form], subject: str) -> dict[tuple[str, str], Form]:
    """Return one subject's forms by name and axis."""
    return {(key.name, key.axis): form for key, form in found.items() if key.subject == subject}


def sent_of(config: RunConfig, step: Step = ONCE, capabilities: Sequence[Capability] = CAPABILITIES) -> Sent:
    """Return what is sent for gradients and parameters: the stage's own, or what a capability has in its place."""
    sent = Sent()
    for capability in capabilities:
        sent = capability.sent(config, step, sent)
    return sent


def beside_of(config: RunConfig, cost: BytesPerParameter, step: Step) -> list[Beside]:
    """Return what lies beside model states."""
    return [part for capability in CAPABILITIES for part in capability.beside(config, cost, step)]


def local_states(config: RunConfig, cost: BytesPerParameter, step: Step) -> dict[str, Form]:
    """Return the bytes of what lies beside model states when backward ends, by kind: local shards at any stage."""
    parts = [part for part in beside_of(config, cost, step) if "states" in part.at]
    of_kind = {part.kind: formulas.total(one.form for one in parts if one.kind == part.kind) for part in parts}
    return {kind: divided(config, form) for kind, form in of_kind.items()}


def _states(config: RunConfig, cost: BytesPerParameter, step: Step) -> Forms:
    beside = beside_of(config, cost, step)
    held = _added(pair for capability in CAPABILITIES for pair in capability.held(config, cost))
    for key, form in held.items():
        more = (part.form for part in beside if part.kind == key.name and key.subject in part.at)
        yield key, formulas.total([form, *more])
    whole = {kind: form for (kind, _), form in of(held, "states").items()}
    there = [part for part in beside if "states" in part.at]
    for capability in CAPABILITIES:
        yield from capability.lies(config, whole, there)


def _added(pairs: Iterable[tuple[Key, Form]]) -> dict[Key, Form]:
    found: dict[Key, Form] = {}
    for key, form in pairs:
        found[key] = found[key] + form if key in found else form
    return found
