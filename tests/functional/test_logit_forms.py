"""A factor and a cap of logits inside the loss: gradients, and one loss in chunks, over ranks, for drawn labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from meeting import Meeting

from zerosim import functional as F
from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.backends.kernels import Backend
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import fp64, int64
from zerosim.errors import InputError
from zerosim.functional.chunked_loss import ChunkedLoss
from zerosim.functional.common import one_like
from zerosim.functional.labels import sample_labels
from zerosim.functional.loss import LogitsGrad
from zerosim.parallel.tensor import Borders, TensorParallel
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor

FORMS = {"factor": LogitForm(0.25), "cap": LogitForm(cap=2.0), "both": LogitForm(1.5, 3.0)}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
VOCAB, TARGETS = 7, np.array([[3, 0, 6], [1, 6, 2]])


def buffer(values: Any, device: Device, dtype: str = "fp64") -> Buffer:
    return tensor(values, device, dtype=dtype).buffer


def composed(logits: Any, form: LogitForm) -> Any:
    return form.cap * np.tanh(logits * form.factor / form.cap) if form.cap else logits * form.factor


@forms
@pytest.mark.usefixtures("plain_device")
def test_gradients(form: LogitForm) -> None:
    gradcheck(lambda x: F.cross_entropy(x, buffer(TARGETS, x.device, "int64"), form), [(2, 3, VOCAB)])


@forms
def test_the_loss_is_that_of_logits_changed_before(form: LogitForm) -> None:
    device, logits = cpu(), 3 * np.random.default_rng(0).standard_normal((2, 3, VOCAB))
    targets = buffer(TARGETS, device, "int64")
    changed = F.cross_entropy(Tensor(buffer(composed(logits, form), device)), targets).item()
    assert F.cross_entropy(Tensor(buffer(logits, device)), targets, form).item() == pytest.approx(changed, rel=1e-13)


@forms
def test_in_chunks(form: LogitForm) -> None:
    rng, device = np.random.default_rng(1), cpu()
    x, weight = (tensor(rng.standard_normal(shape), device, requires_grad=True) for shape in ((2, 3, 5), (VOCAB, 5)))
    targets = buffer(TARGETS, device, "int64")
    whole = F.cross_entropy(F.linear(x, weight, transposed=True), targets, form)
    whole.backward()
    loss = ChunkedLoss(
        [weight],
        lambda logits, ids: F.cross_entropy_sum(logits, ids, form),
        LogitsGrad(targets, 1.0, TARGETS.size, form=form),
        [],
    )
    total = loss.run(x)
    assert float(total.array[0]) / TARGETS.size == pytest.approx(whole.item(), rel=1e-6)
    for ours, leaf in zip(loss.rule(x).backward(one_like(total)), (x, weight), strict=True):
        assert ours is not None
        assert leaf.grad is not None
        np.testing.assert_allclose(ours.array, leaf.grad.numpy(), rtol=1e-5, atol=1e-7)


@forms
@pytest.mark.parametrize("fused", [False, True])
def test_over_ranks(form: LogitForm, fused: bool) -> None:
    """Seven columns over four ranks: one has fewer, and padding is outside."""
    ranks, logits = 4, 3 * np.random.default_rng(0).standard_normal((2, 3, VOCAB))
    whole, lse = F.cross_entropy_sum(buffer(logits, cpu()), buffer(TARGETS, cpu(), "int64"), form)
    padded = np.concatenate([logits, np.full((2, 3, 1), 99.0)], axis=-1)

    def on_rank(rank: int) -> tuple[Any, Any, Any]:
        maps = TensorParallel(ranks, rank, meeting.of(rank), Borders(), keeps_gathered=True, pads_vocab=False)
        split, device = maps.split((VOCAB, 1), 0, padding=1), cpu()
        own, targets = buffer(padded[..., 2 * rank : 2 * rank + 2], device), buffer(TARGETS, device, "int64")
        total, sums = maps.cross_entropy_sum(own, targets, split, fused=fused, form=form)
        of = LogitsGrad(targets, 1.0, 6, *maps.vocabulary(split), form)
        return total.array.copy(), sums.array.copy(), of.write(own, sums, own).array

    meeting = Meeting(ranks)
    found = meeting.run(on_rank)
    alone = buffer(logits, cpu())
    grad = LogitsGrad(buffer(TARGETS, cpu(), "int64"), 1.0, 6, form=form).write(alone, lse, alone).array
    for total, sums, _ in found:
        np.testing.assert_allclose(total, whole.array, rtol=1e-13)
        np.testing.assert_allclose(sums, lse.array, rtol=1e-13)
    columns = np.concatenate([one[2] for one in found], axis=-1)
    np.testing.assert_allclose(columns[..., :VOCAB], grad, rtol=1e-12, atol=1e-15)
    assert not columns[..., VOCAB:].any()


@forms
def test_labels_are_drawn_from_the_loss_s_softmax(form: LogitForm, backend: Backend) -> None:
    """From logits changed before: the same labels, but where a number falls on a border within rounding."""
    device = Device(0, backend)
    logits = 3 * np.random.default_rng(0).standard_normal((500, VOCAB))
    drawn = []
    for values, of in ((logits, form), (composed(logits, form), PLAIN), (logits, PLAIN)):
        source, labels = device.alloc(logits.shape, fp64, Kind.TEMP), device.alloc((500,), int64, Kind.TEMP)
        backend.from_host(values, source.array)
        sample_labels(source, (5, 6), 3, labels, of)
        drawn.append(backend.to_host(labels.array))
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()


def test_what_cannot_be_is_refused() -> None:
    targets = buffer([0], cpu(), "int64")
    for form in (LogitForm(0.0), LogitForm(-1.0), LogitForm(cap=-2.0)):
        with pytest.raises(InputError, match="expected a factor of more than 0, and a cap of more than 0 or none"):
            LogitsGrad(targets, 1.0, 1, form=form)
