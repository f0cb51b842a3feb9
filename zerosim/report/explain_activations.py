"""Which terms answer a question about activations: what a rank keeps of them, and what it sends on a mesh."""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.question import Question, Shape
from zerosim.report.explain_states import ZERO_PAPER
from zerosim.report.explain_terms import Section, Term
from zerosim.report.mesh_words import SCHEDULES
from zerosim.report.names import show

_LIVE_FIRST = {
    "gpipe": "m",
    "1f1b": "min(m, p)",
    "interleaved": "(2(p-1) + (v-1)p + 1)/v",
    "zb-h1": "p",
    "zb-v": "p",
}
RECOMPUTATION_PAPER = "arXiv 2205.05198 (Reducing Activation Recomputation)"


def exchanges(asked: Question, shape: Shape) -> list[Section]:
    """What a rank in the middle of the pipeline sends of activations: blocks alone, no table, no head, no loss."""
    layers, m, each = Fraction(shape.layers, asked.pp), asked.micro_batches, asked.param_bytes
    numel = shape.seq * shape.micro_batch * shape.hidden
    again, t, p = formulas.borders_again(shape.recompute, 1), asked.tp, asked.pp
    sbh = f"{shape.seq:,} · {shape.micro_batch:,} · {shape.hidden:,} · {each}"
    share, times = f"{t - 1:,}/{t:,}", f"{show(layers)} · {m:,}"
    terms = []
    if t > 1 and asked.sequence_parallel:
        gathers, scatters = formulas.sequence_calls(1, first=False, last=False, again=again)
        for name, calls in (("all_gather", gathers), ("reduce_scatter", scatters)):
            value = calls * layers * m * formulas.gather_sent(numel, t) * each
            text = f"{calls} · sbh(t-1)/t · L/p · m"
            terms.append(Term(f"tp: {name}", text, f"{calls} · {share} · {sbh} · {times}", value))
    elif t > 1:
        calls = formulas.tensor_calls(1, first=False, last=False, again=again)
        value = calls * layers * m * formulas.all_reduce_sent(numel, t) * each
        text, numbers = f"{calls} · 2sbh(t-1)/t · L/p · m", f"{calls} · 2 · {share} · {sbh} · {times}"
        terms.append(Term("tp: all_reduce", text, numbers, value))
    if asked.partitions_inputs:
        value = formulas.input_gathers(1) * layers * m * formulas.gather_sent(numel, t) * each
        terms.append(Term("tp: all_gather", "sbh(t-1)/t · L/p · m", f"{share} · {sbh} · {times}", value))
    if p > 1:
        cut = t if asked.sequence_parallel else 1
        calls = formulas.border_sends(min(1, p - 2), p, asked.pipeline.num_chunks, asked.pipeline.pipeline_schedule)
        value = Fraction(calls * m * numel * each, cut)
        text = f"{calls} · sbh{'/t' if cut > 1 else ''} · m"
        terms.append(Term("pp: send", text, f"{calls} · {sbh}{f' / {cut:,}' if cut > 1 else ''} · {m:,}", value))
    if not terms:
        return []
    note = (
        "m micro-batches; the token table, the head and the loss come on top. arXiv 1909.08053, section 3; "
        "2205.05198, section 4.2.2; 2104.04473, section 3.2."
    )
    if asked.partitions_inputs:
        note += f" Pa gathers each block's input: 1/12 of its all-reduces. {ZERO_PAPER}, section 8."
    where = ", in the middle of the pipeline" if p > 2 else ""
    title = f"Activations sent per rank and step{where}"
    return [Section("exchanges", title, tuple(terms), (note,))]


def copies(asked: Question, shape: Shape) -> list[Section]:
    """What a rank moves of kept inputs to the host and back."""
    if not shape.cpu_checkpointing:
        return []
    parts, each = asked.tp if asked.partitions_inputs or asked.sequence_parallel else 1, asked.param_bytes
    numel, layers = shape.seq * shape.micro_batch * shape.hidden, Fraction(shape.layers, asked.pp)
    value = layers * formulas.inputs_moved(1, asked.micro_batches, numel, parts) * each
    cut = "/t" if parts > 1 else ""
    sbh = f"{shape.seq:,} · {shape.micro_batch:,} · {shape.hidden:,} · {each}{f' / {parts:,}' if parts > 1 else ''}"
    numbers = f"{sbh} · {show(layers)} · {asked.micro_batches:,}"
    terms = [Term(way, f"sbh{cut} · L/p · m", numbers, value) for way in ("device to host", "host to device")]
    note = f"Kept inputs of blocks, over PCIe: no rank sends them. {ZERO_PAPER}, section 6.1."
    return [Section("copies", "Copies between device and host per rank and step", tuple(terms), (note,))]


def blocks(asked: Question, shape: Shape) -> Section:
    s, b, h, a, t, p = shape.seq, shape.micro_batch, shape.hidden, shape.heads, asked.tp, asked.pp
    sequence, kind, chunks = asked.sequence_parallel, asked.pipeline.pipeline_schedule, asked.pipeline.num_chunks
    kept = {"partitioned": asked.partitions_inputs, "on_host": shape.cpu_checkpointing}
    block = formulas.block_activations(
        s, b, h, a, recompute=shape.recompute, tensor_parallel=t, sequence_parallel=sequence, **kept
    )
    text = formulas.block_text(shape.recompute, tensor_parallel=t > 1, sequence_parallel=sequence, **kept)
    terms = () if t > 1 else _block_parts(s, b, h, a)
    terms += (Term("a block keeps", text, "", block, is_sum=True),)
    layers = Fraction(shape.layers, p)
    if p == 1:
        terms += (Term("all blocks", "times L", f"{shape.layers:,} blocks", layers * block),)
    else:
        live = Fraction(formulas.live_micro_batches(kind, 0, p, asked.micro_batches, chunks), chunks)
        numbers = f"{show(layers)} blocks · {show(live)}"
        terms += (Term("first stage", f"times L/p · {_LIVE_FIRST[kind]}", numbers, layers * live * block),)
    again = {
        "none": "Nothing is computed again.",
        "selective": "With selective recompute backward computes the scores again.",
        "full": "With full recompute a block keeps its input alone; the block that backward is in lives whole besides.",
    }.get(shape.recompute, f"Backward computes again: {', '.join(formulas.parts_again(shape.recompute))}.")
    note = (
        "s tokens, b rows, h width, a heads; 2-byte tensors, 1-byte dropout masks, an MLP of 4h, "
        f"{f't = {t:,} tensor-parallel ranks' if t > 1 else 'one tensor-parallel rank'}. {again} "
        f"{RECOMPUTATION_PAPER}, section 4."
    )
    if shape.cpu_checkpointing:
        note += " Inputs wait on the host."
    if shape.partition_activations and sequence:
        note += " Pa changes nothing here: under sequence parallelism a rank has 1/t of the input to begin with."
    if p > 1 and asked.pipeline.pipeline:
        share, own_span = (
            form(p, asked.micro_batches, chunks, kind) for form in (formulas.bubble, formulas.own_span_bubble)
        )
        note += (
            f" Live on stage i: {formulas.LIVE[kind]}. Bubble by makespan: {formulas.BUBBLES[kind]} = {share}. By own "
            f"span, of the stage with the most: {own_span}. arXiv 2104.04473, section 2.2; 2401.10241, section 2.2."
        )
    title = f"Activations under {SCHEDULES[kind]}" if p > 1 else "Activations of one micro-batch"
    return Section("activations_2205_05198", f"{title}, tensor by tensor", terms, (note,))


def _block_parts(s: int, b: int, h: int, a: int) -> tuple[Term, ...]:
    parts, sbh = formulas.block_parts(s, b, h, a), f"{s:,} · {b:,} · {h:,}"
    return (
        Term("attention", "11sbh + 5as²b", f"11 · {sbh} + 5 · {a:,} · {s:,}² · {b:,}", Fraction(parts["attention"])),
        Term("mlp", "19sbh", f"19 · {sbh}", Fraction(parts["mlp"])),
        Term("layernorms", "4sbh", f"4 · {sbh}", Fraction(parts["layernorms"])),
    )


def paper_activations(asked: Question, shape: Shape) -> Section:
    s, b, h, layers = shape.seq, shape.micro_batch, shape.hidden, shape.layers
    each = asked.param_bytes
    elements = formulas.zero_paper_elements(s, b, h, layers)
    inputs = formulas.checkpoint_elements(s, b, h, layers)
    sizes = f"{h:,} · {b:,} · {s:,} · {layers:,} · {each}"
    terms = (
        Term("all kept", f"12hbsL · {each}", f"12 · {sizes}", Fraction(each * elements)),
        Term("inputs only", f"hbsL · {each}", sizes, Fraction(each * inputs)),
    )
    notes = (
        f"12hbsL are elements, of {each} bytes here; with recompute, one input per block. {ZERO_PAPER}, section 3.2.",
        formulas.WHY_ESTIMATES_DIFFER,
    )
    return Section("activations_1910_02054", "Activations of one micro-batch, the ZeRO paper's estimate", terms, notes)
