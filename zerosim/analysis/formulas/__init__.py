"""Closed forms, each with its source. Imports nothing of the simulator: formula and count check each other.

Numbers are exact: integers, or a `Fraction` where something does not divide. One file per subject:

    states.py       bytes of parameters, gradients and optimizer states per rank, by stage
    traffic.py      elements and bytes that a rank sends per step
    printed.py      what the ZeRO paper prints, how it rounds, the largest model that fits
    activations.py  what forward keeps, by two papers that differ
    parameters.py   parameters and floating-point operations of GPT-2 and Llama
    calculators.py  published calculators that disagree
"""

from __future__ import annotations

from zerosim.analysis.formulas.activations import (
    RECOMPUTE,
    WHY_ESTIMATES_DIFFER,
    block_activations,
    block_parts,
    block_text,
    checkpoint_elements,
    zero_paper_elements,
)
from zerosim.analysis.formulas.calculators import Calculator, calculators
from zerosim.analysis.formulas.parameters import (
    flops_per_step,
    gpt2_parameters,
    llama_parameters,
    megatron_parameters,
    training_seconds,
    twelve_l_h_squared,
)
from zerosim.analysis.formulas.printed import (
    DEVICE_GB,
    FIGURE_1,
    MIXED_ADAM,
    TABLE_1,
    VOLUME,
    Printed,
    largest_model,
    printed,
    printed_states,
    smallest_fit,
)
from zerosim.analysis.formulas.states import (
    MASTER_BYTES,
    STATES,
    BytesPerParameter,
    bytes_per_parameter,
    bytes_per_parameter_at,
    first_partitioned,
    model_states,
    model_states_text,
    optimizer_step_states,
    padded_numel,
    state_text,
)
from zerosim.analysis.formulas.traffic import Volume, replica_bytes, replica_text, volume

__all__ = [
    "DEVICE_GB",
    "FIGURE_1",
    "MASTER_BYTES",
    "MIXED_ADAM",
    "RECOMPUTE",
    "STATES",
    "TABLE_1",
    "VOLUME",
    "WHY_ESTIMATES_DIFFER",
    "BytesPerParameter",
    "Calculator",
    "Printed",
    "Volume",
    "block_activations",
    "block_parts",
    "block_text",
    "bytes_per_parameter",
    "bytes_per_parameter_at",
    "calculators",
    "checkpoint_elements",
    "first_partitioned",
    "flops_per_step",
    "gpt2_parameters",
    "largest_model",
    "llama_parameters",
    "megatron_parameters",
    "model_states",
    "model_states_text",
    "optimizer_step_states",
    "padded_numel",
    "printed",
    "printed_states",
    "replica_bytes",
    "replica_text",
    "smallest_fit",
    "state_text",
    "training_seconds",
    "twelve_l_h_squared",
    "volume",
    "zero_paper_elements",
]
