"""What no configuration may say, in one table by the words of a shell, with what is said instead; and two rows of it
through the program, by every verb.

Ranges of single fields are not here: `test_run_config.py` tries both ends of every one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parsing import parsed

from zerosim.cli.main import main
from zerosim.errors import InputError

GPT = "--layers 4 --hidden 48 --heads 6 --seq 8 --vocab 256"
LLAMA = f"{GPT} --model llama --heads 12"
FLAT = "--model flat --params 1000 --units 4"
SP = "--sequence-parallel"
CP = "--layers 2 --hidden 16 --heads 4 --vocab 256 --seq 16"
PURE = "--precision bf16-pure"
REFUSED: list[tuple[str, ...]] = [
    # words, what is said, and where no number is advised that stands for a flag (`choose tp 2`), the right words
    ("--stage two", "--stage: 'two': expected a whole number"),
    ("--ranks", "--ranks: expected one argument"),
    ("--stge 3", "unknown flag --stge: did you mean --stage?"),
    ("--tpp 2", "unknown flag --tpp: did you mean --tp?"),
    ("--xyzzy", "unknown flag --xyzzy: see zerosim run --help"),
    ("missing.toml", "cannot read scenario missing.toml"),
    ("missing.toml beside.toml spare", "unexpected 'spare'"),
    ("--sample=", "--sample '': expected at least one character to continue"),
    # -- models
    ("--heads 3", "--heads 3 do not divide hidden 64"),
    ("--model llama --kv-heads 3", "--kv-heads 3 do not divide heads 4"),
    ("--model llama --heads 64", "--heads 64: 1 columns a head cannot be rotated in pairs"),
    ("--model flat --params 3 --units 4", "--units 4: more than params = 3"),
    ("--norm-eps 0", "--norm-eps 0.0: expected more than 0 and at most 1"),
    ("--model gpt3-157b", "--model 'gpt3-157b' is not known; did you mean gpt3-175b or opt-175b?"),
    ("--model=", "--model '': expected a name"),
    ("--model /", "config.json"),
    ("--model no/such/config.json", "cannot read no/such/config.json: No such file"),
    ("--params 7B", "--params 7000000000: a size of model flat only"),
    ("--model gpt2 --seq 4096", "--seq 4096 is longer than the model's 1024 positions"),
    ("--model mlp --dropout 0.1", "--dropout 0.1: the mlp has no dropout"),
    # -- optimizers
    ("--betas 1.5 0.9", "--betas: beta1 1.5: expected a number in [0, 1)"),
    ("--betas 0.9 1.0", "--betas: beta2 1.0: expected a number in [0, 1)"),
    ("--betas 0.9", "--betas: expected 2 arguments"),
    ("--lr nan", "--lr nan: expected a finite number"),
    ("--lr fast", "--lr: 'fast': expected a number"),
    ("--eps inf", "--eps inf: expected a finite number"),
    ("--min-lr 0.1 --lr 0.01", "--min-lr 0.1: expected at most lr = 0.01"),
    ("--optimizer adamw8", "; did you mean 'adamw' or 'adam'?"),
    ("--momentum 0.9", "--momentum 0.9: adam has no momentum"),
    ("--optimizer adafactor --betas 0.9 0.99", "--betas (0.9, 0.99): adafactor has no betas"),
    ("--optimizer adafactor --eps 1e-8", "--eps 1e-08: adafactor has no eps"),
    ("--optimizer adafactor --momentum 0.9", "--momentum 0.9: adafactor has no momentum"),
    (f"{PURE} --optimizer muon", "--precision 'bf16-pure': muon needs fp32 masters here; choose bf16, or adamw"),
    ("--recipe fsdp", "--recipe 'fsdp' is not known; did you mean fsdp2 or fsdp1?"),
    ("--loss hf-4.30", "did you mean 'hf-4.48' or 'hf-4.45'?"),
    ("--optimizer adamw_torch_8bit", "did you mean 'adam8bit'?"),
    ("--autocast bf16", "--autocast 'bf16': without adapters it casts whole fp32 weights; choose precision fp32"),
    ("--optimizer adam --no-scale-parameter", "--scale-parameter: adam does not use it; choose adafactor-hf"),
    ("--optimizer adafactor-hf --nesterov --momentum 0.9", "--nesterov: expected sgd"),
    ("--optimizer adam --momentum-form ema", "--momentum-form 'ema': expected sgd with momentum"),
    ("--optimizer sgd --momentum-form ema", "--momentum-form 'ema': expected sgd with momentum"),
    ("--optimizer adafactor --tp 2 --ranks 4", "--tp 2: adafactor needs whole matrices"),
    ("--optimizer sophia --tp 2 --ranks 4", "sophia draws labels from logits, which tensor parallelism cuts"),
    ("--optimizer muon --stage 2 --partition slices", "--partition 'slices': muon needs whole matrices; choose owner"),
    ("--optimizer muon --tp 2", "--tp 2: muon needs whole matrices, which tensor parallelism cuts"),
    ("--optimizer muon --nesterov", "--nesterov: muon always uses Nesterov's form"),
    ("--optimizer muon --reduce-bucket 5 --stage 1", "--reduce-bucket 5: not with partition 'owner', which muon sets"),
    ("--optimizer muon --pp 2 --accumulate 2", "pass --no-tie-embeddings"),
    ("--aux-lr 1", "--aux-lr 1.0: adam has no aux_lr, only lr; leave it out, or choose"),
    ("--paged-states --optimizer sgd", "--paged-states: sgd without momentum has no states; choose adamw, or leave it"),
    (
        "--paged-states --stage 1 --offload optimizer=host",
        "--paged-states: offload 'optimizer=host' keeps all states off",
    ),
    (
        "--paged-states --stage 3 --offload optimizer=nvme",
        "--paged-states: offload 'optimizer=nvme' keeps all states off",
    ),
    (
        "--paged-states --backend cuda",
        "--paged-states: backend cuda has no unified memory; choose numpy, or use zerosim",
    ),
    (
        "--paged-states --optimizer adam --compress onebit-adam --compress-warmup 1 --stage 0 --grad-dtype fp32",
        "--paged-states: compress 'onebit-adam' sends exp_avg during backward; leave one of them out",
    ),
    # -- precisions
    ("--precision fp8", "--precision 'fp8': products have 8 bits, not parameters; pass --fp8 tensorwise"),
    ("--precision int4", "--precision 'int4': expected one of fp32"),
    ("--loss-scale maybe", "--loss-scale: 'maybe': expected 'dynamic' or a number"),
    ("--loss-scale 0", "--loss-scale 0.0: expected 'dynamic' or a number more than 0"),
    (f"{PURE} --loss-scale dynamic", "--loss-scale 'dynamic': bf16-pure has the range of fp32 and needs no loss scale"),
    (
        "--precision bf16 --rounding kahan",
        "--rounding 'kahan': only a pure half type is rounded; choose precision bf16-pure",
    ),
    (f"{PURE} --master-init exact", "--master-init 'exact': bf16-pure has no masters"),
    (f"{PURE} --recipe deepspeed", "recipe deepspeed needs fp32 masters, and this precision has none"),
    ("--whole-scales", "--whole-scales: no weights are stored as codes; choose a base"),
    ("--adapter-shards rows", "--adapter-shards 'rows': there are no adapters; choose a lora_rank"),
    (f"{PURE} --rounding up", "--rounding 'up': expected one of nearest, stochastic, kahan"),
    # -- memory
    ("--capacity 3elephants", "--capacity: '3elephants' is not a size in bytes: write it like 32GB"),
    ("--allocator cachin", "expected one of exact, caching, arena"),
    ("--allocator-conf expandable_segments:True", "exact has no settings; pass --allocator caching"),
    ("--allocator caching --allocator-conf expandable_segment:True", "did you mean 'expandable_segments'?"),
    ("--allocator caching --allocator-conf max_split_size_mb:1", "expected a whole number of MiB, at least 20"),
    ("--loss megatron-fusd", "--loss 'megatron-fusd': expected one of in-place, lean, megatron, megatron-fused, "),
    (f"--loss chunked {FLAT}", "--loss 'chunked': model flat has no separate head"),
    ("--loss chunked --model mlp", "--loss 'chunked': model mlp has no separate head"),
    ("--recompute ful", "[:K]|auto or 0-9=full+10-27=selective:PART,...; did you mean 'full'?"),
    ("--recompute mlp", "after a colon: selective:mlp"),
    ("--recompute none:2", "expected none|selective"),
    ("--recompute selective:layernrom", "no part of a block is called 'layernrom'; did you mean 'layernorm'?"),
    ("--recompute selective:", "called ''; they are core_attn, mla_up_proj, attn_proj,"),
    ("--recompute selective:mlp,mlp", "names 'mlp' twice; leave one out"),
    ("--recompute selective:mlp_act,op", "names 'op' and 'mlp_act', which share mlp_act"),
    ("--recompute full:0", "at least 1, as in full:2"),
    ("--recompute full:two", "at least 1, as in full:2"),
    (f"--recompute full:{'9' * 5000}", "at least 1, as in full:2"),
    (f"{GPT} --recompute 0-4=full", "--recompute '0-4=full': model gpt has blocks 0 to 3"),
    ("--recompute 0-2=full+2=none", "names block 2 twice; leave one out"),
    ("--recompute 2-0=full", "'2-0=full' is no range of blocks with its value; expected FIRST-LAST=VALUE, as in 0-9="),
    ("--recompute 0-1=full:2", "of 0-1 expected none, selective[:PART,...] or full, not 'full:2'"),
    ("--recompute 0-1=selective:nrom", "no part of a block is called 'nrom'"),
    ("--recompute 0=full+1", "'1' is no range of blocks with its value"),
    (f"{GPT} --model t5 --recompute 0=full", "--recompute '0=full': model t5 has blocks in two stacks; name no ranges"),
    (f"{GPT} --recompute full:5", "of 4 layers every K-th is recomputed; choose at most full:4"),
    (f"{FLAT} --recompute full:2", "--recompute 'full:2': model flat has no blocks"),
    ("--model mlp --recompute selective:op", "--recompute 'selective:op': model mlp has no blocks"),
    (f"{GPT} --recompute selective:mlp --ranks 2 --tp 2 {SP} --keep-gathered", "leave one out"),
    ("--model llama --saves eager --recompute selective:attn_proj", "frees nothing by attn_proj; leave attn_proj out"),
    # -- ZeRO's stages and recipes
    ("--recipe deepsped", "--recipe 'deepsped' is not known; did you mean deepspeed or hf-deepspeed?"),
    (
        "--partition owner --stage 2 --grad-reduction all_reduce",
        "'all_reduce': not with partition 'owner': each gradient",
    ),
    (
        "--stage 3 --allgather-bucket 100",
        "stage 3 does not use it; leave it out, or choose stage 1 or 2",
    ),
    ("--stage 2 --sub-group-size 1e9", "--sub-group 1000000000: stage 2 does not use it; leave it out"),
    (
        "--stage 1 --grad-buckets views",
        "--grad-buckets 'views': stage 1 does not use it",
    ),
    ("--stage 0 --reduce-bucket 1000", "--reduce-bucket 1000: stage 0 does not use it"),
    ("--partition owner --reduce-bucket 1000", "--reduce-bucket 1000: not with partition 'owner'"),
    ("--reduce-bucket -1", "--reduce-bucket: '-1' is not a count"),
    ("--gather tensor", "--gather 'tensor': expected one of unit, module"),
    ("--gather module --stage 2", "--gather 'module': stage 2 does not use it; leave it out, or choose stage 3"),
    ("--gather module --prefetch 1 --prefetch-elements 5", "--prefetch-elements 5: not with prefetch 1: one counts"),
    ("--gather module --max-live 7", "--max-live 7: it has no effect without prefetch_elements; pass it too"),
    ("--prefetch 1 --stage 2", "--prefetch 1: stage 2 does not use it; leave it out, or choose stage 3"),
    # -- replicas
    ("--ranks 4 --dp-replicate 3", "--dp-replicate 3 does not divide ranks 4"),
    ("--ranks 4 --dp-replicate 8", "--dp-replicate 8 does not divide ranks 4", "--ranks 8 --dp-replicate 8"),
    (
        "--ranks 4 --dp-replicate 2 --stage 0",
        "--dp-replicate 2: stage 0 does not use it; leave it out",
    ),
    ("--ranks 4 --dp-replicate 2 --replica-reduction never", "expected one of step, micro_batch"),
    # -- tensor parallelism
    ("--ranks 4 --tp two", "--tp: 'two': expected a whole number"),
    (f"{GPT} --ranks 4 --tp 3", "--tp 3 does not divide ranks 4: choose tp 2 or 4, or ranks 3 or 6"),
    (f"{GPT} --heads 4 --ranks 6 --tp 4", "--tp 4 does not divide ranks 6", f"{GPT} --heads 4 --ranks 8 --tp 4"),
    (f"{GPT} --ranks 6 --tp 2 --dp-replicate 2", "tp 2 x dp_replicate 2 does not divide ranks 6", f"{GPT} --ranks 8"),
    (f"{GPT} --ranks 4 --tp 4", "--tp 4 does not divide heads 6: choose tp 2"),
    (f"{GPT} --ranks 12 --tp 4 --vocab 258 --ffn 48", "--tp 4 does not divide heads 6: choose tp 3 or 6"),
    (f"{GPT} --ranks 4 --tp 2 --heads 4 --ffn 27", "--tp 2 does not divide ffn 27: choose tp 1"),
    (f"{GPT} --ranks 4 --tp 2 --vocab 257", "--tp 2 does not divide vocab 257: pass --pad-vocab, "),
    (f"{GPT} --ranks 6 --tp 2 --vocab 261", "which adds rows that the softmax ignores, or choose tp 1 or 3"),
    (f"{GPT} --ranks 4 --tp 2 {SP} --seq 9", "--sequence-parallel: tp 2 does not divide seq 9: choose seq 8"),
    (f"{GPT} --ranks 4 --tp 4 {SP} --heads 4 --seq 11", "tp 4 does not divide seq 11: choose seq 12"),
    (
        f"{LLAMA} --ranks 12 --tp 4 --kv-heads 3 --vocab 258 --ffn 48",
        "--tp 4 neither divides kv_heads 3 nor is a multiple of it: choose tp 3 or 6",
    ),
    (f"{LLAMA} --ranks 4 --tp 4 --kv-heads 6", "neither divides kv_heads 6 nor is a multiple of it: choose tp 2"),
    (
        "--model mlp --ranks 4 --tp 2",
        "--tp 2: model mlp does not support tensor parallelism; choose gpt, llama or flat",
    ),
    (f"{FLAT} --ranks 4 --tp 2 {SP}", "--sequence-parallel: model flat has no token rows to divide"),
    (SP, "--sequence-parallel: has no effect without tp; pass --tp 2", f"{GPT} --ranks 4 --tp 2 {SP}"),
    ("--keep-gathered", "--keep-gathered: has no effect without tp"),
    ("--pad-vocab", "--pad-vocab: has no effect without tp"),
    ("--ranks 4 --tp 2 --keep-gathered", "has no effect without sequence_parallel; pass --sequence-parallel too"),
    (f"{CP} --ranks 4 --cp 4 --seq 6 --context-order contiguous", "--cp 4: cp (4) does not divide seq 6; choose seq 8"),
    (f"{CP} --ranks 8 --cp 4 --tp 2 {SP} --seq 8", "--cp 4: 2 cp x tp (16) does not divide seq 8; choose seq 16"),
    (f"{CP} --ranks 4 --cp 3 --seq 24", "--cp 3 does not divide ranks 4: choose cp 2 or 4, or ranks 3 or 6"),
    (f"{CP} --ranks 8 --cp 8 --seq 32 --context ulysses", "8 ranks do not divide a rank's 4 heads and 4 of keys and"),
    (f"{CP} --ranks 6 --cp 3 --seq 24 --context ulysses", "of keys and values; choose ring"),
    (f"{CP} --ranks 2 --cp 2 --context rings", "expected one of ring, ulysses, allgather, ulysses+ring; did you mean"),
    (
        f"{CP} --ranks 2 --cp 2 --context ulysses --context-order zigzag",
        "--context-order 'zigzag': ulysses gives every rank all tokens of its heads; leave it out",
    ),
    (f"{CP} --ranks 12 --cp 3 --seq 24 --ranks-per-node 2", "2: cp x tp 3 does not divide it; choose a multiple of 3"),
    (
        f"{CP} --ranks 8 --tp 4 --ranks-per-node 3",
        "--ranks-per-node 3: tp 4 does not divide it; choose a multiple of 4",
    ),
    (f"{CP} --ranks 8 --cp 8 --ranks-per-node 6", "6: cp x tp 8 does not divide it; choose a multiple of 8, or 4"),
    (f"{CP} --ranks 12 --cp 6 --tp 2 --ranks-per-node 7", "7: tp 2 does not divide it; choose a multiple of 12, or 6"),
    (f"{CP} --ranks 4 --cp 4 --context ulysses+ring", "several ranks of cp; pass --ranks-per-node 2, for one"),
    (
        f"{CP} --ranks 6 --cp 3 --tp 2 --seq 24 --context ulysses+ring --ranks-per-node 2",
        "pass --ranks-per-node 6, for",
    ),
    ("--model bert --ranks 2 --cp 2", "--cp 2: model bert has no causal attention over one row; choose gpt or llama"),
    ("--model t5 --ranks 2 --cp 2", "--cp 2: model t5 has no causal attention over one row; choose gpt or llama"),
    *(
        (
            f"{CP} --ranks 8 --cp 2 --stage 3 --{name}",
            "is not modelled with cp 2, which cuts model states too; leave one of them out",
        )
        for name in ("secondary-shard 2", "hierarchical-gather", "quantized-gradients --ranks-per-node 4")
    ),
    ("--partition-activations --recompute full", "--partition-activations: without tp no other rank has the same"),
    ("--ranks 4 --tp 2 --partition-activations", "recompute 'none' does not recompute whole blocks; pass --rec"),
    (
        "--batched-flash --attention flash",
        "--batched-flash: backend numpy has no such products; pass --backend cuda --att",
    ),
    (
        "--batched-flash --backend cuda",
        "--batched-flash: attention eager has no such products; pass --backend cuda --att",
    ),
    ("--cpu-checkpointing --recompute selective", "recompute 'selective' does not recompute whole blocks"),
    ("--cp 2 --ranks 4 --seq 10", "cp 2: 2 cp (4) does not divide seq 10; choose seq 8, for one"),
    ("--cp 2 --ranks 4 --model mlp", "cp 2: model mlp has no causal attention over one row"),
    ("--cp 2 --ranks 4 --model flat", "cp 2: model flat has no causal attention over one row"),
    ("--context ring", "context 'ring': has no effect without cp; pass --cp 2 or more"),
    (
        "--cp 4 --ranks 4 --context ulysses --heads 6 --hidden 96",
        "4 ranks do not divide a rank's 6 heads and 6 of keys",
    ),
    ("--cp 4 --ranks 4 --context ulysses --context-order zigzag", "ulysses gives every rank all tokens of its heads"),
    ("--ranks 65536 --tp 65536 --pp 2", "is 131,072 ranks or more, but a world has at most 65,536"),
    ("--ranks 4 --context ring", "--context 'ring': has no effect without cp; pass --cp 2 or more, or leave it out"),
    ("--ranks 4 --context-order zigzag", "--context-order 'zigzag': has no effect without cp; pass --cp 2 or more"),
    ("--model mlp --ranks 4 --cp 4", "--cp 4: model mlp has no causal attention over one row; choose gpt or llama"),
    (f"{FLAT} --ranks 4 --cp 4", "--cp 4: model flat has no causal attention over one row; choose gpt or llama"),
    (f"{GPT} --ranks 4 --cp 4 --seq 12", "--cp 4: 2 cp (8) does not divide seq 12; choose seq 16, for one"),
    (
        f"{GPT} --ranks 4 --cp 4 --seq 16 --context ulysses",
        "--context 'ulysses': 4 ranks do not divide a rank's 6 heads and 6 of keys and values; choose cp 2, or ring",
        f"{GPT} --ranks 4 --cp 2 --seq 16 --context ulysses",
    ),
    (f"{GPT} --ranks 4 --cp 4 --seq 16 --fp32-softmax", "as flash does; choose flash without fp32_softmax, or context"),
    (f"{GPT} --ranks 4 --cp 4 --seq 16 --attention eager", "--attention 'eager': context ring merges results as flash"),
    # -- pipelines
    ("--ranks 2 --pp two", "--pp: 'two': expected a whole number"),
    (f"{GPT} --ranks 4 --pp 3", "--pp 3 does not divide ranks 4", f"{GPT} --ranks 3 --pp 3 --layers 3"),
    (f"{GPT} --ranks 8 --pp 2 --tp 3", "tp 3 x pp 2 does not divide ranks 8", f"{GPT} --ranks 6 --pp 2 --tp 1"),
    (
        f"{GPT} --ranks 3 --pp 3",
        "--layers 4 do not divide into 3 equal chunks: choose layers 3, pass --balance-ends, or pass "
        "--stage-layers 2,1,1",
        f"{GPT} --ranks 3 --pp 3 --stage-layers 2,1,1",
    ),
    (f"{GPT} --ranks 5 --pp 5 --layers 5 --balance-ends", "and two ends do not divide into 5 equal chunks: choose lay"),
    (
        f"{GPT} --ranks 2 --pp 2 --layers 4 --pipeline interleaved --virtual-stages 3 --accumulate 2",
        "--pp 2 x virtual_stages 3: more than the model's layers, 4; choose layers 6, or pass --balance-ends",
        f"{GPT} --ranks 2 --pp 2 --layers 4 --pipeline interleaved --virtual-stages 3 --accumulate 2 --balance-ends",
    ),
    (f"{GPT} --ranks 8 --pp 8", "--pp 8: more than the model's layers, 4; choose pp 4"),
    (f"{GPT} --ranks 6 --pp 6", "choose pp 2"),
    (
        f"{GPT} --ranks 2 --pp 2 --layers 3 --pipeline interleaved --accumulate 2",
        "--pp 2 x virtual_stages 2: more than the model's layers, 3; choose layers 4",
    ),
    (f"{GPT} --ranks 4 --pp 4 --virtual-stages 2 --pipeline interleaved --accumulate 4", "choose pp 2"),
    (
        f"{GPT} --ranks 2 --pp 2 --pipeline interleaved --accumulate 5 --micro-batch-group 2",
        "--micro-batch-group 2: of 5 microbatches, every group (the last too) needs at least pp 2; choose 3",
        f"{GPT} --ranks 2 --pp 2 --pipeline interleaved --accumulate 5 --micro-batch-group 3",
    ),
    (
        f"{GPT} --ranks 2 --pp 2 --pipeline interleaved --accumulate 1",
        "--accumulate 1: interleaved needs at least pp 2 microbatches; choose 2, or --pipeline 1f1b",
    ),
    (
        "--micro-batch-group 2",
        "--micro-batch-group 2: works only with the interleaved schedule; pass --pipeline interleaved too",
    ),
    (
        f"{GPT} --ranks 4 --pp 4 --layers 4 --pipeline zb-h1 --accumulate 3",
        "--accumulate 3: zb-h1 needs at least pp 4 microbatches; choose 4, or --pipeline 1f1b",
    ),
    (
        f"{GPT} --ranks 2 --pp 2 --layers 4 --pipeline zb-v --accumulate 3",
        "--accumulate 3: zb-v needs at least 2 x pp 2 microbatches; choose 4, or --pipeline 1f1b",
    ),
    (f"{GPT} --ranks 2 --pp 2 --layers 3 --pipeline zb-v --accumulate 4", "--pp 2 x chunks 2: more than the model's"),
    (f"{GPT} --ranks 2 --pp 2 --pipeline zb-v --virtual-stages 2 --accumulate 4", "pass --pipeline interleaved too"),
    (
        "--virtual-stages 2",
        "--virtual-stages 2: works only with the interleaved schedule; pass --pipeline interleaved too",
    ),
    ("--virtual-stages 2 --pipeline interleaved", "--pipeline: without pp there are no pipeline stages; pass --pp 2"),
    ("--pipeline gpipe", "--pipeline: without pp there are no pipeline stages; pass --pp 2"),
    ("--stage-layers 2,2", "--stage-layers: without pp there are no pipeline stages"),
    ("--balance-ends", "--balance-ends: without pp there are no pipeline stages"),
    (
        f"{GPT} --ranks 4 --pp 2 --stage-layers 2,2 --balance-ends",
        "--balance-ends: not with stage_layers '2,2'",
    ),
    (f"{GPT} --ranks 2 --pp 2 --pipeline 1fb1", "'1fb1': expected one of gpipe, 1f1b, interleaved"),
    *(
        (f"{GPT} --ranks 2 --pp 2 --stage-layers {given}", "expected 2 numbers that make up 4 layers, such as 2,2")
        for given in ("1,2", "4", "999999999,2")
    ),
    *(
        (f"{GPT} --ranks 2 --pp 2 --stage-layers={given}", "expected numbers with commas, such as 3,4,4,3")
        for given in ("-1,5", "1.5,2.5", "2,²", "2,,2", f"2,{'9' * 5000}")
    ),
    (
        f"{GPT} --ranks 3 --pp 3 --stage-layers 2,0,2",
        "stage 1 without layers has nothing to do; the first and the last may have none; choose 2,1,1",
        f"{GPT} --ranks 3 --pp 3 --stage-layers 2,1,1",
    ),
    (
        f"{GPT} --ranks 4 --pp 2 --partition owner",
        "--partition 'owner': a table tied across pipeline stages has an owner on each of them; choose slices",
        f"{GPT} --ranks 4 --pp 2 --partition slices",
    ),
    (f"{FLAT} --ranks 3 --pp 3", "--units 4 do not divide into 3 equal chunks: choose units 3"),
    (f"{FLAT} --ranks 2 --pp 2 --stage-layers 0,4", "the first chunk and the last one need units; choose 2,2"),
    (f"{FLAT} --ranks 4 --pp 2 --balance-ends", "--balance-ends: model flat has no table and no head"),
    (f"{FLAT} --ranks 8 --pp 8", "--pp 8: more than the model's units, 4; choose pp 4"),
    # -- offload
    (
        "--stage 3 --precision fp32 --offload params=host",
        "--offload 'params=host': the device updates fp32 parameters in place; offload the optimizer too, or choose bf",
        "--stage 3 --precision fp32 --offload params=host,optimizer=host",
        "--stage 3 --precision bf16 --offload params=host",
    ),
    ("--stage 2 --offload params=host", "DeepSpeed takes offload_param there and ignores it without a word"),
    ("--model mlp --ranks 2 --pp 2", "--pp 2: model mlp does not support pipeline stages; choose gpt, llama or flat"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0][:80])
def test_it_is_refused_in_one_line_and_what_is_advised_is_accepted(row: tuple[str, ...]) -> None:
    words, said, *right = row
    with pytest.raises(InputError) as refused:
        parsed(*words.split())
    text = str(refused.value)
    assert said in text
    assert "\n" not in text
    assert len(text) < 3000
    for one in right:
        parsed(*one.split())
    mesh = "does not divide ranks" in text  # which knows no model: one is taken that every axis divides
    rest = ["--heads", "24", "--hidden", "192", "--vocab", "6144", "--layers", "24"] if mesh else []
    axes = r"(tp|cp|pp|dp_replicate|ranks) ([\d or]+)" if mesh else r"choose (tp|cp|pp|seq|layers|units) ([\d or]+)"
    for name, numbers in re.findall(axes, text[text.find("choose") :] if mesh else text):
        for number in re.findall(r"\d+", numbers):
            parsed(*words.split(), *rest, f"--{name.replace('_', '-')}", number)  # the rest unchanged


def test_of_two_that_exclude_each_other_each_is_told_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for text, words, said in (
        (
            "partition = 'owner'",
            "--reduce-bucket 9",
            rf"^--reduce-bucket 9: not with partition 'owner'.*scenario's, {file}",
        ),
        ("reduce_bucket = 9", "--partition owner", rf"^scenario {file}: reduce_bucket 9: .*\(--partition was given\)"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=said):
            parsed(str(file), *words.split())


VERBS = (
    *("run", "plan", "compare", "fit --find layers --limit 1GB", "step", "plot memory -o out.svg"),
    "export trace --gpu a100-80 -o out.json",
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_so_in_one_line_and_exits_with_2(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, said in (
        ("--ranks 4 --tp 3", "--tp 3 does not divide ranks 4"),
        ("--ranks 4 --dp-replicat 2", "unknown flag --dp-replicat: did you mean --dp-replicate?"),
    ):
        assert main([*verb.split(), *words.split()]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"zerosim: error: {said}")
    assert not list(tmp_path.iterdir())
