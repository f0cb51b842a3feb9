"""The router of a layer of experts: its gate, its choice, its losses, and the biases that balance it."""

from __future__ import annotations

from functools import partial

from zerosim import functional as F
from zerosim.backends.forms import Choice
from zerosim.device.device import Buffer, Device, Phase
from zerosim.dtypes import DType, fp32
from zerosim.functional.router import Chosen, Known
from zerosim.nn.balance import Noted
from zerosim.nn.context import LayerContext
from zerosim.nn.lora import in_autocast
from zerosim.nn.lora_stacks import adapted_router
from zerosim.placement.block import BALANCE, Experts
from zerosim.tensor.tensor import Operand, Parameter, Tensor


class Router:
    """Chooses experts for tokens x (..., D): weights (M, k), and the experts."""

    def __init__(self, here: LayerContext, row: Experts) -> None:
        sizes, options, summed = here.sizes, here.experts, here.group.maps.axes
        self.here, self.top_k, self.how, self.balance = here, sizes.top_k, choice_of(row, here), here.group.balance
        self.spread, self.capacity = options.spread_of(sizes.experts, here.number), options.capacity
        self.name, self.is_wide = f"{here.name}.{row.gate}.{BALANCE}", options.widens(row)
        self.losses = F.RouterLosses(options.aux_loss, options.z_loss) if options.has_losses else None
        self.of_sequences = options.aux_loss_over == "sequence"
        if self.balance is not None:
            self.balance.join(self.name, sizes.experts, biased=row.biased or options.bias_rate > 0)
        at = here / row.gate
        gate = at.declare("weight", (sizes.experts, sizes.hidden), std=here.std, summed=summed)
        self.read = adapted_router(at, row, gate)
        self.gate_bias = at.declare("bias", (sizes.experts,), summed=summed) if row.gate_bias else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Chosen]:
        dtype = fp32 if self.is_wide and x.dtype.is_half else None
        balance, device, routes = self.balance, x.device, self.here.group.routes
        known = None if routes is None else routes.take(self.name, device)
        logits = router_map(self.here, x, self.read(), dtype, self.gate_bias, known and known.logits)
        bias = None if balance is None or known is not None else balance.bias(self.name, device)
        weights, chosen = F.route(
            logits, self.top_k, self.how, bias, spread=self.spread, capacity=self.capacity, known=known
        )
        if routes is not None:
            routes.keep(self.name, device, Known(logits.buffer, weights.buffer, chosen.ids))
        if balance is not None and self.losses is not None and device.is_training:
            losses = self.losses._replace(runs=x.shape[0] if self.of_sequences else 1)
            factor = partial(balance.factor, self.here.group.maps.size)
            weights = F.with_losses(weights, logits, chosen.ids, self.how, losses, factor)
        return weights, chosen

    def note(self, device: Device, way: Noted) -> None:
        """Count a microbatch's choices; not where backward runs it again."""
        if self.balance is not None and device.where.phase == Phase.FORWARD.value:
            self.balance.note(self.name, way)


def router_map(
    here: LayerContext,
    x: Tensor,
    weight: Operand,
    dtype: DType | None = None,
    bias: Parameter | None = None,
    known: Buffer | None = None,
) -> Tensor:
    """Return a router's map of x, under autocast where the run is; its result may be `known`."""
    [own], ([read], more) = in_autocast(here, x, [weight], [] if bias is None else [bias])
    return F.linear(own, read, *more, transposed=True, dtype=dtype, known=known)


def choice_of(row: Experts, here: LayerContext) -> Choice:
    """Return how a router chooses, from its row and the model's numbers."""
    numbers = here.sizes.numbers
    groups, chosen, best = numbers.expert_groups, numbers.chosen_groups, 2 if row.ranks == "two" else 1
    return Choice(row.router, groups, chosen, best, row.normed, numbers.expert_scale)
