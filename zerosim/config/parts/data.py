"""The data, and how a batch is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import Part, option
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong
from zerosim.placement.documents import Packing, packing_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Part):
    """The data: files, how a batch is made of them, the seed; and the text that the model continues at the end."""

    group = "data and weights"

    micro_batch: int = option(
        4, "rows per rank and microbatch", low=1, high=10**7, metavar="B", also=("--mbs",), group="training",
        after="steps", words="per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu",
    )  # fmt: skip
    accumulate: int = option(
        1, "microbatches per step; the global batch is N*A*B rows", low=1, high=10**7, metavar="A",
        also=("--grad-acc-steps", "--gradient-accumulation-steps"), group="training", after="micro_batch",
    )  # fmt: skip
    seed: int = option(
        0, "seed of weights, batches and dropout", low=0, high=2**63 - 1, metavar="SEED", group="training"
    )
    file: str | None = option(
        None, "text to train on: any file, read as bytes", flat="data", metavar="FILE",
        shown="the packaged primer on ZeRO",
    )  # fmt: skip
    tokens: str | None = option(
        None, "tokens to train on: an int64 array 'tokens' of shape (steps, global batch, seq + 1)", metavar="IN.npz",
        shown="from --data",
    )  # fmt: skip
    documents: str | None = option(
        None, "several documents in a row, N tokens each or each up to a token ID: attention stays within each, and no "
        "document's first token is predicted. The loss is the mean over all other labels of the global batch",
        metavar="N|eod:ID", shown="a row is one document",
    )  # fmt: skip
    weights: str | None = option(
        None, "full parameters to start from, by name; or a released model's: a folder with its safetensors, or such a "
        "file", metavar="IN.npz|DIR", shown="drawn from --seed",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "tokenizer.json that turns --data and --sample into tokens", metavar="FILE", shown="bytes"
    )
    sample: str | None = option(None, "let the trained model continue this text", metavar="TEXT", shown="no sample")
    sample_tokens: int = option(200, "number of tokens that continue --sample", low=1, high=100_000, metavar="COUNT")

    def _check(self) -> None:
        if self.documents is not None and self.packing is None:
            raise wrong("documents", f" {self.documents!r}: expected N, at least 2 tokens each, or eod:ID")
        if self.tokenizer is not None and self.tokens is not None and self.sample is None:
            why = "tokens are numbers already; leave it out, or pass data or a sample"
            raise wrong("tokenizer", f" {self.tokenizer!r}: {why}")
        if self.sample == "":
            raise wrong("sample", " '': expected at least one character to continue")
        try:
            (self.sample or "").encode()
        except UnicodeEncodeError:
            raise wrong("sample", f" {self.sample!r}: expected text in UTF-8") from None

    @property
    def packing(self) -> Packing | None:
        """How documents lie in a row; None: a row is one document."""
        return None if self.documents is None else packing_of(self.documents)


def rules(data: DataConfig, model: ModelConfig, optim: OptimConfig) -> Iterator[InputError]:
    """Yield what an encoder cannot do, and a text that the model's vocabulary lacks."""
    if model.is_masked and data.sample is not None:
        yield wrong(
            "sample", f" {data.sample!r}: an encoder ({model.family}) fills in masked tokens, and "
            "continues no text; leave it out",
        )  # fmt: skip
    if model.is_masked and OPTIMIZERS[optim.optimizer].estimates_every:
        yield wrong(
            "optimizer", f" {optim.optimizer!r}: draws a label for every token, and an encoder "
            f"({model.family}) predicts masked ones only; choose adam",
        )  # fmt: skip
    text = None if data.tokenizer else data.sample
    if text is not None and max(text.encode()) >= model.vocab:
        yield wrong("sample", f" {text!r} holds byte {max(text.encode())}: vocab {model.vocab} is too small, use 256")


WORDS = (
    (
        "global_batch_size train_batch_size total_batch_size training.global_batch_size",
        "--accumulate A, which is the global batch / (--micro-batch x data ranks)",
    ),
    ("batch_size", "--micro-batch B, the rows of a rank and microbatch, and --accumulate A microbatches"),
    (
        "training.local_batch_size",
        "--micro-batch B. In a pipeline these rows are microbatches: --micro-batch 1 --accumulate B",
    ),
)


LACKING = (
    ("rampup_batch_size step_batch_size_schedule", "a batch that grows", "--accumulate is the same in every step"),
)
