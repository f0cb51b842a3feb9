"""The device that a verb's flags name: --gpu or --node, --limit and --reserve."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zerosim.config.presets.hardware import Hardware, find_hardware
from zerosim.config.presets.nodes import Node, find_node
from zerosim.errors import InputError
from zerosim.units import MOST_BYTES, format_bytes

if TYPE_CHECKING:
    from zerosim.report.verdict import Limit


def node_of(args: argparse.Namespace) -> Node | None:
    """Return the node of --node. Raises: InputError for an unknown node."""
    name = getattr(args, "node", None)
    return None if name is None else find_node(name)


def device_of(args: argparse.Namespace) -> Hardware | None:
    """Return the device of --gpu, or of --node. Raises: InputError for an unknown device, and for two different
    ones."""
    node, name = node_of(args), getattr(args, "gpu", None)
    device = None if name is None else find_hardware(name)
    if node is None:
        return device
    if device is not None and device.name != node.gpu:
        raise InputError(f"--gpu {name}: --node {node.name} already has GPUs, {node.gpu}; leave one of them out")
    return find_hardware(node.gpu)


def device_limit(args: argparse.Namespace, capacity: int | None) -> Limit | None:
    """Return the memory limit of --gpu, --limit or a scenario's capacity, with its reserve; None without any.

    Raises: InputError for an unknown device, and for a reserve without a limit.
    """
    from zerosim.report.verdict import Limit

    device, given = device_of(args), getattr(args, "limit", None)
    if given is not None and not 1 <= given <= MOST_BYTES:
        raise InputError(
            f"--limit {given}: expected at least 1 byte and at most {format_bytes(MOST_BYTES)}, such as 32GB"
        )
    kept = getattr(args, "reserve", None)
    if kept is not None and not 0 <= kept <= MOST_BYTES:
        raise InputError(f"--reserve {kept}: expected 0 to {format_bytes(MOST_BYTES)}, such as 2GB")
    if given is not None or device is None:
        nbytes = given if given is not None else capacity
        if nbytes is None and kept is not None:
            raise InputError(f"--reserve {kept}: needs a device memory; pass --gpu NAME or --limit SIZE too")
        return None if nbytes is None else Limit("", nbytes, device, kept)
    return Limit(device.name, device.memory_bytes, device, kept)
