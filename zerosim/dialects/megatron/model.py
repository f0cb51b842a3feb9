"""The model that a Megatron command line describes, as a family and its sizes."""

from __future__ import annotations

import os
from typing import Any

from zerosim.config.hub import is_of_hub
from zerosim.dialects.megatron.args import Arguments
from zerosim.dialects.megatron.keys import KINDS_OF_BLOCK

_MIXED = {"gpt": "gpt", "llama": "llama", "qwen3": "qwen3_moe"}
_WITH_DROPOUT = ("gpt", "gpt_bigcode")
GPT2 = 50257
OTHERS = ("--multi-latent-attention", "--spec", "--yaml-cfg", "--heterogeneous-layers-config-path",
          "--hybrid-override-pattern", "--experimental-attention-variant", "--is-hybrid-model",
          "--window-size", "--window-attn-skip-freq", "--softmax-type", "--moe-layer-freq")  # fmt: skip
_BLOCK = ("--swiglu", "--normalization", "--position-embedding-type", "--disable-bias-linear", "--add-qkv-bias",
          "--qk-layernorm", "--group-query-attention")  # fmt: skip
_DESCRIBED = (*_BLOCK, "--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size", "--padded-vocab-size",
              "--ffn-hidden-size", "--kv-channels", "--num-query-groups", "--rotary-base", "--norm-epsilon",
              "--squared-relu", "--quick-geglu", "--untie-embeddings-and-output-weights", "--num-experts",
              "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size",
              "--rotary-percent", "--max-position-embeddings", "--attention-dropout",
              "--hidden-dropout", *OTHERS)  # fmt: skip


def model_of(arguments: Arguments, tp: int) -> None:
    """Set the family, its sizes and the rows' length."""
    _length(arguments)
    if arguments.is_swift:
        _swift_model(arguments)
    if arguments.flag("model") is not None:
        for name in _DESCRIBED:
            if arguments.has(name):
                arguments.tell(name, "understood", "--model says it")
        _vocabulary(arguments, tp, is_given=True)
        return
    if arguments.is_swift:
        if "model" in arguments.notes.values:
            _vocabulary(arguments, tp, is_given=True)
        return
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings"):
        if not arguments.has(name) and name not in arguments.notes.document.keys:
            plain = name.lstrip("-").replace("-", "_")
            arguments.refuse(name, f"AssertionError: {plain} argument is None", f"add {name}, or pass --model NAME")
            return
    for name in OTHERS:
        arguments.lacks(name, "blocks that no argument here describes", advice="pass --model FOLDER/config.json, or "
                        f"--without {name.lstrip('-')}")  # fmt: skip
    _sizes(arguments)
    family = _family(arguments)
    _dropout(arguments, family)
    _vocabulary(arguments, tp)


def _length(arguments: Arguments) -> None:
    seq, most = arguments["--seq-length"], arguments["--max-position-embeddings"]
    if seq is None and not arguments.is_swift and "--seq-length" not in arguments.notes.document.keys:
        arguments.refuse("--seq-length", "AssertionError without a text: a length is required", "add --seq-length")
    if seq is not None and most is not None and most < seq:
        why = f"AssertionError: max_position_embeddings ({most}) must be greater than or equal to seq_length ({seq})"
        arguments.refuse("--max-position-embeddings, --seq-length", why, f"write --max-position-embeddings {seq}")
    if arguments.is_swift and arguments.has("--max-length") and not arguments.has("--seq-length"):
        arguments.sets("--max-length", seq=arguments["--max-length"])


def _swift_model(arguments: Arguments) -> None:
    name = arguments.values.get("--model")
    if name is None or arguments.flag("model") is not None:
        arguments.tell("--model", "understood", "--model says it")
    elif os.path.exists(str(name)):
        arguments.sets("--model", model=str(name))
    elif is_of_hub(str(name)):
        arguments.refuse("--model", f"{name!r}: a hub's name, and nothing is downloaded", "download its config.json, "
                         "and pass --model FOLDER/config.json", by="zerosim")  # fmt: skip
    else:
        arguments.sets("--model", model=str(name))


def _sizes(arguments: Arguments) -> None:
    hidden, heads = arguments["--hidden-size"], arguments["--num-attention-heads"]
    arguments.sets("--num-layers", layers=arguments["--num-layers"])
    arguments.sets("--hidden-size", hidden=hidden)
    arguments.sets("--num-attention-heads", heads=heads)
    wide = arguments["--kv-channels"]
    if not hidden or not heads:
        return
    if wide is None and hidden % heads:
        arguments.refuse("--num-attention-heads", f"AssertionError without a text: {heads} do not divide {hidden}")
    elif wide is not None and wide * heads == hidden:
        arguments.tell("--kv-channels", "ignored", "equals hidden / heads")
    elif wide is not None:
        arguments.sets("--kv-channels", head_dim=wide)
    wide = arguments.flag("hidden") or hidden
    ffn = arguments["--ffn-hidden-size"] or (int(4 * wide * 2 / 3 / 64) * 64 if arguments["--swiglu"] else 4 * wide)
    arguments.sets("--ffn-hidden-size", ffn=ffn)
    if arguments["--group-query-attention"]:
        arguments.sets("--num-query-groups", kv_heads=arguments["--num-query-groups"])
        arguments.tell("--group-query-attention", "understood", f"kv_heads {arguments['--num-query-groups']}")
    else:
        arguments.tell("--num-query-groups", "ignored", "without --group-query-attention Megatron ignores it")
        kv_heads = arguments.flag("heads") or heads
        arguments.usually("Megatron without --group-query-attention", kv_heads=kv_heads)
    tied = not arguments["--untie-embeddings-and-output-weights"]
    arguments.sets("--untie-embeddings-and-output-weights", tie_embeddings=tied)


def _family(arguments: Arguments) -> str:
    """Set the family, and its positions; return its name, '' if it has none."""
    turns = arguments.has("--use-rotary-position-embeddings")
    positions = "rope" if turns else arguments["--position-embedding-type"]
    if arguments.has("--no-position-embedding") and positions != "rope":
        arguments.refuse("--no-position-embedding", "RuntimeError: deprecated", "use --position-embedding-type")
    gated, biased = bool(arguments["--swiglu"]), not arguments["--disable-bias-linear"]
    shares = bool(arguments["--group-query-attention"]) and (
        arguments["--num-query-groups"] != arguments["--num-attention-heads"]
    )
    norms, of_q = bool(arguments["--qk-layernorm"]), biased or bool(arguments["--add-qkv-bias"])
    block = (arguments["--normalization"], gated, positions, biased, of_q, norms)
    fitting = [family for family, one in KINDS_OF_BLOCK.items() if one[:6] == block and (one[6] or not shares)]
    family = fitting[0] if fitting else ""
    experts = arguments["--num-experts"] or 0
    for name in ("--squared-relu", "--quick-geglu"):
        arguments.lacks(name, "a feed-forward with this function")
    if experts:
        family = _MIXED.get(family, "")
    if not family:
        what = f"{arguments['--normalization']}, {'SwiGLU' if gated else 'GELU'}, positions {positions}, "
        what += f"{'with' if biased else 'without'} biases{' of q, k and v' * (of_q > biased)}"
        what += " and norms of q and k" * norms + " and shared keys" * shares + f", {experts} experts" * bool(experts)
        named = ", ".join(name for name in _BLOCK if arguments.has(name)) or "--normalization"
        why = f"no family here has blocks of {what}"
        arguments.refuse(named, why, "pass --model NAME, such as llama or gpt", by="zerosim")
        family = "llama" if gated else "gpt"
    arguments.usually("the arguments of its blocks", model=family)
    for name in (*_BLOCK, "--use-rotary-position-embeddings", "--no-position-embedding"):
        if arguments.has(name):
            arguments.tell(name, "understood", f"model {family}")
    if positions == "rope":
        arguments.sets("--rotary-base", rope_base=float(arguments["--rotary-base"]))
        arguments.tell("--max-position-embeddings", "understood", "rotary positions have no table")
        arguments.tell("--rotary-percent", "understood", "1 rotates whole heads")
        if arguments["--rotary-percent"] != 1:
            arguments.lacks("--rotary-percent", "rotary positions of a part of each head", costs=False)
    else:
        arguments.sets("--max-position-embeddings", positions=arguments["--max-position-embeddings"])
    if experts:
        _experts(arguments, experts)
    return family


def _experts(arguments: Arguments, experts: int) -> None:
    arguments.sets("--num-experts", experts=experts)
    arguments.sets("--moe-router-topk", top_k=arguments["--moe-router-topk"])
    if arguments.has("--moe-ffn-hidden-size"):
        arguments.sets("--moe-ffn-hidden-size", expert_ffn=arguments["--moe-ffn-hidden-size"])
    if shared := arguments["--moe-shared-expert-intermediate-size"]:
        arguments.sets("--moe-shared-expert-intermediate-size", shared_experts=1, shared_ffn=shared)


def _dropout(arguments: Arguments, family: str) -> None:
    hidden, scores = arguments["--hidden-dropout"], arguments["--attention-dropout"]
    if arguments.flag("dropout") is not None:
        return
    names = "--hidden-dropout, --attention-dropout"
    write = "write --hidden-dropout 0 --attention-dropout 0, or pass --dropout P"
    if family not in _WITH_DROPOUT and (hidden or scores):
        source = "" if arguments.has(*names.split(", ")) else ", Megatron's default"
        arguments.refuse(names, f"dropout {max(hidden, scores)}{source}: a {family} has none here", write, by="zerosim")
        return
    if hidden != scores:
        arguments.refuse(names, f"{hidden} and {scores}: one rate for both here", write, by="zerosim")
    arguments.sets("--hidden-dropout", dropout=hidden)
    arguments.tell("--attention-dropout", "understood", f"dropout {hidden}")


def _vocabulary(arguments: Arguments, tp: int, *, is_given: bool = False) -> None:
    """Set the vocabulary, padded as Megatron pads it."""
    multiple = arguments["--make-vocab-size-divisible-by"]
    if is_given:
        if tp > 1 and multiple == 128:
            arguments.sets("--make-vocab-size-divisible-by", pad_vocab=True)
        arguments.tell("--make-vocab-size-divisible-by", "understood", "--model says the vocabulary")
        return
    vocab = arguments.flag("vocab") or arguments["--vocab-size"]
    kind = arguments["--tokenizer-type"]
    if arguments["--padded-vocab-size"]:
        arguments.sets("--padded-vocab-size", vocab=arguments["--padded-vocab-size"])
        arguments.tell("--vocab-size", "ignored", "--padded-vocab-size says it")
        return
    source = "--vocab-size"
    if vocab is None and "--vocab-size" in arguments.notes.document.keys:
        return
    if vocab is None and kind not in (None, "GPT2BPETokenizer"):
        arguments.refuse("--tokenizer-type", f"{kind!r}: the vocabulary is in the tokenizer's files", "pass --vocab V",
                         by="zerosim")  # fmt: skip
        return
    if vocab is None:
        vocab, source = GPT2, "GPT-2's tokenizer"
        arguments.notes.note(f"without --vocab-size the vocabulary is GPT-2's, {GPT2:,}")
        arguments.tell("--tokenizer-type", "understood", f"vocab {GPT2}")
    padded = -(-vocab // (multiple * tp)) * multiple * tp if multiple > 0 else vocab
    own = multiple == 128 and tp > 1
    values: dict[str, Any] = {"vocab": vocab, "pad_vocab": True} if own else {"vocab": padded}
    more = f"{vocab:,} padded to a multiple of {multiple * tp}" if padded > vocab else ""
    if source in arguments.values and arguments.flag("vocab") is None:
        arguments.sets(source, more, **values)
    else:
        arguments.usually(source if source != "--vocab-size" else "--vocab", **values)
    arguments.tell("--make-vocab-size-divisible-by", "understood", more or "nothing to pad")
