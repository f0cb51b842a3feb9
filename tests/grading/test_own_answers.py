"""zerosim's own code solves no exercise for anybody: for each one an answer in which it does the work."""

from __future__ import annotations

import pytest
from forty import solution
from grading_here import grade_source

from zerosim.grading import EXERCISES, find_exercise
from zerosim.grading.variants import variant

HEAD = """\
from __future__ import annotations
import numpy as np
from zerosim.analysis import slots
from zerosim.backends.forms import Choice
from zerosim.backends.numpy import nf4, quantize, rounding
from zerosim.backends.numpy.experts import route_backward
from zerosim.device.allocators import arena
from zerosim.dialects import Context, Document, deepspeed
from zerosim.dialects.reading import flat
from zerosim.grading import *
from zerosim.nn.balance import Balance
from zerosim.grading import best_fit, optimizers, placing, waiting
from zerosim.grading.given import bugs, other_bugs
from zerosim.parallel import ddp, gathered, pipeline, prefetch, zero1
from zerosim.parallel.compression import codecs, powersgd
from zerosim.parallel.exchange import AllReduce, Slices
from zerosim.parallel.offload import OffloadedGradients
from zerosim.parallel.secondary import Secondary
from zerosim.placement import partition
from zerosim.placement.context import ContextCut
from zerosim.tensor import float8
"""

REDUCES = """\
    def post_backward(self, unit):
        if unit.reduces:
            flat, exchange = unit.flat, Slices()
            exchange.join(self.groups)
            flat.add_grad_shard(exchange.launch_reduce([flat], [flat.take_grad()]).wait()[0])
"""
RULE = """\
    def rule(self, xp, w, g, now, *states):
        new = optimizers.{0}(w, g + now.weight_decay * w, now.step, list(states))
        w += (new - w) * (now.lr / optimizers.LR)
"""

OWN = {
    "bounds": ("slice_of", """\
def slice_of(*sizes):
    part = partition.slice_of(*sizes)
    return part.start, part.stop
"""),
    "ddp": ("KeepSlice.launch_reduce", """\
class MyDDP(Strategy):
    sees_all_grads = True
    def owned(self, flat):
        return Slice(0, flat.numel, flat.numel)
    def padded(self, flat):
        return flat.numel
    def post_backward(self, unit):
        if unit.reduces:
            flat, exchange = unit.flat, AllReduce()
            exchange.join(self.groups)
            flat.add_grad_whole(flat.take_grad())
            if self.last:
                exchange.launch_in_place([flat], [flat.whole_grad()]).wait()
                flat.grad_shard = flat.whole_grad()
"""),
    "zero1": ("Zero1.post_backward and Zero1.publish_params", "class MyZero1(zero1.Zero1): pass\n"),
    "zero2": ("Slices.launch_publish and Slices.launch_reduce", f"""\
class MyZero2(Strategy):
    keeps_grads = False
{REDUCES}
    def publish_params(self, flat):
        exchange = Slices()
        exchange.join(self.groups)
        exchange.launch_publish(flat).wait()
"""),
    "zero3": ("Shared.gather, Shared.post_backward and 3 more", "class MyZero3(bugs.Shared): pass\n"),
    "tied": ("Gathered.release", """\
class MyTied(Zero3):
    def post_backward(self, unit):
        for flat in self.gathered.release(unit):
            flat.add_grad_shard(self.comm.reduce_scatter(flat.take_grad()))
"""),
    "accumulation": ("Reducer.launch", """\
class MyAccumulation(Zero2):
    def post_backward(self, unit):
        for flat in unit.completes:
            self.reducer.launch([flat], [flat.take_grad()])
            self.reducer.wait()
"""),
    "clipping": ("parallel.norm.decided", """\
class MyClipping(Zero2):
    def reduce_grad_norm(self):
        return self._decided(self.updater.decide)
"""),
    "prefetch": ("Units.launch", """\
class MyPrefetch(Zero3):
    def default_gathered(self):
        return gathered.Gathered(self.exchange, gathered.Residency(), prefetch.Units(1))
"""),
    "bug_thrifty": ("Shared.gather", "class Thrifty(bugs.Shared): pass\n"),
    "bug_mean": ("DDP.post_backward", "class Mean(ddp.DDP): pass\n"),
    "bug_shared": ("Hasty.post_backward", """\
class Shared(bugs.Shared):
    post_backward = bugs.Hasty.post_backward
"""),
    "bug_hasty": ("Zero3.post_backward", "class Hasty(Zero3): pass\n"),
    "bug_patient": ("Zero1.post_backward", "class Patient(zero1.Zero1): pass\n"),
    "bug_sparing": ("Sparing.post_backward", """\
class Sparing(bugs.Sparing):
    post_backward = other_bugs.Sparing.post_backward
"""),
    "borders": ("Borders.f_backward", "class MyBorders(Borders): pass\n"),
    "one_f_one_b": ("pipeline._one_by_one", "def my_1f1b(*sizes):\n    return pipeline.one_f_one_b(*sizes)\n"),
    "bug_rounds": ("pipeline.gpipe", """\
def rounds(p, stage, m, chunks=1):
    turns = [(first, pipeline.gpipe(p, stage, min(p, m - first))) for first in range(0, m, p)]
    return [type(one)(one.slot + first) for first, turn in turns for one in turn]
"""),
    "best_fit": ("Book.best", """\
class MyArena:
    def __init__(self, capacity):
        self.book = best_fit.Book(capacity)
    def reserve(self, nbytes):
        address = self.book.best(nbytes)
        if address is not None:
            self.book.live[address] = nbytes
        return address
    def release(self, address):
        del self.book.live[address]
"""),
    "compaction": ("compacted", "def my_compaction(live):\n    return arena.compacted(live)\n"),
    "depth": ("simulate", """\
def my_depth(compute, gather):
    waits = [waiting.waited(compute, gather, ahead) for ahead in range(len(compute))]
    return waits.index(waits[-1])
"""),
    "micro_batches": ("counted_bubble", """\
def my_micro_batches(stages, chunks, share):
    pace = count = stages if chunks > 1 else 1
    while waiting.bubble_of(stages, chunks, count) > share:
        count += pace
    return count
"""),
    "adagrad": ("grading.optimizers.adagrad", "class MyAdaGrad(Elementwise):\n    states, flops = ('sum',), 7\n"
        + RULE.format("adagrad")),
    "radam": ("grading.optimizers.radam", "class MyRAdam(Elementwise):\n    states, flops = "
        "('exp_avg', 'exp_avg_sq'), 9\n"
        + RULE.format("radam")),
    "quantiser": ("quantize", "def my_quantiser(values, table):\n    codes, scale = quantize.quantize(values, table)\n"
        "    return codes, float(scale[0])\n"),
    "rounding": ("stochastic", "def my_rounding(values, drawn):\n    return rounding.stochastic(values, drawn)\n"),
    "zb_h1": ("pipeline._one_by_one", "def my_zb_h1(*sizes):\n    return pipeline.zb_h1(*sizes)\n"),
    "nf4": ("quantize.quantize", """\
def my_nf4(values, table):
    codes, scale = quantize.quantize(values, table)
    codes = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
    return codes[::2] << 4 | codes[1::2], float(scale[0])
"""),
    "top_k": ("TopK.encode", """\
def my_top_k(grad, residual, k):
    left, kept, places = (grad + residual)[None], np.zeros((1, k)), np.zeros((1, k), np.int32)
    codecs.TopK(k / len(grad)).encode(np, left, kept, places)
    return places[0], kept[0], left[0]
"""),
    "powersgd": ("orthogonalize", """\
def my_powersgd(m, q):
    p = np.mean([one @ q for one in m], axis=0)
    powersgd.orthogonalize(np, p)
    q = np.mean([one.T @ p for one in m], axis=0)
    return p @ q.T, q
"""),
    "second_shard": ("Secondary._second and Zero3.pre_backward", """\
class MySecondShard(Zero3):
    def default_gathered(self):
        return Secondary(self.exchange, gathered.Residency())
"""),
    "cpu_adam": ("OffloadedGradients.send", """\
class MyCpuAdam(Zero2):
    def post_backward(self, unit):
        if unit.reduces:
            grad = self.comm.reduce_scatter(unit.flat.take_grad())
            OffloadedGradients("host", lambda flat: None, as_it_goes=True).send(unit.flat, grad)
"""),
    "offload": ("simulate", """\
def my_offload(psi, room, links, compute, update):
    fits = [where for where in placing.PLACEMENTS if not placing._over(psi, room, where)]
    return min(fits, key=lambda where: sum(placing.seconds(psi, links, compute, update, where)))
"""),
    "balance": ("ContextCut.pieces", """\
def my_pieces(ranks):
    cut = ContextCut(ranks, zigzag=True)
    return [[piece for run in cut.pieces(2 * ranks, rank) for piece in run] for rank in range(ranks)]
"""),
    "router": ("route_backward", """\
def my_router(logits, ids, grad, normed):
    dlogits = np.empty_like(logits)
    route_backward(grad, logits, ids, Choice("softmax", normed=normed), dlogits)
    return dlogits
"""),
    "bias": ("Balance.move", """\
def my_bias(scores, bias, top_k, rate):
    ids, balance = np.argsort(-(scores + bias))[..., :top_k], Balance(rate, 1)
    weights = np.take_along_axis(scores, ids, 2)
    balance.biases["router"] = list(bias)
    balance.loads["router"] = []
    balance.move({"router": np.bincount(ids.ravel(), minlength=len(bias)).tolist()})
    return weights / weights.sum(axis=2, keepdims=True), np.array(balance.biases["router"])
"""),
    "auto": ("filled", """\
def my_auto(config, hidden, micro, accumulate, ranks):
    keys = {**flat(config), "bf16.enabled": True}
    given = dict(model="llama", hidden=hidden, heads=8, micro_batch=micro, accumulate=accumulate, ranks=ranks)
    values = deepspeed.read(Document("ds_config.json", "deepspeed", keys), Context(given)).values
    zero = {**config["zero_optimization"], "reduce_bucket_size": values["reduce_bucket"]}
    return {**config, "zero_optimization": zero}, []
"""),
    "recut": ("slice_of", """\
def my_recut(pieces, numel, ranks):
    pieces = sorted(pieces, key=lambda piece: piece[0])
    state = np.concatenate([values for _, _, values in pieces])[:numel]
    parts = [partition.slice_of(numel, rank, ranks) for rank in range(ranks)]
    padded = np.pad(state, (0, parts[-1].stop - numel))
    return [(part.start, part.stop, padded[part.start : part.stop]) for part in parts]
"""),
    "scale": ("amax_of", """\
def my_scale(values, block):
    casting = float8.Casting(float8.E4M3, block)
    amax = float8.amax_of(np, casting, values)
    scales = np.empty_like(amax)
    float8.scales_from(np, casting, amax, scales)
    return scales
"""),
    "hole": ("slice_of", """\
def my_hole(files, sizes, ranks):
    total, at = sum(sizes.values()), 0
    owners = {one: rank for rank in range(ranks) for part in [partition.slice_of(total, rank, ranks)]
              for one in range(part.start, part.stop)}
    for name, numel in sizes.items():
        runs = [range(a, b) for own in files.values() for tensor, a, b in own if tensor == name]
        if left := sorted(set(range(numel)).difference(*runs)):
            return owners[at + left[0]], name, left[0], left[-1] + 1
        at += numel
    return None
"""),
}  # fmt: skip
"""By exercise: what is named, and the answer."""

WITHOUT = {
    "all_reduce": "comm.all_reduce is refused by the check of its halves",
    "merge": "zerosim merges inside a kernel that takes queries, keys and values",
    "ulysses": "zerosim's exchange takes the buffers of a run, no arrays",
    "adapter": "zerosim's adapter takes the tensors and buffers of a run, no arrays",
    "dispatch": "zerosim's rows travel in the buffers of a run, and a stable argsort is NumPy's",
    "divisor": "zerosim averages the buffers of a run, no arrays",
}


def test_there_is_one_for_each_exercise() -> None:
    assert sorted([*OWN, *WITHOUT]) == sorted(one.name for one in EXERCISES)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", sorted(OWN, key=lambda name: len(find_exercise(name).cases)))
def test_zerosims_own_work_is_named(name: str) -> None:
    words, source = OWN[name]
    found = grade_source(HEAD + source, name)
    assert words in found.verdict.void, str(found)
    assert found.points == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_an_exercise_gives_may_be_kept(seed: int) -> None:
    """A repair that overrides one method of the given class; the others are given."""
    one = variant(find_exercise("bug_thrifty"), seed)
    module = one.given.__module__.rpartition(".")[2]
    repaired = "def gather(self, flat):\n        flat.unshard(self.comm.all_gather(flat.shard()))\n"
    found = grade_source(f"{HEAD}\n\nclass Thrifty({module}.Thrifty):\n    {repaired}", one)
    assert found.passed, str(found)


@pytest.mark.slow
def test_a_gather_of_the_base_is_no_theft() -> None:
    """Exercise 33 is about the second shard: forward's gather may be that of the given base."""
    source = solution(
        "second_shard",
        ("full = self.comm.all_gather(flat.shard())", "super().pre_forward(unit)"),
        ("flat.unshard(full)", "full = flat.whole_param()"),
    )
    found = grade_source(source, "second_shard")
    assert found.passed, str(found)
