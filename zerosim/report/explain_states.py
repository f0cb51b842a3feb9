"""Which terms answer a question about model states and their traffic. The formulas are in `analysis/formulas`."""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.formulas.form import Form, symbol
from zerosim.analysis.question import Question, Shape
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.report.explain_terms import PRINTED, Section, Term, gigabytes
from zerosim.report.names import local, show

ZERO_PAPER = "ZeRO paper (arXiv 1910.02054)"
_OPERATIONS = {0: ("all_reduce", ""), 1: ("", "all_gather"), 2: ("", "all_gather"), 3: ("reduce_scatter", "all_gather")}


def _local(asked: Question, form: Form) -> str:
    """A formula in words, of what a rank holds."""
    return local(str(form)) if asked.parts_of_model > 1 else str(form)


def _bytes(asked: Question, form: Form) -> Fraction:
    """A formula's bytes; of what is not known from Psi there is nothing."""
    unknown = dict.fromkeys(form.symbols, 0)
    return form.at(unknown, Ψ=asked.held, N=asked.shards, w=asked.param_bytes, g=asked.grad_bytes)


def states(asked: Question) -> Section:
    psi, ranks, cost = asked.held, asked.shards, asked.cost
    forms = formulas.model_states(asked.states_stage, cost)
    terms = [_state(asked, kind, form) for kind, form in forms.items()]
    whole = formulas.total(forms.values())
    total = _bytes(asked, whole)
    terms.append(Term("total", _local(asked, whole), "", total, is_sum=True))
    notes = [_about_mesh(asked)] if asked.parts_of_model > 1 else []
    notes += [
        f"{cost.param} + {cost.grad} + {cost.optim} bytes per parameter (param + grad + optim)."
        f"{_about_masters(asked)} {ZERO_PAPER}, sections 3.1 and 5."
    ]
    if asked.replicas > 1:
        notes.append(f"N = {ranks:,} ranks hold one of R = {asked.replicas:,} replicas together (HSDP, MiCS).")
    compared = cost == formulas.MIXED_ADAM and psi == asked.num_parameters
    figures = formulas.printed_states(asked.stage, asked.num_parameters, ranks) if compared else []
    exact = total / 10**9
    agrees = all(formulas.printed(exact, figure.gigabytes) == figure.gigabytes for figure in figures)
    if figures:
        shown = " and ".join(f"{figure.gigabytes} GB ({figure.where})" for figure in figures)
        notes.append(f"{PRINTED} {shown}. Exact: {float(exact):.9g} GB.")
    notes.append(_against_paper(asked, total))
    title = "Model states per rank when backward ends"
    return Section("model_states", title, tuple(terms), tuple(filter(None, notes)), agrees if figures else None)


def _state(asked: Question, kind: str, form: Form) -> Term:
    each = {"param": asked.cost.param, "grad": asked.cost.grad, "optim": asked.cost.optim}[kind]
    divided = asked.states_stage >= formulas.first_partitioned(kind)
    numbers = f"{each} · {show(asked.held)}" + (f" / {asked.shards:,}" if divided else "")
    return Term(kind, _local(asked, form), numbers if each else "0", _bytes(asked, form))


def _about_mesh(asked: Question) -> str:
    """What Psi_r is, and what a formula of Psi alone cannot know."""
    sizes = {"t": asked.tp, "p": asked.pp}
    names = " · ".join(name for name, size in sizes.items() if size > 1)
    values = " · ".join(str(size) for size in sizes.values() if size > 1)
    notes = [f"Ψ_r = Ψ / ({names}) = {asked.num_parameters:,} / ({values}): of a model that divides evenly."]
    if asked.tp > 1:
        notes.append("Norms, positions and row-parallel biases are whole on each of the t ranks.")
    if asked.pp > 1:
        notes.append("The token table and the head are the first and the last stage's.")
    return " ".join([*notes, "A plan counts what each rank holds."])


def _about_masters(asked: Question) -> str:
    kept = ["an fp32 master"] if asked.param_bytes == 2 and not asked.config.precision.is_pure else []
    kept += [{1: "one moment", 2: "two moments", 3: "three states"}[asked.moments]] if asked.moments else []
    kept += ["Kahan's compensation"] if asked.config.precision.rounding == "kahan" else []
    kept = [" and ".join(kept) + ", of 2 bytes each,"] if asked.config.precision.is_pure and kept else kept
    cast = "" if asked.cost.param else " No 2-byte shard is stored: it is cast from the master."
    pure = " and no master" if asked.config.precision.is_pure and kept else ""
    return f" The optimizer keeps {' and '.join(kept) or 'nothing'}{pure}.{cast}"


def _against_paper(asked: Question, total: Fraction) -> str:
    """Beside DDP, or, for another recipe than the paper's, beside the paper's rule."""
    cost = formulas.bytes_per_parameter(asked.param_bytes, asked.param_bytes, asked.moments)
    if asked.cost != cost:
        paper = formulas.total(formulas.model_states(asked.stage, cost).values())
        return f"The paper's own rule, {_local(asked, paper)}, gives {gigabytes(_bytes(asked, paper))}."
    if asked.stage == 0:
        return ""
    whole = formulas.total(formulas.model_states(0, cost).values())
    ddp = _bytes(asked, whole)
    less = f"{float(ddp / total):.3g} times as much" if ddp > total else "as much"
    return f"DDP's {_local(asked, whole)} is {gigabytes(ddp)}, {less}."


def optimizer_step(asked: Question) -> Section:
    psi, ranks, cost, group = asked.held, asked.shards, asked.cost, asked.config.optim.sub_group
    is_cut = bool(group) and psi / ranks > group  # then a sub-group's copies are all
    forms = formulas.optimizer_step_states(asked.states_stage, cost, upcast_grads=True)
    held, copies = formulas.total(formulas.model_states(asked.states_stage, cost).values()), forms["upcast"]
    numbers = f"4 · {show(psi)}" + (f" / {ranks:,}" if asked.stage else "")
    note = "The reduced gradients and their fp32 copies, both alive: DeepSpeed edaa722, stage_1_and_2.py, stage3.py."
    if is_cut:
        copies, numbers = formulas.MASTER_BYTES * symbol("G"), f"4 · {group:,}"
        note += " G elements are copied and stepped at once (sub_group_size), and what the last tensor has beyond."
    terms = (
        Term("states", _local(asked, held), "as above", _bytes(asked, held)),
        Term("upcast", _local(asked, copies), numbers, _bytes(asked, copies.where(G=group))),
        Term("total", _local(asked, held + copies), "", _bytes(asked, (held + copies).where(G=group)), is_sum=True),
    )
    return Section("optimizer_step", "While the optimizer steps", terms, (note,))


def traffic(asked: Question) -> Section:
    psi, ranks, moved = asked.held, asked.shards, asked.volume
    reduce_op, gather_op = _OPERATIONS[asked.stage]
    reduce_op = reduce_op or asked.config.reduction.grad_reduction
    sends = [(reduce_op, moved.grads, asked.grad_bytes), (gather_op, moved.params, asked.param_bytes)]
    terms = [
        Term(op, _local(asked, form.elements), _sent(asked, form, each), _bytes(asked, form))
        for op, form, each in sends
        if op
    ]
    whole, text = moved.total, moved.total.elements
    if asked.replicas > 1:
        across = formulas.replica_bytes(asked.replicas)
        numbers = f"{asked.replicas - 1:,}/{asked.replicas:,} · 2 · {show(psi)} / {ranks:,} · {asked.grad_bytes}"
        terms.append(Term("across replicas", _local(asked, across.elements), numbers, _bytes(asked, across)))
        whole, text = whole + across, text + across.elements
    terms.append(Term("total", _local(asked, text), "", _bytes(asked, whole), is_sum=True))
    notes = [
        f"Elements by formula, times (N-1)/N = {Fraction(ranks - 1, ranks)}, which the paper leaves out, times bytes: "
        f"{asked.grad_bytes} of a gradient, {asked.param_bytes} of a parameter. {ZERO_PAPER}, section 7."
    ]
    if every := OPTIMIZERS[asked.config.optim.optimizer].estimates_every:
        notes.append(f"Every {every}th step has a second forward and backward, for an estimate, which is not in these.")
    if asked.replicas > 1:
        notes.append("Across replicas an all_reduce of the own part, once a step: times (R-1)/R.")
    if "R" in moved.total.symbols:
        notes.append("R, the units outside the blocks, is not known from Ψ: the bytes are those for R = 0.")
    if "P" in moved.total.symbols:
        what = f"{asked.config.gathering.piece}s"
        notes.append(f"P, the {what} that stay gathered, is not known from Ψ: the bytes are those for P = 0.")
    if "M" in moved.total.symbols:
        notes.append("M, the modules that backward runs again, is not known from Ψ: the bytes are those for M = 0.")
    if asked.micro_batches > 1 and asked.stage >= 2:
        notes.append(f"Each of {asked.micro_batches:,} micro-batches is reduced (derived; the paper has one).")
    plain = formulas.volume(asked.stage, micro_batches=asked.micro_batches)
    agrees = None
    if moved != plain:
        notes.append(f"The paper's own schedule moves {plain}.")
    elif asked.micro_batches == 1:
        agrees = str(moved) == formulas.VOLUME[asked.stage]
        notes.append(f"{PRINTED} {formulas.VOLUME[asked.stage]} (section 7).")
    among = ", among data-parallel ranks" if asked.parts_of_model > 1 else ""
    return Section("volume", f"Sent per rank and step{among}", tuple(terms), tuple(notes), agrees)


def gathered(asked: Question, shape: Shape) -> Section:
    """How many parameters are there in full at a time, where stage 3 divides them."""
    each, h, t, gathering = asked.param_bytes, shape.hidden, asked.tp, asked.config.gathering
    by_module = gathering.by_module
    times, name = (4, "one map of an MLP") if by_module else (12, "one block")
    cut = "/t" if t > 1 else ""
    numbers = f"{times} · {h:,}²{f' / {t:,}' if t > 1 else ''} · {each}"
    term = Term(name, f"{times}h²{cut} · {each}", numbers, Fraction(times * h * h * each, t))
    whose = "a map" if by_module else "a block"
    what = "leaf module (a linear map, a norm)" if by_module else "unit (a block, the table, the head)"
    notes = [
        f"A {what} is gathered, used and freed at a time. Counted here: the matrices of {whose}, of an MLP that is "
        "4h wide, without biases and norms. The token table, Vh, may be larger: it is one either way."
    ]
    if gathering.prefetch:
        notes.append(f"Of {gathering.prefetch:,} more the parameters are on their way.")
    if gathering.prefetch_elements:
        limit = f" while fewer than {gathering.max_live:,} elements are there" if gathering.max_live else ""
        notes.append(
            f"At each turn {gathering.prefetch_elements:,} more elements are launched{limit}; one tensor may go beyond."
        )
    return Section("gathered", "Parameters gathered at a time, beside the slices", (term,), tuple(notes))


def _sent(asked: Question, form: Form, each: int) -> str:
    share = f"{asked.shards - 1:,}/{asked.shards:,}" if asked.shards > 1 else "0"
    times = form.elements.at(dict.fromkeys(form.symbols, 0), Ψ=1)
    return f"{share} · {f'{times} · ' if times != 1 else ''}{show(asked.held)} · {each}"
