"""Nodes by name (`nodes.toml`): their GPUs, NICs, host memory and NVMe drives."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.presets.hardware import GB, nics_carry, packaged
from zerosim.errors import InputError, did_you_mean


@dataclass(frozen=True, slots=True)
class Node:
    """One kind of node. `nic` is the bandwidth of all its NICs in bytes per second, one way; the host's figures are
    None if unknown. `bridged`: each even GPU has a bridge to the next one."""

    name: str
    gpu: str
    gpus: int
    nic: float
    source: str
    bridged: bool = False
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    nvme_bytes_per_s: int | None = None
    host_bytes_per_s: int | None = None


def nodes() -> tuple[Node, ...]:
    """Return the nodes known by name."""
    sizes = {"host_gb": ("host_bytes", GB), "nvme_tb": ("nvme_bytes", 1000 * GB), "nvme": ("nvme_bytes_per_s", GB)}
    sizes["host_link"] = "host_bytes_per_s", GB
    found = []
    for name, row in packaged("nodes.toml").items():
        host = {field: round(row[key] * unit) for key, (field, unit) in sizes.items() if key in row}
        bridged = row.get("bridged", False)
        found.append(Node(name, row["gpu"], row["gpus"], nics_carry(row["nics"]), row["source"], bridged, **host))
    return tuple(found)


def find_node(name: str) -> Node:
    """Return the node of that name, in any case. Raises: InputError with the nearest for an unknown one."""
    known = {node.name: node for node in nodes()}
    if (node := known.get(name.strip().lower())) is not None:
        return node
    hint = did_you_mean(name.lower(), known, f"known: {', '.join(known)}", quote=str)
    raise InputError(f"unknown --node {name!r}: {hint}")
