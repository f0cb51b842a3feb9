"""The rows of the recipes (`recipes.py`): by ZeRO stage and precision, the values in which each differs from the
paper's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TORCH: Mapping[str, Any] = {"loss": "torch-half", "kernels": "eager"}
_DEEPSPEED_0 = {**_TORCH, "upcast_grads": True, "clip_norm": 1.0}
_LAZY = {"lazy_states": True}
_DEEPSPEED = {
    **_DEEPSPEED_0,
    **_LAZY,
    "flatten_grads": True,
    "reduce_bucket": 500_000_000,
    "skip_nonfinite": True,
}
_DEEPSPEED_1 = {**_DEEPSPEED, "grad_reduction": "all_reduce", "own_grads_only": True}
_DEEPSPEED_2 = {**_DEEPSPEED, "grad_reduction": "all_reduce", "grads_in_partition": True, "host_buffers": True}
_DEEPSPEED_3 = {
    **_DEEPSPEED,
    "persistent_grads": True,
    "persistent_numel": 100_000,
    "sub_group": 1_000_000_000,
    "overlap_comm": True,
    "gather": "module",
    "prefetch_elements": 50_000_000,
    "max_live": 1_000_000_000,
}
_DEEPSPEED_FROM_1 = (_DEEPSPEED_1, _DEEPSPEED_2, _DEEPSPEED_3)
_BY_DEEPSPEED: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "bf16": ({**_DEEPSPEED_0, "skip_nonfinite": True}, *_DEEPSPEED_FROM_1),
    "fp16": (_DEEPSPEED_0, *_DEEPSPEED_FROM_1),
    "": ({**_DEEPSPEED_0, **_LAZY}, *_DEEPSPEED_FROM_1),
}
_CLIENT = {"foreach": True, "loss": "hf-5"}
_FOREACH = {**_TORCH, "foreach": True}
_LATE = {**_FOREACH, "overlap_reduction": True}
_EACH = {**_LATE, "replica_reduction": "micro_batch"}
_FSDP2 = (
    _FOREACH,
    _FOREACH,
    {**_EACH, "adapter_shards": "rows"},
    {**_EACH, "keep_root_units": True, "cast_shards": True, "prefetch": 1, "offload_policy": "fsdp2"}
    | {"keep_last_output": True, "whole_scales": True, "adapter_shards": "rows"},
)
_FSDP2_PURE = (*_FSDP2[:3], {name: value for name, value in _FSDP2[3].items() if name != "cast_shards"})
_KEPT = {**_EACH, "keep_grads": True, "sum_computed_grads": True}
_FSDP1_PURE = (
    _FOREACH,
    _FOREACH,
    {**_KEPT, "adapter_shards": "tensor"},
    {
        **_KEPT,
        "keep_root_units": True,
        "prefetch": 1,
        "forward_prefetch": False,
        "use_reentrant": True,
        "adapter_shards": "tensor",
        "whole_scales": True,
    },
)
_FSDP1 = (*_FSDP1_PURE[:3], {**_FSDP1_PURE[3], "cast_shards": True})
_FP32 = {"grad_dtype": "fp32", "param_dtype_grads": True}
_FSDP2_HALF = tuple({**row, **_FP32} for row in _FSDP2)
TRANSFORMER_ENGINE = {"transformer_engine": True, "gradient_accumulation_fusion": True}
WITHOUT_IT = {"fp32_softmax": True}
_MEGATRON_2 = {
    "loss": "megatron",
    "flash_kernel": "cudnn",
    "persistent_grads": True,
    "param_dtype_grads": True,
    "transformer_engine": True,
    "keep_last_inputs": True,
    "weigh_between": True,
}
_MEGATRON_0 = {**_MEGATRON_2, **TRANSFORMER_ENGINE}
_MEGATRON = (_MEGATRON_0, _MEGATRON_0, _MEGATRON_2, _MEGATRON_2)
ROWS: Mapping[str, Mapping[str, tuple[Mapping[str, Any], ...]]] = MappingProxyType(
    {
        "paper": {"": ({},) * 4},
        "ddp": {"": ({**_LATE, "grad_buckets": "copies"}, _FOREACH, _FOREACH, _FOREACH)},
        "deepspeed": _BY_DEEPSPEED,
        "hf-deepspeed": {
            precision: tuple({**row, **_CLIENT} for row in rows) for precision, rows in _BY_DEEPSPEED.items()
        },
        "fsdp1": {
            "bf16": (*_FSDP2_HALF[:2], *({**row, **_FP32, "compress": "bf16"} for row in _FSDP1[2:])),
            "fp16": (*_FSDP2_HALF[:2], *({**row, **_FP32, "compress": "fp16"} for row in _FSDP1[2:])),
            "bf16-pure": _FSDP1_PURE,
            "": _FSDP1,
        },
        "fsdp2": {
            "bf16": _FSDP2_HALF,
            "fp16": _FSDP2_HALF,
            "bf16-pure": _FSDP2_PURE,
            "": _FSDP2,
        },
        "megatron": {
            "bf16": tuple({**row, "grad_dtype": "fp32"} for row in _MEGATRON),
            "fp16": tuple({**row, "upcast_grads": True, "keep_upcast": True} for row in _MEGATRON),
            "": _MEGATRON,
        },
    }
)
"""By recipe and the parameters' dtype ('': all others), in stages 0 to 3: values by flat name."""
