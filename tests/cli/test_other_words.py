"""Words that people type from other frameworks: each row of the tables through the command line.

A word that means one thing here is taken. Any other is answered in one line. Every flag that an answer names exists.
"""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any

import pytest

from zerosim.cli import fit, plan, run
from zerosim.cli.main import main
from zerosim.cli.parser import Parser, flag_of
from zerosim.config.other_words import CALLED, LACKING, SWITCHES, TAKEN, WITHOUT_EFFECT, called, not_modelled

BASE = "plan --json - --ranks 4 --layers 1 --hidden 16 --heads 4 --seq 8 --stage 1"
MESH = "plan --json - --stage 1 --accumulate 2 --sequence-parallel"
VALUES = {  # of each option a value that no plan has by itself
    "micro_batch": "2", "seq": "16", "layers": "6", "hidden": "32", "heads": "8", "kv_heads": "2", "ffn": "24",
    "head_dim": "12",
    "vocab": "128", "positions": "64", "rope_base": "5000", "norm_eps": "1e-4", "model": "llama", "ranks": "16",
    "ranks_per_node": "4", "dp_replicate": "2", "tp": "2", "pp": "2", "recompute": "full", "steps": "2",
    "lr": "0.1", "eps": "1e-5", "weight_decay": "0.1", "clip_norm": "0.5", "schedule": "cosine", "gpu": "a40",
    "warmup": "3", "cp": "2", "experts": "4", "top_k": "3", "expert_ffn": "48", "shared_experts": "2",
    "router_dtype": "fp32", "capacity_factor": "1.5", "aux_loss": "0.1", "z_loss": "0.1", "bias_rate": "0.1",
    "ep": "2", "etp": "1", "dispatcher": "deepep", "shared_ffn": "96", "mtp_layers": "1", "mtp_loss": "0.2",
}  # fmt: skip
MESH_8 = "plan --json - --layers 4 --hidden 64 --heads 4 --seq 32"
VALUES_8 = {"fp8": "delayed", "fp8_exact_first": "1", "fp8_exact_last": "2", "fp8_amax_history": "16",
            "fp8_amax_algo": "max"}  # fmt: skip
"""The same for products in 8 bits, which other values exclude."""
BESIDE = {
    "no_fp8_wgrad": "--fp8 tensorwise --seq 16",
    **dict.fromkeys(
        (
            "enable_fsdp_float8_all_gather",
            "fp8_enable_fsdp_float8_all_gather",
            "quantize.linear.float8.enable_fsdp_float8_all_gather",
        ),
        "--fp8 tensorwise --seq 16 --stage 3",
    ),
    **dict.fromkeys(("fp8_param", "fp8_primary_weights"), "--fp8 delayed --seq 16"),
    "load_in_4bit": "--lora-rank 2",
    "autocast_adapter_dtype": "--lora-rank 2",
    "cross_entropy_loss_fusion": "--tp 2",
    "torch_compile": "--gpu a40",
    "compile.enable": "--gpu a40",
    "zero_quantized_weights": "--stage 3 --hidden 64",
    "zero_quantized_gradients": "--stage 3 --hidden 64 --ranks-per-node 2",
    "gradient_as_bucket_view": "--stage 0",
    "grad_reduce_in_bf16": "--recipe megatron",
    "moe_shared_expert_overlap": "--experts 4 --shared-experts 1 --ep 2",
    "ignore_router_for_ac": "--experts 4 --recompute full",
    "moe_pad_expert_input_to_capacity": "--experts 4 --capacity-factor 1.5",
}
"""The flags that a switch needs."""
NOTHING = "it changes nothing that zerosim counts; leave it out"
ROWS = (*CALLED, *LACKING, *((names, NOTHING) for names in WITHOUT_EFFECT))
ASKED = [  # (typed, its own flags), as people have asked for them
    ("--gradient-checkpointing", "--recompute full"),
    ("--gradient_checkpointing True", "--recompute full"),
    ("--per-device-train-batch-size 2", "--micro-batch 2"),
    ("--per_device_train_batch_size=2", "--micro-batch 2"),
    ("--cutoff-len 16", "--seq 16"),
    ("--num-layers 2 --hidden-size 32", "--layers 2 --hidden 32"),
    ("--num-attention-heads 2 --seq-length 16", "--heads 2 --seq 16"),
    ("--micro-batch-size 2", "--micro-batch 2"),
    ("--training.seq_len 16 --training.steps 2", "--seq 16 --steps 2"),
    ("--parallelism.context_parallel_degree 2", "--cp 2"),
    ("--micro_batch 2 --no_tie_embeddings", "--micro-batch 2 --no-tie-embeddings"),
    ("--context-parallel-size 2", "--cp 2"),
]
ASKED_AND_ANSWERED = [
    ("--optimizer.lr -1", "--optimizer.lr -1.0: expected more than 0"),
    ("--global-batch-size 8", "--accumulate A, which is the global batch / (--micro-batch x data ranks)"),
    ("--bf16", "here it is --precision bf16, the default"),
    ("--bf16 True", "here it is --precision bf16, the default"),
    ("--use-liger-kernel", "here it is --loss liger, with --kernels fused for the clock"),
    ("--parallelism.tensor_parallel_degree 2", "here it is --tp T --sequence-parallel"),
    ("--activation_checkpoint.mode selective", "here it is --recompute full or none. Mode selective is --recompute "),
    ("--training.local_batch_size 2", "here it is --micro-batch B. In a pipeline"),
    ("--offload-optimizer cpu", "here it is --offload optimizer=host"),
    ("--async-tp", "here it is --tp-comm-overlap, with --sequence-parallel"),
    ("--enable-cuda-graph", "here it is --cuda-graphs"),
    ("--cp-comm-type a2a+p2p", "here it is --context ring for p2p, ulysses for a2a, ulysses+ring for a2a+p2p, or"),
    ("--sequence-parallel-size 2", "here it is --cp C --context ulysses"),
]


def planned(words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a plan knows of its words: the configuration and the device."""
    assert main(words.split()) == 0, words
    values = json.loads(capsys.readouterr().out)
    return values["config"], values["limit"]


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends with exit code 2."""
    assert main(words.split()) == 2, words
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zerosim: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("zerosim: error: ").rstrip()


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """The flags of a plan and of a search."""
    return flags_of(plan) | flags_of(fit)


def flags_of(verb: ModuleType) -> set[str]:
    parser = Parser("zerosim", "")
    verb.add_arguments(parser)
    return set(parser._option_string_actions)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("typed", "means"), ASKED, ids=[typed for typed, _ in ASKED])
def test_words_that_were_asked_for_are_taken(typed: str, means: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(f"{BASE} {typed}", capsys) == planned(f"{BASE} {means}", capsys)


@pytest.mark.parametrize(("typed", "says"), ASKED_AND_ANSWERED, ids=[typed for typed, _ in ASKED_AND_ANSWERED])
def test_words_that_were_asked_for_are_answered(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(f"{BASE} {typed}", capsys)
    assert said.startswith(re.split(r"[ =]", typed)[0])
    assert says in said


@pytest.mark.quick(1)
@pytest.mark.parametrize("nth", range(max(len(words.split()) for words in TAKEN.values())))
def test_a_word_with_one_meaning_sets_what_the_own_flag_sets(nth: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The nth word of every option, with dashes or underscores, before a blank or before =."""
    assert {*TAKEN} - {*VALUES, *VALUES_8} == {"global_batch"}
    for mesh, values in ((MESH, VALUES), (MESH_8, VALUES_8)):
        words = {option: words.split()[nth % len(words.split())] for option, words in TAKEN.items() if option in values}
        own = [f"{flag_of(option)} {value}" for option, value in values.items()]
        typed = [
            f"--{word} {values[option]}" if nth % 2 else f"{flag_of(word)}={values[option]}"
            for option, word in words.items()
        ]
        assert planned(f"{mesh} {' '.join(typed)}", capsys) == planned(f"{mesh} {' '.join(own)}", capsys)


@pytest.mark.quick(3)
@pytest.mark.parametrize("word", SWITCHES)
def test_a_switch_sets_one_value(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    (option, value), base = SWITCHES[word], f"{BASE} {BESIDE.get(word, '')}"
    own = {True: flag_of(option), False: flag_of(f"no_{option}")}.get(value, f"{flag_of(option)} {value}")
    typed = (f"--{word}", f"{flag_of(word)} True", f"--{word}=true")[len(word) % 3]
    assert planned(f"{base} {typed}", capsys) == planned(f"{base} {own}", capsys), typed
    off, value = ((f"--{word} false", "'false'"), (f"{flag_of(word)}=", "''"))[len(word) % 2]
    assert refused(f"plan {off}", capsys).startswith(f"{off[: len(word) + 2]} {value}: expected nothing or true")


@pytest.mark.parametrize("row", ROWS, ids=[row[0].split()[0] for row in ROWS])
def test_any_other_word_is_answered_by_its_row(
    row: tuple[str, ...], flags: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line. No earlier row, and no flag of zerosim's, hides a name; of wildcards the shortest is tried."""
    names = row[0].replace("*", "").split()
    for name in names:
        assert flag_of(name) not in flags
        assert row[-1] in str(not_modelled(name)), name
    assert row[-1] in refused(f"plan {flag_of(names[-1])} 1", capsys)


def test_every_flag_that_an_answer_names_exists(flags: set[str]) -> None:
    answers = [" ".join(row[1:]) for row in (*CALLED, *LACKING)] + [called(word) for word in SWITCHES]
    named = {flag for answer in answers for flag in re.findall(r"--[a-z][\w-]*", answer)}
    assert len(named) > 40
    assert named <= flags | flags_of(run)
    assert {flag_of(option) for option in TAKEN} <= flags
    taken_words = [word for words in TAKEN.values() for word in words.split()]
    assert len(taken_words) == len({*taken_words, *SWITCHES}) - len(SWITCHES)
    assert not {flag_of(word) for word in (*taken_words, *SWITCHES)} & flags


def test_a_flag_of_another_verb_is_said_to_be_its(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("run --torch-compile", capsys) == (
        "--torch-compile: here it is --kernels compiled (zerosim plan has --kernels)"
    )
    assert refused("fit --limit 1GB --global-batch-size 8", capsys).startswith(
        "--global-batch-size: works only with --find mesh"
    )


def test_an_error_names_the_word_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, said in (
        ("--per_device_train_batch_size 0", "--per_device_train_batch_size 0: expected at least 1"),
        ("--num_layers two", "--num_layers: 'two': expected a whole number"),
        ("--lr-scheduler-type linear", "--lr-scheduler-type 'linear': expected one of constant, cosine"),
        ("--model mlp --gradient-checkpointing", "--gradient-checkpointing 'full': model mlp has no blocks"),
        ("--load-in-4bit", "--load-in-4bit 'nf4': nothing is frozen; choose a lora_rank"),
    ):
        assert refused(f"plan {typed}", capsys).startswith(said)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("num_layers = 2", "'num_layers': here it is --layers"),
        ("gradient_checkpointing = true", "'gradient_checkpointing': here it is --recompute full"),
        ("offload_optimizer = 'cpu'", "'offload_optimizer': here it is --offload optimizer=host"),
        ("fp8 = true", "fp8 True: expected str"),
        ("first_last_layers_bf16 = true", "'first_last_layers_bf16': here it is --fp8-exact-first N"),
        ("fp4_format = 'e2m1'", "'fp4_format': zerosim does not model training in 4 bits (NVFP4) yet."),
    ],
)
def test_keys_of_a_scenario_are_answered(
    key: str, said: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(key, "utf-8")
    assert said in refused(f"plan {tmp_path / 'a.toml'}", capsys)
