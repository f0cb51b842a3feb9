"""Text as token ids, and back: bytes, or the tokens of a tokenizer.json by the library tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from zerosim.config.inputs import read_file
from zerosim.errors import InputError, printable
from zerosim.units import format_bytes

LARGEST_TOKENIZER = 10**8
LARGEST_TEXT = 10**8
"""The most bytes of a text that is tokenized: the library needs a hundred bytes or so for a token."""


class Tokens(Protocol):
    """Makes token ids of text. `unit` is what one is called, `source` says whose they are."""

    unit: str
    source: str

    def encode(self, text: bytes, name: str) -> Any: ...

    def decode(self, prompt: list[int], ids: list[int]) -> bytes: ...

    def mask(self, vocab: int) -> int: ...


class Bytes:
    """Each byte is a token."""

    unit, source = "byte", ""

    def encode(self, text: bytes, name: str) -> Any:
        """Return the ids, uint8."""
        return np.frombuffer(text, np.uint8)

    def decode(self, prompt: list[int], ids: list[int]) -> bytes:
        """Return the text of `ids`, which follow the prompt's."""
        return bytes(token for token in ids if token < 256)

    def mask(self, vocab: int) -> int:
        """Return the id that stands for a masked token: the vocabulary's last one, as RoBERTa's."""
        return vocab - 1


BYTES = Bytes()


class Tokenizer:
    """The tokens of a tokenizer.json. Nothing in the file is executed.

    Raises: InputError for a file that is no tokenizer, and if the library is not installed.
    """

    unit = "token"

    def __init__(self, path: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise InputError(
                f"tokenizer {path}: the library tokenizers is not installed: pip install tokenizers, or train on bytes"
            ) from None
        text, self.source = read_file(path, "tokenizer", LARGEST_TOKENIZER), f" of {path}"
        with _refusals(f"tokenizer {path} is no tokenizer.json that the library tokenizers reads"):
            self._library = tokenizers.Tokenizer.from_str(text.decode())
        self._library.no_truncation()
        self._library.no_padding()

    def encode(self, text: bytes, name: str) -> Any:
        """Return the ids, int32, without special tokens around them. Raises: InputError for text not in UTF-8."""
        if len(text) > LARGEST_TEXT:
            raise InputError(f"{name}: at most {format_bytes(LARGEST_TEXT)} of text are tokenized; cut it")
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not UTF-8, byte {error.start} is {text[error.start]:#04x}: a tokenizer needs text"
            ) from None
        with _refusals(f"{name} cannot be tokenized by the tokenizer{self.source}"):
            return np.array(self._library.encode(decoded, add_special_tokens=False).ids, np.int32)

    def decode(self, prompt: list[int], ids: list[int]) -> bytes:
        """Return the text of `ids`, which follow the prompt's: the space before a word is there."""
        before, whole = self._text(prompt), self._text([*prompt, *ids])
        return (whole[len(before) :] if whole.startswith(before) else self._text(ids)).encode()

    def mask(self, vocab: int) -> int:
        """Return the id of [MASK] or <mask>. Raises: InputError if it has none in the vocabulary."""
        ids = [self._library.token_to_id(word) for word in ("[MASK]", "<mask>")]
        known = next((one for one in ids if one is not None and one < vocab), None)
        if known is None:
            raise InputError(f"the tokenizer{self.source} has no [MASK] and no <mask> below vocab {vocab}")
        return int(known)

    def _text(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Raise the library's exceptions as an InputError in one line."""
    try:
        yield
    except BaseException as error:  # a panic of the library, which is written in Rust, is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what}: {printable(str(error).partition(chr(10))[0][:200])}") from None


def tokens_of(path: str | None) -> Tokens:
    """Return the tokens of a tokenizer.json, or bytes."""
    return BYTES if path is None else Tokenizer(path)


def check_ids(ids: Any, vocab: int, name: str, tokens: Tokens) -> None:
    """Check token ids. Raises: InputError if the model's vocabulary has fewer."""
    largest = int(ids.max()) if len(ids) else 0
    if largest >= vocab:
        hint = ", use 256" if tokens.unit == "byte" else f": ids run to {vocab - 1}; choose the model's own tokenizer"
        raise InputError(f"{name} holds {tokens.unit} {largest}{tokens.source}: vocab {vocab} is too small{hint}")
