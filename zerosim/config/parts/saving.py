"""Checkpoints: when a run saves its state, how, and the checkpoint from which it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import Exclusion, Part, option
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.errors import InputError, wrong

SHARDED, GATHERED, ASYNC = "sharded", "gathered", "async"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingConfig(Part):
    """Weights, optimizer states and everything else that a run needs to go on, saved while it trains."""

    group = "checkpoints"

    folder: str | None = option(
        None, "save the run's state in this folder, a folder for each saved step, so that --resume goes on from there",
        flat="save_state", metavar="DIR", shown="nothing is saved",
    )  # fmt: skip
    every: int | None = option(
        None, "save after every K steps, and after the last", flat="save_every", low=1, high=10**9, metavar="K",
        also=("--every",), shown="after the last step",
    )  # fmt: skip
    how: str | None = option(
        None, "sharded: each rank writes its shards; gathered: the first rank of each group gathers and writes all "
        "(FULL_STATE_DICT); async: shards are copied to the host, and written beside the next steps", flat="save_as",
        choices=(SHARDED, GATHERED, ASYNC), shown=f"{SHARDED}, if a state is saved",
    )  # fmt: skip
    keep: int | None = option(
        None, "keep the N newest saved steps, and remove older ones", flat="save_keep", low=1, high=10**6, metavar="N",
        also=("--keep",), shown="all of them",
    )  # fmt: skip
    resume: str | None = option(
        None, "go on from the newest complete step in this folder, with its options where no others are given: on any "
        "number of ranks, ZeRO stage and mesh", metavar="DIR", shown="start at step 0",
    )  # fmt: skip
    mtbf: float | None = option(
        None, "hours between failures of the whole job, for the interval between saves in a plan", above=0, high=10**9,
        metavar="HOURS", shown="50,700 GPU hours / ranks, as in Llama 3's training",
    )  # fmt: skip

    @property
    def way(self) -> str | None:
        """How a state is saved; None: no state is saved."""
        return self.how or (None if self.folder is None else SHARDED)


EXCLUSIONS = tuple(Exclusion(name, "save_state", needs=True) for name in ("save_every", "save_keep"))


def named(saving: SavingConfig) -> tuple[str, str] | None:
    """Return the option that saves or goes on, and its folder; None without one."""
    if saving.folder is not None:
        return "save_state", saving.folder
    return None if saving.resume is None else ("resume", saving.resume)


def rules(saving: SavingConfig, data: DataConfig, offload: OffloadConfig, tuning: TuningConfig) -> Iterator[InputError]:
    """Yield a start from two places, and a gathering of states that are not on the device."""
    if saving.how == GATHERED and offload.is_on:
        where = f"offload {offload.where!r} has states outside the device, where nothing is gathered"
        yield wrong("save_as", f" 'gathered': {where}; choose sharded")
    for name, given in (("weights", data.weights), ("adapters", tuning.adapters)):
        if saving.resume is not None and given is not None:
            yield wrong(name, f" {given!r}: the {name} are those of resume {saving.resume!r}; leave one out")


WORDS = (
    ("save_steps save_interval checkpoint.interval", "--save-state DIR --every K"),
    ("save_total_limit checkpoint.keep_latest_k", "--keep N"),
    ("resume_from_checkpoint load", "--resume DIR"),
    (
        "state_dict_type fsdp_state_dict_type",
        "--save-as sharded (SHARDED_STATE_DICT) or gathered (FULL_STATE_DICT)",
    ),
)
