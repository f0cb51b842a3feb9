"""The lines that explain a run: its closed forms, section by section, with the sources in the notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import note_of, notes_of
from zerosim.analysis.capabilities.experts import cut_words, psi_of
from zerosim.analysis.capabilities.pipeline import SCHEDULES, live_micro_batches
from zerosim.analysis.capabilities.recompute import block_form, block_parts, recomputes_all
from zerosim.analysis.capability import Key
from zerosim.analysis.cost import cost_of
from zerosim.analysis.facts import frozen_of, is_owned
from zerosim.analysis.forms import divided, forms, of
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.formulas.letters import COUNTS, LETTERS
from zerosim.analysis.letters import letters_of
from zerosim.analysis.nodes import has_nodes, node_forms, node_size
from zerosim.analysis.recompute import differ
from zerosim.analysis.shares import laid_out, shares_of
from zerosim.analysis.weights import shown
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.report.names import OPTIMIZERS, show
from zerosim.report.notes import nodes_note
from zerosim.report.words import by_stage
from zerosim.units import format_bytes

PRINTED = "The paper prints"
"""The beginning of the note to which `Section.agrees` refers."""


@dataclass(frozen=True, slots=True)
class Term:
    """One line: a formula, the same with its numbers, and bytes."""

    name: str
    formula: str
    numbers: str
    value: Fraction
    is_sum: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. Bytes are exact if they are whole; else 'exact' has the fraction."""
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
    """Whether the total is the paper's printed figure; None if it prints none."""


class Asked:
    """The question: a configuration's closed forms, and the numbers of the first pipeline stage's ranks."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.placed = config, laid_out(config)
        self.cost = cost_of(self.placed, 0)
        self.forms = forms(config, self.cost)
        self.held = letters_of(self.placed)
        self.is_part = self.held["Ψ"] != self.placed.num_parameters

    def term(self, name: str, form: Form, *, is_sum: bool = False) -> Term:
        """Return a form in bytes as a line: its elements as text, with the numbers put in, and its value."""
        put_in = form.where({x: value for x, value in self.held.items() if value == 0 or x in COUNTS})
        return Term(name, self.text(form), "" if is_sum else put_in.numbers(self.held), form.at(self.held), is_sum)

    def text(self, form: Form) -> str:
        """Return a form in the printed letters (`psi_of`)."""
        found = shown(form, self.held)
        return str(found.where(Ψ=symbol(psi_of(self.held, is_part=self.is_part))))

    def says(self, *letters: str) -> str:
        """Return 'bsh = 1,024 elements, the activation between two layers of one microbatch'."""
        said = []
        for letter in letters:
            unit = f" {LETTERS[letter].unit}" if LETTERS[letter].unit else ""
            said.append(f"{letter} = {formulas.figure(self.held[letter])}{unit}, {LETTERS[letter].meaning}")
        return "; ".join(said) + "."


def _states(asked: Asked) -> Section:
    config, cost, ranks = asked.config, asked.cost, asked.held["N"]
    by_kind = {kind: form for (kind, _), form in of(asked.forms, "states").items()}
    whole = formulas.total(by_kind.values())
    total = asked.term("total", whole, is_sum=True)
    notes = [
        f"{cost.param} + {cost.grad} + {formulas.figure(cost.optim)} bytes per parameter (param + grad + optim)."
        f"{_kept(config)}{'' if cost.param else ' No 2-byte shard is stored: it is cast from the master.'} "
        f"{whole.source}."
    ]
    if config.optim.optimizer not in formulas.UNIFORM:
        notes.append(
            f"{formulas.figure(cost.optim)} is a mean: what {OPTIMIZERS[config.optim.optimizer]} keeps depends on the "
            "tensor, and a plan counts what each rank has."
        )
    if is_owned(config):
        notes.append(f"Whole {note_of(config, 'piece')}s belong to ranks: the bytes are the mean over ranks.")
    notes += notes_of(config, "model_states")
    printed = []
    if cost == formulas.MIXED_ADAM and not asked.is_part:
        printed = formulas.printed_states(config.parallel.zero_stage, asked.held["Ψ"], ranks)
    exact = total.value / 10**9
    if printed:
        said = " and ".join(f"{figure.gigabytes} GB ({figure.where})" for figure in printed)
        notes.append(f"{PRINTED} {said}. Exact: {float(exact):.9g} GB.")
    agrees = all(formulas.printed(exact, figure.gigabytes) == figure.gigabytes for figure in printed)
    terms = (*(asked.term(kind, form) for kind, form in by_kind.items()), total)
    title = "Model states per rank when backward ends"
    notes = [*_part(asked), *notes, *_beside(asked, total.value)]
    return Section("model_states", title, terms, tuple(notes), agrees if printed else None)


def _kept(config: RunConfig) -> str:
    precision, moments = config.precision, formulas.num_moments(config.optim.optimizer, config.optim.momentum)
    if config.optim.optimizer not in formulas.UNIFORM:
        return ""
    kept = ["an fp32 master"] if precision.has_masters else []
    kept += [{1: "one moment", 2: "two moments", 3: "three states"}[moments]] if moments else []
    kept += ["Kahan's compensation"] if precision.rounding == "kahan" else []
    each = ", of 2 bytes each, and no master" if precision.is_pure and kept else ""
    return f" The optimizer keeps {' and '.join(kept) or 'nothing'}{each}."


def _part(asked: Asked) -> list[str]:
    """Return which part of the model a rank holds, if not all of it."""
    if not asked.is_part:
        return []
    config, held = asked.config, [share.num_parameters for share in shares_of(asked.placed)]
    return [
        " ".join(
            [
                f"Ψ_r = {by_stage(held)}; the whole model has Ψ parameters.",
                *cut_words(asked.held),
                *notes_of(config, "part"),
            ]
        )
    ]


def _beside(asked: Asked, total: Fraction) -> list[str]:
    """Return the paper's own rule if a recipe has another; else DDP's."""
    config, param = asked.config, asked.held["w"]
    moments = formulas.num_moments(config.optim.optimizer, config.optim.momentum)
    if config.optim.optimizer not in formulas.UNIFORM:
        return []
    plain, stage = formulas.bytes_per_parameter(param, param, moments), config.parallel.zero_stage
    if asked.cost != plain:
        paper = divided(config, formulas.total(formulas.model_states(stage, plain).values()))
        return [f"The paper's own rule, {asked.text(paper)}, gives {gigabytes(paper.at(asked.held))}."]
    if stage == 0:
        return []
    whole = divided(config, formulas.total(formulas.model_states(0, plain).values()))
    ddp = whole.at(asked.held)
    less = f"{float(ddp / total):.3g} times as much" if ddp > total else "as much"
    return [f"DDP's {asked.text(whole)} is {gigabytes(ddp)}, {less}."]


def _optimizer_step(asked: Asked) -> Section | None:
    found, group = of(asked.forms, "upcast"), asked.config.optim.sub_group
    copies = found.pop(("upcast", ""))
    if not copies.terms:
        return None
    held = formulas.total(found.values())
    note = f"The reduced gradients and their fp32 copies, both alive: {copies.source}."
    if group and asked.held["Ψ_t"] > group * asked.held["N"]:
        note += " The optimizer copies and steps that many elements at once (sub_group_size), and what the last tensor "
        note += "has beyond."
    else:
        stage, frozen = asked.config.states_stage, frozen_of(asked.config)
        copies = formulas.optimizer_step_states(stage, asked.cost, frozen, upcast_grads=True)["upcast"]
        copies = divided(asked.config, copies)
    terms = (
        Term("states", asked.text(held), "as above", held.at(asked.held)),
        asked.term("upcast", copies),
        asked.term("total", held + copies, is_sum=True),
    )
    return Section("optimizer_step", "While the optimizer steps", terms, (note,))


def _buffers(asked: Asked) -> Section | None:
    if (form := asked.forms.get(Key("buffers", "comm"))) is None:
        return None
    term, note = asked.term("comm", form), f"They live from start to end, beside the gradients. {form.source}."
    return Section("reduction_buffers", "Buffers from which gradients are reduced", (term,), (note,))


def _sent(asked: Asked) -> Section:
    config, ranks, held = asked.config, asked.held["N"], asked.held
    found = {key: form for key, form in of(asked.forms, "sent").items() if shown(form, held).terms}
    names = {"states": "{}", "replicas": "across replicas"}
    terms = [asked.term(names.get(use, f"{use}: {{}}").format(name), form) for (name, use), form in found.items()]
    whole = formulas.total(found.values())
    zero = formulas.total(form for (_, use), form in found.items() if use in ("states", "node", "nodes"))
    terms.append(asked.term("total", whole, is_sum=True))
    notes = [
        f"Elements by formula, times (N-1)/N = {Fraction(ranks - 1, ranks)}, which the paper leaves out, times bytes: "
        f"{held['g']} of a gradient, {held['w']} of a parameter. {zero.source}."
    ]
    notes += notes_of(config, "codes")
    shown_letters = ("VD", "U", "R", "P", "M", "S", "C", "E", "F", "d", "n", "O", "σ_f", "σ_b", "σ_g")
    letters = [x for x in shown_letters if x in shown(whole, held).symbols]
    notes += [asked.says(letter) for letter in letters]
    if every := PRESETS[config.optim.optimizer].estimates_every:
        notes.append(f"Every {every}th step has a second forward and backward, for an estimate, which is not in these.")
    notes += notes_of(config, "volume")
    plain = formulas.volume(config.parallel.zero_stage, formulas.Schedule(config.data.accumulate))
    paper, agrees = formulas.VOLUME[config.parallel.zero_stage], None
    if shown(zero, held) != plain.total.elements:
        notes.append(f"The paper's own schedule moves {plain}.")
    elif config.data.accumulate == 1:
        agrees = str(shown(zero, held)) == paper
        notes.append(f"{PRINTED} {paper} (section 7).")
    among = ", among data-parallel ranks" if asked.is_part else ""
    return Section("volume", f"Sent per rank and step{among}", tuple(terms), tuple(notes), agrees)


def _nodes(asked: Asked) -> Section | None:
    if not has_nodes(asked.config):
        return None
    found = {key: form for key, form in node_forms(asked.config, asked.forms).items() if shown(form, asked.held).terms}
    terms = [asked.term(name if use == "states" else f"{use}: {name}", form) for (name, use), form in found.items()]
    whole = formulas.total(found.values())
    terms.append(asked.term("total", whole, is_sum=True))
    note = f"{nodes_note(asked.config)} {asked.says('d', 'n')}"
    title = f"Leaves a node of {node_size(asked.config)} ranks per step"
    return Section("nodes", title, tuple(terms), (note,))


def _gathered(asked: Asked) -> Section | None:
    """Return how many parameters are gathered at a time, if stage 3 divides them."""
    config = asked.config
    if config.parallel.zero_stage < 3:
        return None
    numels: dict[str, int] = {}
    for name, numel in shares_of(asked.placed)[0].numels.items():
        piece = asked.placed.layout.flats[name].module
        numels[piece] = numels.get(piece, 0) + numel
    largest = max(numels, key=numels.__getitem__)
    numel, each = numels[largest], asked.held["w"]
    term = Term(largest, f"{numel:,} · w", f"{numel:,} · {each}", Fraction(numel * each))
    notes = tuple(notes_of(config, "gathered"))
    return Section("gathered", "Parameters gathered at a time, beside the shards", (term,), notes)


def _exchanged(asked: Asked) -> Section | None:
    found = {key: form for key, form in of(asked.forms, "exchanged").items() if shown(form, asked.held).terms}
    if not found:
        return None
    terms = tuple(asked.term(f"{axis}: {name}", form) for (name, axis), form in found.items())
    where = " on pipeline stage 0" if asked.config.mesh.pp > 1 else ""
    symbols = formulas.total(found.values()).where({x: asked.held[x] for x in COUNTS if x in asked.held}).symbols
    note = f"{asked.says(*(x for x in ('k', 'bsh', 'bs', 'V') if x in symbols))} {'; '.join(_sources(found))}."
    said = note_of(asked.config, "exchanges")
    return Section("exchanges", f"Activations sent per rank and step{where}", terms, (note, said) if said else (note,))


def _copies(asked: Asked) -> Section | None:
    found = of(asked.forms, "copied")
    if not found:
        return None
    terms = tuple(asked.term(way, form) for (way, _), form in found.items())
    offloads = "model states" in notes_of(asked.config, "moved")
    what = "Model states, over PCIe or to the drives" if offloads else "Kept inputs of blocks, over PCIe"
    note = f"{what}: no rank sends them. {'; '.join(_sources(found))}."
    title = f"Copies between {'memories' if offloads else 'device and host'} per rank and step"
    return Section("copies", title, terms, (note,))


def _memories(asked: Asked) -> Section | None:
    found = of(asked.forms, "lies")
    if not found:
        return None
    terms = tuple(asked.term(f"{kind}, {memory or 'device'}", form) for (kind, memory), form in found.items())
    note = "Between uses, offloaded states take no device memory. The host's CPU updates the masters in host memory."
    return Section("memories", "Where they lie", terms, (f"{note} {note_of(asked.config, 'memories')}".rstrip(),))


def _blocks(asked: Asked) -> Section | None:
    config, form = asked.config, asked.forms.get(Key("kept", "block"))
    if form is None:
        return None
    held = asked.held
    in_h = {"f": 4 * symbol("h")} if held["f"] == 4 * held["h"] else {}
    form = form.where({**in_h, **({"t": 1} if held["t"] == 1 else {})})
    is_gpt = config.model.family == "gpt" or recomputes_all(config)  # every block keeps its input
    name = "a block keeps" if is_gpt else "a GPT's block keeps"
    kept = Term(name, str(form), form.numbers(held), form.at(held), is_sum=True)
    parts = {name: part.where(in_h) for name, part in block_parts(config).items()}
    terms = [Term(name, str(part), part.numbers(held), part.at(held)) for name, part in parts.items()]
    live, blocks, kind = live_micro_batches(config), held["l"], config.parallel.pipeline_schedule
    each = [block_form(config, block).at(held) for block in range(blocks)] if held["v"] == 1 else []
    if differ(config) or len({*each}) > 1:
        name, among = ("all blocks", "") if held["p"] == 1 else ("first stage", f" · {live.where(i=0)}")
        last = Term(name, f"sum of blocks{among}", f"{len(each)} blocks", sum(each) * live.where(i=0).at(held))
    elif held["p"] == 1:
        last = Term("all blocks", "times l", f"{blocks:,} blocks", blocks * kept.value)
    else:
        times = (live / symbol("v")).where(i=0) if held["v"] > 1 else live.where(i=0)
        last = Term(
            "first stage",
            f"times l · {times}",
            f"{blocks:,} · {show(times.at(held))}",
            blocks * times.at(held) * kept.value,
        )
    letters = asked.says(*(letter for letter in "sbhfat" if letter in form.symbols))
    notes = [
        f"{letters} 2-byte tensors and 1-byte dropout masks, of a GPT's block. {note_of(config, 'again')} "
        + f"{form.source}. "
        + ("" if is_gpt else f"Blocks of {config.model.family} keep other tensors. ")
        + "A plan counts what the model's own kernels keep.",
    ]
    notes += notes_of(config, "activations")
    if held["p"] > 1:
        bubble, own_span = formulas.bubble(kind), formulas.own_span_bubble(kind)
        notes.append(
            f"Live on stage i: {live} {'microbatches' if held['v'] == 1 else 'chunks'}. Bubble by makespan: {bubble} = "
            f"{bubble.at(held)}. By own span, of the stage with the most: {own_span.at(held)}. {bubble.source}."
        )
    order = f" under {SCHEDULES[kind]}" if held["p"] > 1 else " of one microbatch"
    ends = (kept, last) if last.value else (kept,)
    return Section("activations_2205_05198", f"Activations{order}, tensor by tensor", (*terms, *ends), tuple(notes))


def _paper_activations(asked: Asked) -> Section | None:
    config = asked.config
    if not config.model.has_blocks:
        return None
    held, w = asked.held | {"l": config.model.layers}, symbol("w")
    estimates = {"all kept": formulas.zero_paper_elements() * w, "inputs only": formulas.checkpoint_elements() * w}
    terms = tuple(Term(name, str(form), form.numbers(held), form.at(held)) for name, form in estimates.items())
    notes = (
        f"12hbsl are elements, of {held['w']} bytes here; with recompute, one input per block. "
        f"{estimates['all kept'].source}.",
        formulas.WHY_ESTIMATES_DIFFER,
    )
    return Section("activations_1910_02054", "Activations of one microbatch, the ZeRO paper's estimate", terms, notes)


SECTIONS = (
    _states, _memories, _optimizer_step, _buffers, _sent, _nodes, _gathered, _exchanged, _copies, _blocks,
    _paper_activations,
)  # fmt: skip


def _sources(found: Mapping[tuple[str, str], Form]) -> list[str]:
    return list(dict.fromkeys(form.source for form in found.values() if form.source))


def gigabytes(value: Fraction) -> str:
    """Return three digits, such as '16.6 GB'."""
    return format_bytes(round(value))
