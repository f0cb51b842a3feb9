"""What all processes of an MPI world do at once, so that an error of one of them is an error of all.

Without MPI there is one process, and nothing to agree on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zerosim.errors import InputError
from zerosim.mpirun import mpirun_rank, mpirun_size

if TYPE_CHECKING:
    from zerosim.comm.mpi.session import MpiSession


FIRST_SPEAKS_S = 2.0
"""How long the other processes let the first one say what is wrong, where they do not agree on it."""


def failure_of_all(error: Exception, is_shared: bool) -> BaseException:
    """The one error that all processes which mpirun started end with, now that this one has failed.

    `is_shared`: the processes work together, or were asked to; else each ends on its own, the first one, which
    speaks, before the others: mpirun ends a job at the first process that returns an error.
    """
    if (mpirun_size() or 1) < 2:
        return error
    if is_shared:
        from zerosim.comm.mpi.session import mpi_session

        try:
            session = mpi_session()
            return error if error is session.agreed else session.fail(error)
        except InputError:  # there is no MPI to agree over
            pass
    if mpirun_rank():
        time.sleep(FIRST_SPEAKS_S)
    return error


@contextmanager
def together(world: str) -> Iterator[MpiSession | None]:
    """A block that every process runs: it ends when it has ended on all, or with one error, the same on all.

    Gives the session of an MPI world, None for threads.

    Raises: what the block raises on this process or, in another process's place, on that one; InputError where there
    is no MPI, or no mpirun started this process.
    """
    if world != "mpi":
        yield None
        return
    from zerosim.comm.mpi.session import mpi_session

    session = mpi_session()
    try:
        yield session
    except BaseException as error:
        if error is session.agreed:  # all processes end with it already
            raise
        raise session.fail(error) from None
    session.exchange(None)
