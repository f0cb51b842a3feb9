"""Which names a pickle of a checkpoint may use. They are compared as text: nothing is imported or run by them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "torch.DoubleStorage": "float64",
        "torch.FloatStorage": "float32",
        "torch.HalfStorage": "float16",
        "torch.BFloat16Storage": "bfloat16",
        "torch.LongStorage": "int64",
        "torch.IntStorage": "int32",
        "torch.ShortStorage": "int16",
        "torch.CharStorage": "int8",
        "torch.ByteStorage": "uint8",
        "torch.BoolStorage": "bool",
        "torch.ComplexFloatStorage": "complex64",
        "torch.ComplexDoubleStorage": "complex128",
        "torch.storage.UntypedStorage": "uint8",
    }
)
"""NumPy's name of a typed storage's elements."""

_DTYPES = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64
complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES: Mapping[str, str] = MappingProxyType({f"torch.{name}": name for name in _DTYPES.split()})
"""NumPy's or ml_dtypes' name of PyTorch's dtype: the same words."""

_ENUM_NAMES = (
    "torch.distributed.checkpoint.metadata: _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem: SerializationFormat",
    "torch.distributed.checkpoint.planner: WriteItemType",
    "torch.distributed._shard.sharded_tensor.metadata: MEM_FORMAT_ENCODING",
    "torch.distributed.fsdp.api: ShardingStrategy",
    "deepspeed.runtime.zero.config: ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config: OffloadDeviceEnum",
    "megatron.core.enums: ModelType",
    "megatron.core.transformer.enums: AttnBackend AttnMaskType AttnType CudaGraphScope LayerType ModelType",
    "megatron.core.rerun_state_machine: RerunDiagnostic RerunMode RerunState",
    "megatron.model.enums: ModelType",
    "signal: Signals",
    "transformers.trainer_utils: SchedulerType",
)
_OTHER_NAMES = (
    "_codecs: encode",
    "_io: BytesIO",
    "argparse: Namespace",
    "builtins: set frozenset list tuple dict bytes bytearray slice complex range getattr",
    "collections: OrderedDict defaultdict Counter deque",
    "datetime: datetime date timedelta timezone",
    "numpy: dtype ndarray",
    "numpy.core.multiarray: _reconstruct scalar",
    "numpy._core.multiarray: _reconstruct scalar",
    "pathlib: PosixPath WindowsPath PurePosixPath PureWindowsPath Path",
    "pathlib._local: PosixPath WindowsPath",
    "torch: Size Tensor device",
    "torch._tensor: _rebuild_from_type_v2",
    "torch._utils: _rebuild_parameter _rebuild_parameter_with_state",
    "torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3",
    "torch._utils: _rebuild_sparse_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass",
    "torch.nn.parameter: Parameter",
    "torch.serialization: _get_layout",
    "torch.distributed.checkpoint.metadata: Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata: TensorProperties MetadataIndex StorageMeta",
    "torch.distributed.checkpoint.filesystem: _StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner: SavePlan WriteItem TensorWriteData BytesIOWriteData",
    "torch.distributed._shard.sharded_tensor.metadata: TensorProperties",
    "deepspeed.runtime.fp16.loss_scaler: LossScaler DynamicLossScaler LossScalerBase",
    "deepspeed.utils.tensor_fragment: fragment_address tensor_fragment",
    "deepspeed.checkpoint.utils: SubparamShape",
    "deepspeed.checkpoint.universal_checkpoint: SubparamShape",
    "megatron.core.optimizer.optimizer_config: OptimizerConfig",
    "megatron.core.dist_checkpointing.core: CheckpointingConfig",
    "megatron.core.dist_checkpointing.mapping: ShardedObject",
    "megatron.core.dist_checkpointing.strategies.torch: MCoreMetadata MCoreSavePlan",
)


def _names(lines: Iterable[str]) -> Iterator[str]:
    """Yield the names of lines 'module: name name'."""
    for line in lines:
        module, _, names = line.partition(": ")
        yield from (f"{module}.{name}" for name in names.split())


_ENUMS = frozenset(_names(_ENUM_NAMES))
_ALLOWED = frozenset({*STORAGES, *DTYPES, *_ENUMS, *_names(_OTHER_NAMES)})


def is_allowed(name: str) -> bool:
    """Return whether a pickle may use this name."""
    return name in _ALLOWED or re.fullmatch(r"numpy\.dtypes\.\w+DType", name) is not None


def is_enum(name: str) -> bool:
    """Return whether a name is an enumeration's."""
    return name in _ENUMS
