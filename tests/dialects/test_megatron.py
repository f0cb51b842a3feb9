"""Megatron-LM's command lines: given files, the traps of its parser, bad input, and the way there and back."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dialects.given import config_of, expectation, reading_of, unlike
from dialects.megatron_configs import drawn, said

from zerosim.config import RunConfig
from zerosim.dialects import Context, Reading, document_of, read
from zerosim.dialects.megatron import TABLE
from zerosim.dialects.rows import by_key
from zerosim.dialects.written.megatron import written
from zerosim.errors import InputError

FIGURE, LLAMA, MIXTRAL = "megatron_sc21_figure11.sh", "megatron_llama3_8b_fp8.sh", "megatron_mixtral_8x7b.sh"
GPT3, SWIFT = "megatron_gpt3_175b.sh", "swift_megatron_32b.sh"
CHANGED = {LLAMA: {"model": "llama"}}
"""Sizes are read from the arguments, so the family stands in place of a preset's name."""
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --lr 1e-3"
)
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
GATED = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
LLAMA_ARGS = f"{GATED} --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"


@pytest.fixture
def line(tmp_path: Path) -> Any:
    """Read a command line behind a small model's arguments, on 8 ranks."""

    def reading(
        words: str, *, ranks: int = 8, before: str = "", without: tuple[str, ...] = (), **given: Any
    ) -> Reading:
        path = tmp_path / "train.sh"
        path.write_text(f"{before}\ntorchrun --nproc_per_node {ranks} pretrain_gpt.py {SMALL} {words}\n", "utf-8")
        return read([str(path)], Context(given=given), without)

    return reading


def script(tmp_path: Path, text: str, name: str = "train.sh") -> str:
    (tmp_path / name).write_text(text, "utf-8")
    return str(tmp_path / name)


@pytest.mark.parametrize("name", [LLAMA, MIXTRAL, FIGURE])
def test_given(name: str) -> None:
    reading = reading_of(name)
    assert unlike(name, reading, CHANGED.get(name, {})) == {}
    assert {one.split()[0].rstrip(":") for one in expectation(name)["ignored"]} <= set(reading.of("ignored"))
    assert {said.key for said in reading.said} == set(reading.document.keys)
    assert not reading.of("auto")
    if name == LLAMA:  # products and gathers in 8 bits are modelled by now
        reading.check()
    elif name != MIXTRAL:  # experts too
        assert reading.refusals[0].key == expectation(name)["refuse"]["key"]


def test_given_without_eight_bits_and_with_experts() -> None:
    reading = reading_of(LLAMA, "--fp8-format")
    reading.check()
    assert reading.values["grad_dtype"] == "bf16"
    assert "--fp8-param-gather" in reading.of("ignored")
    config = config_of(reading_of(MIXTRAL))
    assert (config.model.experts, config.mesh.ep, config.model.top_k, config.mesh.ranks_per_node) == (8, 8, 2, 8)


def test_given_in_eight_bits() -> None:
    reading = reading_of(LLAMA)
    fp8 = config_of(reading).fp8
    assert (fp8.param_gather, reading.sources["fp8_param_gather"]) == (True, "--fp8-param-gather")
    assert not config_of(reading_of(LLAMA, "--fp8-param-gather")).fp8.param_gather
    assert (fp8.kind, fp8.library, fp8.form, fp8.exact_wgrad) == ("delayed", "te", "hybrid", False)
    assert (fp8.amax_history, fp8.amax_algo, fp8.margin) == (1024, "max", 0)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--fp8-format hybrid", {"fp8": "delayed"}),  # Megatron's defaults: a history of 1 step, most_recent
        ("--fp8-format e4m3", {"fp8": "delayed", "fp8_format": "e4m3"}),
        (
            "--fp8-format hybrid --fp8-margin 2 --fp8-amax-history-len 16 --fp8-amax-compute-algo max --no-fp8-wgrad",
            {"fp8": "delayed", "fp8_margin": 2, "fp8_amax_history": 16, "fp8_amax_algo": "max",
             "fp8_exact_wgrad": True},
        ),
        (
            "--fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
            {"fp8": "delayed", "fp8_param_gather": True},
        ),
        ("--fp8-format hybrid --fp8-recipe tensorwise", {"fp8": "tensorwise", "fp8_library": "te"}),
        ("--fp8-format e4m3 --fp8-recipe blockwise", {"fp8": "blockwise"}),
        ("--fp8-format hybrid --fp8-recipe mxfp8", {"fp8": "mxfp8", "fp8_format": "hybrid"}),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            {"fp8": "mxfp8", "fp8_exact_first": 1, "fp8_exact_last": 2},
        ),
    ],
)  # fmt: skip
def test_products_in_eight_bits(words: str, values: dict[str, Any], line: Any) -> None:
    reading = line(f"--bf16 {words}")
    reading.check()
    assert {name: one for name, one in reading.values.items() if name.startswith("fp8")} == values
    if values["fp8"] != "blockwise":  # the model is too small for blocks of 128
        config_of(reading)


def test_arguments_of_other_scalings_have_no_effect(line: Any) -> None:
    reading = line("--fp8-format e4m3 --fp8-recipe mxfp8 --no-fp8-wgrad --fp8-amax-history-len 16 "
                   "--num-layers-at-start-in-bf16 2")  # fmt: skip
    reading.check()
    idle = {"--no-fp8-wgrad", "--fp8-amax-history-len", "--num-layers-at-start-in-bf16"}
    assert idle <= set(reading.of("ignored"))
    assert "fp8_exact_wgrad" not in reading.values


def test_swifts_history_is_longer(tmp_path: Path) -> None:
    text = f"megatron sft {SMALL.replace('-', '_').replace('__', '--')} --fp8_format hybrid"
    reading = read([script(tmp_path, text)], Context(given={"ranks": 8}))
    assert (reading.values["fp8_amax_history"], reading.values["fp8_amax_algo"]) == (1024, "max")


def test_megatrons_own_example_is_refused_by_its_parser() -> None:
    reading = reading_of(GPT3)
    assert reading.refusals[0].key == "--step-batch-size-schedule"
    assert "unrecognized arguments: 2.4B:320" in reading.refusals[0].why
    reading = reading_of(GPT3, "step-batch-size-schedule")
    assert "world size (8) is not divisible by total_model_size (128)" in reading.refusals[0].why
    reading = reading_of(GPT3, "step-batch-size-schedule", ranks=128)
    reading.check()
    ours = config_of(reading, ranks=128)
    theirs = {key: tuple(one) if isinstance(one, list) else one for key, one in expectation(GPT3)["understood"].items()}
    assert {key for key, one in theirs.items() if ours.value(key) != one} == {"model"}


def test_swift_translates_underscores() -> None:
    reading = reading_of(SWIFT)
    assert [one.key for one in reading.refusals] == ["--model"]
    understood = expectation(SWIFT)["understood"]
    assert {key: reading.values.get(key) for key in understood} == understood
    assert "argparse exits 2" in reading.notes[0]
    given = reading_of(SWIFT, model="llama3-8b")
    given.check()
    assert config_of(given, model="llama3-8b").parallel.pad_vocab


REFUSED = (
    # words, the key, a part of the reason
    ("--bf16 --fp16", "--fp16, --bf16", "AssertionError"),
    ("--bf", "--bf", "none of the arguments"),
    ("--micro_batch_size 2", "--micro_batch_size", "no underscores"),
    ("--bf16 yes", "--bf16", "unrecognized arguments: yes"),
    ("--seed", None, ""),
    ("--lr", "--lr", "expected one argument"),
    ("--lr fast", "--lr", "invalid float value"),
    ("--num-layers 4.0", "--num-layers", "invalid int value"),
    ("--lr-decay-style sine", "--lr-decay-style", "expected one of"),
    ("--batch-size 4", "--batch-size", "--micro-batch-size"),
    ("--model-parallel-size 2", "--model-parallel-size", "--tensor-model-parallel-size"),
    ("--warmup 0.1", "--warmup", "--lr-warmup-fraction"),
    ("--checkpoint-activations", "--checkpoint-activations", "prints"),
    ("--activations-checkpoint-method uniform", "--activations-checkpoint-method", "argparse exits 2"),
    ("--global-batch-size 12", "--global-batch-size", "eval_global_batch_size"),
    ('--global-batch-size 8 --step-batch-size-schedule "0:8 1B:16"', "--global-batch-size, --step-batch-size-schedule",
     "cannot specify both"),
    ("--rampup-batch-size 8 8 100 --train-iters 9", "--rampup-batch-size, --train-iters", "no batch-size rampup"),
    ("--train-iters 9 --train-samples 9", "--train-iters, --train-samples", "AssertionError"),
    ("--train-samples 9 --lr-warmup-iters 2", "--train-samples, --lr-warmup-iters", "sample-based"),
    ("--min-lr 1", "--min-lr, --lr", "AssertionError"),
    ("--seq-length 128", "--max-position-embeddings, --seq-length", "greater than or equal"),
    ("--tensor-model-parallel-size 3", None, "world size (8) is not divisible"),
    ("--tp-comm-overlap", "--tp-comm-overlap", "sequence parallelism"),
    ("--overlap-param-gather --overlap-grad-reduce", "--overlap-param-gather", "distributed optimizer"),
    ("--overlap-param-gather --use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce"),
    ("--optimizer-cpu-offload --use-distributed-optimizer", "--optimizer-cpu-offload", "precision-aware"),
    ("--recompute-granularity full", "--recompute-granularity", "recompute_method must be"),
    ("--recompute-granularity full --recompute-method uniform", "--recompute-granularity", "num_layers must be"),
    ("--recompute-granularity selective --recompute-method uniform", "--recompute-method", "not yet supported"),
    ("--recompute-granularity selective --recompute-modules moe_act", "--recompute-modules", "moe_grouped_gemm"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "--recompute-num-layers",
     "not modelled"),
    ("--distribute-saved-activations", "--distribute-saved-activations", "full recompute"),
    ("--cuda-graph-impl local --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
     "--cuda-graph-impl", "must not be full"),
    (f"{PP2} --num-layers 5", "--num-layers, --pipeline-model-parallel-size", "divisible"),
    ("--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank", "greater than 1"),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
     "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank", "No more than one"),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
     "--num-virtual-stages-per-pipeline-rank", "greater than 2"),
    (f"{PP2} --pipeline-model-parallel-layout 'Ett|ttxL'", "--pipeline-model-parallel-layout", "Invalid layer"),
    (f"{PP2} --pipeline-model-parallel-layout 'E(t|)*99999999L'", "--pipeline-model-parallel-layout", "million"),
    (f"{PP2} --use-torch-fsdp2", "--use-torch-fsdp2", "pipeline parallelism"),
    ("--use-torch-fsdp2", "--use-torch-fsdp2", "gradient accumulation fusion"),
    ("--use-megatron-fsdp", "--use-megatron-fsdp", "fsdp_dtensor"),
    ("--expert-model-parallel-size 2", "--expert-model-parallel-size", "num_experts must be non None"),
    ("--num-experts 4 --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias", "sigmoid"),
    ("--num-experts 4 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity "
     "--moe-token-dispatcher-type flex",
     "--moe-pad-expert-input-to-capacity", "deepep"),
    ("--num-experts 4 --moe-shared-expert-intermediate-size 96 --moe-shared-expert-overlap",
     "--moe-shared-expert-overlap", "alltoall"),
    ("--num-experts 3 --expert-model-parallel-size 2", "--expert-model-parallel-size", "multiple"),
    ("--num-experts 4 --expert-model-parallel-size 2 --fp16", "--expert-model-parallel-size, --fp16", "fp16"),
    ("--optimizer muon --use-distributed-optimizer", "--optimizer, --use-distributed-optimizer", "Muon"),
    ("--context-parallel-size 8 --seq-length 40", "--seq-length", "2 * context-parallel-size"),
    ("--fp8-param-gather --fp8-format hybrid", "--fp8-param-gather", "distributed optimizer"),
    ("--fp8-format hybrid --fp4-format e2m1", "--fp8-format, --fp4-format", "simultaneously"),
    ("--fp4-format e2m1", "--fp4-format", "4 bits (NVFP4)"),
    ("--fp8-format hybrid --first-last-layers-bf16", "--first-last-layers-bf16", "Delayed scaling does not support"),
    (
        "--fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16 --num-layers-at-end-in-bf16 5",
        "--num-layers-at-end-in-bf16", "layers per pipeline stage (4)",
    ),
    ("--fp8-format hybrid --fp8-recipe rowwise", "--fp8-recipe", "rowwise"),
    ("--fp8-format hybrid --fp8-recipe custom", "--fp8-recipe", "a function of one's own"),
    ("--fp8-format hybrid --transformer-impl local", "--fp8-format, --transformer-impl", "Transformer Engine's"),
    ("--fp8-format hybrid --num-experts 8", "--fp8-format", "experts' maps in 8 bits"),
    ("--fp8-format hybrid --fp8-multi-head-attention", "--fp8-multi-head-attention", "attention in 8 bits"),
    (
        "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer", "--fp8-param-gather",
        "kept and gathered in 8 bits beside --fp8 mxfp8",
    ),
    (
        "--fp8-format hybrid --fp8-param-gather --bf16 --use-distributed-optimizer --optimizer-cpu-offload "
        "--use-precision-aware-optimizer", "--fp8-param-gather", "kept and gathered in 8 bits beside --offload",
    ),
    ("--squared-relu", "--squared-relu", "not modelled"),
    ("--swiglu", "--swiglu", "no family here"),
    (f"{GATED}", "--hidden-dropout, --attention-dropout", "Megatron's default"),
    ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-type", "the tokenizer's files"),
    ("--multi-latent-attention", "--multi-latent-attention", "not modelled"),
    ("--attention-backend local", "--attention-backend", "--spec local"),
)  # fmt: skip


@pytest.mark.parametrize(("words", "key", "why"), REFUSED)
def test_megatron_refuses(line: Any, words: str, key: str | None, why: str) -> None:
    reading = line(words)
    if why:
        named = [f"{one.why} {one.advice}" for one in reading.refusals if key in (None, one.key)]
        assert any(why in text for text in named), reading.refusals
        with pytest.raises(InputError) as error:
            reading.check()
        assert "\n" not in str(error.value)
    else:
        reading.check()


UNDERSTOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--micro-batch-size=2 --micro-batch-size 4", {"micro_batch": 4, "accumulate": 1}),
    (f"{LLAMA_ARGS} --num-query-groups 2", {"model": "llama", "kv_heads": 4, "ffn": 128, "tie_embeddings": False}),
    (f"{LLAMA_ARGS} --num-query-groups 2 --group-query-attention", {"kv_heads": 2}),
    (f"{LLAMA_ARGS} --add-qkv-bias --kv-channels 32", {"model": "qwen2", "head_dim": 32}),
    (f"{LLAMA_ARGS} --num-experts 4 --moe-shared-expert-intermediate-size 96", {"experts": 4, "shared_ffn": 96}),
    ("", {"model": "gpt", "dropout": 0.1, "vocab": 50304, "ffn": 256, "precision": "fp32", "stage": 0}),
    (f"{TP2} --sequence-parallel", {"vocab": 50257, "pad_vocab": True, "sequence_parallel": True}),
    (f"{TP2} --make-vocab-size-divisible-by 64 --vocab-size 100", {"vocab": 128, "pad_vocab": False}),
    ("--data-parallel-sharding-strategy optim_grads", {"stage": 0}),
    (f"{FSDP} --data-parallel-sharding-strategy optim_grads", {"stage": 2, "recipe": "megatron"}),
    (FSDP, {"stage": 3}),
    ("--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights --bf16",
     {"stage": 3, "recipe": "fsdp2", "loss": "megatron"}),
    (f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8",
     {"pipeline": "interleaved", "virtual_stages": 2}),
    (f"{PP2} --decoder-first-pipeline-num-layers 1", {"stage_layers": "1,3"}),
    (f"{PP2} --pipeline-model-parallel-layout 'Et|(t|)*2,tL' --global-batch-size 8",
     {"virtual_stages": 2, "pipeline": "interleaved"}),
    (f"{PP2} --pipeline-model-parallel-layout 'Et*3|tL'", {"stage_layers": "3,1", "pipeline": None}),
    (f"{PP2} --account-for-loss-in-pipeline-split --num-layers 5", {"stage_layers": "3,2"}),
    (f"{PP2} --account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split", {"balance_ends": True}),
    ("--context-parallel-size 2 --cp-comm-type a2a --bf16", {"cp": 2, "context": "ulysses", "attention": "flash"}),
    ("--fp16", {"initial_scale_power": 32, "grad_dtype": "fp16"}),
    ("--bf16 --accumulate-allreduce-grads-in-fp32", {"grad_dtype": "fp32"}),
    ("--bf16 --overlap-grad-reduce --ddp-bucket-size 1000", {"bucket_bytes": 4000}),
    ("--ddp-bucket-size 1000", {"bucket_bytes": None}),
    ("--recompute-activations", {"recompute": "selective"}),
    ("--recompute-granularity selective --recompute-modules layernorm mlp", {"recompute": "selective:layernorm,mlp"}),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", {"recompute": "full"}),
    ("--recompute-num-layers 4", {"recompute": "none"}),
    ("--transformer-impl local --use-flash-attn --bf16", {"transformer_engine": False, "attention": "flash"}),
    ("--attention-backend unfused --attention-softmax-in-fp32 --no-masked-softmax-fusion --bf16",
     {"attention": "eager", "fp32_softmax": True}),
    ("--use-flash-attn --attention-backend unfused", {"attention": "eager"}),
    ("--use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer --bf16",
     {"offload": "optimizer=host"}),
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", {"dp_replicate": 2, "stage": 1}),
    ("--train-samples 100 --lr-decay-samples 80 --lr-warmup-samples 16 --global-batch-size 8", {"warmup": 2}),
    ("--train-iters 9999", {"steps": None}),
)  # fmt: skip


@pytest.mark.parametrize(("words", "values"), UNDERSTOOD)
def test_understood(line: Any, words: str, values: dict[str, Any]) -> None:
    reading = line(words)
    reading.check()
    config = config_of(reading)
    assert {name: config.value(name) for name in values} == values


def test_sequence_parallel_is_dropped_and_the_removed_is_translated(line: Any) -> None:
    assert "--sequence-parallel" in line("--sequence-parallel").of("ignored")
    assert line("--checkpoint-activations").values["recompute"] == "full"
    reading = line("--DDP-impl local --activations-checkpoint-method uniform", without=("--DDP-impl",))
    assert [one.key for one in reading.refusals] == ["--activations-checkpoint-method"]


def test_environment(line: Any) -> None:
    name = "export CUDA_DEVICE_MAX_CONNECTIONS"
    assert "always requires" in line(FSDP, before=f"{name}=1").refusals[0].why
    assert "needs 1" in line(TP2, before=f"{name}=8").refusals[0].why
    line(TP2, before=f"{name}=1").check()
    reading = line("", before="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert reading.values["allocator_conf"] == "expandable_segments:True"
    both = line("--cuda-graph-impl local", before="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert [one.key for one in both.refusals] == ["--cuda-graph-impl"]


def test_flags_replace(line: Any) -> None:
    assert line("--global-batch-size 64", ranks=8, micro_batch=2).values["accumulate"] == 4
    assert line("--global-batch-size 64", ranks=16).values["accumulate"] == 4
    assert "layers" not in line("", model="gpt2").values
    assert "vocab" not in line("--tokenizer-type HuggingFaceTokenizer", model="gpt2").values


SCRIPT = """#!/bin/bash
# a comment's quote
NODES=${NNODES:-2}
if [ -z "$DATA" ]; then
  curl -O http://x; DATA=foo
fi
for f in *.json; do echo $f; done
WORKERS=`nproc`
HIDDEN=$((64*(32+32)/2*2))
: ${MICRO:=5}
ARGS=(--num-layers 32 --hidden-size $HIDDEN   # in an array
  "--lr 1e-4" --micro-batch-size=$MICRO
  # --lr 2
)
ARGS+=(--seq-length 4096 --bf16 $EXTRA)
cat > hosts <<EOF
--num-layers 77 pretrain.py
EOF
python tools/preprocess.py --input x --chunk-size 3 && echo ok
A=1 torchrun --nproc-per-node 8 --nnodes $NODES \\
   pretrain_gpt.py ${ARGS[@]} --global-batch-size "$((8*MICRO))" --data-path $DATA --num-workers $WORKERS $@ 2>&1 | tee
"""


def test_scripts_are_read_without_a_shell(tmp_path: Path) -> None:
    document = document_of(script(tmp_path, SCRIPT))
    assert document is not None
    assert {name: value for name, value in document.keys.items() if not {"$", "`"} & set(str(value))} == {
        "--num-layers": "32", "--hidden-size": "4096", "--lr": "1e-4", "--micro-batch-size": "5",
        "--seq-length": "4096", "--global-batch-size": "40",
    }  # fmt: skip
    assert (document.environment["--nproc_per_node"], document.environment["--nnodes"]) == ("8", "2")
    assert (document.environment["NODES"], document.environment["A"]) == ("2", "1")
    reading = read([script(tmp_path, SCRIPT)], Context())
    assert not {"--bf16", "--data-path", "--num-workers"} & {one.key for one in reading.refusals}
    assert reading.values["ranks"] == 16


HIDDEN = (
    ("MICRO=$(nproc)", "line 1: $(nproc) is a command"),
    ("if [ $X = 1 ]; then MICRO=2; fi", "'if' decides it"),
    ("for i in 1 2; do MICRO=$i; done", "'for' decides it"),
    ("[ -z $X ] && MICRO=3", "decides it"),
    ("", "MICRO is never set"),
    ("MICRO=${OTHER%%.*}", "more than a variable"),
    ("MICRO=$((2 ** 3))", "more than + - * /"),
)


@pytest.mark.parametrize(("before", "why"), HIDDEN)
def test_what_a_shell_would_decide_is_refused_where_it_matters(line: Any, before: str, why: str) -> None:
    reading = line("--micro-batch-size $MICRO --seed $MICRO", before=before)
    assert why in reading.refusals[0].why
    assert reading.refusals[0].advice == "pass --micro-batch, or write the number"
    line("--micro-batch-size $MICRO --seed $MICRO", before=before, micro_batch=1).check()


def test_an_unknown_word_does_not_hide_its_neighbours(line: Any) -> None:
    before = 'TP=$(nproc)\nA="--data-path $DATA --vocab-size 32000 \\\n  --bf16"\nB=" $A --seed $N --lr 1e-4 "'
    reading = line('$B "$UNSET" --clip-grad 2', before=before)
    assert reading.document.keys["--data-path"] == "$DATA"
    assert (reading.values["precision"], reading.values["lr"], reading.values["clip_norm"]) == ("bf16", 1e-4, 2.0)
    assert reading.values["vocab"] == 32000
    reading = line("$A --clip-grad 2", before='TP=$(a b)\nA="--tensor-model-parallel-size $TP --bf16"')
    assert [one.key for one in reading.refusals] == ["--tensor-model-parallel-size"]
    assert reading.values["precision"] == "bf16"


def test_quotes_of_a_default_are_no_part_of_it(tmp_path: Path) -> None:
    text = """NODES=${SLURM_NNODES:-"2"}\nTP=${TP:-'4'}\nL=${L:-"$TP"}\n"""
    text += f"torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py --seed $L {SMALL}"
    document = document_of(script(tmp_path, text))
    assert document is not None
    assert (document.environment["--nnodes"], document.environment["TP"], document.keys["--seed"]) == ("2", "4", "4")


def test_arguments_behind_a_condition_are_refused(line: Any, tmp_path: Path) -> None:
    before = "ARGS=(--bf16)\nif [ $FP8 ]; then ARGS+=(--fp8-format hybrid); fi"
    assert "'if' decides it" in line("${ARGS[@]}", before=before).refusals[0].why
    assert "one quoted word" in line('"${ARGS[@]}"', before='ARGS=("--seed 3")').refusals[0].why
    inside = f"if [ $A ]; then torchrun pretrain_gpt.py {SMALL}; fi"
    with pytest.raises(InputError, match=r"line 1: 'if' decides it; keep the branch"):
        document_of(script(tmp_path, inside))


BAD = (
    ("A='--x-size 1", "line 1: a quote"),
    ("A=(--x-size 1", "an array is never closed"),
    ("A=$((1/0))\n--x-size $A", "divides by zero"),
    ("A=--x-size\n" + "A=$A$A$A$A$A$A$A$A\n" * 9, "grows beyond"),
    ("echo $(( --x-size", "never closed"),
    ("torchrun pretrain_gpt.py word --x-size 1", "expected an argument"),
)


@pytest.mark.parametrize(("text", "why"), BAD)
def test_bad_scripts(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)) as error:
        document_of(script(tmp_path, text))
    assert "\n" not in str(error.value)


def test_yaml_and_launch(tmp_path: Path) -> None:
    words = SMALL.split()
    pairs = "".join(f"  {name}: {value}\n" for name, value in zip(words[::2], words[1::2], strict=True))
    text = f"ENV_VARS:\n  WORLD_SIZE: 4\nMODEL_ARGS:\n{pairs}  --bf16: true\n  --recompute-modules: [core_attn, mlp]\n"
    reading = read([script(tmp_path, text, "model_config.yaml")], Context())
    reading.check()
    assert (reading.values["ranks"], reading.values["precision"], reading.values["accumulate"]) == (4, "bf16", 1)
    off = script(tmp_path, f"{text}  --fp16: false\n", "off.yaml")
    with pytest.raises(InputError, match="leave out a switch that is off"):
        document_of(off)
    launch = document_of(script(tmp_path, "#!/bin/bash\n# zerosim: --ranks 8 --gpu 'a 100'\ntorchrun train.py\n"))
    assert launch is not None
    assert launch.keys == {"flags": ["--ranks", "8", "--gpu", "a 100"]}
    document = document_of(script(tmp_path, f"{SMALL} --fp8-format e4m3"))
    assert document is not None
    assert "--fp8-format" not in document.without("fp8-format").keys


@pytest.mark.parametrize("seed", range(40))
def test_written_is_read_back(seed: int, tmp_path: Path) -> None:
    config = drawn(random.Random(seed))
    reading = read([script(tmp_path, written(config))], Context())
    reading.check()
    assert said(config_of(reading)) == said(config)


def test_written_lacks_models() -> None:
    with pytest.raises(InputError, match="choose gpt or llama"):
        written(RunConfig(model="mlp"))


DIFFERENT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("--context-parallel-size", "--cp-comm-type", "--hierarchical-context-parallel-sizes",
                     "--expert-model-parallel-size", "--expert-tensor-parallel-size"), ("same", "bytes traffic")),
    "--kv-channels": ("same", "all"),
    "--num-experts": ("same", "all"),
    "--mtp-num-layers": ("same", "all"),
    **dict.fromkeys(("--fp8-format", "--fp8-recipe", "--fp8-param-gather"), ("same", "bytes traffic seconds")),
}  # fmt: skip
"""Context parallelism, experts, head_dim, further tokens and 8 bits are options by now."""


def test_table_has_every_key() -> None:
    path = Path(__file__).parent / "keys.toml"
    rows = by_key(TABLE)
    for row in tomllib.loads(path.read_text("utf-8"))["key"]:
        names = [word for word in re.findall(r"--[\w-]*\w(?![\w*-])|[A-Z_]{6,}", row["key"]) if not word.endswith("-")]
        for name in names if row["dialect"] == "megatron" else ():
            if row["says"] == "ignored" and name not in rows:
                continue  # names alone (megatron_names.py)
            assert (rows[name].says, rows[name].changes) == DIFFERENT.get(name, (row["says"], row["changes"])), name
