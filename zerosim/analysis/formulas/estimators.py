"""The frameworks' own estimators with all their arguments: DeepSpeed's of stages 2 and 3, accelerate's of training.

DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py and stage3.py, and accelerate 1.15 commands/estimate.py, in their own
order of operations: their functions return the same integers. Bytes; both print units of 2^30 and call them GB.
"""

from __future__ import annotations

from typing import NamedTuple

GIVEN_UP = -1
"""accelerate's figure for int8 and int4, shown as N/A."""


class Estimate(NamedTuple):
    """Bytes of host memory in a node, and of each GPU."""

    host: int
    gpu: int


def deepspeed_stage_2(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    *,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """Return DeepSpeed's `estimate_zero2_model_states_mem_needs`."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return Estimate(int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params)
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return Estimate(int(host), 2 * total_params + int(18 * total_params / gpus))


def deepspeed_stage_3(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    *,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """Return DeepSpeed's `estimate_zero3_model_states_mem_needs`, without its third figure, 4 bytes a parameter of
    the largest layer.

    A layer is a module with its own parameters, not those of its children: in Llama the table of words.
    `cpu_offload_params` counts only beside `cpu_offload`.
    """
    gpus, share, layer = num_nodes * num_gpus_per_node, 1 / num_nodes, 4 * largest_layer_params
    host: float
    if not cpu_offload:
        loaded = largest_layer_params if zero_init else total_params
        host = loaded * 4 * num_gpus_per_node * additional_buffer_factor
        return Estimate(int(host), layer + int(18 * total_params / gpus))
    kept = 18 if cpu_offload_params else 16
    if zero_init:
        host = total_params * kept * share * additional_buffer_factor
    else:
        host = total_params * max(4 * num_gpus_per_node, kept * share) * additional_buffer_factor
    return Estimate(int(host), layer + (0 if cpu_offload_params else int(2 * total_params / gpus)))


def accelerate_training(fp32_bytes: int, mixed_precision: str) -> dict[str, int]:
    """Return accelerate's `estimate_training_usage` of a model of so many bytes in fp32.

    `accelerate estimate-memory` prints the largest of the four: with Adam 16 bytes a parameter in float32, and 8 in
    float16, which are the moments alone. For int8 and int4 all are -1.
    """
    if mixed_precision == "float32":
        return {"model": fp32_bytes, "optimizer": 2 * fp32_bytes, "gradients": fp32_bytes, "step": 4 * fp32_bytes}
    if mixed_precision in ("float16", "bfloat16", "fp8"):
        grads, moments = fp32_bytes + fp32_bytes // 2, 2 * fp32_bytes
        return {"model": fp32_bytes, "optimizer": moments, "gradients": grads, "step": moments}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), GIVEN_UP)
