"""What figures can be compared with: COUNTS, read off the ledgers of a run, and FORMULAS, put together from its values.

No formula is in the counts: their bytes are those of the rank with the most, padding included. Nothing is counted in
the formulas; what a schedule gathers more or less often than Ψ is read off the units of the run's model
(`analysis/shares.py`), as the tables of a run do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis import formulas
from zerosim.analysis.advice import run
from zerosim.analysis.search import most_that_fits
from zerosim.analysis.shares import cost_of, gathers_of, is_mesh, shares_of, volume_of
from zerosim.comm.runtime import make_backend
from zerosim.config import ModelConfig, RunConfig
from zerosim.device.device import Device
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.train.build import build_model, is_block
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

SHAPES, TRAINING = "shapes", "training"


class Runs:
    """Runs that were made, so that tables that ask for the same one make it once."""

    def __init__(self) -> None:
        self._made: dict[tuple[RunConfig, str], RunResult] = {}
        self._largest: dict[tuple[RunConfig, int], int] = {}

    def result(self, config: RunConfig, counted_on: str) -> RunResult:
        """A step on shapes alone, or training for real numbers. Raises: what either raises."""
        if (config, counted_on) not in self._made:
            self._made[config, counted_on] = run(config) if counted_on == TRAINING else plan(config)
        return self._made[config, counted_on]

    def largest(self, config: RunConfig, memory: int) -> int:
        """Parameters of the largest flat model whose counted states fit so many bytes; 0 where none does."""

        def states(tried: RunConfig) -> int:
            return max(sum(rank.model_states().values()) for rank in plan(tried).memory)

        if (config, memory) not in self._largest:
            found = most_that_fits(config, "params", memory, states).best
            self._largest[config, memory] = found.value if found else 0
        return self._largest[config, memory]


@dataclass(frozen=True, slots=True)
class Asked:
    """One cell's question: a run, and what a quantity takes beside it."""

    config: RunConfig
    runs: Runs
    counted_on: str = SHAPES
    mp: int = 1
    at: str = "end_of_backward"
    memory: int = 0
    calculator: str = ""

    @property
    def result(self) -> RunResult:
        return self.runs.result(self.config, self.counted_on)


@dataclass(frozen=True, slots=True)
class Quantity:
    """How to read a number, what it is, its dimension, and which keys of [expect] it needs or takes."""

    read: Callable[[Asked], Fraction | int | None]
    dimension: str
    what: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def _ring_share(config: RunConfig) -> Fraction:
    """(N-1)/N: of a volume, what a rank of a ring sends. Raises: InputError where a volume is divided otherwise."""
    if config.mesh.ranks == 1:
        raise InputError("ranks 1: one rank sends nothing, so its volume has no factor (N-1)/N; give two at least")
    if config.mesh.dp_replicate > 1:
        raise InputError(
            f"dp_replicate {config.mesh.dp_replicate}: a volume has two factors then, within and across replicas; "
            "expect sent_bytes"
        )
    if is_mesh(config):
        raise InputError(
            f"tp {config.mesh.tp}, pp {config.mesh.pp}: ranks hold parts of Ψ there, and a volume is no multiple "
            "of it; expect sent_bytes"
        )
    return Fraction(config.mesh.ranks - 1, config.mesh.ranks)


# -- counts -------------------------------------------------------------------------------------------
def _counted_states(asked: Asked) -> int:
    marks = asked.result.memory[0].marks
    if asked.at not in marks:
        raise InputError(f"at {asked.at!r}: this run has no such moment; it has {', '.join(marks)}")
    return max(sum(memory.model_states(asked.at).values()) for memory in asked.result.memory)


def _counted_sent(asked: Asked) -> int:
    result = asked.result
    return max(result.sent_bytes(rank, len(result.steps) - 1) for rank in range(result.config.mesh.ranks))


def _counted_volume(asked: Asked) -> Fraction:
    result, share, last = asked.result, _ring_share(asked.config), len(asked.result.steps) - 1
    rows = [row for rows in result.traffic for row in rows if row.step == last and row.purpose == "states"]
    elements = sum((Fraction(row.wire_bytes, dtype(row.dtype).itemsize) for row in rows), Fraction(0))
    return elements / asked.config.mesh.ranks / share / result.num_parameters


def _counted_blocks(asked: Asked) -> list[int]:
    """What each block's forward saved, as its ops recorded it."""
    kept = [sum(row.nbytes for row in rows) for unit, rows in asked.result.saved.items() if is_block(unit)]
    if not kept or asked.config.model.family == "flat":
        raise InputError(f"model {asked.config.model.name} has no blocks whose activations could be counted")
    return kept


def _counted_largest(asked: Asked) -> int:
    """Times mp: a model of mp times as many parameters leaves each rank what one of this size does."""
    if asked.config.model.family != "flat":
        raise InputError(f"model {asked.config.model.name}: the largest is searched among flat ones; choose model flat")
    return asked.runs.largest(asked.config, asked.memory) * asked.mp


def _counted_parameters(asked: Asked) -> int:
    """Of the model as it is built; nothing has to run for that."""
    return build_model(asked.config, Device(0, make_backend("meta"))).num_parameters


COUNTS: Mapping[str, Quantity] = MappingProxyType(
    {
        "model_states_bytes": Quantity(
            _counted_states, "bytes", "param + grad + optim on the rank with the most, padding included", takes=("at",)
        ),
        "peak_bytes": Quantity(
            lambda asked: max(memory.peak.total_bytes for memory in asked.result.memory),
            "bytes",
            "the most live bytes at once, on the rank with the most",
        ),
        "sent_bytes": Quantity(_counted_sent, "bytes", "model states sent in the last step, by the rank with the most"),
        "sent_over_psi": Quantity(
            _counted_volume, "volume", "elements of model states sent in the last step, x N/(N-1), over Ψ"
        ),
        "block_activation_bytes": Quantity(
            lambda asked: max(_counted_blocks(asked)), "bytes", "what forward keeps of one block"
        ),
        "activation_bytes": Quantity(
            lambda asked: sum(_counted_blocks(asked)), "bytes", "what forward keeps of all blocks"
        ),
        "parameters": Quantity(_counted_parameters, "count", "parameters that the model declares, a tied table once"),
        "largest_model": Quantity(
            _counted_largest, "count", "most parameters whose counted states fit, x mp", ("memory",), ("mp",)
        ),
    }
)


# -- formulas -----------------------------------------------------------------------------------------
def _psi(config: RunConfig) -> int:
    """Parameters by the formula of the model's family."""
    model = config.model
    if model.family == "flat":
        assert model.params is not None  # its family fills it in
        return model.params
    if model.family == "gpt":
        sizes = model.layers, model.hidden, model.vocab, model.positions
        return formulas.gpt2_parameters(*sizes, ffn=model.ffn, tied=model.tie_embeddings)
    if model.family == "llama":
        llama_sizes = model.layers, model.hidden, model.ffn, model.vocab, model.heads, model.kv_heads
        return formulas.llama_parameters(*llama_sizes, tied=model.tie_embeddings)
    raise InputError(f"model {model.name}: no formula for its parameters; choose gpt, llama or flat, or count them")


def _formula_states(asked: Asked) -> Fraction:
    c = asked.config
    upcast = asked.at == "gradients_upcast" and c.recipe_choices.upcast_grads
    held = [share.num_parameters for share in shares_of(asked.result)] if is_mesh(c) else [_psi(c)]

    def states(psi: int) -> Fraction:
        of = formulas.optimizer_step_states(
            c.parallel.zero_stage, psi, c.mesh.dp_shard, cost_of(c), upcast_grads=upcast
        )
        return sum(of.values(), Fraction(0))

    return max(map(states, held))


def _formula_volume(asked: Asked) -> Fraction:
    result, psi, share = asked.result, _psi(asked.config), _ring_share(asked.config)
    return volume_of(result).sent_bytes(psi, asked.config.mesh.ranks, 1, 1, *gathers_of(result)) / share / psi


def _formula_largest(asked: Asked) -> Fraction:
    c = asked.config
    return formulas.largest_model(asked.memory, c.parallel.zero_stage, c.mesh.dp_shard, cost_of(c), asked.mp)


def _with_blocks(asked: Asked) -> ModelConfig:
    if not asked.config.model.has_blocks:
        raise InputError(f"model {asked.config.model.name} has no blocks: choose a gpt")
    return asked.config.model


def _formula_block(asked: Asked) -> Fraction:
    model, c = _with_blocks(asked), asked.config
    return formulas.block_activations(
        model.seq,
        c.data.micro_batch,
        model.hidden,
        model.heads,
        ffn=model.ffn,
        recompute=c.memory.recompute,
        tensor_parallel=c.mesh.tp,
        sequence_parallel=c.parallel.sequence_parallel,
        keep_gathered=c.parallel.keep_gathered,
    )


def _twelve_bytes(asked: Asked) -> int:
    model, rows = _with_blocks(asked), asked.config.data.micro_batch
    return formulas.zero_paper_elements(model.seq, rows, model.hidden, model.layers) * _param_bytes(asked)


def _checkpoint_elements(asked: Asked) -> Fraction:
    model, rows = _with_blocks(asked), asked.config.data.micro_batch
    return Fraction(formulas.checkpoint_elements(model.seq, rows, model.hidden, model.layers), asked.mp)


def _checkpoint_bytes(asked: Asked) -> Fraction:
    return _checkpoint_elements(asked) * _param_bytes(asked)


def _param_bytes(asked: Asked) -> int:
    return dtype(asked.config.precision.param_dtype).itemsize


def _megatron_parameters(asked: Asked) -> Fraction:
    model = _with_blocks(asked)
    return formulas.megatron_parameters(model.layers, model.hidden, model.vocab, model.positions)


def _twelve_l_h_squared(asked: Asked) -> int:
    model = _with_blocks(asked)
    return formulas.twelve_l_h_squared(model.layers, model.hidden)


def _calculator(asked: Asked) -> Fraction | None:
    c = asked.config
    (known,) = (each for each in formulas.calculators() if each.name == asked.calculator)
    return known.model_states(c.parallel.zero_stage, _psi(c), c.mesh.dp_shard)


FORMULAS: Mapping[str, Quantity] = MappingProxyType(
    {
        "model_states_bytes": Quantity(
            _formula_states,
            "bytes",
            "(2 + 2 + K) Ψ, divided as the stage does; on a mesh of the Ψ_r that a rank holds, the most",
            takes=("at",),
        ),
        "sent_over_psi": Quantity(_formula_volume, "volume", "2Ψ, 2Ψ, 2Ψ, 3Ψ with accumulation and recipe"),
        "block_activation_bytes": Quantity(_formula_block, "bytes", "34sbh + 5as²b of arXiv 2205.05198"),
        "parameters": Quantity(lambda asked: _psi(asked.config), "count", "by the family's formula"),
        "largest_model": Quantity(
            _formula_largest, "count", "memory x mp / bytes per parameter", needs=("memory",), takes=("mp",)
        ),
        "zero_activation_bytes": Quantity(_twelve_bytes, "bytes", "12 hbsL elements"),
        "checkpoint_elements": Quantity(_checkpoint_elements, "count", "hbsL elements, over mp", takes=("mp",)),
        "checkpoint_bytes": Quantity(_checkpoint_bytes, "bytes", "hbsL elements, over mp", takes=("mp",)),
        "checkpoints_and_block_bytes": Quantity(
            lambda asked: _checkpoint_bytes(asked) + Fraction(_twelve_bytes(asked), asked.config.model.layers),
            "bytes",
            "hbsL elements and the 12 hbs of one live block",
        ),
        "megatron_parameters": Quantity(_megatron_parameters, "count", "12Lh² (1 + 13/(12h) + (V+s)/(12Lh))"),
        "twelve_l_h_squared": Quantity(_twelve_l_h_squared, "count", "12Lh²"),
        "calculator": Quantity(_calculator, "bytes", "a published calculator's rule", needs=("calculator",)),
    }
)
