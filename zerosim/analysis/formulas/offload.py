"""Offloaded model states: their bytes in each memory, and the bytes that move between memories in a step.

Source: ZeRO-Offload (2101.06840, section 4: 2M bytes of gradients out, 2M of parameters back, divided by N) and
ZeRO-Infinity (2104.07857, sections 5 and 6); with several microbatches, and what passes NVMe twice, derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerosim.analysis.formulas.form import Form, symbols
from zerosim.analysis.formulas.states import PSI, TRAINED, N

ZERO_OFFLOAD, ZERO_INFINITY = "arXiv 2101.06840", "arXiv 2104.07857"
DEVICE, HOST, NVME = "device", "host", "nvme"


def offloaded(
    memories: Mapping[str, str],
    gathers: Form,
    sizes: tuple[int, int, int],
    reductions: int,
    *,
    cpu_steps: bool,
    frozen: bool = False,
) -> Iterator[tuple[str, Form]]:
    """Yield the bytes that a rank copies in a step, by direction ('device to host'), in the order of their first copy.

    memories     of 'param', 'grad' and 'optim'
    gathers      bytes that all gathers of a step bring together, of which each rank holds its own shard
    sizes        bytes of a parameter, of its gradient, and of its master and states
    reductions   how often a reduced gradient leaves the device in a step
    cpu_steps    the CPU updates the states, and the device otherwise
    frozen       some parameters are not trained

    On NVMe gradients are read once for the norm and once for the step, and before each later microbatch's is added.
    """
    own, param, grad, optim = (TRAINED if frozen else PSI) / N, memories["param"], memories["grad"], memories["optim"]
    params, grads, states = (each * own for each in sizes)
    up = gathers / N if param != DEVICE else params if cpu_steps else Form()
    if param == NVME:
        yield f"{NVME} to {HOST}", up.by(ZERO_INFINITY)
    yield f"{HOST} to {DEVICE}", up.by(ZERO_OFFLOAD)
    if grad != DEVICE:
        yield f"{DEVICE} to {HOST}", (reductions * grads).by(ZERO_OFFLOAD)
    if param != DEVICE and not cpu_steps:
        yield f"{DEVICE} to {HOST}", params.by(ZERO_INFINITY)
    if grad == NVME:
        yield f"{HOST} to {NVME}", (reductions * grads).by(ZERO_INFINITY)
        yield f"{NVME} to {HOST}", ((reductions + 1) * grads).by(ZERO_INFINITY)
    if optim == NVME:
        for way in (f"{NVME} to {HOST}", f"{HOST} to {NVME}"):
            yield way, states.by(ZERO_INFINITY)
    if param == NVME:
        yield f"{HOST} to {NVME}", params.by(ZERO_INFINITY)


_nl, _h, _b, _s, _ci, _a = symbols("l h b s ci a")


def infinity_states() -> Form:
    """Return 240 l h² bytes: 20 of each of 12lh² parameters (ZeRO-Infinity, section 3, equation 2: 2 + 2 of half types,
    and 16 of Adam with an fp32 gradient)."""
    return (240 * _nl * _h * _h).by(f"{ZERO_INFINITY}, section 3")


def infinity_checkpoints() -> Form:
    """Return 2 b s h l / ci bytes of activation checkpoints, one for every ci blocks (equation 3)."""
    return (2 * _b * _s * _h * _nl / _ci).by(f"{ZERO_INFINITY}, section 3")


def infinity_working_memory() -> tuple[Form, Form]:
    """Return bytes of the largest map and its gradient, 16h², and of activations between two checkpoints, b s ci (16h +
    2as) (equations 4 and 5)."""
    activations = _b * _s * _ci * (16 * _h) + 2 * _b * _s * _s * _ci * _a
    source = f"{ZERO_INFINITY}, section 3"
    return (16 * _h * _h).by(source), activations.by(source)
