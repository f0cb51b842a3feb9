"""What all processes of an MPI world do together, so that one process's error ends all of them.

Without MPI there is one process, and nothing to agree on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from zerosim.config.launcher import mpirun_folder, mpirun_rank, mpirun_size
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.comm.transports.mpi.session import MpiSession


FIRST_SPEAKS_S = 2.0
"""How long the other processes wait for the first one to print an error, if they cannot agree on one."""

NEXT_SPEAKS_S, MOST_TURNS = 1.0, 4
"""How long each waits for the one before it, if the first prints nothing; and how many of them take turns."""

END_S = 10.0
"""How long mpirun may take to end the job after one process has printed its error. A process that is still alive then
prints its own."""


def failure_of_all(error: BaseException, is_shared: bool) -> tuple[BaseException, bool]:
    """Return the exit error of a process that mpirun started, now that it has failed, and whether this process prints
    it.

    `is_shared`: the processes work together. Then all end with one error, which the first one prints. Otherwise each
    prints its own, one after the other: mpirun ends a job at the first process that returns an error, so that one is
    read.
    """
    is_interrupt = isinstance(error, KeyboardInterrupt)  # mpirun's signal, to all
    if is_shared and not is_interrupt and (mpirun_size() or 1) > 1:
        from zerosim.comm.transports.mpi.session import mpi_session

        try:
            session = mpi_session()
        except InputError:  # there is no MPI to agree over
            pass
        else:
            return (error if error is session.agreed else session.fail(error)), session.process == 0
    process = mpirun_rank()
    if is_interrupt:
        return error, not (is_shared and process)
    if process:
        time.sleep(FIRST_SPEAKS_S + NEXT_SPEAKS_S * min(process - 1, MOST_TURNS))
    if process is not None and not _is_first_to_tell(process):
        time.sleep(END_S)
    return error, True


def _is_first_to_tell(process: int) -> bool:
    """Return whether no other process of this job and host has printed an error, as far as can be known.

    The printing process leaves a link to its number in the job's folder: only one process can create a link.
    """
    folder = mpirun_folder()
    if folder is None:
        return True
    told = os.path.join(folder, f"zerosim-told.{os.environ.get('PMIX_NAMESPACE', '')}")
    try:
        with suppress(FileExistsError):
            os.symlink(str(process), told)
        return os.readlink(told) == str(process)  # perhaps its own from an earlier command of the same job
    except OSError:  # links are impossible there, or the folder is gone with the job
        return True


@contextmanager
def on_every_process(world: str) -> Iterator[MpiSession | None]:
    """Run a block on every process, until it has ended on all, or with one error, the same on all.

    Yields the session of an MPI world, None for threads.

    Raises: the block's error on this process or, in another process's place, that one's; InputError if there is no MPI,
    or mpirun did not start this process.
    """
    if world != "mpi":
        yield None
        return
    from zerosim.comm.transports.mpi.session import mpi_session

    session = mpi_session()
    try:
        yield session
    except BaseException as error:
        if error is session.agreed:  # all processes already end with it
            raise
        raise session.fail(error) from None
    session.exchange(None)
