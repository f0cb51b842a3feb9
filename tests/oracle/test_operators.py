"""The table of what frameworks launch (`operators.toml`), counted again from their formulas in PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition

from zerosim import functional as Z
from zerosim.backends.kernels import AdamStep
from zerosim.comm.runtime import make_backend
from zerosim.config import plan_config
from zerosim.config.presets.operators import ALONE, Operator, operators
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Kernel
from zerosim.dtypes import dtype
from zerosim.functional.fp8 import Wanted, cast
from zerosim.functional.fp8_recipes import torchao
from zerosim.functional.loss import LogitsGrad, cross_entropy_sum
from zerosim.functional.loss_modes import MODES
from zerosim.functional.policy import ActivationPolicy
from zerosim.tensor.autograd import backward
from zerosim.tensor.tensor import Leaf, Tensor
from zerosim.train.plan import plan_first_step

from . import frameworks
from .launches import Launched, Launches, counted

B, T, D, H, K, E, V = 1, 8192, 4096, 32, 8, 128, 128_256
"""Llama 3's 8B: rows of 8,192 tokens, 32 heads on 8 of keys and values."""
MEGATRON = ActivationPolicy("megatron")


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def fixed(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=of, device="meta")


class Recorded:
    """zerosim's own events of an operator on shapes."""

    def __init__(self) -> None:
        self.device = Device(0, make_backend("meta"))

    def buffer(self, *shape: int, of: str = "bf16") -> Buffer:
        return self.device.alloc(shape, dtype(of), Kind.ACTIVATION)

    def tensor(self, *shape: int) -> Tensor:
        return Tensor(self.buffer(*shape), Leaf())

    def of(self, run: Callable[[], Any]) -> tuple[Any, list[Kernel]]:
        before = len(self.device.recorder.events)
        result = run()
        return result, [event for event in self.device.recorder.events[before:] if isinstance(event, Kernel)]

    def both(self, op: Callable[..., Tensor], *shapes: tuple[int, ...]) -> tuple[list[Kernel], list[Kernel]]:
        """The events of forward and of backward."""
        out, forward = self.of(lambda: op(*(self.tensor(*shape) for shape in shapes)))
        assert out.node is not None
        return forward, self.of(lambda: backward(out.node, [out.new_grad()]))[1]


class Case(NamedTuple):
    """An operator: a framework's formula with its inputs, zerosim's op with its shapes."""

    formula: Callable[..., Any]
    inputs: Sequence[torch.Tensor]
    op: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]


X, WIDE = (B, T, D), (B, T, 4 * D)
CASES: Mapping[str, Case] = {
    "rms_norm": Case(
        frameworks.rms_norm, [bf16(*X), bf16(D)], lambda x, w: Z.rms_norm(x, w, policy=MEGATRON), [X, (D,)]
    ),
    "layer_norm": Case(
        frameworks.layer_norm, [bf16(*X), bf16(D), bf16(D)],
        lambda x, w, b: Z.layer_norm(x, w, b, policy=MEGATRON), [X, (D,), (D,)],
    ),
    "swiglu": Case(frameworks.swiglu, [bf16(*WIDE), bf16(*WIDE)], Z.swiglu, [(B, T, 8 * D)]),
    "gelu": Case(frameworks.gelu, [bf16(*WIDE)], Z.gelu, [WIDE]),
    "dropout": Case(frameworks.dropout, [bf16(*X)], lambda x: Z.dropout(x, 0.1, (0, 0)), [X]),
    "softmax": Case(
        frameworks.scores_to_probabilities, [bf16(B, H, T, T), fixed(B, 1, T, T)],
        lambda qkv: Z.attention(qkv, H, num_kv_heads=K, policy=MEGATRON), [(B, T, (H + 2 * K) * E)],
    ),
}  # fmt: skip
EAGER = operators("eager")


def bytes_of(events: Sequence[Kernel], name: str) -> int:
    return sum(event.bytes_read + event.bytes_written for event in events if event.name == name)


def row_of(launches: Sequence[Launched], events: Sequence[Kernel], name: str) -> Operator:
    """What a table should have: kernels launched for the events of a name, and how many times its bytes they move."""
    times = sum(event.name == name for event in events)
    moved = sum(one.nbytes for one in launches)
    return Operator(len(launches) // times, round(moved / bytes_of(events, name), 2))


@pytest.mark.parametrize("name", CASES)
def test_eager_rows(name: str) -> None:
    case = CASES[name]
    launched, events = counted(case.formula, *case.inputs), Recorded().both(case.op, *case.shapes)
    names = name, name if name == "dropout" else f"{name}_backward"
    for seen, recorded, row in zip(launched, events, names, strict=True):
        assert EAGER[row] == row_of(seen.all, recorded, row)


def test_rotary_is_one_name_for_forward_and_backward() -> None:
    table = fixed(T, E // 2, of=torch.complex64)
    forward, back = counted(frameworks.rotary, bf16(B, T, H, E), bf16(B, T, K, E), table)
    events = Recorded().both(lambda qkv: Z.rotary(qkv, H, K), (B, T, (H + 2 * K) * E))
    assert EAGER["rotary"] == row_of([*forward.all, *back.all], [*events[0], *events[1]], "rotary")


def test_adamw_steps_a_list_at_a_time() -> None:
    optimizer, numel = frameworks.adamw_step(10**6), 10**6
    with Launches() as seen:
        optimizer.step()
    record = Recorded()
    arrays = [record.buffer(numel, of="fp32").array for _ in range(4)]
    numbers = AdamStep(1.0, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, 2)
    events = record.of(lambda: record.device.kernel(0, record.device.backend.adam, *arrays, numbers))[1]
    assert operators("eager", foreach=True)["adam"] == row_of(seen.all, events, "adam")
    assert EAGER["adam"] == ALONE  # apex's FusedAdam, DeepSpeed's: one kernel


def test_clipping_multiplies_the_gradients() -> None:
    """zerosim's kernel of the optimizer does that as it reads them. A step's few scalars are left out."""
    with Launches() as seen:
        frameworks.clip(10**6)
    record = Recorded()
    grad, out = record.buffer(10**6, of="fp32").array, record.buffer(1, of="fp64").array
    events = record.of(lambda: record.device.kernel(0, record.device.backend.sum_squares, grad, 10**6, out))[1]
    of_gradients = [one for one in seen.all if one.op.startswith("_foreach")]
    assert EAGER["sum_squares"] == row_of(of_gradients, events, "sum_squares")._replace(launches=0)  # of a whole list


def loss_events(mode: str, of: str) -> tuple[list[Kernel], list[Kernel]]:
    record = Recorded()
    logits, targets = [record.buffer(T, V, of=of)], record.buffer(T, of="int64")
    (_, make_grad), forward = record.of(
        lambda: MODES[mode](logits, lambda own: cross_entropy_sum(own, targets), LogitsGrad(targets, 1.0, T))
    )
    return forward, record.of(make_grad)[1]


def test_the_loss_of_pytorch() -> None:
    """Its events are a cast, log_softmax, nll_loss, and theirs backward; as many kernels, and as many bytes."""
    launched = counted(frameworks.cross_entropy, bf16(T, V), fixed(T, of=torch.int64))
    rows = operators("eager", loss="torch")
    for seen, events in zip(launched, loss_events("torch", "bf16"), strict=True):
        assert sum(rows[event.name].launches for event in events) == len(seen.all)
        moved = sum(rows[name].traffic * bytes_of(events, name) for name in {event.name for event in events})
        assert moved == pytest.approx(seen.nbytes, rel=1e-4)


def test_the_loss_of_megatron() -> None:
    logits = torch.empty(T, V, device="meta", requires_grad=True)
    launched = counted(frameworks.MegatronLoss.apply, logits, fixed(T, of=torch.int64))
    rows, events = operators("fused", loss="megatron"), loss_events("megatron", "fp32")
    assert rows["cross_entropy"] == row_of(launched[0].all, events[0], "cross_entropy")
    assert rows["cross_entropy_backward"] == row_of(launched[1].all, events[1], "cross_entropy_backward")
    # Over tensor-parallel ranks the maximum, the logarithm and two sums of rows are events of their own.
    own = [one.nbytes for one in launched[0].all if one.op not in ("max", "log")]
    assert rows["cross_entropy_shares"] == Operator(len(own) - 2, round(sum(own) / (4 * T * V), 2))


def test_casts_to_8_bits() -> None:
    """Tensorwise: the codes of a tensor, which are not its transpose's too."""
    x, scale = fixed(T, D), fixed(1, of=torch.float32)
    with Launches() as amax:
        frameworks.float8_amax(x)
    with Launches() as codes:
        frameworks.float8_cast(x, scale)
    record = Recorded()
    casting = torchao("tensorwise", "floor", exact_wgrad=False).forward.left
    events = record.of(lambda: cast(record.device, record.buffer(T, D).array, [Wanted(casting)]))[1]
    for seen, name in ((amax, "fp8_amax"), (codes, "fp8_cast")):
        assert EAGER[name] == row_of(seen.all, events, name)
    with Launches() as rows:
        frameworks.float8_rows(x)
    casting = torchao("rowwise", "floor", exact_wgrad=False).forward.left
    events = record.of(lambda: cast(record.device, record.buffer(T, D).array, [Wanted(casting)]))[1]
    assert operators("eager", by_rows=True)["fp8_cast"] == row_of(rows.all, events, "fp8_cast")


def test_a_compiled_map_finds_three_amaxes_of_five() -> None:
    """Forward has those of x and of weight, which backward asks for again, and grad's is new."""
    found = Counter[str]()

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.update(str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    x, weight = bf16(64, 32), bf16(16, 32)
    compiled = aot_function(
        frameworks.Float8Linear.apply, compiler, compiler, partition_fn=min_cut_rematerialization_partition
    )
    compiled(x, weight).sum().backward()
    assert found["max"] == 3
    asked = 5
    assert operators("compiled")["fp8_amax"] == Operator(1, found["max"] / asked)


def test_what_no_framework_runs() -> None:
    """Statistics are kept, a dropout draws its own mask, and nobody but zerosim looks at each gradient."""
    for kernels in ("eager", "compiled", "fused"):
        rows = operators(kernels)
        unused = {name for name, row in rows.items() if row == Operator(0, 0.0)}
        # in a product, in the residual's kernel, in the experts' activation
        adds = {"accumulate", "add_bias", "weigh_rows", "weigh_rows_backward"} if kernels == "fused" else set()
        assert unused == {"rms_norm_stats", "layer_norm_stats", "dropout_mask", "finite_probe", "add_norm"} | adds


def test_every_eager_row_is_counted() -> None:
    backwards = {f"{name}_backward" for name in CASES if name != "dropout"}
    counted_here = {*CASES, *backwards, "rotary", "sum_squares", "fp8_amax", "fp8_cast"}
    assert {name for name, row in EAGER.items() if row != Operator(0, 0.0)} == counted_here


def test_compiled_rows_follow_from_the_rule() -> None:
    """Arrays of a block's width that kernels read and write; row reductions are fused with what is beside them."""
    compiled = operators("compiled")
    norm_backward = [["grad", "x", "dx"], ["grad", "x"]]  # of x, and of weight along the other axis
    alone = len(norm_backward[0])
    row = Operator(len(norm_backward), round(sum(map(len, norm_backward)) / alone, 2))
    assert compiled["rms_norm_backward"] == compiled["layer_norm_backward"] == row
    after_attention = [["x", "branch", "sum", "normed"]]  # the residual and the second norm
    end_of_block = [["x", "branch", "sum"]]
    first_norm = [["of q", "of k", "of v", "x", "residual", "dx"]]
    second_norm = [["of gate", "of up", "x", "residual", "dx"]]
    kernels = [*after_attention, *end_of_block, *first_norm, *second_norm]
    of_norms = 2 + alone + alone  # what the norms' own events have
    adds = 2 + 3 + 2
    assert adds == adds_of_a_layer()
    assert compiled["add"] == Operator(0, round((sum(map(len, kernels)) - of_norms) / (3 * adds), 2))


def adds_of_a_layer() -> int:
    """Events of one Llama block."""
    sizes: dict[str, Any] = dict(model="llama", hidden=64, heads=4, seq=16, vocab=128, ranks=1, attention="flash")
    one, two = (
        sum(isinstance(event, Kernel) and event.name == "add" and event.scope.step == 0 for event in events)
        for layers in (1, 2)
        for events in [plan_first_step(plan_config(**sizes, layers=layers)).events[0]]
    )
    return two - one


def test_rotary_kernels_leave_the_values_alone() -> None:
    assert operators("fused")["rotary"] == Operator(2, round((H + K) / (H + 2 * K), 2))
