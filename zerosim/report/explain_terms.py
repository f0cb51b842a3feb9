"""Which terms answer a question about memory and traffic: each a formula, its numbers, and bytes.

`explain.py` lays them out. The formulas themselves, with their sources, are in `analysis/formulas`. Nothing here was
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.analysis import formulas
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.analysis.question import Question, Shape
from zerosim.units import format_bytes

ZERO_PAPER = "ZeRO paper (arXiv 1910.02054)"
RECOMPUTATION_PAPER = "arXiv 2205.05198 (Reducing Activation Recomputation)"
PRINTED = "The paper prints"
"""How the note begins that `Section.agrees` is about."""
_OPERATIONS = {0: ("all_reduce", ""), 1: ("", "all_gather"), 2: ("", "all_gather"), 3: ("reduce_scatter", "all_gather")}


@dataclass(frozen=True, slots=True)
class Term:
    """One line: a formula, the same with its numbers, and bytes."""

    name: str
    formula: str
    numbers: str
    value: Fraction
    is_sum: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Bytes are exact where they are whole; else 'exact' has the fraction."""
        whole = self.value.denominator == 1
        exact = {} if whole else {"exact": str(self.value)}
        value = int(self.value) if whole else float(self.value)
        return {"name": self.name, "formula": self.formula, "numbers": self.numbers, "bytes": value, **exact}


@dataclass(frozen=True, slots=True)
class Section:
    """Terms under a title, with notes that name their source."""

    key: str
    title: str
    terms: tuple[Term, ...]
    notes: tuple[str, ...]
    agrees: bool | None = None
    """Whether the total is what the paper prints; None where it prints nothing."""


def sections(question: Question) -> tuple[Section, ...]:
    """Every formula that answers the question."""
    found = [_states(question)]
    if question.choices.upcast_grads and question.grad_bytes < formulas.MASTER_BYTES:
        found.append(_optimizer_step(question))
    found.append(_traffic(question))
    if question.shape is not None:
        found += [_blocks(question.shape), _paper_activations(question, question.shape)]
    return tuple(found)


def _states(asked: Question) -> Section:
    psi, ranks, cost = asked.num_parameters, asked.shards, asked.cost
    values = formulas.model_states(asked.stage, psi, ranks, cost)
    terms = [_state(asked, kind, values[kind]) for kind in formulas.STATES]
    total = sum(values.values(), Fraction(0))
    terms.append(Term("total", formulas.model_states_text(asked.stage, cost), "", total, is_sum=True))
    notes = [
        f"{cost.param} + {cost.grad} + {cost.optim} bytes per parameter (param + grad + optim)."
        f"{_about_masters(asked)} {ZERO_PAPER}, sections 3.1 and 5."
    ]
    if asked.replicas > 1:
        notes.append(f"N = {ranks:,} ranks hold one of R = {asked.replicas:,} replicas together (HSDP, MiCS).")
    figures = formulas.printed_states(asked.stage, psi, ranks) if cost == formulas.MIXED_ADAM else []
    exact = total / 10**9
    agrees = all(formulas.printed(exact, figure.gigabytes) == figure.gigabytes for figure in figures)
    if figures:
        shown = " and ".join(f"{figure.gigabytes} GB ({figure.where})" for figure in figures)
        notes.append(f"{PRINTED} {shown}. Exact: {float(exact):.9g} GB.")
    notes.append(_against_paper(asked, total))
    title = "Model states per rank when backward ends"
    return Section("model_states", title, tuple(terms), tuple(filter(None, notes)), agrees if figures else None)


def _state(asked: Question, kind: str, value: Fraction) -> Term:
    each = {"param": asked.cost.param, "grad": asked.cost.grad, "optim": asked.cost.optim}[kind]
    divided = asked.stage >= formulas.first_partitioned(kind)
    numbers = f"{each} · {asked.num_parameters:,}" + (f" / {asked.shards:,}" if divided else "")
    return Term(kind, formulas.state_text(asked.stage, kind, asked.cost), numbers if each else "0", value)


def _about_masters(asked: Question) -> str:
    kept = ["an fp32 master"] if asked.param_bytes == 2 else []
    kept += [{1: "one moment", 2: "two moments"}[asked.moments]] if asked.moments else []
    cast = "" if asked.cost.param else " No 2-byte shard is stored: it is cast from the master."
    return f" The optimizer keeps {' and '.join(kept) or 'nothing'}.{cast}"


def _against_paper(asked: Question, total: Fraction) -> str:
    """Beside DDP, or, for another recipe than the paper's, beside the paper's rule."""
    psi, ranks = asked.num_parameters, asked.shards
    cost = formulas.bytes_per_parameter(asked.param_bytes, asked.param_bytes, asked.moments)
    if asked.cost != cost:
        paper = sum(formulas.model_states(asked.stage, psi, ranks, cost).values(), Fraction(0))
        text = formulas.model_states_text(asked.stage, cost)
        return f"The paper's own rule, {text}, gives {gigabytes(paper)}."
    if asked.stage == 0:
        return ""
    ddp = sum(formulas.model_states(0, psi, ranks, cost).values(), Fraction(0))
    less = f"{float(ddp / total):.3g} times as much" if ddp > total else "as much"
    return f"DDP's {formulas.model_states_text(0, cost)} is {gigabytes(ddp)}, {less}."


def _optimizer_step(asked: Question) -> Section:
    psi, ranks, cost = asked.num_parameters, asked.shards, asked.cost
    values = formulas.optimizer_step_states(asked.stage, psi, ranks, cost, upcast_grads=True)
    # The copies are divided from stage 1 on, as the optimizer states are.
    copies = BytesPerParameter(0, 0, formulas.MASTER_BYTES)
    with_copies = BytesPerParameter(cost.param, cost.grad, cost.optim + formulas.MASTER_BYTES)
    numbers = f"4 · {psi:,}" + (f" / {ranks:,}" if asked.stage else "")
    total = sum(values.values(), Fraction(0))
    terms = (
        Term("states", formulas.model_states_text(asked.stage, cost), "as above", total - values["upcast"]),
        Term("upcast", formulas.state_text(asked.stage, "optim", copies), numbers, values["upcast"]),
        Term("total", formulas.model_states_text(asked.stage, with_copies), "", total, is_sum=True),
    )
    note = "The reduced gradients and their fp32 copies, both alive: DeepSpeed edaa722, stage_1_and_2.py, stage3.py."
    return Section("optimizer_step", "While the optimizer steps", terms, (note,))


def _traffic(asked: Question) -> Section:
    psi, ranks, moved = asked.num_parameters, asked.shards, asked.volume
    reduce_op, gather_op = _OPERATIONS[asked.stage]
    reduce_op = reduce_op or asked.choices.grad_reduction
    grads, params = moved.sent_grad_bytes(psi, ranks, asked.grad_bytes), Fraction(0)
    terms = [Term(reduce_op, moved.grads_text(), _sent(asked, moved.grads, asked.grad_bytes), grads)]
    if gather_op:
        params = moved.sent_param_bytes(psi, ranks, asked.param_bytes)
        terms.append(Term(gather_op, moved.params_text(), _sent(asked, moved.params, asked.param_bytes), params))
    across, text = Fraction(0), moved.text()
    if asked.replicas > 1:
        across = formulas.replica_bytes(psi, ranks, asked.replicas, asked.grad_bytes)
        numbers = f"{asked.replicas - 1:,}/{asked.replicas:,} · 2 · {psi:,} / {ranks:,} · {asked.grad_bytes}"
        terms.append(Term("across replicas", formulas.replica_text(), numbers, across))
        text += f" + {formulas.replica_text()}"
    terms.append(Term("total", text, "", grads + params + across, is_sum=True))
    notes = [
        f"Elements by formula, times (N-1)/N = {Fraction(ranks - 1, ranks)}, which the paper leaves out, times bytes: "
        f"{asked.grad_bytes} of a gradient, {asked.param_bytes} of a parameter. {ZERO_PAPER}, section 7."
    ]
    if asked.replicas > 1:
        notes.append("Across replicas an all_reduce of the own part, once a step: times (R-1)/R.")
    if moved.root:
        notes.append("R, the units outside the blocks, is not known from Ψ: the bytes are those for R = 0.")
    if moved.persistent:
        notes.append("P, the units that stay gathered, is not known from Ψ: the bytes are those for P = 0.")
    if asked.micro_batches > 1 and asked.stage >= 2:
        notes.append(f"Each of {asked.micro_batches:,} micro-batches is reduced (derived; the paper has one).")
    plain = formulas.volume(asked.stage, micro_batches=asked.micro_batches)
    agrees = None
    if moved.text() != plain.text():
        notes.append(f"The paper's own schedule moves {plain.text()}.")
    elif asked.micro_batches == 1:
        agrees = moved.text() == formulas.VOLUME[asked.stage]
        notes.append(f"{PRINTED} {formulas.VOLUME[asked.stage]} (section 7).")
    return Section("volume", "Sent per rank and step", tuple(terms), tuple(notes), agrees)


def _sent(asked: Question, times: Fraction, each: int) -> str:
    share = f"{asked.shards - 1:,}/{asked.shards:,}" if asked.shards > 1 else "0"
    return f"{share} · {f'{times} · ' if times != 1 else ''}{asked.num_parameters:,} · {each}"


def _blocks(shape: Shape) -> Section:
    s, b, h, a = shape.seq, shape.micro_batch, shape.hidden, shape.heads
    parts = formulas.block_parts(s, b, h, a)
    sbh = f"{s:,} · {b:,} · {h:,}"
    block = formulas.block_activations(s, b, h, a, recompute=shape.recompute)
    terms = (
        Term("attention", "11sbh + 5as²b", f"11 · {sbh} + 5 · {a:,} · {s:,}² · {b:,}", Fraction(parts["attention"])),
        Term("mlp", "19sbh", f"19 · {sbh}", Fraction(parts["mlp"])),
        Term("layernorms", "4sbh", f"4 · {sbh}", Fraction(parts["layernorms"])),
        Term("a block keeps", formulas.block_text(shape.recompute), "", block, is_sum=True),
        Term("all blocks", "times L", f"{shape.layers:,} blocks", shape.layers * block),
    )
    again = {
        "none": "Nothing is computed again.",
        "selective": "With selective recompute backward computes the scores again.",
        "full": "With full recompute a block keeps its input alone; the block that backward is in lives whole besides.",
    }[shape.recompute]
    note = (
        "s tokens, b rows, h width, a heads; 2-byte tensors, 1-byte dropout masks, an MLP of 4h, one tensor-parallel "
        f"rank. {again} {RECOMPUTATION_PAPER}, section 4."
    )
    return Section("activations_2205_05198", "Activations of one micro-batch, tensor by tensor", terms, (note,))


def _paper_activations(asked: Question, shape: Shape) -> Section:
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


def gigabytes(value: Fraction) -> str:
    """Three figures, such as '16.6 GB'."""
    return format_bytes(round(value))
