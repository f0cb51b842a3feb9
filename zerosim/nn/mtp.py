"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): blocks that predict further tokens in training.

Depth d predicts the token d + 1 places on, of the state before it and of the embedding of the token d places on. The
table and the head are the model's:

    depth d: x = eh_proj(enorm(embed(ids[i + d])) | hnorm(state));  state = norm(block(x))
             loss: cross-entropy of head(state), times mtp_loss / D

The first state is the last norm's result. The order is Megatron-Core's (core/transformer/multi_token_prediction.py,
0.16.1): every depth's logits and loss are computed before the model's own logits, and their backward starts when the
model's loss reaches the last norm's result. Rows keep their length: a place without a token d places on reads token 0,
and one without a token to predict has no loss.

By the group's cut: eh_proj is cut by outputs, whose columns are gathered (f before it, `gather_columns` after it). A
pipeline's last stage has all depths, and so a copy of the table; `across.add_shares` adds its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim import functional as F
from zerosim.device.device import Buffer
from zerosim.nn.aside import Aside
from zerosim.nn.context import LayerContext
from zerosim.nn.decoder import DecoderBlock
from zerosim.nn.layers import TokenTable
from zerosim.nn.lora import in_autocast
from zerosim.nn.norm import Norm
from zerosim.tensor.tensor import Tensor

LossOf = Callable[[Tensor, Buffer, float], Tensor]
"""From a state, its targets and a factor to that factor times the loss, as the gradient sees it."""


class Further:
    """What so many depths read of a microbatch beside the stream, whose losses have this `weight` each."""

    def __init__(self, depths: int, weight: float) -> None:
        self.depths, self.weight = depths, weight
        self.ids, self.targets = list[Buffer](), list[Buffer]()
        self.loss_of: LossOf | None = None
        self.tokens = 0

    def open(self, ids: list[Buffer], targets: list[Buffer], tokens: int, loss_of: LossOf) -> None:
        """Take a microbatch's ids and targets by depth, of rows of so many tokens, before its forward."""
        self.ids, self.targets, self.tokens, self.loss_of = ids, targets, tokens, loss_of

    def loss(self, depth: int, state: Tensor) -> Tensor:
        """Return a depth's loss. Its mean is over the tokens that it predicts, fewer than the model does."""
        assert self.loss_of is not None, "open a microbatch first"
        predicted = (self.tokens - depth) / self.tokens
        return self.loss_of(state, self.targets[depth - 1], self.weight / predicted)

    def close(self) -> None:
        """Drop the tokens, and the model's loss, when the microbatch's forward has ended."""
        self.ids, self.targets, self.loss_of = [], [], None


class FurtherTable:
    """The embedding of each place's further token. The `state` stands beside the stream from here on."""

    def __init__(self, table: TokenTable, further: Further, depth: int, state: Aside) -> None:
        self.table, self.further, self.depth, self.state = table, further, depth, state

    def __call__(self, x: Tensor) -> Tensor:
        self.state.put(x)
        return self.table(Tensor(self.further.ids[self.depth - 1]))


class FurtherBlock:
    """A depth's norms and maps around its block. Shapes: x (B, T, D), the further tokens' embeddings; y the same."""

    def __init__(self, here: LayerContext, state: Aside) -> None:
        self.here, self.state, self.maps = here, state, here.group.maps
        self.enorm, self.hnorm = here.leaf("enorm", Norm), here.leaf("hnorm", Norm)
        shape, at = (here.sizes.hidden, 2 * here.sizes.hidden), here / "eh_proj"
        splits, summed = self.maps.split(shape, 0), self.maps.summed(here.group.rows)
        self.weight = at.declare("weight", shape, std=here.std, splits=splits, summed=summed)
        self.block = DecoderBlock(here)
        self.norm = (here / "shared_head").leaf("norm", Norm)

    def __call__(self, x: Tensor) -> Tensor:
        held = [F.beside(self.enorm(x), self.hnorm(self.state.read()))]
        del x
        [both], ([weight], _) = in_autocast(self.here, held.pop(), [self.weight], [])
        held.append(self.maps.column_linear(both, weight, transposed=True))
        del both
        held.append(self.maps.gather_columns(held.pop()))
        return self.norm(self.block(held.pop()))


class FurtherHead:
    """The loss of a depth's state, beside the stream: that state or, after the last depth, what `goes_on`."""

    def __init__(self, further: Further, depth: int, goes_on: Aside | None) -> None:
        self.further, self.depth, self.goes_on = further, depth, goes_on

    def __call__(self, x: Tensor) -> Tensor:
        loss = self.further.loss(self.depth, x)
        return F.with_loss(x if self.goes_on is None else self.goes_on.read(), loss)
