"""FORMULAS: values computed from a run's configuration, to compare with a printed figure.

They count nothing. Gathers that a schedule adds to Psi or saves are read off the units of the run's
model (`analysis/shares.py`), as in the tables of a run.
"""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import pipeline, tuning, zero
from zerosim.analysis.capabilities.recompute import block_form
from zerosim.analysis.cost import cost_of
from zerosim.analysis.expect.asked import WHOLE, Asked, quantity, ring_share, table
from zerosim.analysis.expect.sweeps import BANDWIDTH, PIPELINE_STAGE
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.forms import forms, of, sent_of
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import is_mesh, shares_of
from zerosim.analysis.weights import sizes
from zerosim.config import ModelConfig, RunConfig
from zerosim.config.parts.mtp import further_blocks
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.placement.mesh import MODEL


def parameters_of(config: RunConfig) -> int:
    """Return the parameters by the formula of the model's family."""
    model = config.model
    if model.family == "flat":
        assert model.params is not None  # its family fills it in
        return model.params
    if model.has_blocks:
        return _of_decoder(model, further_blocks(config.mtp))
    raise InputError(
        f"model {model.name}: no formula for its parameters; choose a model with blocks or flat, or count them with "
        "quantity"
    )


def active_of(model: ModelConfig, further: int = 0) -> int:
    """Return the parameters that work for one token: of the experts the chosen ones alone. So many `further` blocks
    predict further tokens."""
    return _of_decoder(model, further, model.top_k)


def _of_decoder(model: ModelConfig, further: int, chosen: int | None = None) -> int:
    """Return the parameters of a model with blocks: which norms and biases it has is its row's, how many numbers each
    has the formula's. So many `further` blocks predict further tokens. `chosen`: count so many of the experts; None:
    all."""
    row, block = model.decoder, model.decoder.block
    attention, mlp = block.branches
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    between = {"": 0, "head": 2 * model.head_dim, "all": queries + keys, "heads": queries + keys, "plain": 0}
    second, own = 0, None
    if model.is_latent:
        row_of = attention.latent
        low_rank = row_of is not None and row_of.q is not None
        widths = model.latents._replace(q=model.latents.q * low_rank)
        own = formulas.latent_parameters(model.hidden, model.heads, *widths, bias=attention.rows.bias)
    if row.second is not None:
        second = formulas.second_parameters(
            model.depths[1], model.hidden, queries, keys, model.heads, model.numbers.bias_buckets
        )
    beside, experts = 0, mlp.experts
    if experts is not None:
        beside = formulas.experts_parameters(
            sum(model.kind(number).has_experts for number in range(model.layers + further)),
            model.hidden,
            model.ffn,
            model.expert_ffn,
            model.experts,
            model.experts if chosen is None else chosen,
            model.width("shared"),
            gated=block.between in ("swiglu", "geglu", "clamped_swiglu"),
            biases=(mlp.columns.bias, mlp.rows.bias),
            shared_gate=bool(experts.shared_gate),
            gate_bias=experts.gate_bias,
            expert_biases=experts.bias,
        )
    norm_params = 2 if block.norm == "layer" else 1
    return (
        beside
        + second
        + formulas.further_parameters(further, model.hidden, norm_params)
        + formulas.decoder_parameters(
            sum(model.depths) + further,
            model.hidden,
            model.ffn,
            model.vocab,
            queries=queries,
            keys=keys,
            gated=block.between in ("swiglu", "geglu", "clamped_swiglu"),
            biases=(attention.columns.bias, attention.rows.bias, mlp.columns.bias, mlp.rows.bias),
            norms=len({name for one in (attention, mlp) for name in (one.before, one.after) if name}),
            norm_params=norm_params,
            between=between[block.qk_norm] + model.heads * block.sinks,
            positions=row.first_position + model.positions if model.has_position_table else 0,
            around=bool(row.last_norm) + model.is_second + bool(row.table_norm) + model.is_masked,
            head_bias=row.head_bias,
            tied=model.tie_embeddings,
            types=model.numbers.token_types if model.is_masked else 0,
            transform=model.is_masked,
            attention=own,
        )
    )


@quantity(
    "bytes",
    "(2 + 2 + K) Ψ, divided as the stage does; on a mesh of the Ψ_r that a rank holds, the most",
    takes=("at", PIPELINE_STAGE),
)
def model_states_bytes(asked: Asked) -> Fraction:
    c = asked.config
    held = [share.num_parameters for share in shares_of(asked.result)] if is_mesh(c) else [parameters_of(c)]
    if asked.pipeline_stage is not None:
        held = held[asked.pipeline_stage : asked.pipeline_stage + 1]
    subject = {"gradients_upcast": "upcast", "after_step": "between"}.get(asked.at, "states")
    whole = formulas.total(of(forms(c, cost_of(asked.result)), subject).values())
    if frozen_of(c) is not None:  # the layout says which weights are trained, and which are stored as codes
        return whole.at(letters_of(asked.result, asked.pipeline_stage or 0))
    return max(whole.at(Ψ=psi, N=c.mesh.shards) for psi in held)


@quantity("volume", "2Ψ, 2Ψ, 2Ψ, 3Ψ with accumulation and recipe")
def sent_over_psi(asked: Asked) -> Fraction:
    result, psi, share = asked.result, parameters_of(asked.config), ring_share(asked.config)
    held = letters_of(result) | {"Ψ": psi, "N": asked.config.mesh.ranks, "w": 1, "g": 1, "q": 1}
    sent = sent_of(asked.config, capabilities=(zero.CAPABILITY, tuning.CAPABILITY))
    return formulas.total((*sent.grads.values(), *sent.params.values())).at(held) / share / psi


def _with_blocks(asked: Asked) -> ModelConfig:
    if not asked.config.model.has_blocks:
        raise InputError(f"model {asked.config.model.name} has no blocks: choose a gpt")
    return asked.config.model


@quantity("bytes", "34sbh + 5as²b of arXiv 2205.05198")
def block_activation_bytes(asked: Asked) -> Fraction:
    _with_blocks(asked)
    return block_form(asked.config).at(sizes(asked.config))


@quantity("share", "that of a block, over sbh (10 + 24/t + 5as/(ht))")
def activation_share(asked: Asked) -> Fraction:
    c, whole, blocks = asked.config, asked.config.replace(**WHOLE), range(_with_blocks(asked).layers)
    kept = formulas.total(block_form(c, block) for block in blocks).at(sizes(c))
    return kept / (len(blocks) * block_form(whole).at(sizes(whole)))


@quantity("bytes", "the scores of one layer and microbatch, as²b/t elements")
def score_bytes(asked: Asked) -> Fraction:
    model, c = _with_blocks(asked), asked.config
    return Fraction(c.data.micro_batch * model.heads * model.seq**2 * _param_bytes(asked), c.mesh.tp)


@quantity("bytes", "a causal mask of a microbatch, bs²/c of one byte")
def mask_bytes(asked: Asked) -> int:
    if asked.config.model.is_masked:
        raise InputError(f"model {asked.config.model.name} is an encoder: its attention has no causal mask")
    return asked.config.data.micro_batch * _with_blocks(asked).seq ** 2 // asked.config.mesh.cp


@quantity("bytes", "token ids, attention mask and labels of a microbatch, 8 bytes each")
def batch_bytes(asked: Asked) -> int:
    return 3 * 8 * asked.config.data.micro_batch * _with_blocks(asked).row_tokens


@quantity(
    "bytes",
    "the results of the attention cores of all microbatches that are live at once, sbh L/(t p) elements each",
    takes=(PIPELINE_STAGE,),
)
def attention_output_bytes(asked: Asked) -> Fraction:
    model, c = _with_blocks(asked), asked.config
    held = sizes(c) | {"i": asked.pipeline_stage or 0}
    live = pipeline.live_weights(c).at(held)
    return held["bsh"] * held["w"] * live * model.layers / (c.mesh.axes.size(*MODEL) * held["v"])


@quantity("share", "(p-1)/m, interleaved (p-1)/(v m), zb-h1 (p-1)/(3m), zb-v (p-1)/(6m)")
def bubble(asked: Asked) -> Fraction:
    return pipeline.bubble(asked.config).at(sizes(asked.config))


@quantity("count", "by the family's formula")
def parameters(asked: Asked) -> int:
    return parameters_of(asked.config)


@quantity("count", "memory x mp / bytes per parameter", needs=("memory",), takes=("mp",))
def largest_model(asked: Asked) -> Fraction:
    c = asked.config
    return formulas.largest_model(asked.memory, c.parallel.zero_stage, c.mesh.shards, cost_of(asked.result), asked.mp)


@quantity("bytes", "12 hbsL elements")
def zero_activation_bytes(asked: Asked) -> Fraction:
    elements = formulas.zero_paper_elements().at(sizes(asked.config), l=_with_blocks(asked).layers)
    return elements * _param_bytes(asked)


@quantity("count", "hbsL elements, over mp, or over tp with Pa", takes=("mp",))
def checkpoint_elements(asked: Asked) -> Fraction:
    parts = asked.config.mesh.tp if asked.config.partitions_inputs else asked.mp
    return formulas.checkpoint_elements().at(sizes(asked.config), l=_with_blocks(asked).layers) / parts


@quantity("bytes", "hbsL elements, over mp, or over tp with Pa", takes=("mp",))
def checkpoint_bytes(asked: Asked) -> Fraction:
    return Fraction(checkpoint_elements(asked) * _param_bytes(asked))


def _param_bytes(asked: Asked) -> int:
    return dtype(asked.config.precision.stored).itemsize


@quantity("share", "an all-gather of bsh over 6 all-reduces of bsh")
def partition_share(asked: Asked) -> Fraction:
    if not asked.config.partitions_inputs:
        raise InputError(
            "partition_share: the inputs of blocks are not divided; set partition_activations, tp and recompute"
        )
    return formulas.partition_share().at(t=asked.config.mesh.tp)


@quantity("bytes", "hbsL elements and the 12 hbs of one live block")
def checkpoints_and_block_bytes(asked: Asked) -> Fraction:
    return Fraction(checkpoint_bytes(asked) + zero_activation_bytes(asked) / asked.config.model.layers)


@quantity("count", "12Lh² (1 + 13/(12h) + (V+s)/(12Lh))")
def megatron_parameters(asked: Asked) -> Fraction:
    model = _with_blocks(asked)
    return formulas.megatron_parameters(model.layers, model.hidden, model.vocab, model.positions)


@quantity("count", "12Lh²")
def twelve_l_h_squared(asked: Asked) -> int:
    model = _with_blocks(asked)
    return formulas.twelve_l_h_squared(model.layers, model.hidden)


def _efficiency(asked: Asked, intensity: Fraction | int) -> Fraction:
    if asked.bandwidth is None:
        raise InputError('an efficiency needs a bandwidth: set it in [sweep], as bandwidth = ["70GB"]')
    return formulas.efficiency(intensity, asked.bandwidth)


@quantity("share", "i w / (i w + 70e12) with i = seq x rows", takes=(BANDWIDTH,))
def parameter_efficiency(asked: Asked) -> Fraction:
    c = asked.config
    return _efficiency(asked, formulas.parameter_intensity(_with_blocks(asked).seq, c.data.micro_batch))


@quantity("share", "i w / (i w + 70e12) with i = seq x rows / 4", takes=(BANDWIDTH,))
def optimizer_efficiency(asked: Asked) -> Fraction:
    c = asked.config
    return _efficiency(asked, formulas.optimizer_intensity(_with_blocks(asked).seq, c.data.micro_batch))


@quantity("share", "i w / (i w + 70e12) with i = 24 x hidden", takes=(BANDWIDTH,))
def activation_efficiency(asked: Asked) -> Fraction:
    return _efficiency(asked, formulas.activation_intensity(_with_blocks(asked).hidden))


def _infinity(asked: Asked, form: formulas.Form) -> Fraction:
    """A rule of ZeRO-Infinity's with this model's sizes, for one GPU that checkpoints each block."""
    model = _with_blocks(asked)
    rows = asked.config.data.micro_batch
    return form.at({"l": model.layers, "h": model.hidden, "a": model.heads, "s": model.seq, "b": rows, "ci": 1})


@quantity("bytes", "20 bytes of each of 12Lh² parameters")
def infinity_states(asked: Asked) -> Fraction:
    """Return 20 bytes of each parameter; of a flat model, of its given number of parameters."""
    if asked.config.model.family == "flat":
        return formulas.infinity_states().at({"l": Fraction(parameters_of(asked.config), 12), "h": 1})
    return _infinity(asked, formulas.infinity_states())


@quantity("bytes", "2bshL: a block's input of each block")
def infinity_checkpoints(asked: Asked) -> Fraction:
    return _infinity(asked, formulas.infinity_checkpoints())


@quantity("bytes", "16h²: the largest linear map and its gradient")
def infinity_largest_map(asked: Asked) -> Fraction:
    return _infinity(asked, formulas.infinity_working_memory()[0])


@quantity("bytes", "bs(16h + 2as): activations between two checkpoints")
def infinity_activations(asked: Asked) -> Fraction:
    return _infinity(asked, formulas.infinity_working_memory()[1])


@quantity("bytes", "a published calculator's rule", needs=("calculator",))
def calculator(asked: Asked) -> Fraction | None:
    c = asked.config
    (known,) = (each for each in formulas.calculators() if each.name == asked.calculator)
    return known.model_states(c.parallel.zero_stage, parameters_of(c), c.mesh.shards)


FORMULAS = table(
    model_states_bytes, sent_over_psi, block_activation_bytes, activation_share, score_bytes, mask_bytes, batch_bytes,
    attention_output_bytes, bubble, parameters, largest_model, zero_activation_bytes, checkpoint_elements,
    checkpoint_bytes, partition_share, checkpoints_and_block_bytes, megatron_parameters, twelve_l_h_squared,
    parameter_efficiency, optimizer_efficiency, activation_efficiency, infinity_states, infinity_checkpoints,
    infinity_largest_map, infinity_activations, calculator,
)  # fmt: skip
