"""The ledgers of every rank of a run, and how the processes of an MPI world combine them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from zerosim.config import RunConfig
from zerosim.config.inputs import open_file
from zerosim.device.events import Event
from zerosim.device.memory import Allocator
from zerosim.device.recorder import Reader
from zerosim.errors import InputError, OutOfMemory, wrong
from zerosim.ledger.activations import ActivationLedger
from zerosim.ledger.allocator import AllocatorLedger
from zerosim.ledger.costs import Costs
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.pace import PaceLedger
from zerosim.ledger.pools import PoolLedger
from zerosim.ledger.requests import RequestLedger, Requests
from zerosim.ledger.saving import SaveLedger
from zerosim.ledger.traffic import CommLedger

if TYPE_CHECKING:
    from zerosim.comm.transports.mpi.session import MpiSession

T = TypeVar("T")
FILES = ("data", "tokens", "weights")


class RankLedgers:
    """The ledgers of one rank: memory, traffic, its memory pool; on rank 0 activations too (all ranks save the same);
    its allocator, unless it is exact; and times, by `costs`, in the step `timed`. With `saving` it counts saves alone,
    beside memory and traffic. `served_by`: an allocator that serves the requests of an exact one's
    device; with `by_moment` it does so later, and the `requests` are kept.

    `events` is the run's stored record.
    """

    def __init__(
        self,
        rank: int,
        allocator: str = "exact",
        costs: Costs | None = None,
        *,
        by_moment: bool = False,
        timed: int = 0,
        saving: bool = False,
        served_by: Allocator | None = None,
    ) -> None:
        self.rank = rank
        self.memory = MemoryLedger(by_moment=by_moment)
        self.traffic = CommLedger()
        self.pool = PoolLedger()
        self.activations = ActivationLedger() if rank == 0 else None
        self.allocator = None if allocator == "exact" else AllocatorLedger()
        self.requests: Requests | None = None
        if served_by is not None and by_moment:
            self.requests = Requests()
        elif served_by is not None:
            self.allocator = RequestLedger(served_by)
        self.pace = None if costs is None or saving else PaceLedger(costs, step=timed)
        self.save = SaveLedger(costs) if saving else None
        self.events: list[Event] = []

    @property
    def readers(self) -> tuple[Reader, ...]:
        memory = self.memory, self.traffic, self.pool, self.activations, self.allocator, self.requests
        own = *memory, self.pace, self.save
        return tuple(reader for reader in own if reader is not None)

    def explain(self, error: OutOfMemory) -> None:
        """Give the error the live bytes at the refusal."""
        refusal = self.memory.refusal
        if refusal is not None:
            error.live, error.by_unit = dict(refusal.by_kind), dict(refusal.by_unit)


def of_all_processes(
    session: MpiSession, ledgers: list[RankLedgers], outcomes: list[T]
) -> tuple[list[RankLedgers], list[T]]:
    """Return every rank's ledgers and outcome, given those of this process's ranks."""
    everyone = [pair for pairs in session.exchange(list(zip(ledgers, outcomes, strict=True))) for pair in pairs]
    return [one for one, _ in everyone], [outcome for _, outcome in everyone]


def check_alike(session: MpiSession, config: RunConfig) -> None:
    """Refuse processes with different configurations, or with different files under one name.

    Raises: InputError naming a field and both values.
    """
    given = config.to_dict()
    read = {name: _digest(path) for name in FILES if (path := given[name]) is not None}
    answers = session.exchange((given, read))
    asked, digests = answers[0]
    for process, (other, others) in enumerate(answers):
        for name, value in asked.items():
            if other[name] != value:
                raise wrong(
                    name,
                    f" is {value!r} in process 0 and {other[name]!r} in process {process}: "
                    "all processes of a world must be asked for the same run",
                )
        for name, digest in digests.items():
            if digest and others[name] and digest != others[name]:
                raise wrong(
                    name,
                    f" {asked[name]}: process 0 and process {process} read different files under this name; "
                    "give every machine the same one",
                )


def _digest(path: str) -> str | None:
    """Return the digest of a file's bytes. None if it cannot be read: the actual reader reports why."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (InputError, OSError):
        return None
