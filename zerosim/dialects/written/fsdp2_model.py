"""The model of a plain FSDP2 script: transformers' class with the given sizes, cut and wrapped block by block."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.numbers import NEUTRAL
from zerosim.config.recompute import read_recompute

_COLUMNS = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
_TINY: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "GPT2Config": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 16},
        "LlamaConfig": {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 256,
        },
    }
)
_LLAMA: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "layers",
        "hidden_size": "hidden",
        "intermediate_size": "ffn",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab",
        "max_position_embeddings": "seq",
        "rope_theta": "rope_base",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }
)
_GPT: Mapping[str, str] = MappingProxyType(
    {
        "n_layer": "layers",
        "n_embd": "hidden",
        "n_inner": "ffn",
        "n_head": "heads",
        "vocab_size": "vocab",
        "n_positions": "positions",
        "embd_pdrop": "dropout",
        "resid_pdrop": "dropout",
        "attn_pdrop": "dropout",
        "tie_word_embeddings": "tie_embeddings",
    }
)
"""By transformers' names, ours."""


def is_gpt(config: RunConfig) -> bool:
    """Return whether the model is transformers' GPT-2."""
    return config.model.family == "gpt"


def is_plain(config: RunConfig) -> bool:
    """Return whether sizes alone say the model; others come from their config.json."""
    model = config.model
    return model.family in ("gpt", "llama") and model.numbers == NEUTRAL and not config.value("experts")


def transformers(config: RunConfig) -> list[str]:
    """Return what the script takes from transformers."""
    names = ["GPT2Config" if is_gpt(config) else "LlamaConfig", *([] if is_plain(config) else ["AutoConfig"])]
    return [f"from transformers import {', '.join(sorted(['AutoModelForCausalLM', *names]))}"]


def sizes(config: RunConfig) -> dict[str, Any]:
    """Return the sizes of a GPT-2 or a Llama by transformers' names."""
    return {name: config.value(option) for name, option in (_GPT if is_gpt(config) else _LLAMA).items()}


def every_block(config: RunConfig) -> int:
    """Return K if every K-th block is recomputed whole, 0 if none is."""
    return read_recompute(config.value("recompute")).every


def words(values: Mapping[str, Any]) -> str:
    """Return keywords of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _call(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{name}(", *textwrap.wrap(words(values) + ",", 100, initial_indent="    ", subsequent_indent="    "), ")"]


def _indented(start: str, lines: Sequence[str]) -> list[str]:
    return textwrap.indent(start + "\n".join(lines), "    ").splitlines()


def model(config: RunConfig) -> list[str]:
    """Return the model, cut by tp, with its checkpoints and compiled blocks."""
    kind, layers = ("GPT2Config", "model.transformer.h") if is_gpt(config) else ("LlamaConfig", "model.model.layers")
    eager = ', attn_implementation="eager"' if config.value("attention") == "eager" else ""
    whole = _call(kind, sizes(config)) if is_plain(config) else ['AutoConfig.from_pretrained("config.json")']
    lines = [f"torch.manual_seed({config.value('seed')})  # the same weights on every rank"]
    lines += ["if TINY:", *_indented("config = ", _call(kind, _TINY[kind])), "else:", *_indented("config = ", whole)]
    lines.append(f"model = AutoModelForCausalLM.from_config(config{eager})")
    if config.value("precision") == "bf16-pure":
        lines.append("model.to(torch.bfloat16)")
    lines.append(f"blocks = {layers}")
    if config.value("tp") > 1:
        lines.append("plan = {")
        lines += [f'    "{name}": ColwiseParallel(),' for name in _COLUMNS]
        lines += [f'    "{name}": RowwiseParallel(),' for name in _ROWS]
        lines += ["}", "for block in blocks:", '    parallelize_module(block, mesh["tp"], plan)']
    if every := every_block(config):
        lines.append("for index, block in enumerate(blocks):")
        indent = "    "
        if every > 1:
            lines, indent = [*lines, f"    if (index + 1) % {every} == 0:"], "        "
        lines.append(f"{indent}blocks[index] = checkpoint_wrapper(block)")
    if config.value("kernels") == "compiled":
        lines += ["for block in blocks:", "    if not TINY:", "        block.compile()"]
    return lines
