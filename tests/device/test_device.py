"""A device's doors: bytes, work, scopes, and the switch that ends a run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.device.copies import copy_to_host
from zerosim.device.device import Device, Kind, Phase, Switch
from zerosim.device.events import Alloc, Free, Kernel, Mark, Retag, Scope
from zerosim.device.memory import Exact
from zerosim.device.recorder import Recorder
from zerosim.device.work import KernelWork
from zerosim.dtypes import bf16, fp16, fp32, fp64, int64, uint8
from zerosim.errors import Aborted, OutOfMemory


def with_capacity(capacity: int) -> Device:
    return Device(3, NumpyBackend(), allocator=Exact(capacity), recorder=Recorder(keep=True))


# -- scopes --------------------------------------------------------------------------------------------------
def test_scopes_nest_and_are_left_again(device: Device) -> None:
    assert device.where == Scope(-1, "init", "", 0)
    with device.scope(step=4, phase=Phase.FORWARD):
        with device.scope(unit="h.0", slot=2):
            assert device.where == Scope(4, "forward", "h.0", 2)
            with device.phase(Phase.BACKWARD):
                assert device.where == Scope(4, "backward", "h.0", 2)
            assert device.where.phase == "forward"
        assert device.where == Scope(4, "forward", "", 0)
    assert device.where == Scope()


def test_zero_and_the_empty_name_can_be_set(device: Device) -> None:
    with device.scope(step=4, unit="h.0", slot=2), device.scope(step=0, unit="", slot=0):
        assert device.where == Scope(0, "init", "", 0)


def test_an_exception_restores_the_scope_and_carries_the_innermost(device: Device) -> None:
    with (
        pytest.raises(ZeroDivisionError) as caught,
        device.scope(step=1),
        device.phase(Phase.BACKWARD),
        device.scope(unit="h.1"),
    ):
        raise ZeroDivisionError
    assert device.where == Scope()
    assert caught.value.__dict__["zerosim_scope"] == Scope(1, "backward", "h.1", 0)


def test_no_grad_nests_and_is_left_on_exceptions(device: Device) -> None:
    with device.no_grad():
        with pytest.raises(ZeroDivisionError), device.no_grad():
            raise ZeroDivisionError
        assert not device.grad_enabled
    assert device.grad_enabled
    with pytest.raises(ZeroDivisionError), device.no_grad():
        raise ZeroDivisionError
    assert device.grad_enabled


def test_events_carry_the_scope(device: Device) -> None:
    with device.scope(step=2, phase=Phase.OPTIMIZER, unit="h.3", slot=1):
        buffer = device.alloc((4,), fp32, Kind.OPTIM)
        device.mark("here")
    del buffer  # outside
    here = Scope(2, "optimizer", "h.3", 1)
    assert [(type(e), e.scope) for e in device.recorder.events] == [(Alloc, here), (Mark, here), (Free, Scope())]


# -- memory --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "size"), [(fp64, 8), (fp32, 4), (fp16, 2), (bf16, 2), (int64, 8), (uint8, 1)])
def test_a_buffers_bytes(device: Device, live: Callable[[], int], dtype: object, size: int) -> None:
    buffer = device.alloc((3, 5), dtype, Kind.PARAM, padding=2)  # type: ignore[arg-type]
    assert (buffer.shape, buffer.numel, buffer.nbytes, live()) == ((3, 5), 15, 15 * size, 15 * size)
    (event,) = device.recorder.history
    assert isinstance(event, Alloc)
    assert (event.nbytes, event.reserved_bytes, event.kind, event.padding_bytes) == (
        15 * size,
        15 * size,
        "param",
        2 * size,
    )


def test_bytes_die_with_the_last_handle(device: Device, live: Callable[[], int]) -> None:
    buffer = device.alloc((100,), fp32, Kind.ACTIVATION)
    window = buffer[10:20].reshape(2, 5)
    assert live() == 400  # views cost nothing
    window.array[...] = 7
    assert buffer.array[10:20].tolist() == [7] * 10
    del buffer
    assert live() == 400  # and keep the whole storage
    del window
    assert live() == 0


@pytest.mark.parametrize("where", ["device", "host"])
def test_bytes_die_without_a_line_of_python(device: Device, where: str) -> None:
    """Ctrl-C that lands in a destructor is ignored by Python: it would be lost, and the rest of the destructor too."""
    buffer = device.alloc((4,), fp32, Kind.TEMP)
    if where == "host":
        buffer = copy_to_host(buffer, Kind.KEPT)
    number = buffer.storage.id
    called: list[str] = []
    sys.setprofile(lambda frame, event, what: called.append(frame.f_code.co_name) if event == "call" else None)
    del buffer
    sys.setprofile(None)
    assert called == []
    assert device.recorder.events[-1] == Free(Scope(), number, where)
    ends = [event for event in device.recorder.events if isinstance(event, Free)]
    assert len(ends) == (1 if where == "device" else 2)


@pytest.mark.slow
def test_bytes_that_die_in_a_cycle_are_recorded_when_it_is_collected(device: Device) -> None:
    cycle: list[object] = [device.alloc((4,), fp32, Kind.TEMP)]
    cycle.append(cycle)
    del cycle
    assert not isinstance(device.recorder.events[-1], Free)
    gc.collect()
    assert isinstance(device.recorder.events[-1], Free)


def test_empty_buffers_and_single_elements(device: Device, live: Callable[[], int]) -> None:
    nothing, one = device.alloc((0,), fp32, Kind.GRAD), device.alloc((), fp32, Kind.GRAD)
    assert (nothing.nbytes, one.nbytes, one.numel, live()) == (0, 4, 1, 4)


def test_retag_changes_the_kind_of_the_same_bytes(device: Device) -> None:
    buffer = device.alloc((4,), fp32, Kind.UNSHARDED_GRAD)
    device.retag(buffer[1:], Kind.GRAD)
    alloc, retag = device.recorder.events
    assert isinstance(alloc, Alloc)
    assert isinstance(retag, Retag)
    assert (retag.id, retag.kind) == (alloc.id, "grad")


def test_a_device_that_is_full_says_so() -> None:
    device = with_capacity(1000)
    kept = device.alloc((100,), fp64, Kind.PARAM)
    with device.scope(phase=Phase.FORWARD, unit="h.2"), pytest.raises(OutOfMemory) as caught:
        device.alloc((51,), fp32, Kind.ACTIVATION)
    error = caught.value
    assert (error.rank, error.requested, error.kind, error.capacity) == (3, 204, "activation", 1000)
    assert error.where == "forward of h.2"
    assert "rank 3 is out of memory in forward of h.2: 204 B for activation do not fit" in str(error)
    assert error.exit_code == 3
    fits = device.alloc((50,), fp32, Kind.ACTIVATION)  # to the last byte
    assert device.allocator.reserve(99, 1) is None
    del kept, fits
    assert device.alloc((1000,), uint8, Kind.PARAM).nbytes == 1000


def test_what_was_refused_was_never_live() -> None:
    device = with_capacity(10)
    with pytest.raises(OutOfMemory):
        device.alloc((3,), fp32, Kind.TEMP)
    assert not [event for event in device.recorder.events if isinstance(event, (Alloc, Free))]


# -- work ----------------------------------------------------------------------------------------------------
def test_a_kernel_is_run_and_counted(device: Device) -> None:
    a, b = device.alloc((4,), fp32, Kind.TEMP), device.alloc((4,), fp16, Kind.TEMP)
    device.backend.fill(a.array, 3.0)
    device.kernel(4, device.backend.add, a.array, 0.5, b.array)
    kernel = device.recorder.events[-1]
    assert isinstance(kernel, Kernel)
    assert kernel[1:] == ("add", "vector", 4, 16, 8, (), None, "device")
    assert b.array.tolist() == [3.5] * 4
    assert device.ticks == 1


def test_without_a_record_everything_still_runs() -> None:
    device = Device(0, NumpyBackend(), recorder=Recorder(enabled=False))
    a = device.alloc((4,), fp32, Kind.TEMP)
    device.kernel(0, device.backend.fill, a.array, 1.0)
    device.mark("x")
    assert a.array.tolist() == [1] * 4
    assert device.recorder.events == []


def test_the_switch_ends_a_rank_at_its_next_kernel() -> None:
    switch = Switch()
    device = Device(5, NumpyBackend(), switch=switch)
    a = device.alloc((4,), fp32, Kind.TEMP)
    device.kernel(0, device.backend.fill, a.array, 1.0)
    switch.aborted = True
    with pytest.raises(Aborted, match="rank 5 was ended because another rank failed"):
        device.kernel(0, device.backend.fill, a.array, 2.0)
    with pytest.raises(Aborted):
        device.count(KernelWork("reduce", "vector", 0, 0, 0))
    assert np.all(a.array == 1)
