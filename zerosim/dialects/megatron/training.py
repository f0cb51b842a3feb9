"""The optimizer, rates and experts' routing on a Megatron command line."""

from __future__ import annotations

import math
from typing import Any

from zerosim.dialects.megatron.args import Arguments

_MOE = ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-layer-freq",
        "--moe-token-dispatcher-type", "--moe-enable-deepep", "--moe-flex-dispatcher-backend",
        "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff",
        "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-router-dtype",
        "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy",
        "--moe-grouped-gemm", "--moe-layer-recompute", "--moe-extended-tp", "--moe-use-legacy-grouped-gemm",
        "--moe-apply-probs-on-input", "--moe-router-num-groups", "--moe-router-group-topk",
        "--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap")  # fmt: skip


def training_of(arguments: Arguments) -> None:
    """Set what else is predicted, how experts are chosen, and how parameters change."""
    _further(arguments)
    _experts(arguments)
    _optimizer(arguments)
    _rates(arguments)


def _further(arguments: Arguments) -> None:
    if depths := arguments["--mtp-num-layers"]:
        arguments.sets("--mtp-num-layers", mtp_layers=depths)
        arguments.sets("--mtp-loss-scaling-factor", mtp_loss=arguments["--mtp-loss-scaling-factor"])
    else:
        arguments.tell("--mtp-num-layers", "ignored", "0 further tokens")
        arguments.tell("--mtp-loss-scaling-factor", "ignored", "without --mtp-num-layers")


def _experts(arguments: Arguments) -> None:
    if not arguments["--num-experts"]:
        for name in _MOE:
            arguments.tell(name, "ignored", "there are no experts")
        return
    kind, sends = "--moe-token-dispatcher-type", arguments["--moe-token-dispatcher-type"]
    spread = "deepep" if sends == "flex" else sends
    tp, etp = arguments["--tensor-model-parallel-size"], arguments["--expert-tensor-parallel-size"]
    spreads = arguments["--expert-model-parallel-size"] > 1 or (etp or tp) != tp
    if spreads:
        arguments.sets(kind, dispatcher=spread)
    else:
        arguments.tell(kind, "ignored", "all experts are on every rank")
    backend = arguments["--moe-flex-dispatcher-backend"]
    for name in ("--moe-enable-deepep", "--moe-flex-dispatcher-backend"):
        arguments.tell(name, "understood" if sends == "flex" else "ignored", f"dispatcher {spread}")
    if sends == "flex" and backend != "deepep":
        arguments.lacks("--moe-flex-dispatcher-backend", f"{backend}'s exchange")
    _beside(arguments)
    _balance(arguments)
    if arguments["--moe-router-dtype"] == "fp32":
        arguments.sets("--moe-router-dtype", router_dtype="fp32")
    elif arguments["--moe-router-dtype"] is None:
        arguments.usually("Megatron without --moe-router-dtype", router_dtype="model")
    else:
        arguments.lacks("--moe-router-dtype", "a router in fp64")
    factor = arguments["--moe-expert-capacity-factor"]
    if factor is not None and factor > 0 and sends == "allgather" and spreads:
        what = f"a capacity beside {kind} allgather, the default"
        arguments.lacks("--moe-expert-capacity-factor", what, advice=f"write {kind} alltoall")
    elif factor is not None and factor > 0:
        policy = "weight" if arguments["--moe-token-drop-policy"] == "probs" else "position"
        arguments.sets("--moe-expert-capacity-factor", capacity_factor=factor, token_drop=policy)
        arguments.tell("--moe-token-drop-policy", "understood", f"token_drop {policy}")
        pads = arguments["--moe-pad-expert-input-to-capacity"]
        if pads and sends == "flex" and backend == "deepep":
            why = "ValueError of TransformerConfig: flex with deepep does not support it"
            arguments.refuse("--moe-pad-expert-input-to-capacity", why, f"write {kind} alltoall")
        elif pads:
            arguments.sets("--moe-pad-expert-input-to-capacity", pad_to_capacity=True)
    for name in ("--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy", "--moe-expert-capacity-factor"):
        if factor is None or factor <= 0:
            arguments.tell(name, "ignored", "no token is dropped")
    arguments.tell("--moe-grouped-gemm", "understood", "experts_kernel grouped")
    if not arguments.has("--moe-grouped-gemm"):
        arguments.notes.note("without --moe-grouped-gemm Megatron runs an expert at a time; here all are grouped")
    elif not arguments["--bf16"]:
        why = "AssertionError: Currently GroupedGEMM for MoE only supports bf16 dtype"
        arguments.refuse("--moe-grouped-gemm", why, "add --bf16")


def _beside(arguments: Arguments) -> None:
    """Set whether shared experts run beside the exchange of rows."""
    name, sends = "--moe-shared-expert-overlap", arguments["--moe-token-dispatcher-type"]
    if not arguments[name] or not arguments["--moe-shared-expert-intermediate-size"]:
        arguments.tell(name, "ignored", "there are no shared experts")
    elif sends != "alltoall":
        why = "ValueError of TransformerConfig: moe_shared_expert_overlap only works with alltoall token dispatcher"
        arguments.refuse(name, why, "add --moe-token-dispatcher-type alltoall")
    elif arguments["--expert-model-parallel-size"] == 1:
        arguments.tell(name, "ignored", "all experts are on every rank")
    else:
        arguments.sets(name, shared_expert_overlap=True)


def _balance(arguments: Arguments) -> None:
    kinds, factors = arguments["--moe-router-load-balancing-type"], arguments["--moe-aux-loss-coeff"]
    name = "--moe-router-load-balancing-type"
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
    if unknown := [kind for kind in kinds if kind not in known]:
        arguments.refuse(name, f"argparse exits 2: invalid choice: {unknown[0]!r}", f"they are {', '.join(known)}")
    elif len(kinds) > 1 or kinds[0] in ("sinkhorn", "global_aux_loss"):
        arguments.lacks(name, f"{' and '.join(kinds)}: another balance", costs=False)
        arguments.tell("--moe-aux-loss-coeff", "lacking", "of another balance")
    elif kinds[0] == "none" or not factors[0]:
        for one in (name, "--moe-aux-loss-coeff"):
            arguments.tell(one, "ignored", "no loss balances the experts")
    else:
        arguments.sets("--moe-aux-loss-coeff", aux_loss=factors[0])
        if kinds[0] == "seq_aux_loss":
            arguments.sets(name, aux_loss_over="sequence")
        arguments.tell(name, "understood", kinds[0])
    if arguments["--moe-z-loss-coeff"]:
        arguments.sets("--moe-z-loss-coeff", z_loss=arguments["--moe-z-loss-coeff"])
    if arguments["--moe-router-enable-expert-bias"]:
        arguments.sets("--moe-router-enable-expert-bias", bias_rate=arguments["--moe-router-bias-update-rate"])
        arguments.tell("--moe-router-bias-update-rate", "understood", "the biases' step")
        if arguments.values.get("--moe-router-score-function") != "sigmoid":
            why = "ValueError of TransformerConfig: Expert bias only supports sigmoid score function"
            arguments.refuse("--moe-router-enable-expert-bias", why, "add --moe-router-score-function sigmoid")
    else:
        arguments.tell("--moe-router-bias-update-rate", "ignored", "without --moe-router-enable-expert-bias")


def _optimizer(arguments: Arguments) -> None:
    kind = arguments["--optimizer"]
    values: dict[str, Any] = {
        "adam": {"optimizer": "adamw"},
        "sgd": {"optimizer": "sgd", "momentum": arguments["--sgd-momentum"]},
        "muon": {"optimizer": "muon", "momentum": arguments["--muon-momentum"]},
        "dist_muon": {"optimizer": "muon", "momentum": arguments["--muon-momentum"]},
        "lion": {"optimizer": "lion"},
    }.get(kind, {})
    if kind in ("muon", "dist_muon"):
        if kind == "muon" and arguments["--use-distributed-optimizer"]:
            why = "AssertionError: Muon optimizer does not support distributed optimizer for now"
            arguments.refuse("--optimizer, --use-distributed-optimizer", why, "--without use-distributed-optimizer")
        if arguments["--use-torch-fsdp2"] or arguments["--use-megatron-fsdp"]:
            arguments.refuse("--optimizer", "AssertionError: Muon optimizer does not support FSDP for now")
    if values:
        arguments.sets("--optimizer", **values)
    else:
        arguments.lacks("--optimizer", f"optimizer {kind}")
    for name, owner in (("--sgd-momentum", "sgd"), ("--muon-momentum", "muon")):
        arguments.tell(name, "understood" if owner in kind else "ignored", f"optimizer {kind}")
    averages = ("--adam-beta1", "--adam-beta2")
    if kind == "adam":
        arguments.sets(averages[0], betas=(arguments[averages[0]], arguments[averages[1]]))
        arguments.tell(averages[1], "understood", f"betas {arguments[averages[1]]}")
        arguments.sets("--adam-eps", eps=arguments["--adam-eps"])
        arguments.usually("Megatron's biases and norms do not decay", decay="matrices")
    else:
        for name in (*averages, "--adam-eps"):
            arguments.tell(name, "ignored", f"optimizer {kind}")


def _rates(arguments: Arguments) -> None:
    rate, least = arguments.flag("lr") or arguments["--lr"], arguments["--min-lr"]
    if rate is not None and least > rate:
        arguments.refuse("--min-lr, --lr", f"AssertionError without a text: {least} is above {rate}", "choose less")
    style = arguments["--lr-decay-style"]
    if style in ("cosine", "constant"):
        arguments.sets("--lr-decay-style", schedule=style)
    else:
        arguments.lacks("--lr-decay-style", f"a rate that falls by {style}", costs=False)
    both = [name for name in ("--train-iters", "--train-samples") if arguments.has(name)]
    steps, rows = arguments["--train-iters"], arguments["--train-samples"]
    if len(both) > 1:
        arguments.refuse(", ".join(both), "AssertionError: expected iteration-based training", "keep one")
    for name, count, of in (("--train-iters", steps, "steps"), ("--train-samples", rows, "rows")):
        if count is not None:
            arguments.tell(name, "understood", f"{count:,} {of}; a plan has one step")
    wrong = "--lr-decay-samples --lr-warmup-samples" if steps else "--lr-decay-iters --lr-warmup-iters" if rows else ""
    for name in wrong.split():
        if arguments[name]:
            based = "iteration" if steps else "sample"
            why = f"AssertionError: expected {based}-based learning rate {'decay' if 'decay' in name else 'warmup'}"
            arguments.refuse(f"{both[0]}, {name}", why, "count both in steps, or both in rows")
    _warmup(arguments, steps, rows)


def _warmup(arguments: Arguments, steps: int | None, rows: int | None) -> None:
    share, batch = arguments["--lr-warmup-fraction"], arguments["--global-batch-size"]
    name, warm = "--lr-warmup-iters", arguments["--lr-warmup-iters"]
    samples = arguments["--lr-warmup-samples"]
    if share is not None and (warm or samples):
        arguments.refuse("--lr-warmup-fraction", "AssertionError: can only specify one of them", "keep one")
        return
    if share is not None:
        name, length = "--lr-warmup-fraction", arguments["--lr-decay-iters"] or steps
        decay = arguments["--lr-decay-samples"] or rows
        length = length or (math.ceil(decay / batch) if decay and batch else None)
        warm = None if length is None else int(share * length)
    elif samples:
        name, warm = "--lr-warmup-samples", math.ceil(samples / batch) if batch else None
    if warm is None:
        arguments.lacks(name, "a share of an unknown length", costs=False)
    elif warm:
        arguments.sets(name, warmup=warm)
    for one in ("--lr-warmup-iters", "--lr-warmup-samples", *([name] if warm == 0 else [])):
        if not arguments[one] or warm == 0:
            arguments.tell(one, "ignored", "no warm-up")
