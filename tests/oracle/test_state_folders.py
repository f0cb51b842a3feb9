"""Folders of accelerate, transformers' Trainer, save_pretrained and PEFT, beside the models that wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zerosim.state.formats import WholeState, format_of, read_whole

from .state_files import check_tensors
from .state_model import Tiny, groups, tokens

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
STATES = ("exp_avg", "exp_avg_sq")


def llama(dtype: torch.dtype = torch.float32, tied: bool = False) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=tied, use_cache=False)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype)


def check_states(state: WholeState, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(one): name for name, one in model.named_parameters()}
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    assert state.states.keys() == {names[id(one)] for one in trained}
    for one in trained:
        own = {key: optimizer.state[one][key] for key in STATES}
        check_tensors(state.states[names[id(one)]], own, names[id(one)])


def order_of(model: torch.nn.Module) -> list[str]:
    """The trained weights in the model's own order, which zerosim knows of its models."""
    return [name for name, one in model.named_parameters() if one.requires_grad]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_accelerates_folder(tmp_path: Path, safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = Tiny()
    model.head.weight = torch.nn.Parameter(model.emb.weight.detach().clone())
    optimizer = torch.optim.AdamW(groups(model, split=False), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(tokens(0, 0, 1)))
    optimizer.step()
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    accelerate.state.AcceleratorState._reset_state(True)
    assert format_of(str(tmp_path)) == "accelerate"
    state = read_whole(str(tmp_path), order_of(model))
    check_tensors(state.weights, model.state_dict(), "weights")
    check_states(state, model, optimizer.optimizer)
    assert (state.kind, state.step) == ("accelerate", 1)
    assert state.others["random_states_0.pkl"] == "states of random generators"
    without = read_whole(str(tmp_path))
    assert not without.states
    assert "names are not in the files" in without.others["optimizer"]


@pytest.mark.filterwarnings("ignore")
def test_the_trainers_folder(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, rows = llama(), torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    words = dict(report_to=[], max_steps=2, save_steps=2, weight_decay=0.1, use_cpu=True, disable_tqdm=True)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, **words)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    assert format_of(str(folder)) == "accelerate"
    state = read_whole(str(folder), order_of(model))
    assert (state.kind, state.step) == ("trainer", 2)
    check_tensors(state.weights, model.state_dict(), "weights")
    check_states(state, model, trainer.optimizer.optimizer)
    assert not read_whole(str(folder)).states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pretrained_folders_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama(dtype, tied=True)
    for name, size in (("whole", "1GB"), ("shards", "4KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        expected = {key: one for key, one in model.state_dict().items() if key != "lm_head.weight"}
        assert format_of(str(tmp_path / name)) == "safetensors"
        check_tensors(read_whole(str(tmp_path / name)).weights, expected, name)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()


@pytest.mark.filterwarnings("ignore")
def test_pefts_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    expected = peft.get_peft_model_state_dict(model)
    check_tensors(read_whole(str(tmp_path)).weights, expected, "adapters")
