"""What `digests.py` takes beside random cases: small models in every way, and what every verb prints.

A way is planned twice on a GPU: with its events, those of all microbatches, and without, as a page does. A page is a
command line, whose text and JSON are read, and the plans inside it.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from zerosim.cli.main import main
from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import InputError, OutOfMemory, RankFailed
from zerosim.train import plan as planning
from zerosim.train.extend import Planned
from zerosim.train.memory import RankMemory
from zerosim.train.result import RunResult

GPT: dict[str, Any] = dict(model="gpt", layers=4, hidden=64, heads=8, seq=32, vocab=256, ranks=4, accumulate=6)
LLAMA = GPT | dict(model="llama", kv_heads=8)
PARTS = "selective:layernorm,mlp_act"


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Small models: every schedule, stage, recipe and form of recompute, and each capability."""
    for pp, schedules in {4: (1, 3), 8: (0, 2), 16: (1,), 64: (1,)}.items():
        for kind in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
            if pp < 64 or kind in ("1f1b", "gpipe"):
                twice = {"interleaved": 2, "zb-v": 2}.get(kind, 1)
                fields = LLAMA | dict(pp=pp, ranks=2 * pp, pipeline=kind, layers=pp * twice, hidden=32)
                for stage in schedules:
                    yield f"pp {pp} {kind} {stage}", fields | dict(stage=stage, accumulate=min(3 * pp, 32))
    for recipe in ("paper", "ddp", "deepspeed", "fsdp2", "megatron"):
        for stage in range(4):
            yield f"{recipe} {stage}", GPT | dict(recipe=recipe, stage=stage, dropout=0.1)
            yield f"{recipe} {stage} full", LLAMA | dict(recipe=recipe, stage=stage, recompute="full:2")
    for recompute in ("none", "selective", PARTS, "selective:layernorm,mlp,attn_proj", "full", "full:2"):
        for tp in (1, 2):
            sp = dict(tp=tp, sequence_parallel=tp > 1, attention="flash" if tp > 1 else "eager")
            yield f"{recompute} tp {tp}", LLAMA | sp | dict(stage=1, recompute=recompute)
            yield f"{recompute} tp {tp} pp", GPT | sp | dict(stage=2, recompute=recompute, pp=2)
            yield f"{recompute} by module", LLAMA | dict(stage=3, recompute=recompute, gather="module")
    fields: dict[str, Any]
    for where in ("host", "nvme"):
        for stage, what in ((1, ""), (2, "grads"), (3, "params"), (3, "grads")):
            offload = ",".join(f"{one}={where}" for one in ("optimizer", what) if one)
            for pp in (1, 2):
                fields = dict(stage=stage, offload=offload, pp=pp, accumulate=8)
                yield f"offload {offload} {stage} pp {pp}", GPT | fields
        yield f"deepspeed {where}", GPT | dict(stage=3, recipe="deepspeed", offload=f"optimizer={where},params={where}")
    ring = dict(LLAMA, tp=2, recompute="full", stage=1)
    for name, fields in {
        "tied": dict(GPT, pp=4, stage=1, tie_embeddings=True, accumulate=9),
        "uneven": dict(GPT, pp=4, layers=7, stage=1, stage_layers="1,3,2,1", accumulate=9),
        "sums of three": dict(GPT, ranks=3, stage=2, recipe="ddp", precision="fp16"),
        "two steps": dict(GPT, stage=2, steps=2, precision="bf16-pure"),
        "zero++": dict(GPT, ranks=8, stage=3, quantized_weights=True, quantized_gradients=True, secondary_shard=4),
        "hsdp": dict(GPT, ranks=8, stage=3, dp_replicate=2, replica_reduction="micro_batch"),
        "top-k": dict(GPT, stage=1, compress="top-k", precision="fp32"),
        "powersgd": dict(GPT, stage=0, compress="powersgd", precision="fp32"),
        "int8": dict(GPT, stage=2, compress="int8", precision="fp32"),
        "lora": dict(LLAMA, stage=3, lora_rank=4, lora_target="all-linear", base="nf4"),
        "lora pp": dict(LLAMA, stage=1, lora_rank=4, pp=2),
        "frozen": dict(GPT, stage=1, pp=2, freeze="h.0,h.1"),
        "muon": dict(LLAMA, ranks=8, stage=2, optimizer="muon"),
        "muon 1": dict(GPT, ranks=8, stage=1, optimizer="muon"),
        "muon 1 pp": dict(LLAMA, ranks=8, stage=1, optimizer="muon", pp=2, recompute="full"),
        "muon 0": dict(GPT, stage=0, optimizer="muon"),
        "muon one": dict(LLAMA, ranks=24, layers=6, stage=2, optimizer="muon", accumulate=1),
        "muon fp16": dict(GPT, ranks=8, stage=2, optimizer="muon", precision="fp16", clip_norm=1.0, accumulate=1),
        "muon zb": dict(LLAMA, ranks=4, stage=1, optimizer="muon", pp=2, pipeline="zb-v"),
        "muon refused": dict(GPT, ranks=8, stage=2, optimizer="muon", capacity=650_000),
        "owner": dict(GPT, ranks=8, stage=2, partition="owner"),
        "owner 1": dict(GPT, ranks=8, stage=1, partition="owner", accumulate=1),
        "owner 3": dict(LLAMA, ranks=8, stage=3, partition="owner"),
        "adafactor": dict(GPT, ranks=8, stage=1, optimizer="adafactor"),
        "sophia": dict(GPT, stage=1, optimizer="sophia", pp=2),
        "adam8bit": dict(LLAMA, stage=1, optimizer="adam8bit", pp=2),
        "lazy": dict(GPT, stage=1, lazy_states=True, foreach=True),
        "delayed": dict(GPT, stage=2, offload="optimizer=host", delayed_update=1),
        "inputs on the host": dict(ring, partition_activations=True, cpu_checkpointing=True),
        "inputs in parts": dict(ring, partition_activations=True, pp=2),
        "inputs on the host of a node": dict(ring, cpu_checkpointing=True, host_memory=10**9),
        "saves on the host": dict(GPT, stage=1, offload_activations=True, stash_window=1, pp=2, pipeline="zb-h1"),
        "caching": dict(GPT, stage=3, allocator="caching", steps=2),
        "caching pp": dict(GPT, stage=1, pp=2, allocator="caching", capacity=10**8),
        "segments": dict(GPT, stage=2, allocator="caching", allocator_conf="expandable_segments:True"),
        "arena": dict(GPT, stage=1, allocator="arena", capacity=10**8),
        "ring": dict(GPT, tp=2, stage=2, collective="ring"),
        "buckets": dict(GPT, tp=2, stage=1, bucket_bytes=1000),
        "chunked": dict(LLAMA, pp=2, stage=1, loss="chunked"),
        "groups": dict(LLAMA, layers=4, pp=2, pipeline="interleaved", micro_batch_group=3, accumulate=15),
        "prefetch": dict(LLAMA, stage=3, prefetch=2, overlap_reduction=True, recompute="full"),
        "elements": dict(GPT, stage=3, recipe="deepspeed", prefetch_elements=5000, persistent_numel=100),
        "tiles": dict(LLAMA, stage=3, gather="module", tiles=2),
        "graphs": dict(GPT, tp=2, stage=1, cuda_graphs=True, recipe="megatron", pp=2),
        "beside products": dict(LLAMA, tp=2, sequence_parallel=True, stage=1, tp_comm_overlap=True, recipe="megatron"),
        "beside products pp": dict(
            LLAMA, tp=2, sequence_parallel=True, stage=1, tp_comm_overlap=True, pp=2, recompute="selective"
        ),
        "side stream": dict(GPT, stage=3, recipe="deepspeed", overlap_comm=True),
        "side stream module": dict(
            LLAMA, stage=3, overlap_comm=True, gather="module", recipe="deepspeed", prefetch_elements=900
        ),
        "compiled": dict(LLAMA, stage=3, kernels="compiled", recompute="full", precision="bf16"),
        "dummies": dict(GPT, tp=2, stage=1, recipe="megatron", transformer_engine=True, pp=2),
    }.items():
        yield name, fields
    for family, model in (("gpt", GPT | dict(dropout=0.1)), ("llama", LLAMA)):
        for precision in ("fp32", "bf16"):
            for name, fields in {
                "parts": dict(stage=1, recompute="selective:layernorm,attn_proj,mlp,mlp_act,core_attn"),
                "parts of a module": dict(stage=3, gather="module", recompute="selective:layernorm,attn_proj,mlp"),
                "parts sp": dict(stage=1, tp=2, sequence_parallel=True, recompute="selective:layernorm,attn_proj"),
                "flash full": dict(stage=3, attention="flash", recompute="full"),
                "megatron": dict(stage=0, saves="megatron", recompute="selective"),
                "lora sp": dict(stage=1, tp=2, sequence_parallel=True, lora_rank=4, lora_target="q,v,up"),
                "lora module": dict(stage=3, tp=2, gather="module", lora_rank=4, lora_target="all-linear"),
                "lora fused": dict(stage=3, lora_rank=4, lora_target="k,o,down", recompute="full", pp=2),
                "nf4 module": dict(stage=3, gather="module", lora_rank=4, lora_target="o", base="nf4"),
                "frozen maps": dict(stage=2, freeze="*.weight", pp=2),
                "chunked tied": dict(stage=3, loss="chunked", tie_embeddings=True),
                "zb-h1": dict(stage=1, pp=2, pipeline="zb-h1", tp=2),
            }.items():
                yield f"{family} {precision} {name}", {**model, "precision": precision, **fields}
    for capacity in (1_000_000, 1_500_000, 2_000_000, 2_500_000):
        yield f"refused {capacity}", GPT | dict(stage=1, capacity=capacity)
        yield f"refused {capacity} pp", LLAMA | dict(stage=2, capacity=capacity, pp=2, recompute="full:2")
        yield f"refused {capacity} gpipe", GPT | dict(stage=0, capacity=capacity, pp=2, pipeline="gpipe")


L8, G2, G3 = "--model llama3-8b", "--model gpt2-xl", "--model gpt3-175b --pad-vocab"
PAGES: Mapping[str, str] = {
    "l8": f"plan {L8} --ranks 8 --gpu h100",
    "l8 stage 0": f"plan {L8} --ranks 8 --gpu h100 --stage 0",
    "l8 stage 1": f"plan {L8} --ranks 64 --gpu h100 --stage 1 --accumulate 8",
    "l8 full": f"plan {L8} --ranks 64 --stage 3 --recompute full --accumulate 2 --gpu a100-80",
    "l8 selective": f"plan {L8} --ranks 16 --tp 8 --sp --recipe megatron --stage 1 --recompute selective --gpu h100",
    "l8 deepspeed": f"plan {L8} --ranks 8 --stage 3 --recipe deepspeed --gpu h100 --accumulate 4",
    "l8 pp 4": f"plan {L8} --ranks 16 --pp 4 --stage 1 --accumulate 16 --gpu h100",
    "l8 interleaved": f"plan {L8} --ranks 16 --pp 4 --accumulate 16 --stage 1"
    " --pipeline interleaved --virtual-stages 2 --gpu h100",
    "l8 gpipe": f"plan {L8} --ranks 16 --pp 4 --stage 1 --accumulate 16 --pipeline gpipe --gpu h100",
    "l8 zb-h1": f"plan {L8} --ranks 32 --pp 8 --stage 1 --accumulate 24 --pipeline zb-h1 --gpu h100",
    "l8 zb-v": f"plan {L8} --ranks 16 --pp 4 --stage 1 --accumulate 16 --pipeline zb-v --gpu h100",
    "l8 overlap": f"plan {L8} --ranks 16 --tp 8 --sp --tp-comm-overlap --stage 1 --gpu h100 --recipe megatron"
    " --overlap all --accumulate 6",
    "l8 chunked": f"plan {L8} --ranks 32 --pp 4 --stage 1 --loss chunked --gpu h100 --accumulate 9",
    "l8 refused": f"plan {L8} --ranks 8 --stage 0 --capacity 40GB",
    "l8 fits": f"plan {L8} --ranks 8 --stage 3 --capacity 30GB",
    "l8 muon": f"plan {L8} --ranks 16 --stage 2 --optimizer muon --gpu h100",
    "l8 offload": f"plan {L8} --ranks 8 --stage 1 --offload optimizer=host --gpu h100 --accumulate 7",
    "l8 offload 3": f"plan {L8} --ranks 8 --stage 3 --offload optimizer=host,params=host --gpu h100 --accumulate 6",
    "l8 nvme": f"plan {L8} --ranks 8 --stage 3 --offload optimizer=nvme,params=nvme --gpu h100 --accumulate 6",
    "l8 lora": f"plan {L8} --ranks 4 --lora-rank 16 --base nf4 --gpu h100",
    "l8 caching": f"plan {L8} --ranks 8 --stage 3 --allocator caching --gpu h100 --accumulate 2",
    "l8 zero++": f"plan {L8} --ranks 16 --quantized-weights --quantized-gradients --secondary-shard 8 --gpu h100",
    "175b zb-v": f"plan {G3} --ranks 128 --tp 8 --pp 4 --stage 1 --accumulate 12 --pipeline zb-v --gpu h100",
    "175b pp 16": f"plan {G3} --ranks 128 --tp 8 --pp 16 --accumulate 32 --stage 1 --gpu a100-80",
    "175b chunks": f"plan {G3} --ranks 64 --tp 8 --pp 8 --accumulate 16 --stage 1 --pipeline interleaved"
    " --virtual-stages 3 --recompute full --gpu a100-80 --recipe megatron",
    "175b sp": f"plan {G3} --ranks 64 --tp 8 --pp 8 --sp --accumulate 16 --stage 1 --recompute selective"
    " --recipe megatron --gpu h100",
    "xl stage 3": f"plan {G2} --ranks 12 --pp 4 --stage 3 --accumulate 8 --gpu a100-80",
    "xl stage 2": f"plan {G2} --ranks 8 --pp 2 --stage 2 --accumulate 8 --gpu a100-80",
    "xl uneven": f"plan {G2} --ranks 16 --pp 4 --stage 1 --accumulate 12 --stage-layers 11,13,13,11 --gpu a100-80",
    "xl fp16": f"plan {G2} --ranks 8 --stage 2 --precision fp16 --gpu v100-32 --steps 2",
    "xl owner": f"plan {G2} --ranks 8 --stage 2 --partition owner --gpu v100-32 --accumulate 2",
    "xl sophia": f"plan {G2} --ranks 8 --stage 1 --optimizer sophia --gpu v100-32",
    "xl delayed": f"plan {G2} --ranks 2 --stage 2 --offload optimizer=host --delayed-update 1 --gpu v100-32",
    "xl stash": f"plan {G2} --ranks 2 --stage 2 --offload-activations --stash-window 2 --gpu v100-32",
    "plan on the CPU": "plan --model gpt2 --ranks 4 --pp 2 --stage 1 --accumulate 8",
    "fit": f"fit {L8} --ranks 8 --stage 3 --gpu h100 --limit 80GB",
    "fit mesh": "fit --model gpt2-medium --ranks 8 --gpu a100-80 --find mesh --accumulate 8",
    "fit offload": "fit --model gpt2-xl --ranks 2 --gpu v100-32 --find offload --host-memory 64GB",
    "explain": f"explain {L8} --ranks 64 --pp 4 --stage 1 --accumulate 8",
    "compare": f"compare {G2} --ranks 8 --shapes --accumulate 4",
    "compare optimizers": "compare --model gpt --layers 2 --ranks 4 --steps 2 --stage 2 --optimizers adam,muon",
    "check": "check scenarios/table1.toml scenarios/trillion.toml scenarios/figure6.toml scenarios/steps_torchao.toml",
    "run": "run --model gpt --stage 2 --ranks 4 --steps 2",
    "zoo": "zoo models",
    "export trace": "export trace --model gpt2 --ranks 4 --pp 2 --stage 1 --accumulate 4 --gpu h100 --out OUT.json",
    "export memory": "export memory --model gpt2 --ranks 4 --stage 2 --accumulate 2 --out OUT.json",
    "plot timeline": "plot timeline --model gpt2 --ranks 4 --stage 2 --out OUT.svg",
    "plot streams": "plot streams --model gpt2 --ranks 4 --pp 2 --stage 1 --accumulate 4 --gpu h100 --out OUT.svg",
    "plot schedule": "plot schedule --pp 4 --accumulate 8 --pipeline zb-h1 --out OUT.svg",
    "plot memory": "plot memory --model gpt2 --ranks 16 --pp 4 --stage 1 --accumulate 6 --out OUT.svg",
    "step": "step --model gpt --layers 2 --ranks 2 --stage 3 --steps 1",
}


REFUSED = """
plan --model mlp --recompute full --attention flash
run --offload-activations --backend cuda
plan --model mlp --offload-activations
plan --layers 4 --recompute full:5 --tp 3
plan --tp 2 --sp --keep-gathered --recompute selective:layernorm
plan --model mlp --loss chunked --lora-rank 4
plan --lora-rank 4 --hidden 2 --heads 1
plan --base nf4 --tiles 3
plan --stage 3 --gather module --tiles 3 --tp 2
plan --stage 3 --gather module --tiles 3 --quantized-weights
plan --sequence-parallel --pipeline zb-v
plan --ranks 8 --tp 8 --heads 4 --pp 2
plan --model gpt2 --tp 2 --ranks 4 --stage 1
plan --partition-activations --cpu-checkpointing
plan --recompute full --partition-activations --stash-window 1
plan --pp 4 --ranks 4 --layers 3 --accumulate 4
plan --pp 2 --accumulate 1 --pipeline zb-v --partition owner
plan --pp 2 --stage 1 --pipeline interleaved --micro-batch-group 3 --accumulate 4
plan --optimizer muon --partition slices --tp 2
plan --optimizer muon --precision bf16-pure
plan --compress fp16 --precision fp16 --offload optimizer=host
plan --compress dgc --precision fp32 --stage 2
plan --compress top-k --precision fp32 --skip-nonfinite --tp 2
plan --compress int8 --partition owner --precision fp32
plan --stage 3 --quantized-weights --quantized-gradients --ranks 1
plan --stage 3 --quantized-weights --tp 2 --precision fp64
plan --stage 3 --ranks 8 --hierarchical-gather --ranks-per-node 8
plan --stage 3 --secondary-shard 3 --ranks 8 --lora-rank 4
plan --stage 3 --secondary-shard 4 --ranks 8 --no-reshard-after-forward --partition owner
plan --delayed-update 2 --stage 2 --offload params=host
plan --stage 2 --offload params=host
plan --stage 3 --offload optimizer=nvme --recipe deepspeed --persistent-grads
plan --stage 1 --offload optimizer=host --optimizer muon --precision bf16-pure
run --world mpi --ranks 3 --ranks-per-process 2
run --sample é --vocab 100
plan --model bert --sample x --optimizer sophia
plan --model bert --optimizer sophia --stage 1
plan --stage 2 --reduce-bucket 100 --partition owner --prefetch 1
plan --stage 3 --prefetch 1 --prefetch-elements 5 --max-live 3
plan --stage 1 --keep-upcast --own-grads-only --persistent-grads
plan --fp32-softmax --attention flash --balance-ends --stage-layers 1,3
plan --tp-comm-overlap --overlap-comm --stage 3
plan --optimizer adam --momentum 0.9 --nesterov
plan --freeze nothing.at.all --lora-rank 4
plan --lora-rank 4 --lora-target rows
plan --freeze * --stage 3 --quantized-gradients
plan --stage 3 --quantized-weights --quantized-gradients --ranks-per-node 2 --hidden 20 --heads 2
plan --context-parallel-size 2
plan --num-experts 8
plan --stge 3
fit --model gpt2 --gpu h100 --ranks 4 --find mesh --tp 2
fit --model gpt2 --ranks 4 --find offload --stage 0
fit --model gpt2 --gpu h100 --find lora-rank --lora-rank 3
explain --ranks 6 --tp 4
"""
"""Command lines that are refused, most with several things wrong: which one is named may not change."""


def of_way(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a way's plans leave: events in both precisions, all figures, and those of short plans."""
    found: dict[str, Any] = {}
    cluster = cluster_of(find_hardware("h100"))
    for precision in (None, "fp32"):
        given = {**fields, **({"precision": precision} if precision and "precision" not in fields else {})}
        whole, short = _ended(given, keep_events=True, cluster=cluster), _ended(given, cluster=cluster)
        found[f"events {precision}"] = whole if isinstance(whole, tuple) else [whole.events[rank] for rank in whole.ran]
        for name, ended in {"whole": whole, "short": short}.items():
            found[f"{name} {precision}"] = ended if isinstance(ended, tuple) else of_plan(ended)
            found[f"{name} time {precision}"] = None if isinstance(ended, tuple) else ended.time
    return found


def _ended(fields: Mapping[str, Any], **how: Any) -> RunResult | tuple[Any, ...]:
    try:
        return planning.plan(plan_config(**fields), **how)
    except OutOfMemory as error:
        return str(error), error.live, error.by_unit, error.where, error.requested
    except (InputError, RankFailed) as error:
        return (str(error),)


def of_plan(result: RunResult) -> tuple[Any, ...]:
    """A plan's figures but its time, with the order of its tables' rows."""
    memory = [_memory(result.memory[rank]) for rank in result.ran]
    traffic = [result.traffic[rank] for rank in result.ran]
    saved = result.saved, result.saved_again
    return memory, traffic, saved, result.stands_for, result.live_bytes_after, result.steps


def _memory(held: RankMemory) -> tuple[Any, ...]:
    return (
        *(held.marks, held.peak, held.allocator, held.host_peak_bytes, held.states, held.allocator_marks),
        *(held.first_step_bytes, {name: (one.marks, one.peak) for name, one in held.others.items()}),
    )


def of_page(line: str) -> dict[str, Any]:
    """What a command leaves: exit code, text with all tables, JSON, written file, and the plans inside it."""
    inner, plans = planning._plan, list[Any]()

    def spied(*args: Any, **how: Any) -> Planned:
        planned = inner(*args, **how)
        plans.append((planned.result.config.data.accumulate, of_plan(planned.result)))
        return planned

    with tempfile.TemporaryDirectory() as folder, patch.object(planning, "_plan", spied):
        argv = [re.sub("^OUT", f"{folder}/out", word) for word in line.split()]
        text = _printed([*argv, "--all"] if argv[0] == "plan" else argv)
        inside = list(plans)
        has_json = argv[0] not in ("plot", "export", "explain", "step", "fit")
        json = _printed([*argv, "--json", "-"]) if has_json else None
        written = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    return {"text": _steady(text, folder), "json": _steady(json, folder), "plans": inside, "written": written}


def _steady(printed: object, folder: str) -> str:
    """Leave out seconds that were measured, and the name of a temporary folder."""
    text = str(printed).replace(folder, "FOLDER")
    return re.sub(r"(in|took) [0-9.]+ (s|ms|min)\b|[0-9.,]+ tokens/s here|\b[0-9.]+ s on this machine", "", text)


def _printed(argv: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), patch("sys.stdin", io.StringIO()):
        code = main(argv)
    return code, out.getvalue()
