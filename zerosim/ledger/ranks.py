"""What was counted on every rank of a run, and how the processes of an MPI world put theirs together."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from zerosim.config import RunConfig
from zerosim.config.inputs import open_file
from zerosim.device.events import Event, Reader
from zerosim.errors import InputError
from zerosim.ledger.activations import ActivationLedger
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.pools import PoolLedger
from zerosim.ledger.traffic import CommLedger

if TYPE_CHECKING:
    from zerosim.comm.transports.mpi.session import MpiSession

T = TypeVar("T")
FILES = ("data", "tokens", "weights")
Page = tuple[MemoryLedger, CommLedger, PoolLedger, ActivationLedger, list[Event]]


class Books:
    """By rank: memory, traffic, pool, and the events that were kept; activations of rank 0 (all save the same)."""

    def __init__(self, ranks: int) -> None:
        self.memory = [MemoryLedger() for _ in range(ranks)]
        self.traffic = [CommLedger() for _ in range(ranks)]
        self.pools = [PoolLedger() for _ in range(ranks)]
        self.activations = ActivationLedger()
        self.histories: list[list[Event]] = [[] for _ in range(ranks)]

    def readers(self, rank: int) -> tuple[Reader, ...]:
        own = (self.memory[rank], self.traffic[rank], self.pools[rank])
        return (*own, self.activations) if rank == 0 else own

    def of_all_processes(self, session: MpiSession, per_process: int, outcomes: list[T]) -> list[T]:
        """The outcomes of all ranks, given this process's; what the other processes counted is put in here."""
        first = session.process * per_process
        own = [(first + index, outcome, self._page(first + index)) for index, outcome in enumerate(outcomes)]
        everyone = [record for records in session.exchange(own) for record in records]
        for rank, _, page in everyone:
            self._put(rank, page)
        return [outcome for _, outcome, _ in everyone]

    def _page(self, rank: int) -> Page:
        return self.memory[rank], self.traffic[rank], self.pools[rank], self.activations, self.histories[rank]

    def _put(self, rank: int, page: Page) -> None:
        self.memory[rank], self.traffic[rank], self.pools[rank], activations, self.histories[rank] = page
        if rank == 0:
            self.activations = activations


def check_alike(session: MpiSession, config: RunConfig) -> None:
    """Refuse processes that were asked for different runs, or that read different files under one name.

    Raises: InputError naming a field and both values.
    """
    given = config.to_dict()
    read = {name: _digest(path) for name in FILES if (path := given[name]) is not None}
    answers = session.exchange((given, read))
    asked, digests = answers[0]
    for process, (other, others) in enumerate(answers):
        for name, value in asked.items():
            if other[name] != value:
                raise InputError(
                    f"{name} is {value!r} in process 0 and {other[name]!r} in process {process}: "
                    "all processes of a world must be asked for the same run"
                )
        for name, digest in digests.items():
            if digest and others[name] and digest != others[name]:
                raise InputError(
                    f"{name} {asked[name]}: process 0 and process {process} read different files under this name; "
                    "give every machine the same one"
                )


def _digest(path: str) -> str | None:
    """Of a file's bytes. None where it cannot be read: who reads it in earnest says why."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (InputError, OSError):
        return None
