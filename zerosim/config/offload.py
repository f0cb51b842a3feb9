"""Model states that do not lie on the device: ZeRO-Offload (2101.06840) and ZeRO-Infinity (2104.07857)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.config.option import Part, option
from zerosim.errors import InputError, did_you_mean, wrong
from zerosim.placement.memories import DEVICE, HOST, MEMORIES, NVME
from zerosim.units import MOST_BYTES, parse_bytes

STATES: Mapping[str, str] = {"optimizer": "optim", "params": "param", "grads": "grad"}
"""The model states that can be offloaded, and their rows in a layout."""
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

    where: str = option(
        "", "stages 1 to 3: keep masters and optimizer states in host memory or on NVMe, where the host's CPU updates "
        "them (ZeRO-Offload). Gradients follow them. Stage 3: parameters too (ZeRO-Infinity)", flat="offload",
        metavar=FORM, parse=read_offload, stages=(1, 2, 3), shown="all on the device",
    )  # fmt: skip
    nvme: str | None = option(
        None, "an existing folder on the drive. A run makes its own folder inside and removes it at the "
        "end", metavar="DIR",
        shown="none",
    )  # fmt: skip
    host_memory: int | None = option(
        None, "the host memory of a node, which its ranks share; exceeding it ends the run",
        low=1, high=MOST_BYTES, metavar="SIZE", shown="no limit", parse=parse_bytes,
    )  # fmt: skip

    def _check(self) -> None:
        if self.nvme == "":
            raise wrong("nvme", " '': expected the name of an existing folder")
        if self.is_on and self.memory_of("grads") != DEVICE and self.memory_of("optimizer") == DEVICE:
            raise wrong(
                "offload",
                f" {self.where!r}: the device takes the optimizer step and needs its gradients; offload the "
                "optimizer too",
            )
        if self.memory_of("optimizer") != DEVICE and self.memory_of("grads") == DEVICE:
            raise wrong(
                "offload", f" {self.where!r}: the CPU takes the optimizer step and needs the gradients; leave grads out"
            )

    @property
    def is_on(self) -> bool:
        return any(self.memory_of(what) != DEVICE for what in STATES)

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
