"""ZeRO++ and MiCS: a second shard changes no bit, codes are DeepSpeed's, and every byte has its form.

DeepSpeed's kernels need a GPU. Their rules are written down here once more, group by group and number by number, out of
csrc/includes/quantization_utils.h, swizzled_quantize.cu, quant_reduce.cu, partition_parameters.py (CUDAQuantizer) and
coalesced_collectives.py (all_to_all_quant_reduce); commits: `parallel/compression/groups.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from same import assert_same_bits

from zerosim.analysis import formulas
from zerosim.analysis.checks import checks
from zerosim.backends.numpy.cast import BFLOAT16
from zerosim.comm.runtime import Context, launch
from zerosim.config import RunConfig
from zerosim.config.other_words import not_modelled
from zerosim.device.device import Kind
from zerosim.device.events import Kernel, Launch, Message
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.parallel.compression.groups import Groups, grad_groups, weight_groups
from zerosim.placement.formats import blocks
from zerosim.placement.neighbours import NeighbouringSlices
from zerosim.placement.partition import EvenSlices
from zerosim.train.build import build_rank, place_rank
from zerosim.train.build_updater import build_updater
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run
from zerosim.train.world import world_of

SMALL: dict[str, Any] = dict(
    layers=1, hidden=64, heads=2, seq=8, vocab=128, micro_batch=1, steps=2, seed=5, ranks=4, stage=3
)
HPZ, QWZ, QGZ = (
    {"secondary_shard": 2},
    {"quantized_weights": True},
    {"quantized_gradients": True, "ranks_per_node": 2},
)
MICS = {"hierarchical_gather": True, "ranks_per_node": 2}
ALL = {**HPZ, **QWZ, "quantized_gradients": True}


def assert_every_byte_has_its_form(result: RunResult) -> None:
    step = len(result.steps) - 1
    for stage in range(result.config.mesh.pp):
        found = [*checks(result)[stage].states, *checks(result, step)[stage].sent, *checks(result, step)[stage].nodes]
        assert all(check.agrees for check in found), [check for check in found if not check.agrees]


# -- bits -------------------------------------------------------------------------------------------
OPTIONS: list[dict[str, Any]] = [
    {"precision": "fp16"},
    {"precision": "fp32", "prefetch": 1, "accumulate": 2},
    {"precision": "bf16", "gather": "module", "recompute": "full", "persistent_numel": 100},
    {"recipe": "fsdp2", "ranks": 8, "dp_replicate": 2},
    {"ranks": 8, "pp": 2, "layers": 2, "accumulate": 2, "keep_last_unit": True},
    {"precision": "fp32", "tie_embeddings": False, "keep_last_unit": True},
    {"ranks": 8, "pp": 2, "layers": 2, "accumulate": 4, "pipeline": "zb-h1"},
    {"recipe": "deepspeed"},
    {"ranks": 8, "tp": 2},
    {"optimizer": "adam8bit"},
    {"model": "llama", "layers": 1, "grad_sync": False, "accumulate": 2},
]


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_second_shard_and_hops_change_no_bit(options: dict[str, Any]) -> None:
    config = RunConfig(**{**SMALL, "hidden": 16, **options})
    exact = run(config)
    for more in (HPZ, {**HPZ, **MICS} if config.mesh.tp == 1 else {**MICS, "ranks_per_node": 2 * config.mesh.tp}):
        result = run(config.replace(**more))
        assert_same_bits(result, exact)
        assert_every_byte_has_its_form(result)


def test_backward_gathers_in_the_node_and_the_second_shard_is_made_once_an_update() -> None:
    small = {**SMALL, "layers": 1, "hidden": 16, "accumulate": 2}
    result = run(RunConfig(**small, **HPZ), keep_events=True)
    rows = [row for row in result.traffic[0] if row.op == "all_gather"]
    assert {(row.phase, row.axis) for row in rows} == {("forward", "dp_shard"), ("backward", "node")}
    units = len(result.units)
    copies = [e for e in result.events[0] if getattr(e, "name", "") == "copy" and e.scope.phase == "forward"]
    assert len(copies) == units * len(result.steps)
    shards = sum(-(-flat.numel // 4) * 2 * 2 for flat in result.layout.flats.values())
    plain = run(RunConfig(**small))
    held = [one.memory[0].marks["end_of_backward"].by_kind["param"] for one in (result, plain)]
    assert held[0] - held[1] == shards


def test_a_second_shard_is_neighbouring_primary_slices() -> None:
    for numel, nodes, node in product((1, 7, 24, 100, 1001), (1, 2, 3), (2, 3, 4)):
        primary, second, ranks = EvenSlices(), NeighbouringSlices(nodes), nodes * node
        assert second.padded(numel, node) == primary.padded(numel, ranks)
        kinds = second.kinds([numel], node)
        for place in range(node):
            part = second.part([numel], 0, place, node)
            slices = [primary.part([numel], 0, place * nodes + at, ranks) for at in range(nodes)]
            assert (part.start, part.stop) == (slices[0].start, slices[-1].stop)
            assert part.padding == sum(one.padding for one in slices)
            assert kinds[place] == (part.size - part.padding,)


# -- codes ------------------------------------------------------------------------------------------
def quantize(values: Sequence[Any], bits: int) -> tuple[list[int], Any]:
    """One group: `Params<Symmetric>` and its `quantize`."""
    most = max(abs(np.float32(v)) for v in values)
    scale = np.float32(1) if most == 0 else np.float32(1 << bits) / (np.float32(2) * most)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = [min(max(int(np.rint(np.float32(v) * scale)), low), high) for v in values]
    return codes, np.float32(1) / scale


def quantize_all(values: Any, groups: int, bits: int) -> tuple[list[list[int]], list[Any]]:
    each = [quantize(group, bits) for group in np.asarray(values).reshape(groups, -1)]
    return [codes for codes, _ in each], [scale for _, scale in each]


def dequantize(codes: Sequence[int], scale: Any) -> Any:
    return np.array([np.float16(np.float32(code) * scale) for code in codes])


def packed(codes: Sequence[int], bits: int) -> bytes:
    """int4: `PackedInt4{second, first}`, whose first field is the lower half of the byte."""
    if bits == 8:
        return bytes(code & 255 for code in codes)
    return bytes((first & 15) << 4 | second & 15 for first, second in zip(codes[::2], codes[1::2], strict=True))


def transcribed_groups(numel: int) -> int:
    """`CUDAQuantizer.quantize`."""
    groups = math.ceil(numel / 8000)
    while groups < numel:
        if numel % (8 * groups) == 0:
            break
        groups += 1
    while numel % (8 * groups * 2) == 0 and numel / groups > 8000:
        groups *= 2
    assert numel % (8 * groups) == 0
    assert numel / groups < 16000
    return groups


def test_groups_of_weights_are_deepspeeds() -> None:
    for numel in [*range(8, 4000, 8), 8000, 8008, 16000, 24_000, 64_000, 65_536, 786_432, 12_345_600, 50_331_648]:
        assert weight_groups(numel) == transcribed_groups(numel) == formulas.weight_scales(numel)


def test_groups_of_gradients_are_deepspeeds_where_its_rule_holds() -> None:
    """It takes max(rows, columns, ranks), which has to cut each rank's slice into whole groups of an even size."""
    holds = 0
    for rows, columns, ranks in product((4, 16, 48, 64, 192), (8, 16, 64, 192), (4, 8, 16)):
        numel, groups = rows * columns, max(rows, columns, ranks)
        found = grad_groups(((rows, columns),), numel, ranks)
        assert found == formulas.grad_scales([(rows, columns)], numel, ranks)
        if numel % (2 * ranks) == 0 and groups % ranks == 0 and numel % groups == 0 and numel // groups % 2 == 0:
            assert found == groups
            holds += 1
    assert holds > 40
    assert grad_groups(((64,),), 64, 4) == 0  # one dimension: exactly
    assert grad_groups(((3, 5),), 16, 16) == 0


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_a_slice_of_few_elements_is_cut_into_pairs(ranks: int) -> None:
    """A thin tensor, such as the positions of one token, has more columns than groups of two elements."""
    for rows, columns in product((1, 2, 3), range(2, 60)):
        numel = -(-rows * columns // ranks) * ranks
        found = grad_groups(((rows, columns),), numel, ranks)
        assert found == formulas.grad_scales([(rows, columns)], numel, ranks)
        assert found == 0 or (found % ranks, numel % found, numel // found % 2) == (0, 0, 0)
    result = run(RunConfig(**SMALL | QGZ | dict(steps=1, seq=1, positions=1, hidden=8)))
    assert result.live_bytes_after == [0] * 4
    assert_every_byte_has_its_form(result)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_deepspeeds(bits: int) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(480) * 10.0 ** rng.integers(-6, 3, 480)).astype(np.float16)
    values[:48] = 0
    values[48], values[97] = np.float16(65504), np.float16(6e-8)
    groups = 10
    codes, scales = np.empty(480 * bits // 8, np.uint8), np.empty(groups, np.float32)
    codec = Groups(blocks(bits, 480 // groups))
    codec.encode(np, values, codes, scales)
    expected, expected_scales = quantize_all(values, groups, bits)
    assert codes.tobytes() == packed([code for group in expected for code in group], bits)
    assert scales.tolist() == expected_scales
    back = [dequantize(group, scale) for group, scale in zip(expected, expected_scales, strict=True)]
    assert codec.decode(np, codes, scales).tobytes() == np.concatenate(back).tobytes()
    # The positive maximum of a group returns as 127/128 or 7/8 of itself.
    top = np.array([1.0, *[0.25] * 7], np.float16)
    codes, scales = np.empty(bits, np.uint8), np.empty(1, np.float32)
    codec.encode(np, top, codes, scales)
    assert codec.decode(np, codes, scales)[0] == {8: 127 / 128, 4: 7 / 8}[bits]


def two_hops(grads: Sequence[Any], nodes: int, node: int, groups: int) -> list[Any]:
    """`all_to_all_quant_reduce` for the gradients of all ranks, one tensor each; what each rank has then, as a sum."""
    ranks, own = nodes * node, grads[0].size // (nodes * node)
    each = groups // ranks
    sent = {}
    for rank, grad in enumerate(grads):
        codes, scales = quantize_all(grad.astype(np.float16), groups, 4)
        for part in range(ranks):  # partition p goes to place p % node, and there to node p // node
            sent[rank, part] = codes[part * each : (part + 1) * each], scales[part * each : (part + 1) * each]
    found = []
    for rank in range(ranks):
        of_nodes = []
        for source in range(nodes):
            total = np.zeros(own, np.float16)
            for peer in range(node):
                codes, scales = sent[source * node + peer, rank]
                total = total + np.concatenate([dequantize(*one) for one in zip(codes, scales, strict=True)])
            again = quantize_all(total, each, 4)
            of_nodes.append(np.concatenate([dequantize(*one) for one in zip(*again, strict=True)]))
        found.append(sum(of_nodes))
    return found


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize(("nodes", "node", "format"), [(2, 2, "fp32"), (2, 3, "fp16"), (3, 2, "bf16")])
def test_gradients_arrive_as_two_hops_leave_them(nodes: int, node: int, format: str) -> None:
    ranks = nodes * node
    config = RunConfig(
        **{**SMALL, **QGZ, "ranks": ranks, "ranks_per_node": node, "hidden": 48, "layers": 1, "precision": format}
    )
    grads: dict[int, Any] = {}

    def reduce_one(ctx: Context) -> Any:
        built = build_rank(ctx, config, build_updater(config, 1))
        place_rank(ctx, built.model, built.strategy, lambda flat, group: None)
        flat = next(flat for flat in built.model.flats if flat.name == "h.0")
        exchange = built.strategy.exchange  # type: ignore[attr-defined]
        random = np.random.default_rng([ctx.rank, 1]).standard_normal(flat.padded_numel).astype(np.float32) / 50
        grad = ctx.device.alloc((flat.padded_numel,), dtype(format), Kind.UNSHARDED_GRAD)
        ctx.device.backend.from_host(random, grad.array)
        grads[ctx.rank] = ctx.device.backend.to_host(grad.array)
        [arrived] = exchange.launch_reduce([flat], [grad]).wait()
        own = exchange.own_part(flat, arrived)
        codec = exchange.codec_of(flat)
        groups = 0 if codec is None else codec.format.blocks(flat.padded_numel)
        return ctx.device.backend.to_host(own.array), groups

    results = launch(reduce_one, world_of(config))
    groups = results[0][1]
    sums = two_hops([grads[rank] for rank in range(ranks)], nodes, node, groups)
    mean = np.mean([grads[rank] for rank in range(ranks)], axis=0)
    own = mean.size // ranks
    for rank, (values, _) in enumerate(results):
        expected = (sums[rank] / np.float16(ranks)).astype(np.float32)
        if format == "bf16":
            expected = expected.astype(BFLOAT16).astype(np.float32)
        assert np.array_equal(values.astype(np.float32), expected)
        # A step is an eighth of a group's largest: half of one for each rank's code, and of one for each node's sum.
        away = np.abs(values.astype(np.float32) - mean[rank * own : (rank + 1) * own])
        most = max(np.abs(grads[rank]).max() for rank in range(ranks))
        assert away.max() <= (1 / 8 + 1 / 8) * most


def test_gathered_weights_are_within_half_a_step() -> None:
    """A step is max / 128 of a group. Rounding to fp16 takes 1/16 of it, the positive maximum a whole one."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(16_000).astype(np.float16)
    groups = weight_groups(values.size)
    codes, scales = np.empty(values.size, np.uint8), np.empty(groups, np.float32)
    codec = Groups(blocks(8, values.size // groups))
    codec.encode(np, values, codes, scales)
    away = np.abs(codec.decode(np, codes, scales).astype(np.float64) - values).reshape(groups, -1)
    steps = scales.astype(np.float64)[:, None]
    assert (away <= np.where(values.reshape(groups, -1) > 127 * steps, 1.07, 0.57) * steps).all()


# -- training ---------------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize("more", [ALL, QWZ, QGZ], ids=["together", "qwZ", "qgZ"])
def test_the_loss_stays_beside_the_exact_one(more: dict[str, Any]) -> None:
    config = RunConfig(**{**SMALL, "precision": "fp32", "steps": 6, "hidden": 32, "vocab": 256})
    exact, coded = run(config), run(config.replace(**more))
    assert coded.losses != exact.losses
    means = [np.mean(result.losses, axis=1) for result in (coded, exact)]
    assert np.allclose(*means, atol=0.05)
    assert means[1][-1] < means[1][0] - 0.9
    assert_every_byte_has_its_form(coded)


def test_overflows_are_seen_through_codes() -> None:
    """A gradient that is not finite makes its group's scale so, and every rank skips the step."""
    config = RunConfig(**{**SMALL, **ALL, "precision": "fp16", "initial_scale_power": 30, "hysteresis": 1, "steps": 3})
    assert run(config).steps[0].skipped


# -- bytes ------------------------------------------------------------------------------------------
CORNERS: list[dict[str, Any]] = [
    {},
    {"gather": "module", "recompute": "full", "accumulate": 2},
    {"recipe": "deepspeed", "persistent_numel": 200},
    {"ranks": 8, "pp": 2, "layers": 2, "accumulate": 2, "keep_last_unit": True},
    {"recipe": "fsdp2", "collective": "ring"},
    {"ranks": 8, "dp_replicate": 2, "overlap": "all"},
    {"grad_sync": False, "accumulate": 2, "tie_embeddings": False, "keep_last_unit": True},
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", CORNERS, ids=str)
def test_plans_count_what_runs_do_event_by_event(options: dict[str, Any]) -> None:
    for more in (QWZ, ALL, {**HPZ, **MICS}):
        config = RunConfig(**{**SMALL, **options, **more})
        real = run(config, keep_events=True)
        assert_every_byte_has_its_form(real)
        shapes = plan(config, keep_events=True)
        for rank in shapes.ran:
            assert shapes.events[rank] == real.events[rank]
        assert shapes.memory == real.memory
        assert shapes.traffic == real.traffic


ODD: list[dict[str, Any]] = [
    {**SMALL, "hidden": 6, "heads": 1, "vocab": 17, "seq": 3, "ranks": 12, "secondary_shard": 3},
    {"model": "flat", "params": 210, "units": 1, "ranks": 4, "steps": 2, **HPZ, "optimizer": "adam8bit"},
]


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_ranks_of_unlike_second_shards_are_run_apart(sizes: dict[str, Any]) -> None:
    """Padding is on the last ranks of the last nodes, and between blocks of 8-bit states."""
    config = RunConfig(**sizes)
    few, every = plan(config), plan(config, every_rank=True)
    assert few.memory == every.memory
    assert few.traffic == every.traffic
    assert_every_byte_has_its_form(every)


@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_what_leaves_a_node_is_what_messages_carry(collective: str) -> None:
    for more in ({"ranks_per_node": 2}, ALL, MICS):
        config = RunConfig(**{**SMALL, **more, "ranks": 4, "collective": collective, "steps": 1})
        result, away = run(config, keep_events=True), 0
        for rank in (0, 1):
            works: dict[int, Launch] = {}
            for event in result.events[rank]:
                if isinstance(event, Launch):
                    works[event.work] = event
                if isinstance(event, Message) and works[event.work].purpose == "states":
                    others = [other for other in works[event.work].group if other != rank]
                    peers = others if event.peer < 0 else [event.peer]
                    away += event.nbytes * event.count * sum(peer > 1 for peer in peers) // len(peers)
        assert away == checks(result, 0)[0].nodes[-1].mean


def test_a_code_takes_three_operations_to_make_and_one_to_add() -> None:
    """Over 3 nodes of 2 ranks: a rank decodes all gathered weights, and of a gradient its slice from every node."""
    config = RunConfig(**{**SMALL, **QWZ, **QGZ, "ranks": 6, "hidden": 48, "steps": 1})
    events, flops = plan(config, keep_events=True).events[0], dict.fromkeys(("quantize", "reduce", "dequantize"), 0)
    codes = dict.fromkeys(("dp_shard", "node", "nodes"), 0)
    for event in events:
        if isinstance(event, Launch) and event.dtype == "uint8":
            codes[event.axis] += event.payload_bytes * (1 if event.axis == "dp_shard" else 2)  # int8 or int4
        elif isinstance(event, Kernel) and event.name in flops and event.work is None:
            flops[event.name] += event.flops
    gathered, first, second = codes.values()
    made = {"quantize": gathered // 6 + first, "reduce": second}
    added = {"reduce": first, "dequantize": gathered + second}
    assert flops == {name: 3 * made.get(name, 0) + added.get(name, 0) for name in flops}
    assert gathered > first > second > 0


def test_three_psi_become_three_quarters_across_nodes() -> None:
    """On rings and before scales: 3 Psi of an untied model, of 2-byte parameters and gradients."""
    config = RunConfig(**{**SMALL, "tie_embeddings": False, "collective": "ring", "steps": 1})
    exact = checks(plan(config.replace(ranks_per_node=2)), 0)[0].nodes[-1]
    coded = checks(plan(config.replace(**ALL)), 0)[0].nodes
    assert str(exact.form) == "3Ψ"
    total = coded[-1].form.where(σ_f=0, σ_g=0, O=0)
    assert str(total) == "0.75Ψ"
    assert coded[-1].mean < exact.mean / 3


def test_gathers_are_the_volumes_parts() -> None:
    flags = ("tied", "keep_last_unit", "keep_root_units", "persistent", "again")
    for values in product((False, True), repeat=len(flags)):
        schedule = formulas.Schedule(micro_batches=3, **dict(zip(flags, values, strict=True)))
        moved, whole = formulas.gathers(schedule), formulas.gathered(schedule).elements
        letters = dict(zip(["Ψ", "VD", "U", "R", "P", "M"], (1000, 20, 30, 40, 5, 60), strict=True))
        assert (moved.forward + moved.backward + moved.after).at(letters) == whole.at(letters), schedule


# -- what is refused --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ranks": 8, "secondary_shard": 3}, "secondary_shard 3 does not divide dp_shard 8; choose 2 or 4"),
        ({"ranks": 8, "secondary_shard": 1}, "secondary_shard 1: every rank would keep whole parameters"),
        (
            {"ranks": 8, "secondary_shard": 8},
            "the secondary shard would equal the first one, cut over dp_shard; choose 2 or 4",
        ),
        ({"ranks": 3, "secondary_shard": 2}, "no divisor between 1 and 3; choose more ranks"),
        ({"stage": 2, "secondary_shard": 2}, "secondary_shard 2: stage 2 does not use it"),
        ({"stage": 1, "quantized_weights": True}, "choose stage 3"),
        ({"stage": 2, **QGZ}, "choose stage 3"),
        ({"precision": "fp64", **QWZ}, "choose fp32, bf16 or fp16"),
        ({"precision": "fp64", **QGZ}, "choose fp32, bf16 or fp16"),
        ({"quantized_gradients": True}, "communicates both within a node and across nodes; pass --ranks-per-node 2"),
        ({"hierarchical_gather": True, "ranks_per_node": 4}, "ranks_per_node is 4; pass --ranks-per-node 2"),
        ({"ranks": 8, "ranks_per_node": 3}, "3 does not divide dp_shard 8; choose 2 or 4"),
        ({"ranks": 8, "ranks_per_node": 4, "secondary_shard": 2}, "choose 4, or leave one of them out"),
        ({"ranks": 8, "tp": 2, **QWZ}, "the copies of a weight would be rounded differently on each rank"),
        ({**QGZ, "compress": "int8", "precision": "fp32"}, "both choose how gradients are encoded"),
        ({**HPZ, "partition": "owner"}, "owners hold whole units"),
        ({**HPZ, "reshard_after_forward": False}, "without resharding, backward gathers nothing"),
        ({**MICS, **QWZ}, "int8 codes are gathered in one hop"),
        ({**HPZ, "lora_rank": 2}, "works only where all parameters are trained"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        RunConfig(**{**SMALL, **fields})


def test_other_names_are_answered_with_these() -> None:
    asked = ("zero_hpz_partition_size", "zero_quantized_weights", "--zero-quantized-gradients", "mics_shard_size")
    here = ("--secondary-shard G", "--quantized-weights", "--quantized-gradients", "--dp-replicate R")
    for name, own in zip(asked, here, strict=True):
        assert own in str(not_modelled(name))


def test_sizes_without_whole_groups_are_refused() -> None:
    sizes = {**SMALL, "hidden": 10, "heads": 1}
    with pytest.raises(
        InputError, match=r"quantized_weights: of wpe each of 4 ranks has 20 elements, not a multiple of 8"
    ):
        run(RunConfig(**sizes, **QWZ))
    with pytest.raises(
        InputError, match=r"of norm .* choose 8 ranks, or persistent_numel 4097, which keeps it gathered"
    ):
        plan(RunConfig(model="llama3-8b", ranks=12, **QWZ))
    odd = {**sizes, "vocab": 17, "hidden": 3, "seq": 3}
    with pytest.raises(
        InputError, match=r"quantized_gradients: of .* elements, an odd number, but two int4 codes share a byte"
    ):
        plan(RunConfig(**odd, **QGZ))
