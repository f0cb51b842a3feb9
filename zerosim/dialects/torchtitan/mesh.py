"""torchtitan's mesh: the degrees of each axis, what they bring along, and the ranks of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from zerosim.config import RunConfig
from zerosim.dialects.reading import Notes
from zerosim.dialects.torchtitan.models import FLEX
from zerosim.errors import InputError

BY = "torchtitan 0.2.2"
AXES = {
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
}
_REPLICAS, _SHARDS = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
_EP, _ETP = "parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"
_ASYNC = "parallelism.enable_async_tensor_parallel"


class Degrees(NamedTuple):
    """The ranks along each axis. `shard` is 0 if --ranks must say it."""

    replicate: int = 1
    shard: int = 0
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass
class Setup:
    """What the rules read: the notes, every key's value or default, the family, and options that say the sizes."""

    notes: Notes
    keys: Mapping[str, Any]
    family: str
    sizes: Mapping[str, Any]
    degrees: Degrees = field(default_factory=Degrees)

    @property
    def fsdp(self) -> bool:
        """Whether torchtitan applies FSDP: over more than one rank along dp_shard and cp."""
        return self.degrees.shard != 1 or self.degrees.cp > 1

    def has(self, key: str) -> bool:
        """Return whether the file says this key."""
        return key in self.notes.document.keys

    def sets(self, key: str, text: str = "", **values: Any) -> None:
        """Set options from a key, or from its default if the file has none."""
        if self.has(key):
            self.notes.sets(key, text=text, **values)
            return
        default = self.notes.rows[key].default
        source = f"torchtitan's default: {key.rpartition('.')[2]} {default}"
        self.notes.values |= values
        self.notes.sources |= dict.fromkeys(values, source)

    def refuse(self, keys: tuple[str, ...], why: str, advice: str = "") -> None:
        """Refuse the file as torchtitan does, for the first of these keys that it says."""
        found = next((key for key in keys if self.has(key)), keys[0])
        self.notes.refuse(found, BY, why, advice)

    @cached_property
    def model(self) -> RunConfig | None:
        """The model on one rank; None if its sizes are not known."""
        try:
            return RunConfig(**self.sizes, ranks=1) if "model" in self.sizes else None
        except InputError:
            return None

    @property
    def layers(self) -> int:
        return 0 if self.model is None else int(self.model.value("layers"))

    @property
    def has_experts(self) -> bool:
        return self.model is not None and bool(self.model.value("experts"))


def mesh(setup: Setup) -> None:
    """Set the degrees; refuse products that are not the world."""
    notes, keys, given = setup.notes, setup.keys, setup.notes.context.given
    axes = {name: given.get(name, keys[key]) for name, key in AXES.items()}
    replicate, shard, ranks = given.get("dp_replicate", keys[_REPLICAS]), keys[_SHARDS], given.get("ranks")
    others = replicate * axes["cp"] * axes["tp"] * axes["pp"]
    if shard < 0:
        shard = 0 if ranks is None else ranks // others
    product = others * shard
    if ranks is not None and product != ranks:
        factors = " * ".join(f"{name}({size})" for name, size in axes.items())
        setup.refuse(
            (_SHARDS, _REPLICAS, *AXES.values()),
            f"AssertionError: Invalid parallel dims: dp_replicate({replicate}) * dp_shard({shard}) * {factors} != "
            f"WORLD_SIZE({ranks})",
            f"pass --ranks {others * max(shard, 1)}, or other degrees",
        )
    setup.degrees = Degrees(replicate, shard, **axes, ep=given.get("ep", keys[_EP]))
    for name, key in AXES.items():
        if setup.has(key):
            notes.sets(key, **{name: axes[name]})
    if shard and keys[_SHARDS] > 0:
        notes.sets(_SHARDS, ranks=product)
    else:
        text = (
            f"{shard} shards: what the other degrees leave of {ranks} ranks" if shard else "what they leave of --ranks"
        )
        notes.tell(_SHARDS, "understood", text)
    _data_parallel(setup, ranks)
    _tensor(setup)
    _context(setup)


def _data_parallel(setup: Setup, ranks: int | None) -> None:
    """Set stage and recipe: FSDP2, DDP, or neither."""
    notes, keys, (replicate, _, cp, tp, pp, _) = setup.notes, setup.keys, setup.degrees
    reshard, offload = "parallelism.fsdp_reshard_after_forward", "training.enable_cpu_offload"
    if setup.fsdp:
        notes.usually("torchtitan: fully_shard over dp_shard x cp", stage=3, recipe="fsdp2")
        if setup.has(_REPLICAS):
            notes.sets(_REPLICAS, dp_replicate=replicate)
        _reshard(setup, reshard)
        if keys[offload]:
            notes.sets(offload, offload="optimizer=host,params=host", pin_memory=True)
        return
    for key in (reshard, offload):
        notes.tell(key, "ignored", "one rank along dp_shard and cp: no FSDP")
    notes.usually("torchtitan: no FSDP over one rank along dp_shard and cp", stage=0, recipe="ddp")
    if replicate > 1:
        notes.tell(_REPLICAS, "understood", f"DDP over {replicate} ranks")
        notes.usually("torchtitan's DDP: bucket_cap_mb 100", bucket_bytes=100 * 2**20)
        if cp * tp * pp > 1:
            why = "RuntimeError: DDP has not supported > 1D parallelism"
            setup.refuse((_REPLICAS, _SHARDS), why, "write data_parallel_shard_degree -1 and replicate degree 1")
    else:
        notes.tell(_REPLICAS, "understood", "one replica")


def _reshard(setup: Setup, key: str) -> None:
    """Set what stays gathered after forward."""
    notes, policy, piped = setup.notes, setup.keys[key], setup.degrees.pp > 1
    if policy == "never" or (policy == "default" and piped):
        text = "default keeps blocks gathered beside a pipeline" if policy == "default" else ""
        values: dict[str, Any] = {"reshard_after_forward": False}
    elif policy == "always":
        text, values = "", {"reshard_after_forward": True, "keep_root_units": False, "keep_last_unit": False}
    else:
        text = "norm and head stay gathered, the table does not"
        values = {"reshard_after_forward": True, "keep_root_units": False, "keep_last_unit": True}
    setup.sets(key, text, **values)
    if piped:
        notes.usually(
            "PyTorch's pipelining: set_requires_gradient_sync(False) before the last microbatch", grad_sync=False
        )
        if not values["reshard_after_forward"]:
            notes.note(
                "PyTorch's pipeline gathers a block once a step; zerosim's stage 3 gathers it in each microbatch. "
                "--stage 2 counts one gather a step."
            )


def _tensor(setup: Setup) -> None:
    """Set what tensor parallelism brings along."""
    notes, keys, tp, cp = setup.notes, setup.keys, setup.degrees.tp, setup.degrees.cp
    seq = notes.context.given.get("seq", keys["training.seq_len"])
    setup.sets("training.seq_len", seq=seq)
    if seq % (tp * 2 * cp):
        why = f"Sequence length {seq} must be divisible by the product of TP degree ({tp}) and 2 * CP degree ({cp})"
        setup.refuse(("training.seq_len", AXES["tp"], AXES["cp"]), f"AssertionError: {why}")
    if tp == 1:
        notes.tell(_ASYNC, "ignored", "without tensor parallelism")
        notes.tell("parallelism.disable_loss_parallel", "ignored", "without tensor parallelism")
        return
    setup.sets(AXES["tp"], "torchtitan always divides norms and residuals too", sequence_parallel=True)
    if keys["parallelism.disable_loss_parallel"]:
        notes.lacks("parallelism.disable_loss_parallel", "whole logits on every rank")
    if not keys[_ASYNC]:
        notes.tell(_ASYNC, "understood", "collectives are exposed")
    elif keys["compile.enable"] and "model" in keys["compile.components"]:
        notes.sets(_ASYNC, tp_comm_overlap=True)
    else:
        why = "RuntimeError: Async TP requires 'model' in --compile.components and --compile.enable"
        notes.refuse(_ASYNC, BY, why)


def _context(setup: Setup) -> None:
    """Set how ranks of cp exchange keys and values."""
    notes, keys, cp = setup.notes, setup.keys, setup.degrees.cp
    balancer, method = "parallelism.context_parallel_load_balancer", "parallelism.context_parallel_rotate_method"
    if cp == 1:
        for key in (balancer, method):
            notes.tell(key, "ignored", "without context parallelism")
        return
    context = "allgather" if keys[method] == "allgather" else "ring"
    setup.sets(method, context=context)
    if setup.family in FLEX:
        why = "NotImplementedError: Context Parallel only supports SDPA attention. Got attn_type='flex'"
        notes.refuse(AXES["cp"], BY, why)
    if keys[balancer] == "ptrr":
        notes.lacks(balancer, "FlexAttention's balance by processing time")
    else:
        setup.sets(balancer, context_order="zigzag")


def experts(setup: Setup) -> None:
    """Set the ranks of experts; a model without experts ignores them."""
    notes, keys, (_, shard, cp, tp, _, ep) = setup.notes, setup.keys, setup.degrees
    backend = "parallelism.expert_parallel_comm_backend"
    if setup.model is not None and not setup.has_experts:
        for key in (_EP, _ETP, backend):
            notes.tell(key, "ignored", "the model has no experts")
        setup.degrees = setup.degrees._replace(ep=1)
        return
    etp = keys[_ETP]
    if ep > 1 and etp not in (1, tp):
        notes.refuse(_ETP, BY, "AssertionError: Currently we only support ETP=TP or ETP=1")
    elif ep > 1 and shard and shard * cp * tp % (ep * etp):
        why = f"the experts' mesh: dp_shard {shard} x cp {cp} x tp {tp} is no multiple of ep {ep} x etp {etp}"
        setup.refuse((_EP, _ETP), why)
    if setup.has(_EP):
        notes.sets(_EP, ep=ep)
    if ep == 1 or tp == 1:
        notes.tell(_ETP, "ignored", "without expert parallelism" if ep == 1 else "without tensor parallelism")
    else:
        setup.sets(_ETP, etp=etp)
    if keys[backend] == "standard":
        notes.tell(backend, "understood", "all-to-all")
    elif ep == 1:
        notes.refuse(backend, BY, "ValueError: DeepEP requires expert parallelism (ep_degree > 1)")
    elif etp > 1:
        notes.refuse(
            backend, BY, "NotImplementedError: DeepEP with Expert Tensor Parallelism (ETP) is not supported yet"
        )
    else:
        notes.sets(backend, dispatcher="deepep")
