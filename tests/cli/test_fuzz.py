"""Files from outside, at random: whatever bytes they hold, they are read or refused in one line, and nothing else.

Seeded, and a few hundred cases; `python tests/cli/test_fuzz.py 20000` runs as many as one likes.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim
from zerosim.analysis.expect import read_expectations
from zerosim.config import RunConfig
from zerosim.config.files import read_scenario_file
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.safetensors import Planned, read_header, write_tensors
from zerosim.errors import InputError
from zerosim.train.data import read_tokens, read_weights

ROOT = Path(__file__).parents[2]
MEMORY = 3 * 2**30  # of address space, in which NumPy's libraries alone take one
SECONDS = 20  # of the processor's time, of one case
SHAPES = {"wte.weight": (8, 4), "h.0.ln.bias": (4,), "empty": (0, 3), "scalar": ()}

WORDS = [
    *("9" * 5000, "-" + "9" * 99, "0x" + "f" * 4000, "1e999", "-1e999", "nan", "inf", "-0", "1_0", "0b1", "1979-05-27"),
    *("true", "null", "None", "[]", "{}", "[" * 3000, "{" * 3000, "[[expect]]", "[sweep]", "[expect.with]", "[a.b]"),
    *("a." * 3000 + "a = 1", '"\\u0000"', '"\\ud800"', '"""', "'''", '"' + "x" * 5000 + '"', "\x00", "\ufeff", "\r"),
    *("NaN", "Infinity", "-Infinity", '"x":{"x":' * 2000, "0", "-1", "1", "4096", "1e30", "0.5", '"gpt2"', '"²"'),
    *('"**1**"', '"1e9"', '"' + "9" * 5000 + '"', '"-"', '"31.4GB"', "[1, 2, 3]", '["a", ["b"]]', "{ stage = 1 }"),
]
NUMBERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1]
HEADERS = [
    *(
        "(8, 4)",
        "(4, 8)",
        "(32,)",
        "()",
        "(True, 4)",
        "(-1,)",
        "(8.0, 4)",
        "(10**12,)",
        f"({10**12},)",
        f"({10**30}, 2)",
    ),
    *("'<f4'", "'<f8'", "'>f4'", "'|O'", "'<U9'", "'<f7'", "'V8'", "[('a', '<f4')]", "True", "False", "None", "1"),
    *("'descr'", "'shape'", "{", "}", "(" * 300, "'", "\\", "\n", " " * 400, "__import__('os').abort()"),
]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, put in, said twice, or cut off."""
    found = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(found) + 1), rng.choice((1, 2, 4, 8, 30))
        match rng.randrange(6):
            case 0:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = rng.randbytes(length)
            case 3:
                found[at:at] = found[at : at + 4 * length]
            case 4:
                size = rng.choice((2, 4, 8))
                found[at : at + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")
            case 5 if rng.random() < 0.3:
                del found[at:]
    return bytes(found)


def reworded(text: str, rng: random.Random, words: list[str]) -> str:
    """Some words replaced, doubled or dropped."""
    parts = re.findall(r"\w+|\s+|[^\w\s]", text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        parts[at : at + rng.randrange(2)] = [rng.choice([*words, rng.choice(parts), ""])]
    return "".join(parts)


def weights(rng: random.Random) -> bytes:
    made = {name: np.arange(np.prod(shape), dtype="f4").reshape(shape) for name, shape in SHAPES.items()}
    made["wte.weight"] = rng.choice([made["wte.weight"], np.asfortranarray(made["wte.weight"])])
    return arrays(made, rng)


def tensors(rng: random.Random) -> bytes:
    """A .safetensors file: damaged as a whole, or its header reworded."""
    file = BytesIO()
    made = {name: np.ones(shape, "f4") for name, shape in SHAPES.items()}
    write_tensors(file, [Planned(name, "F32", one.shape, lambda one=one: one) for name, one in made.items()])
    raw = file.getvalue()
    if rng.random() < 0.5:
        return damaged(raw, rng)
    end = 8 + int.from_bytes(raw[:8], "little")
    header = reworded(raw[8:end].decode(), rng, [*WORDS, "F16", "F64", "[", "]"]).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + raw[end:]


def read_all(path: str) -> None:
    for one in read_header(path).values():
        one.check_float()
        one.read()


def tokens(rng: random.Random) -> bytes:
    ids = np.zeros((2, 2, 9), np.int64)
    return arrays({"tokens": rng.choice([ids, np.asfortranarray(ids)])}, rng)


def arrays(made: dict[str, Any], rng: random.Random) -> bytes:
    """An .npz file: damaged as a whole, or whole around a damaged member."""
    file = BytesIO()
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(file, **made)
    if rng.random() < 0.4:
        return damaged(file.getvalue(), rng)
    again = BytesIO()
    hurt = rng.choice(sorted(made)) + ".npy"
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with (
        warnings.catch_warnings(action="ignore"),  # of names that are there twice
        zipfile.ZipFile(file) as whole,
        zipfile.ZipFile(again, "w", method) as zipped,
    ):
        for name in whole.namelist():
            raw = whole.read(name)
            if name == hurt:
                raw = changed_member(raw, rng)
            zipped.writestr(rng.choice(["x/", "a.txt", ".npy", "\x1b[2J.npy"]) if rng.random() < 0.03 else name, raw)
    return again.getvalue() if rng.random() < 0.8 else damaged(again.getvalue(), rng)


def changed_member(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return damaged(raw, rng)
    end = 10 + int.from_bytes(raw[8:10], "little")
    header = reworded(raw[10:end].decode(), rng, HEADERS).encode()
    if rng.random() < 0.8:
        length = len(header).to_bytes(2, "little")
    else:
        length = rng.randrange(2**16).to_bytes(2, "little")
    return raw[:8] + length + header + raw[end:]


def scenario(rng: random.Random) -> bytes:
    path = rng.choice(sorted((ROOT / "scenarios").glob("*.toml")))
    return text_of(path.read_text("utf-8"), rng)


def device(rng: random.Random) -> bytes:
    text = 'name = "own"\nmemory_bytes = "24GB"\npeak_flops = 165e12\nhbm_bytes_per_s = 1e12\nlink_bytes_per_s = 1e9\n'
    return text_of(text, rng)


def model(rng: random.Random) -> bytes:
    gpt2 = dict(model_type="gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=64, vocab_size=256, resid_pdrop=0.1)
    llama = dict(
        model_type="llama", hidden_size=64, intermediate_size=96, max_position_embeddings=64, num_attention_heads=4,
        num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=256,
        rope_scaling={"rope_type": "llama3", "factor": 8.0},
    )  # fmt: skip
    return text_of(json.dumps(rng.choice([gpt2, llama]), indent=1), rng)


def text_of(text: str, rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return reworded(text, rng, WORDS).encode("utf-8", "surrogatepass")
    return damaged(text.encode(), rng)


def read_scenario(path: str) -> None:
    file = read_scenario_file(path)
    try:
        RunConfig.from_dict(file.run)
    except InputError as error:
        said(error)
    read_expectations(file)


def said(error: InputError) -> None:
    text = " ".join(str(error).splitlines())
    assert text.isprintable()
    assert 0 < len(text) < 10 * InputError.LONGEST


KINDS: list[tuple[str, Callable[[random.Random], bytes], Callable[[str], object]]] = [
    ("weights.npz", weights, lambda path: read_weights(path, SHAPES)),
    ("model.safetensors", tensors, read_all),
    ("tokens.npz", tokens, lambda path: read_tokens(path, 2, 8, 256, None)),
    ("scenario.toml", scenario, read_scenario),
    ("device.toml", device, find_hardware),
    ("config.json", model, lambda path: RunConfig(model=path)),
]


def run_cases(cases: int, seed: int) -> dict[str, int]:
    """How many of each kind were read whole; anything but success or InputError is raised, its file kept."""
    read = {name: 0 for name, _, _ in KINDS}
    folder = Path(tempfile.mkdtemp())
    for case in range(cases):
        name, make, use = KINDS[case % len(KINDS)]
        path = folder / name
        path.write_bytes(make(random.Random(f"{seed} {case}")))
        begin = time.process_time()
        try:
            use(str(path))
            read[name] += 1
        except InputError as error:
            said(error)
        except BaseException:
            print(f"seed {seed}, case {case}: {path}", file=sys.stderr)
            raise
        if time.process_time() - begin > SECONDS:
            raise TimeoutError(f"seed {seed}, case {case}: {path}")
        path.unlink()
    folder.rmdir()
    return read


@pytest.mark.slow
def test_random_files_are_read_or_refused() -> None:
    """In a process of its own, whose memory is bounded."""
    environment = {**os.environ, "PYTHONPATH": str(Path(zerosim.__file__).parents[1])}
    words = [sys.executable, "-W", "error", __file__, "1200"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", env=environment, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    read = json.loads(done.stdout)
    assert all(0 < some < 200 for some in read.values()), read  # neither all refused nor all read


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(json.dumps(run_cases(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
