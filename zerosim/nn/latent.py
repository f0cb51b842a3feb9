"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values come of one narrow latent a token, and queries of another one where the family has it. Beside the latent
the first map has R columns that are rotated and belong to every head's key:

    q = q_b(norm(q_a(x)))                      per head N plain columns and R rotated ones
    latent, turned = kv_a(x);  k|v = kv_b(norm(latent))    per head N columns of the key, V of the value
    q|k|v: per head (N + R), (N + R) and V columns; scores times 1 / sqrt(N + R)

Saved for backward: x once for both first maps, the latents before and after their norms, q|k|v and what the core saves.
The results of the maps into heads are freed when q|k|v is made. Part mla_up recomputes q|k|v from the latents, which
are all that is left of it then.

Under tensor parallelism the maps into latents, and their norms, are whole on every rank (Megatron's are too): each
works on its own rows. The maps into heads are cut by heads. The turned columns enter them as the latents do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zerosim import functional as F
from zerosim.backends.forms import Scores
from zerosim.nn.aside import Aside
from zerosim.nn.context import LayerContext
from zerosim.nn.group import WHOLE_MAPS
from zerosim.nn.lora import as_4bit, before_kernel
from zerosim.nn.maps import ColumnMap, Layer, back_to_width
from zerosim.nn.norm import Norm
from zerosim.nn.rope import rope_of
from zerosim.placement.block import Branch, Map, Place, Role
from zerosim.tensor.order import Passed, visit_before
from zerosim.tensor.tensor import Tensor

EPS = 1e-6
"""Added to the average of a latent's squares, whatever the model's other norms add."""


class LatentAttention:
    """Attention of heads that are made of latents. Shapes: x and y (B, T, D)."""

    def __init__(
        self,
        here: LayerContext,
        branch: Branch,
        number: int = 0,
        beside: Aside | None = None,
        bias: Aside | None = None,
    ) -> None:
        sizes, maps, row = here.sizes, here.group.maps, branch.latent
        assert row is not None
        columns, self.policy = sizes.latents, here.policy
        self.kv, self.turned = columns.kv, columns.turned
        whole = here._replace(group=replace(here.group, maps=WHOLE_MAPS))
        self.q_latent = list[Layer]()
        if row.q is not None:
            self.q_latent.append(_map(whole, branch.columns, "columns"))
            self.q_latent.append(here.taking(Role(0, "between")).leaf(row.q_norm, Norm, columns.q, EPS))
        self.q = _map(here, branch.columns, "columns") if row.q is None else _map(here, row.q, "up")
        self.kv_a = _map(whole, row.kv_a, "kv_columns")
        self.kv_norm = here.taking(Role(0, "kv_between")).leaf(row.kv_norm, Norm, columns.kv, EPS)
        self.kv_b = _map(here, row.kv_b, "kv_up")
        self.proj = back_to_width(here, number, branch.rows, sizes.width("values"))
        self.maps, self.rows, self.rope = maps, here.group.rows, rope_of(sizes, sizes.kind(here.number))
        self.heads = sizes.heads // maps.size
        form = Scores(sizes.numbers.query_scale)
        heads = dict(num_heads=self.heads, first_head=maps.index * self.heads, whole_heads=sizes.heads)
        self.core = partial(here.group.attention, **heads, policy=here.policy, form=form, value=columns.value)
        self.casts, self.part = before_kernel(here), branch.rows.part

    def __call__(self, x: Tensor) -> Tensor:
        run, held = partial(self.policy.run, "mla_up"), [x]
        for layer in self.q_latent:
            held.append(layer(held.pop()))
        up = [run(self.q, held.pop())]
        held.append(self.kv_a(x))
        visit_before(held[0], up[0])  # as PyTorch does, and as leaves are prefetched
        latent = [self.kv_norm(F.columns(held[0], 0, self.kv))]
        held.append(self._entered(F.columns(held.pop(), self.kv, self.kv + self.turned)))
        up.append(run(self.kv_b, latent.pop()))
        held.append(run(self._heads, up.pop(0), up.pop(), held.pop()))
        for layer in self.casts:
            held.append(layer(held.pop()))
        held.append(self.core(held.pop()))
        return self.policy.run(self.part, self.proj, held.pop())

    def _entered(self, turned: Tensor) -> Tensor:
        """Return the shared columns of all rows: each rank's heads have a share of their gradient."""
        if self.maps.size == 1:
            return turned
        return self.maps.columns(turned, (), lambda whole: whole.buffer, lambda _: Passed(), "turned", reads=False)

    def _heads(self, q: Tensor, kv: Tensor, turned: Tensor) -> Tensor:
        positions = self.rows.tokens(q.shape[1] * self.rows.context.ranks)
        return F.latent_heads(q, kv, turned, self.heads, rope=self.rope, positions=positions)


def _map(here: LayerContext, row: Map, place: Place) -> Layer:
    return as_4bit(here.taking(Role(0, place, row.part)).map(row.name, ColumnMap, row), here, row.name)
