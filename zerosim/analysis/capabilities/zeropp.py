"""ZeRO++ and MiCS: what stage 3 sends within a node and across nodes, and hpZ's second shard."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capability import Asked, Beside, Capability, Sent, Step
from zerosim.analysis.facts import reductions
from zerosim.analysis.formulas import BytesPerParameter, Form, Operation
from zerosim.analysis.shares import itemsizes
from zerosim.analysis.weights import of_weights, sizes
from zerosim.analysis.zero_gathers import freed_of, schedule_of
from zerosim.config import RunConfig


def _sent(config: RunConfig, step: Step, sent: Sent) -> Sent:
    gathering, secondary, (param, grad) = config.gathering, config.mesh.secondary_shard > 0, itemsizes(config)
    if config.reduction.quantized_gradients:
        times = reductions(config, step.passes)
        sent = sent._replace(grads=dict(formulas.grads_sent(reductions=times, grad_bytes=grad)))
    if not (gathering.quantized_weights or gathering.hierarchical_gather or secondary):
        return sent
    params: dict[Operation, Form] = {}
    moved = formulas.gathers(schedule_of(config, step.passes))
    for operation, form in formulas.params_sent(
        moved,
        param_bytes=param,
        secondary=secondary,
        quantized=gathering.quantized_weights,
        hierarchical=gathering.hierarchical_gather,
    ):
        params[operation] = params.get(operation, Form()) + form
    if secondary:  # later gathers read hpZ's shard, which is on the device
        sent = sent._replace(fetched=param * (moved.forward + moved.after))
    return sent._replace(params=params)


def _beside(config: RunConfig, cost: BytesPerParameter, step: Step) -> Iterator[Beside]:
    """Yield hpZ's second shard, which is on the device wherever the primary one is."""
    if config.mesh.secondary_shard:
        moved, param = schedule_of(config), itemsizes(config)[0]
        second = formulas.secondary_states(param, keep_root_units=moved.keep_root_units, persistent=moved.persistent)
        yield Beside("param", second, memory="")


def _letters(asked: Asked) -> dict[str, int]:
    """Return the letters of ZeRO++'s codes: scales, and elements that are reduced exactly."""
    placed, share, padded, config = asked.placed, asked.share, asked.padded, asked.placed.config
    ranks, node, found = config.mesh.shards, config.mesh.axes.node, dict[str, int]()
    if config.gathering.quantized_weights:
        moved = formulas.gathers(schedule_of(config))
        among = {"σ_f": (moved.forward, ranks), "σ_b": (moved.backward, node if config.mesh.secondary_shard else ranks)}
        freed = freed_of(placed, share)
        for letter, (form, members) in among.items():
            scales = {
                name: members * formulas.weight_scales(numel // members) if name in freed else 0
                for name, numel in share.whole.items()
            }
            found[letter] = int(form.at(sizes(config) | of_weights(placed, share, padded=padded, instead=scales)))
    if config.reduction.quantized_gradients:
        flats = placed.layout.flats
        groups = {
            name: formulas.grad_scales([weight.shape for weight in flats[name].weights], numel, ranks)
            for name, numel in share.whole.items()
        }
        numels = share.whole if padded else share.numels
        found |= {"σ_g": sum(groups.values()), "O": sum(numels[name] for name, each in groups.items() if not each)}
    return found


def _is_coded(config: RunConfig) -> bool:
    return config.reduction.quantized_gradients or config.gathering.quantized_weights


def _codes(config: RunConfig) -> Iterator[str]:
    if _is_coded(config):
        yield "A code counts as its fraction of an element's bytes. Each scale is 4 bytes."


CAPABILITY = Capability(
    sent=_sent, beside=_beside, letters=_letters, measured=lambda config: not _is_coded(config),
    notes={"codes": _codes}, axes={"node": "d", "nodes": "n"},
)  # fmt: skip
