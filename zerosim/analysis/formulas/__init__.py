"""Closed forms, each with its source. Imports nothing of the simulator: formula and count check each other.

Numbers are exact: integers, or a `Fraction` where something does not divide. One file per subject:

    states.py       bytes of parameters, gradients and optimizer states per rank, by stage
    traffic.py      elements and bytes that a rank sends per step
    zeropp.py       traffic of ZeRO++ and MiCS within and across nodes, hpZ's second shard, groups of codes
    context.py      traffic of context parallelism
    parallel.py     traffic of tensor, sequence and pipeline parallelism
    experts.py      two numbers of ranks, and the traffic of tokens to experts
    printed.py      the ZeRO paper's printed figures and rounding, and the largest model that fits
    activations.py  activations that forward saves, by two papers that differ
    parameters.py   parameters of GPT-2 and Llama
    efficiency.py   the share of a step that computes, at a bandwidth
    saving.py       what a save writes, gathers and holds on the host, and Young's interval between saves
    calculators.py  published calculators that disagree
    estimators.py   DeepSpeed's and accelerate's own estimators, with all their arguments
"""

from __future__ import annotations

from zerosim.analysis.formulas.activations import WHY_ESTIMATES_DIFFER as WHY_ESTIMATES_DIFFER
from zerosim.analysis.formulas.activations import block_activations as block_activations
from zerosim.analysis.formulas.activations import block_parts as block_parts
from zerosim.analysis.formulas.activations import checkpoint_elements as checkpoint_elements
from zerosim.analysis.formulas.activations import differ as differ
from zerosim.analysis.formulas.activations import keeps_scores as keeps_scores
from zerosim.analysis.formulas.activations import parts_again as parts_again
from zerosim.analysis.formulas.activations import zero_paper_elements as zero_paper_elements
from zerosim.analysis.formulas.calculators import Calculator as Calculator
from zerosim.analysis.formulas.calculators import calculators as calculators
from zerosim.analysis.formulas.compression import REDUCED as REDUCED
from zerosim.analysis.formulas.compression import encoded_bytes as encoded_bytes
from zerosim.analysis.formulas.compression import kept_numel as kept_numel
from zerosim.analysis.formulas.compression import powersgd_numel as powersgd_numel
from zerosim.analysis.formulas.context import context_parallel as context_parallel
from zerosim.analysis.formulas.efficiency import activation_intensity as activation_intensity
from zerosim.analysis.formulas.efficiency import efficiency as efficiency
from zerosim.analysis.formulas.efficiency import optimizer_intensity as optimizer_intensity
from zerosim.analysis.formulas.efficiency import parameter_intensity as parameter_intensity
from zerosim.analysis.formulas.estimators import Estimate as Estimate
from zerosim.analysis.formulas.estimators import accelerate_training as accelerate_training
from zerosim.analysis.formulas.estimators import deepspeed_stage_2 as deepspeed_stage_2
from zerosim.analysis.formulas.estimators import deepspeed_stage_3 as deepspeed_stage_3
from zerosim.analysis.formulas.experts import OF_EXPERTS as OF_EXPERTS
from zerosim.analysis.formulas.experts import Dispatch as Dispatch
from zerosim.analysis.formulas.experts import exchanged_rows as exchanged_rows
from zerosim.analysis.formulas.experts import gathered_tokens as gathered_tokens
from zerosim.analysis.formulas.experts import kept_routes as kept_routes
from zerosim.analysis.formulas.experts import over_both as over_both
from zerosim.analysis.formulas.form import Form as Form
from zerosim.analysis.formulas.form import figure as figure
from zerosim.analysis.formulas.form import total as total
from zerosim.analysis.formulas.fp8 import gathered_codes as gathered_codes
from zerosim.analysis.formulas.fp8 import histories as histories
from zerosim.analysis.formulas.fp8 import sent_codes as sent_codes
from zerosim.analysis.formulas.fp8 import shared_amax as shared_amax
from zerosim.analysis.formulas.fp8 import shared_histories as shared_histories
from zerosim.analysis.formulas.fp8 import stored_codes as stored_codes
from zerosim.analysis.formulas.fp8 import weight_codes as weight_codes
from zerosim.analysis.formulas.mtp import further_gathers as further_gathers
from zerosim.analysis.formulas.mtp import further_sequence_parallel as further_sequence_parallel
from zerosim.analysis.formulas.mtp import further_tensor_parallel as further_tensor_parallel
from zerosim.analysis.formulas.offload import infinity_checkpoints as infinity_checkpoints
from zerosim.analysis.formulas.offload import infinity_states as infinity_states
from zerosim.analysis.formulas.offload import infinity_working_memory as infinity_working_memory
from zerosim.analysis.formulas.offload import offloaded as offloaded
from zerosim.analysis.formulas.optimizers import UNIFORM as UNIFORM
from zerosim.analysis.formulas.optimizers import exchanged as exchanged
from zerosim.analysis.formulas.optimizers import padding_bytes as padding_bytes
from zerosim.analysis.formulas.optimizers import state_bytes as state_bytes
from zerosim.analysis.formulas.parallel import LOSS_CALLS as LOSS_CALLS
from zerosim.analysis.formulas.parallel import WIDE as WIDE
from zerosim.analysis.formulas.parallel import Inputs as Inputs
from zerosim.analysis.formulas.parallel import RecomputedBoundaries as RecomputedBoundaries
from zerosim.analysis.formulas.parallel import boundary_sends as boundary_sends
from zerosim.analysis.formulas.parallel import bubble as bubble
from zerosim.analysis.formulas.parallel import flat_parallel as flat_parallel
from zerosim.analysis.formulas.parallel import head_norm_sums as head_norm_sums
from zerosim.analysis.formulas.parallel import input_gathers as input_gathers
from zerosim.analysis.formulas.parallel import inputs_moved as inputs_moved
from zerosim.analysis.formulas.parallel import live_micro_batches as live_micro_batches
from zerosim.analysis.formulas.parallel import live_weights as live_weights
from zerosim.analysis.formulas.parallel import own_span_bubble as own_span_bubble
from zerosim.analysis.formulas.parallel import partition_share as partition_share
from zerosim.analysis.formulas.parallel import recomputed_boundaries as recomputed_boundaries
from zerosim.analysis.formulas.parallel import second_parallel as second_parallel
from zerosim.analysis.formulas.parallel import sequence_parallel as sequence_parallel
from zerosim.analysis.formulas.parallel import shared_grads as shared_grads
from zerosim.analysis.formulas.parallel import tensor_parallel as tensor_parallel
from zerosim.analysis.formulas.parallel import tied_grads as tied_grads
from zerosim.analysis.formulas.parameters import decoder_parameters as decoder_parameters
from zerosim.analysis.formulas.parameters import experts_parameters as experts_parameters
from zerosim.analysis.formulas.parameters import further_parameters as further_parameters
from zerosim.analysis.formulas.parameters import latent_parameters as latent_parameters
from zerosim.analysis.formulas.parameters import megatron_parameters as megatron_parameters
from zerosim.analysis.formulas.parameters import second_parameters as second_parameters
from zerosim.analysis.formulas.parameters import twelve_l_h_squared as twelve_l_h_squared
from zerosim.analysis.formulas.printed import FIGURE_1 as FIGURE_1
from zerosim.analysis.formulas.printed import MIXED_ADAM as MIXED_ADAM
from zerosim.analysis.formulas.printed import TABLE_1 as TABLE_1
from zerosim.analysis.formulas.printed import VOLUME as VOLUME
from zerosim.analysis.formulas.printed import Printed as Printed
from zerosim.analysis.formulas.printed import largest_model as largest_model
from zerosim.analysis.formulas.printed import printed as printed
from zerosim.analysis.formulas.printed import printed_states as printed_states
from zerosim.analysis.formulas.states import KEPT as KEPT
from zerosim.analysis.formulas.states import MASTER_BYTES as MASTER_BYTES
from zerosim.analysis.formulas.states import STATES as STATES
from zerosim.analysis.formulas.states import TRAINED as TRAINED
from zerosim.analysis.formulas.states import ZERO_PAPER as ZERO_PAPER
from zerosim.analysis.formulas.states import BytesPerParameter as BytesPerParameter
from zerosim.analysis.formulas.states import Frozen as Frozen
from zerosim.analysis.formulas.states import after_step_states as after_step_states
from zerosim.analysis.formulas.states import blocked_numel as blocked_numel
from zerosim.analysis.formulas.states import bytes_per_parameter as bytes_per_parameter
from zerosim.analysis.formulas.states import bytes_per_parameter_at as bytes_per_parameter_at
from zerosim.analysis.formulas.states import first_partitioned as first_partitioned
from zerosim.analysis.formulas.states import late_states as late_states
from zerosim.analysis.formulas.states import model_states as model_states
from zerosim.analysis.formulas.states import num_moments as num_moments
from zerosim.analysis.formulas.states import optimizer_step_states as optimizer_step_states
from zerosim.analysis.formulas.states import padded_numel as padded_numel
from zerosim.analysis.formulas.states import reduction_buffers as reduction_buffers
from zerosim.analysis.formulas.traffic import Schedule as Schedule
from zerosim.analysis.formulas.traffic import Volume as Volume
from zerosim.analysis.formulas.traffic import all_reduce_volume as all_reduce_volume
from zerosim.analysis.formulas.traffic import encoded_volume as encoded_volume
from zerosim.analysis.formulas.traffic import gathered as gathered
from zerosim.analysis.formulas.traffic import gathered_beside_frozen as gathered_beside_frozen
from zerosim.analysis.formulas.traffic import optimizer_sums as optimizer_sums
from zerosim.analysis.formulas.traffic import published as published
from zerosim.analysis.formulas.traffic import reduced as reduced
from zerosim.analysis.formulas.traffic import replica_bytes as replica_bytes
from zerosim.analysis.formulas.traffic import volume as volume
from zerosim.analysis.formulas.zeropp import Gathers as Gathers
from zerosim.analysis.formulas.zeropp import Operation as Operation
from zerosim.analysis.formulas.zeropp import gathers as gathers
from zerosim.analysis.formulas.zeropp import grad_scales as grad_scales
from zerosim.analysis.formulas.zeropp import grads_sent as grads_sent
from zerosim.analysis.formulas.zeropp import leaves_a_node as leaves_a_node
from zerosim.analysis.formulas.zeropp import params_sent as params_sent
from zerosim.analysis.formulas.zeropp import secondary_states as secondary_states
from zerosim.analysis.formulas.zeropp import weight_scales as weight_scales
