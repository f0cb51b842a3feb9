"""Model states that do not lie on the device: ZeRO-Offload (2101.06840) and ZeRO-Infinity (2104.07857)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Draft, Exclusion, Part, option
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.parts.reduction import Reduction
from zerosim.config.parts.world import WorldConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, did_you_mean, wrong
from zerosim.placement.memories import DEVICE, HOST, MEMORIES, NVME
from zerosim.units import MOST_BYTES, parse_bytes

STATES: Mapping[str, str] = {"optimizer": "optim", "params": "param", "grads": "grad"}
"""The model states that can be offloaded, and their rows in a layout."""
FSDP2 = "fsdp2"
"""The policy of PyTorch's CPUOffloadPolicy."""
FORM = "optimizer|params|grads=host|nvme,..."
_SAID = {"cpu": HOST, "gpu": DEVICE, "parameters": "params", "param": "params", "gradients": "grads", "none": DEVICE}


def read_offload(text: str) -> str:
    """Return `optimizer=host,params=nvme` in its shortest form; the words of DeepSpeed's configuration are known.

    Raises: InputError for any other word.
    """
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip().lower() for part in text.split(","))):
        what, sign, where = (_SAID.get(word.strip(), word.strip()) for word in pair.partition("="))
        if not sign or what not in STATES or where not in MEMORIES:
            known = MEMORIES if what in STATES else STATES
            word = where if what in STATES else what
            hint = did_you_mean(word, known, f"write {FORM}, such as optimizer=host or params=nvme,optimizer=nvme")
            raise InputError(f"{text!r}: {word!r} is none of {', '.join(known)}; {hint}")
        if what in found:
            raise InputError(f"{text!r}: it names the memory of {what} twice; leave one of them out")
        found[what] = where
    return ",".join(f"{what}={found[what]}" for what in STATES if what in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(Part):
    """Which model states lie in the host's memory or on NVMe drives, and how large these are."""

    group = "offload"

    where: str = option(
        "", "stages 1 to 3: keep masters and optimizer states in host memory or on NVMe, where the host's CPU updates "
        "them (ZeRO-Offload). Gradients follow them. Stage 3: parameters too (ZeRO-Infinity)", flat="offload",
        metavar=FORM, parse=read_offload, stages=(1, 2, 3), shown="all on the device",
    )  # fmt: skip
    policy: str = option(
        "deepspeed", "stage 3: deepspeed has one gradient on its way to the host at a time. fsdp2 waits for none until "
        "backward ends (PyTorch's CPUOffloadPolicy), and needs --offload optimizer=host,params=host",
        flat="offload_policy", choices=("deepspeed", FSDP2), stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    pin_memory: bool = option(
        False, "pin the host's masters, gradients and parameters. PyTorch rounds each pinned request up to a power of "
        "two: DeepSpeed's is a rank's whole slice, FSDP2's that of a unit"
    )  # fmt: skip
    host_load: str = option(
        "none", "which processes load the weights in fp32 into host memory before their device has them: every one, as "
        "from_pretrained does without zero.Init, or rank 0 of each node (--ranks-per-node) alone, as with accelerate's "
        "cpu_ram_efficient_loading. device: every one, and at stage 3 the device holds all of them before it keeps a "
        "shard (DeepSpeed without zero.Init). none: loading takes no memory here",
        choices=("none", "every", "first", "device"),
        switches={"fsdp_cpu_ram_efficient_loading": "first", "cpu_ram_efficient_loading": "first"},
    )  # fmt: skip
    nvme: str | None = option(
        None, "an existing folder on the drive. A run makes its own folder inside and removes it at the "
        "end", metavar="DIR", shown="none",
    )  # fmt: skip
    host_memory: int | None = option(
        None, "the host memory of a node, which its ranks share; exceeding it ends the run",
        low=1, high=MOST_BYTES, metavar="SIZE", shown="no limit", parse=parse_bytes,
    )  # fmt: skip

    def loads(self, local: int) -> bool:
        """Return whether the process of the node's rank `local` loads the weights itself."""
        return self.host_load in ("every", "device") or (self.host_load == "first" and local == 0)

    def _check(self) -> None:
        if self.nvme == "":
            raise wrong("nvme", " '': expected the name of an existing folder")
        if self.memory_of("grads") != DEVICE and not self.cpu_steps:
            raise wrong(
                "offload",
                f" {self.where!r}: the device takes the optimizer step and needs its gradients; offload the "
                "optimizer too",
            )
        if self.cpu_steps and self.memory_of("grads") == DEVICE:
            raise wrong(
                "offload", f" {self.where!r}: the CPU takes the optimizer step and needs the gradients; leave grads out"
            )

    @property
    def is_on(self) -> bool:
        return any(self.memory_of(what) != DEVICE for what in STATES)

    @property
    def cpu_steps(self) -> bool:
        """Whether the host's CPU takes the optimizer step."""
        return self.memory_of("optimizer") != DEVICE

    @property
    def is_all_host(self) -> bool:
        return all(self.memory_of(what) == HOST for what in STATES)

    @property
    def uses_nvme(self) -> bool:
        return any(self.memory_of(what) == NVME for what in STATES)

    def memory_of(self, what: str) -> str:
        """Return the memory of 'optimizer', 'params' or 'grads'. Gradients follow the optimizer unless they are
        named."""
        said = dict(pair.split("=") for pair in self.where.split(",") if pair)
        return said.get(what) or (said.get("optimizer", DEVICE) if what == "grads" else DEVICE)

    @property
    def by_state(self) -> Mapping[str, str]:
        """By the name of a layout's row."""
        return {row: self.memory_of(what) for what, row in STATES.items()}


def has_host_buffers(grads: GradMemory, offload: OffloadConfig, precision: PrecisionConfig) -> bool:
    """Return whether the host holds the buffers of `--host-buffers`."""
    on_host = offload.memory_of("optimizer") == offload.memory_of("grads") == HOST
    return grads.host_buffers and on_host and precision.has_masters


def settles(draft: Draft) -> Mapping[str, str]:
    """Take out a recipe's gradient buffer that stays on the device, if gradients lie on NVMe, and its policy, if
    not all states lie on the host."""
    name, offload, found = "persistent_grads", OffloadConfig(where=draft.given.get("offload", "")), dict[str, str]()
    if not offload.is_all_host:
        found = draft.without("offload_policy", f"not with offload {offload.where!r}: that policy moves all states")
    if offload.memory_of("grads") == NVME and draft.values.get(name):
        found |= draft.without(name, f"not with offload {offload.where!r}: gradients on NVMe have no permanent buffer")
    return found if offload.is_on else {}


EXCLUSIONS = (
    Exclusion("cast_shards", "offload", "the masters are not on the device"),
    Exclusion("keep_grads", "offload", "what leaves the device is freed there"),
)


def rules(
    offload: OffloadConfig, parallel: ParallelConfig, optim: OptimConfig, precision: PrecisionConfig,
    reduction: Reduction, grads: GradMemory, world: WorldConfig,
) -> Iterator[InputError]:  # fmt: skip
    """Yield what offloading refuses of ZeRO stage, optimizer, formats and backend."""
    if offload.policy == FSDP2 and not offload.is_all_host:
        yield wrong(
            "offload_policy",
            f" {FSDP2!r}: PyTorch's CPUOffloadPolicy moves all states to the host; pass --offload "
            "optimizer=host,params=host",
        )
    if offload.policy == FSDP2 and grads.lasts:
        yield wrong("persistent_grads", f": with offload_policy {FSDP2!r} each gradient's copy is a buffer of its own")
    if offload.pin_memory and not offload.is_on:
        yield wrong("pin_memory", ": no model state lies on the host; pass --offload optimizer=host, or leave it out")
    stage = parallel.zero_stage
    if offload.host_load == "device" and stage < 3:
        yield wrong("host_load", f" 'device': stage {stage} holds whole parameters in any case; choose every")
    if not offload.is_on:
        return

    def refuse(why: str) -> InputError:
        return wrong("offload", f" {offload.where!r}: {why}")

    if offload.memory_of("params") != DEVICE and stage < 3:
        yield refuse(
            f"stage {stage} keeps whole parameters on every device (DeepSpeed takes offload_param there and ignores "
            "it without a word); choose stage 3, or leave params out"
        )
    if world.backend == "cuda":
        yield refuse("backend cuda runs no kernels on the host; choose backend numpy, or use zerosim plan")
    if parallel.partition == "owner" and offload.memory_of("optimizer") == NVME:
        yield refuse("NVMe stores slices in tiles, not whole units; choose partition slices, or optimizer=host")
    if not offload.cpu_steps:
        if not precision.has_masters and offload.memory_of("params") != DEVICE:
            kind = precision.param_dtype
            yield refuse(f"the device updates {kind} parameters in place; offload the optimizer too, or choose bf16")
        return
    if OPTIMIZERS[optim.optimizer].cut != "elements" or OPTIMIZERS[optim.optimizer].estimates_every:
        yield refuse(
            f"the CPU updates element by element, but {optim.optimizer} needs more; choose adam, adamw or lion"
        )
    if precision.is_pure:
        yield refuse(f"{precision.param_dtype} has no masters for the CPU to update; choose precision bf16")
    if precision.param_dtype == "fp64":
        yield refuse("masters on the CPU are fp32, too narrow for fp64; choose precision fp32, bf16 or fp16")
    if reduction.is_encoded:
        yield refuse(f"compress {reduction.compress!r} keeps its residual on the device; leave one of them out")
    if offload.memory_of("grads") == NVME and grads.lasts:
        yield wrong("persistent_grads", f": gradients on NVMe ({offload.where}) have no permanent buffer; leave it out")


WORDS = (
    (
        "*optimizer_offload *offload_optimizer* *optimizer_cpu_offload zero_offload",
        "--offload optimizer=host, or optimizer=nvme",
    ),
    ("*offload_param *offload_param_* *offload_param.* *cpu_offload_param", "--offload params=host, or params=nvme"),
    (
        "*offload_params *cpu_offload *enable_cpu_offload",
        "--offload optimizer=host,params=host at stage 3, optimizer=host below it",
    ),
    ("zero_infinity *nvme_path", "--offload optimizer=nvme,params=nvme, with --nvme DIR in a run"),
)


LACKING = (
    (
        "*optimizer_offload_fraction super_offload zenflow*",
        "an optimizer that is offloaded in part",
        "--offload optimizer=host moves all of it",
    ),
)
