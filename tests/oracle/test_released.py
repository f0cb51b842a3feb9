"""Real weights beside transformers: what it saves trains here, what is saved here it loads, with equal logits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from built import builder, place

from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.config_json import config_json
from zerosim.dtypes import fp32
from zerosim.models.released import read_released
from zerosim.placement.block import BALANCE
from zerosim.placement.families import DECODERS
from zerosim.tensor.tensor import Tensor, cpu
from zerosim.train.build_model import BUILDERS
from zerosim.train.data import shift_right
from zerosim.train.masked import UNREAD, mask_tokens
from zerosim.train.run import run
from zerosim.train.uploads import upload

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

SIZES: dict[str, Any] = dict(layers=2, hidden=32, heads=4, seq=12, vocab=40)
MORE: dict[str, dict[str, Any]] = {
    "t5": dict(decoder_seq_length=9),
    "bloom": dict(ffn=128),
    "falcon": dict(kv_heads=2),
    "gpt_bigcode": dict(kv_heads=1),
}
FURTHER = [
    ("gpt", dict(tie_embeddings=False, ffn=48)),
    ("llama", dict(tie_embeddings=True, head_dim=4)),
    ("gpt_neox", dict(tie_embeddings=True)),
    ("bloom", dict(tie_embeddings=False, ffn=128)),
    ("falcon", dict(kv_heads=1)),
    ("falcon", dict(kv_heads=4)),
    ("gpt_bigcode", dict(kv_heads=4)),
]
QUICK = "gpt", "llama", "gpt_neox", "falcon"
CASES = [
    pytest.param(family, MORE.get(family, {}), id=family, marks=[] if family in QUICK else [pytest.mark.slow])
    for family in DECODERS
] + [pytest.param(*case, id=f"{case[0]}-{number}", marks=[pytest.mark.slow]) for number, case in enumerate(FURTHER)]
FLAGS = *SIZES, "kv_heads", "head_dim", "ffn", "tie_embeddings"
ROWS, LR = 2, 1e-2


@dataclass(frozen=True)
class Task:
    """A family's tiny model as transformers draws and saves it, and two batches."""

    config: RunConfig
    model: Any
    tokens: Any


def made(family: str, sizes: dict[str, Any], folder: Path) -> Task:
    """Draw every weight and bias: at first many are 0 or 1, and equal if their places are confused."""
    config = RunConfig(
        model=family, **{**SIZES, **sizes}, weights=str(folder), tokens=str(folder / "tokens.npz"), optimizer="sgd",
        lr=LR, steps=2, precision="fp32", micro_batch=ROWS, ranks=1,
    )  # fmt: skip
    values = config_json(config.model, "float32")
    torch.manual_seed(3)  # what transformers draws
    model = auto(config).from_config(transformers.AutoConfig.for_model(**values))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    model.eval().save_pretrained(folder)
    tokens = np.random.default_rng(5).integers(2, SIZES["vocab"], (2, ROWS, config.model.text_tokens + 1))
    np.savez(folder / "tokens.npz", tokens=tokens)
    return Task(config, model, tokens)


def logits_of(config: RunConfig, weights: dict[str, Any], ids: Any) -> Any:
    """zerosim's logits (B, T, V) with these weights."""
    sizes = {name: getattr(config.model, name) for name in ("name", *FLAGS)}
    new = builder(cpu(), fp32, **{**sizes, "decoder_seq_length": config.model.decoder_seq_length})
    built = place(BUILDERS[config.model.family](new))
    built.load_state_dict({name: values for name, values in weights.items() if not name.endswith(BALANCE)})
    x = Tensor(upload(ids, built.flats[0].device))
    for unit in built.units:
        x = unit.forward(x)
    return np.array(built.whole_logits(x).array)


def auto(config: RunConfig) -> Any:
    if config.model.is_second:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForMaskedLM if config.model.is_masked else transformers.AutoModelForCausalLM


def parted(config: RunConfig, tokens: Any, step: int = 0) -> tuple[Any, Any]:
    """What a model reads of these rows of text, and what it predicts."""
    model, data = config.model, config.data
    if model.is_masked:
        rows = mask_tokens(tokens[:, :-1], data.seed, step, model.vocab, model.vocab - 1)
        return rows[:, : model.seq], rows[:, model.seq :]
    if model.is_second:
        rows = shift_right(tokens, model.seq, model.numbers.decoder_start)
        return rows[:, : -model.decoder_tokens], rows[:, -model.decoder_tokens :]
    return tokens[:, :-1], tokens[:, 1:]


def their_logits(config: RunConfig, model: Any, ids: Any) -> Any:
    """The logits of a model of transformers: a tensor with its graph."""
    if config.model.is_second:
        first, second = (torch.from_numpy(part) for part in np.split(ids, [config.model.seq], axis=1))
        return model(first, decoder_input_ids=second).logits
    return model(torch.from_numpy(ids)).logits


def loss_of(task: Task, model: Any, step: int) -> float:
    inputs, labels = parted(task.config, task.tokens[step], step)
    assert not task.config.model.is_masked or inputs.min() > 1, "transformers takes 0 or 1 for padding"
    with torch.no_grad():
        logits, targets = their_logits(task.config, model, inputs), torch.from_numpy(labels).flatten()
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=UNREAD))


def loaded(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """What transformers loads, which must miss and drop nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return found.eval()


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_saved_weights_train_here_and_go_back(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    task, out = made(family, sizes, tmp_path), tmp_path / "out"
    both = run(task.config)
    assert both.losses[0][0] == pytest.approx(loss_of(task, task.model, 0), abs=1e-5)
    assert trained(task.config.replace(steps=1), "--save-weights", out) == 0
    theirs = loaded(out, auto(task.config))
    assert both.losses[1][0] == pytest.approx(loss_of(task, theirs, 1), abs=1e-5)
    weights = run(task.config.replace(steps=1)).weights
    ids = parted(task.config, task.tokens[1])[0]
    if not any(values.any() for name, values in weights.items() if name.endswith(BALANCE)):  # only a run has them
        with torch.no_grad():
            difference = their_logits(task.config, theirs, ids).numpy() - logits_of(task.config, weights, ids)
        assert np.abs(difference).max() <= 1e-5
    again = read_released(str(out), task.config.model, {name: values.shape for name, values in weights.items()})
    assert all(np.array_equal(read(), weights[name]) for name, read in again.items())


def trained(config: RunConfig, *more: object) -> int:
    """Train as a user does."""
    model, data = config.model, config.data
    words = [f"--{name.replace('_', '-')}={getattr(model, name)}" for name in FLAGS[:-1]]
    words += ["--decoder-seq-length", str(model.decoder_tokens)] if model.is_second else []
    words.append("--tie-embeddings" if model.tie_embeddings else "--no-tie-embeddings")
    name = ["--model", model.name, "--weights", str(data.weights), "--tokens", str(data.tokens)]
    each = f"--ranks 1 --micro-batch {ROWS} --precision fp32 --optimizer sgd --lr {LR} --steps {config.optim.steps} -q"
    return main(["run", *name, *words, *each.split(), *map(str, more)])


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_folder_is_a_model(family: str, dtype: str, tmp_path: Path) -> None:
    """config.json, half types, shards: all from one folder, and the saved weights are theirs bit for bit."""
    task = made(family, {}, tmp_path)
    half = task.model.to(getattr(torch, dtype))
    half.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    half.float()
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    words = f"--model {tmp_path / 'in'} --weights {tmp_path / 'in'} --tokens {task.config.data.tokens} --ranks 1"
    more = f"--seq 12 --micro-batch {ROWS} --dropout 0 --precision fp32 --optimizer sgd --lr 1e-30 --steps 1 -q"
    assert main(["run", *words.split(), *more.split(), "--save-weights", str(tmp_path / "out")]) == 0
    own, ours = half.state_dict(), loaded(tmp_path / "out").state_dict()
    assert own.keys() == ours.keys()
    assert all(torch.equal(own[name], ours[name]) for name in own)


# -- adapters --------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # PEFT's use of transformers
@pytest.mark.parametrize(
    ("family", "target"),
    [("llama", "q,v,down"), ("gpt", "o,fc"), ("gpt_neox", "query_key_value"), ("bert", "q,down"), ("t5", "q,v,down")],
)
def test_adapters_go_to_peft_and_back(family: str, target: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    task, out, merged = made(family, {}, tmp_path), tmp_path / "adapters", tmp_path / "merged"
    changes = dict(lora_rank=2, lora_alpha=6.0, lora_target=target, lr=1.0)
    words = ["--lora-rank", 2, "--lora-alpha", 6, "--lr", 1, "--lora-target", target]
    assert trained(task.config.replace(steps=1), *words, "--save-adapters", out, "--save-merged", merged) == 0
    both = run(task.config.replace(**changes))
    theirs = peft.PeftModel.from_pretrained(task.model, out, is_trainable=False).eval()
    assert both.losses[1][0] == pytest.approx(loss_of(task, theirs, 1), abs=1e-5)
    assert both.losses[1][0] == pytest.approx(loss_of(task, loaded(merged, auto(task.config)), 1), abs=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    one = run(task.config.replace(**changes, steps=1)).weights
    again = task.config.replace(**{**changes, "lr": 1e-30}, steps=1, adapters=str(tmp_path / "theirs"))
    assert all(np.array_equal(values, one[name]) for name, values in run(again).weights.items())
