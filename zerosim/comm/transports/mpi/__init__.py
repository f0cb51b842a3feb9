"""Rounds between processes, over MPI. To read in this order:

transport.py   ranks join rounds as on threads; one thread per process talks to MPI, until all have ended
queues.py      in which order rounds run
rounds.py      one round: who sends what to whom, and what has come
wire.py        notes, bytes, tags, requests: all that MPI is asked for
staging.py     how arrays become bytes: as they lie, through the host's memory, or on the GPU
native.py      MPI's own collectives in place of rounds
session.py     what processes do together outside of rounds; one error for all
watch.py       where everybody stands: deadlocks and late ranks across processes
check.py       whether there is an MPI, and what mends it when there is none
"""
