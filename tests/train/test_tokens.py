"""Text as a tokenizer.json makes tokens of it: the library's own ids, decoded samples, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.data import primer, read_text, sample_batch
from zerosim.train.run import run
from zerosim.train.tokens import BYTES, Tokenizer

tokenizers = pytest.importorskip("tokenizers")
VOCAB, SEQ = 300, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Byte-level pairs, as GPT-2 has them, with a special token, and truncation that a run must not have."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>"], show_progress=False, initial_alphabet=alphabet
    )
    made.train_from_iterator([primer().decode()], trainer)
    made.enable_truncation(5)
    made.enable_padding(length=7)
    name = str(tmp_path_factory.mktemp("tokens") / "tokenizer.json")
    made.save(name)
    return name


def config(path: str, **changes: Any) -> RunConfig:
    sizes = dict(layers=1, hidden=16, heads=2, seq=SEQ, vocab=VOCAB, micro_batch=1, ranks=2, steps=2)
    return RunConfig(**{**sizes, "tokenizer": path, **changes})


def test_ids_are_the_librarys(path: str) -> None:
    library = tokenizers.Tokenizer.from_file(path)
    library.no_truncation()
    library.no_padding()
    wanted = library.encode(primer().decode(), add_special_tokens=False).ids
    assert list(read_text(None, SEQ, VOCAB, Tokenizer(path))) == wanted
    assert len(wanted) < len(read_text(None, SEQ, VOCAB))


def test_a_run_trains_on_them(path: str, tmp_path: Path) -> None:
    ids = read_text(None, SEQ, VOCAB, Tokenizer(path))
    batches = [sample_batch(ids, 0, step, rows=2, seq=SEQ) for step in range(2)]
    np.savez(tmp_path / "tokens.npz", tokens=np.array(batches))
    given = config(path, tokenizer=None, tokens=str(tmp_path / "tokens.npz"))
    assert run(config(path)).losses == run(given).losses


def test_a_sample_is_text_again(path: str) -> None:
    """Of any tokens: the text that follows the prompt, its first space too."""
    tokens = Tokenizer(path)
    prompt, whole = "ZeRO", "ZeRO shards the optimizer states <s>é"
    first, ids = ([int(one) for one in tokens.encode(text.encode(), "text")] for text in (prompt, whole))
    assert ids[: len(first)] == first
    assert tokens.decode(first, ids[len(first) :]).decode() == whole.removeprefix(prompt)
    assert isinstance(run(config(path, sample="ZeRO", sample_tokens=3)).sample, bytes)
    assert BYTES.decode([65], [66, 300, 67]) == b"BC"


def test_ids_beyond_the_vocabulary_are_refused_with_both_numbers(path: str) -> None:
    with pytest.raises(InputError, match=r"primer holds token 299 of .*: vocab 280 is too small: ids run to 279"):
        run(config(path, vocab=280))
    with pytest.raises(InputError, match=r"sample 'ZeRO' holds token \d+ of .*: vocab 20 is too small"):
        run(config(path, vocab=20, sample="ZeRO"))


def test_what_is_no_text_or_too_little_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 100)
    (tmp_path / "short").write_text("ZeRO", "utf-8")
    with pytest.raises(InputError, match="bytes is not UTF-8, byte 0 is 0xff: a tokenizer needs text"):
        run(config(path, data=str(tmp_path / "bytes")))
    with pytest.raises(InputError, match=r"short has \d tokens of .*: one row needs seq \+ 1 = 9 tokens"):
        run(config(path, data=str(tmp_path / "short")))


@pytest.mark.parametrize("content", ["{}", '{"version": "1.0"}', "[", '{"model": {"type": "X"}}', "\x00", "null"])
def test_a_file_that_is_none_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content, "utf-8")
    with pytest.raises(
        InputError, match=r"bad.json is no tokenizer.json that the library tokenizers reads: "
    ) as refusal:
        Tokenizer(str(tmp_path / "bad.json"))
    assert "\n" not in str(refusal.value)


def test_it_is_of_no_use_with_tokens_alone(path: str) -> None:
    with pytest.raises(InputError, match=r"tokenizer .*: tokens are numbers already; leave it out"):
        config(path, tokens="tokens.npz")


def test_the_mask_is_the_tokenizers(path: str, tmp_path: Path) -> None:
    """For encoders; without one in the vocabulary a run is refused before a rank starts."""
    with pytest.raises(InputError, match=r"^the tokenizer of .* has no \[MASK\] and no <mask> below vocab 300$"):
        run(config(path, model="bert"))
    library = tokenizers.Tokenizer.from_file(path)
    library.add_special_tokens(["<mask>"])
    library.save(str(tmp_path / "masked.json"))
    masked = str(tmp_path / "masked.json")
    assert Tokenizer(masked).mask(VOCAB + 1) == library.token_to_id("<mask>") == VOCAB
    assert len(run(config(masked, model="bert", vocab=VOCAB + 1)).losses) == 2
    assert BYTES.mask(256) == 255
