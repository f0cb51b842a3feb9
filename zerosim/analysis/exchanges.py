"""What a run counted of tensor, sequence and pipeline parallelism's traffic, beside the closed forms.

The purpose of that traffic is `activations`: what crosses the borders of cut weights (axis tp) and of pipeline stages
(axis pp). The closed forms are those of `formulas/parallel.py`, for the layers that a stage holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.shares import Share, all_reduce_times, is_by_pairs, itemsizes, passes_of, share_of
from zerosim.analysis.traffic import Form, TrafficCheck, sent_rows, traffic_of
from zerosim.config import RunConfig
from zerosim.dtypes import compute_dtype, dtype
from zerosim.placement.spec import is_block
from zerosim.train.result import RunResult

PURPOSE = "activations"


def check_exchanges(result: RunResult, step: int, stage: int = 0) -> list[TrafficCheck]:
    """By operation and axis what the ranks of a pipeline stage sent of activations and their gradients.

    A receipt sends nothing and has no row; an operation that should not be there has one.
    """
    share = share_of(result, stage)
    forms = dict(_forms(result.config, share, passes_of(result, step)))
    sent = [(rank, row) for rank, row in sent_rows(result, step, share, PURPOSE) if row.op != "recv"]
    for _, row in sent:
        forms.setdefault((row.op, row.axis), (Form(Fraction(0), Fraction(0), "0"), True))
    return [
        traffic_of(result, share, [(r, row) for r, row in sent if (row.op, row.axis) == key], *key, form, even=even)
        for key, (form, even) in forms.items()
    ]


def border_numel(config: RunConfig) -> int:
    """bsh: elements of what passes from layer to layer of one micro-batch, over all tensor-parallel ranks."""
    width = config.model.hidden if config.model.has_blocks else config.model.vocab
    return config.data.micro_batch * config.model.seq * width


def _forms(config: RunConfig, share: Share, passes: int) -> Iterator[tuple[tuple[str, str], tuple[Form, bool]]]:
    """By operation and axis the form, and whether every rank sends as much. Under tp there is one pass."""
    mesh = config.mesh.axes
    if mesh.tp > 1:
        for op, form in _tensor_forms(config, share).items():
            yield (op, "tp"), (form, _divides(config))
    if mesh.pp > 1:
        micro_batches = config.data.accumulate * passes
        chunks, order = config.parallel.num_chunks, config.parallel.pipeline_schedule
        count = formulas.border_sends(share.stage, mesh.pp, chunks, order) * micro_batches
        cut = mesh.tp if config.parallel.sequence_parallel else 1
        nbytes = Fraction(count * border_numel(config) * itemsizes(config)[0], cut)
        yield ("send", "pp"), (Form(nbytes, nbytes, times_of(count, "bsh/t" if cut > 1 else "bsh")), True)


def _tensor_forms(config: RunConfig, share: Share) -> dict[str, Form]:
    mesh, times, each = config.mesh.axes, config.data.accumulate, itemsizes(config)[0]
    stats = compute_dtype(dtype(config.precision.stored)).itemsize
    pairs, moved = is_by_pairs(config), all_reduce_times(config, mesh.tp)
    if not config.model.has_blocks:  # the flat model adds up one number for each column
        calls = share.layers * times
        nbytes = formulas.all_reduce_sent(calls * config.model.vocab, mesh.tp, pairs=pairs) * stats
        return {"all_reduce": Form(nbytes, nbytes, times_of(moved * calls, "V"))}
    first, last = share.stage == 0, share.stage == config.chunks.last_stage
    again, bsh = _run_again(config, share), border_numel(config)
    loss = formulas.LOSS_CALLS * times * last
    of_loss = formulas.all_reduce_sent(loss * bsh // config.model.hidden, mesh.tp, pairs=pairs) * stats
    loss_text = times_of(moved * loss, "bs") if loss else ""
    if not config.parallel.sequence_parallel:
        calls = formulas.tensor_calls(share.layers, first=first, last=last, again=again) * times
        nbytes = formulas.all_reduce_sent(calls * bsh, mesh.tp, pairs=pairs) * each + of_loss
        forms = {
            "all_reduce": Form(nbytes, nbytes, " + ".join(filter(None, (times_of(moved * calls, "bsh"), loss_text))))
        }
        if config.partitions_inputs:
            count = formulas.input_gathers(blocks_run_again(config, share)) * times
            nbytes = formulas.gather_sent(count * bsh, mesh.tp) * each
            forms["all_gather"] = Form(nbytes, nbytes, times_of(count, "bsh"))
        return forms
    keeps = config.parallel.keep_gathered
    counts = formulas.sequence_calls(share.layers, first=first, last=last, again=again, keep_gathered=keeps)
    forms = {}
    for op, count in zip(("all_gather", "reduce_scatter"), counts, strict=True):
        nbytes = formulas.gather_sent(count * times * bsh, mesh.tp) * each
        forms[op] = Form(nbytes, nbytes, times_of(count * times, "bsh"))
    if loss:
        forms["all_reduce"] = Form(of_loss, of_loss, loss_text)
    return forms


def _run_again(config: RunConfig, share: Share) -> formulas.Again:
    """What recompute adds to f and g of a stage's blocks."""
    if config.memory.again.every:
        return formulas.borders_again("full", blocks_run_again(config, share))
    return formulas.borders_again(config.memory.recompute, share.layers)


def blocks_run_again(config: RunConfig, share: Share) -> int:
    """Blocks of a stage that keep their input alone: all with `full`, every K-th with `full:K`."""
    blocks = [int(name.rpartition(".")[2]) for name in share.units if is_block(name)]
    return sum(map(config.memory.again.wraps, blocks))


def _divides(config: RunConfig) -> bool:
    """Whether tensor-parallel ranks add equal shares of all that they reduce."""
    tokens = config.data.micro_batch * config.model.seq
    if not config.model.has_blocks:
        return config.model.vocab % config.mesh.tp == 0
    return tokens % config.mesh.tp == 0


def times_of(count: int, name: str) -> str:
    """'24bsh'."""
    return name if count == 1 else f"{count:,}{name}" if count else "0"
