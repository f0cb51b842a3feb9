"""One process of two that train `Tiny` by DeepSpeed on gloo, at each ZeRO stage.

    torchrun -m oracle.state_deepspeed_worker FOLDER save
    torchrun -m oracle.state_deepspeed_worker FOLDER load

`save` leaves the engine's checkpoint in FOLDER/CASE, what ds_to_universal makes of it in FOLDER/CASE-universal, what
zero_to_fp32 makes of it in CASE-fp32.pt, the engine's fp32 weights in CASE-now.pt, and a step later in CASE-next.pt.
`load` starts engines anew from FOLDER/CASE-ours, a universal checkpoint, and leaves the weights in CASE-loaded.pt and,
the same step later, in CASE-ours.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from .state_model import ROWS, Tiny, groups, tokens

STEPS = 3
CASES = {f"{dtype}-{stage}": (dtype, stage) for dtype in ("fp32", "bf16", "fp16") for stage in (1, 2, 3)}
del CASES["fp16-1"], CASES["fp16-3"]
CASES["bf16-accumulated"] = "bf16", 1  # bf16 that accumulates in fp32 has an optimizer of its own


def engine(dtype: str, stage: int, universal: bool, accumulated: bool = False) -> Any:
    tile = 10**9 if universal else 50  # steps of a universal checkpoint count right in one sub-group only (findings/)
    zero = {"stage": stage, "sub_group_size": tile, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
    zero |= {"parameter_alignment": True} if (dtype, stage) == ("bf16", 2) else {}
    zero |= {"round_robin_gradients": True} if (dtype, stage) == ("fp32", 2) else {}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    config |= {dtype: {"enabled": True}} if dtype != "fp32" else {}
    config |= {"fp16": {"enabled": True, "initial_scale_power": 4}} if dtype == "fp16" else {}
    config |= {"data_types": {"grad_accum_dtype": "fp32"}} if accumulated else {}
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model, split=dtype == "bf16"), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(of: Any, first: int, last: int) -> None:
    for step in range(first, last):
        of.backward(of(tokens(step, deepspeed.comm.get_rank(), 2)))
        of.step()


def masters(of: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(one) for name, one in of.module.named_parameters() if one.requires_grad}


def save(folder: Path) -> None:
    for case, (dtype, stage) in CASES.items():
        is_own = case == "bf16-accumulated"
        one = engine(dtype, stage, universal=False, accumulated=is_own)
        steps(one, 0, STEPS)
        one.save_checkpoint(str(folder / case), tag="tag")
        now = {name: value.clone() for name, value in masters(one).items()}
        steps(one, STEPS, STEPS + 1)
        after = masters(one)
        if deepspeed.comm.get_rank() == 0:
            torch.save(now, folder / f"{case}-now.pt")
            torch.save(after, folder / f"{case}-next.pt")
        if deepspeed.comm.get_rank() == 0 and not is_own:  # zero_to_fp32 refuses it
            torch.save(
                dict(get_fp32_state_dict_from_zero_checkpoint(str(folder / case), "tag")), folder / f"{case}-fp32.pt"
            )
            words = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
            (folder / f"{case}-universal").mkdir()
            ds_to_universal.main(
                SimpleNamespace(
                    input_folder=str(folder / case / "tag"),
                    output_folder=str(folder / f"{case}-universal" / "tag"),
                    inject_missing_state=stage < 3,
                    **words,
                )
            )
        deepspeed.comm.barrier()


def load(folder: Path) -> None:
    for case, (dtype, stage) in CASES.items():
        if dtype == "fp16" or case == "bf16-accumulated":
            continue
        one = engine(dtype, stage, universal=True)
        one.load_checkpoint(str(folder / f"{case}-ours"))
        assert one.global_steps == STEPS
        loaded = {name: value.clone() for name, value in masters(one).items()}
        steps(one, STEPS, STEPS + 1)
        after = masters(one)
        if deepspeed.comm.get_rank() == 0:
            torch.save(loaded, folder / f"{case}-loaded.pt")
            torch.save(after, folder / f"{case}-ours.pt")


if __name__ == "__main__":
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch's CPU has it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which gcc compiles for a minute
    deepspeed.init_distributed("gloo")
    {"save": save, "load": load}[sys.argv[2]](Path(sys.argv[1]))
    deepspeed.comm.barrier()
    os._exit(0)
