"""What each verb refuses of its own flags, in one line, with nothing printed and nothing written.

What a configuration may not say is in `tests/config/test_refused.py`, files that are bad in `test_cli.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zerosim.cli.main import main
from zerosim.config import OPTIONS

OPTIMIZERS = ", ".join(OPTIONS["optimizer"].choices)
SIZES = "--hidden 1600 --layers 48 --heads 25 --seq 1024 --micro-batch 32"
REFUSED: dict[str, list[tuple[str, str]]] = {
    "plot": [
        ("descent --surface bowel -o p.svg", "--surface: unknown surface 'bowel': did you mean bowl?"),
        ("descent --optimizers adam,lyon -o p.svg", "--optimizers: unknown optimizer 'lyon': did you mean lion?"),
        ("descent --optimizers adam,adam-sage -o p.svg", "adam-sage: moves a weight as its sensitivity changes"),
        ("descent --steps 0 -o p.svg", "--steps: 0: expected 1 to 10,000 steps"),
        ("descent --stage 2 -o p.svg", "unknown flag --stage"),
        ("optimizers --optimizers adam --optimizer sgd -o p.svg", "both given: choose one"),
        ("optimizers --optimizers adamz -o p.svg", "unknown optimizer 'adamz': did you mean adam?"),
        ("", "expected a figure: one of memory"),
        ("memry", "unknown figure 'memry': did you mean memory?"),
        ("memory", "--out: expected a file"),
        ("memory -o x.pdf", "ends in .png or .svg"),
        ("memory -o no/such/x.png", "does not exist"),
        ("memory -o x.png --size 5", "--size: '5': expected inches"),
        ("memory -o x.png --size 1x1", "expected 5x3 to 40x40 inches"),
        ("memory -o x.png --theme blue", "--theme: invalid choice: 'blue'"),
        ("memory -o x.png --mark end", "--mark: invalid choice: 'end'"),
        ("memory -o x.png --limit 1GB --gpu h100", "--limit and --gpu are both given"),
        ("memory -o x.png --stages 1 --stage 2", "both given"),
        ("traffic -o x.png --limit 1GB", "unknown flag --limit"),
        ("scaling -o x.png --ranks 4", "--ranks-list"),
        ("timeline -o x.png --rank 4", "--rank 4: expected 0 to 3"),
        ("timeline -o x.png --rank all --ranks 64", "more than the 8"),
        ("timeline -o x.png --step 3", "--step 3: expected 0 to 0, or more --steps"),
    ],
    "plan --model gpt2": [
        ("--kernels eager", "--kernels eager: needs a device; pass --gpu NAME too"),
        ("--cuda-graphs", "--cuda-graphs: needs a device; pass --gpu NAME too"),
        ("--gpu h100 --kernels egaer", "expected one of eager, compiled, fused; did you mean 'eager'?"),
        ("--gpu h100 --flash-kernel fa4", "--flash-kernel 'fa4': expected one of fa1, fa2, fa3, cudnn, triton"),
    ],
    "run": [("--kernels eager", "unknown flag --kernels")],
    "compare --optimizers adam,sgd": [("--flash-kernel fa2", "--flash-kernel fa2: needs a device; pass --gpu")],
    "plot gradients --steps 2 -q -o p.svg": [
        ("--ranks 4", "--ranks 4: gradients are counted with --ranks 1; leave it out"),
        ("--precision bf16", "--precision bf16: gradients are counted with --precision fp32; leave it out"),
        ("--loss-scale 8", "--loss-scale 8.0: every loss scale is tried; leave it out"),
        ("--size 1x1", "size 1x1: expected 5x3 to 40x40 inches"),
        ("--lr 1e30", "is not finite at step 1"),
    ],
    "plot operands --steps 2 -q -o p.svg": [
        ("--ranks 4", "--ranks 4: operands are counted with --ranks 1; leave it out"),
        ("--fp8 mxfp8", "--fp8 mxfp8: operands are counted with --fp8 none; leave it out"),
        ("--lora-rank 4", "--lora-rank 4: operands are counted with --lora-rank 0; leave it out"),
        ("--model flat --params 1K --units 1", "has no blocks with linear maps"),
    ],
    "plot throughput --gpu a100-80 -o p.svg": [
        ("--sizes 1,2 --ranks-list 1", "choose one"),
        ("--sizes gtp2", "did you mean"),
        ("--sizes 0", "layers 0"),
        ("--ranks-list 1 --model flat --params 1K --units 1", "computes no matrix products"),
    ],
    "fit": [
        ("--find fastest --gpu a100-80", "expected one of micro-batch"),
        ("--find mesh --gpu a100-80 --tp 2", "--tp 2: the search varies it"),
        ("--find mesh --gpu a100-80 --sequence-parallel", "--sequence-parallel: the search varies it"),
        ("--find mesh --gpu a100-80 --pipeline zbh", "did you mean 'zb-h1'"),
        ("--find mesh --gpu a100-80 --virtual-stages 2", "pass --pipeline interleaved too"),
        ("--find mesh --gpu a100-80 --global-batch 8 --micro-batch 2", "choose one"),
        ("--find mesh --gpu a100-80 --global-batch 0", "expected at least 1"),
        ("--find mesh --gpu a100-80 --ranks 7 --global-batch 5", "choose another --global-batch"),
        ("--find mesh --gpu a100-80 --time-limit 0", "--time-limit 0: expected more than 0 seconds"),
        ("--find seq --gpu a100-80 --time-limit 5", "--time-limit: works only with --find mesh"),
        ("--find ranks --gpu a100-80 --global-batch 8", "--global-batch: works only with --find mesh"),
        ("--find width --gpu v100-32", "micro-batch"),
        ("--find params --gpu v100-32", "flat"),
        ("--find ranks --ranks 4 --gpu v100-32", "the search varies it"),
        ("--find mesh --cpu-checkpointing", "--cpu-checkpointing: --find recompute varies it"),
        ("", "--gpu"),
    ],
    "": [
        ("export trace -o trace.json", "--gpu"),
        ("export film -o a --gpu a100-80", "unknown format 'film'"),
        ("export", "one of trace, memory"),
        ("export memory -o a.svg", "expected a name that ends in .pickle or .json"),
        ("export memory -o a.pickle --allocator exact", "choose caching or arena"),
        ("export memory -o a.pickle --allocator arena", "pass --capacity"),
        ("export memory -o a.pickle --rank 9", "--rank 9: expected 0 to 3"),
        ("export memory -o nowhere/a.pickle", "nowhere does not exist"),
        ("export memory -o a.json --every-rank --ranks 4096", "a browser cannot open a file"),
        ("export trace --gpu a101 -o trace.json", "unknown hardware 'a101'"),
        ("export trace --gpu a100-80 --node-gpus 0 -o trace.json", "--node-gpus 0"),
        ("plan --nic 200GB", "--nic 200000000000: needs a device; pass --gpu NAME too"),
        ("explain --stage 2", "--params is missing"),
    ],
    "compare": [
        ("--optimizers adam,adamz", "unknown optimizer 'adamz': did you mean adam?"),
        ("--optimizers adam --stages 1,2", "--optimizers compares at one stage"),
        ("--optimizers adam --optimizer lion", "both given: choose one"),
        ("--precisions bf16,bf16-pure:kahn", "unknown precision 'bf16-pure:kahn': did you mean bf16-pure:kahan?"),
        ("--precisions bf16 --rounding kahan", "both given: choose one"),
        ("--precisions bf16 --optimizers adam", "both given: choose one"),
        ("--precisions bf16-pure --optimizer muon", "muon needs fp32 masters"),
        ("--stage 2", "--stage works only with --recipes, --optimizers"),
        ("--shapes --tokens x.npz", "--tokens: works only in training"),
        ("--shapes --ranks 4 --tp 3", "--tp 3 does not divide ranks 4"),
        ("--model llama3-8b --ranks 8 --no-shapes", "or count it with zerosim plan"),
    ],
    "plan": [
        ("--model flat --params 7B --layers 3", "--layers 3: model flat has no blocks"),
        ("--model gpt2 --params 7B", "a size of model flat only"),
        ("--model gpt2 --gpu a100-80 --node dgx-9", "did you mean dgx-2"),
        ("--gpu v100-23", "v100-32"),
        ("--limit 0", "limit"),
        ("--limit 1e30", "limit"),
        ("--limit -4GB", "-4GB"),
        ("--reserve 1GB", "--gpu"),
        ("--reserve 1e30 --limit 1GB", "reserve"),
        ("--data x", "unknown flag --data"),
    ],
    "explain --stage 2 --params 7.5B --ranks 64": [
        ("--stage 4", "--stage 4: expected at least 0 and at most 3"),
        ("--params 0", "--params 0: expected at least 1"),
        ("--params 1e30", "expected at least 1 and at most 1000000000000000"),
        ("--params 1.5", "--params: '1.5' is not a whole number"),
        ("--recipe deepsped", "--recipe 'deepsped' is not known; did you mean deepspeed or hf-deepspeed?"),
        ("--precision fp8", "--precision"),
        ("--optimizer adm", f"--optimizer 'adm': expected one of {OPTIMIZERS}; did you mean 'adam' or 'radam'?"),
        ("--momentum 0.9", "--momentum 0.9: adam has no momentum"),
        ("--optimizer sgd --momentum 1", "--momentum 1.0: expected a number in [0, 1)"),
        ("--hidden 64", "leave out --params, or --hidden"),
        ("--recompute ful", "full"),
        ("--rank 4", "unknown flag --rank: did you mean --ranks?"),
    ],
    "explain --stage 2 --params 1M --ranks 16 --tp 2 --pp 2": [
        ("--tp 3", "--tp 3"),
        ("--cpu-checkpointing", "--cpu-checkpointing"),
        ("--tp 0", "--tp 0: expected at least 1"),
        ("--dp-replicate 3", "does not divide ranks 16"),
        ("--dp-replicate 0", "--dp-replicate 0: expected at least 1"),
        ("--stage 0 --dp-replicate 2", "--dp-replicate 2: stage 0 does not use it"),
        ("--tp 1 --sequence-parallel", "--sequence-parallel"),
    ],
}
ROWS = [(f"{verb} {words}", said) for verb, rows in REFUSED.items() for words, said in rows]


@pytest.mark.parametrize(("words", "said"), ROWS, ids=[words for words, _ in ROWS])
def test_bad_flags_are_refused_in_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == (4 if "not finite" in said else 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("zerosim: error: ")
    assert said in err
    assert not list(tmp_path.iterdir())
