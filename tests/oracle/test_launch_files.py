"""Drawn files beside the launcher of accelerate and TrainingArguments: both readers take a file, or both refuse it."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oracle.drawn_files import arguments, launch_file
from zerosim.dialects import Context, accelerate, trainer
from zerosim.dialects.reading import Document, Reading, flat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    launch = pytest.importorskip("accelerate.commands.launch")
    training = pytest.importorskip("transformers.training_args")
    pytest.importorskip("deepspeed")
    from accelerate import parallelism_config
    from accelerate.utils import dataclasses, deepspeed
    from accelerate.utils import launch as environment

DRAWN = range(60)
pytestmark = pytest.mark.filterwarnings("ignore")


def of_accelerate(path: Path) -> dict[str, Any]:
    """Start as accelerate launch does, up to the plugin in each process. Raises: as accelerate does."""
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, defaults, of_file = launch._validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(
            [*defaults.deepspeed_config, *(["mixed_precision"] if of_file else [])]
        )
        own = environment.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu or args.use_megatron_lm:
        own = environment.prepare_multi_gpu_env(args)
    else:
        own = environment.prepare_simple_launcher_cmd_env(args)[1]
    os.environ.update(own)
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        is_second = args.use_fsdp and str(args.fsdp_version) == "2"
        world = SimpleNamespace(
            num_processes=args.num_processes, multi_device=args.multi_gpu, is_main_process=False, is_fsdp2=is_second,
            distributed_type=defaults.distributed_type,
        )  # fmt: skip
        parallelism_config.ParallelismConfig()._validate_accelerator(world)
    if args.use_fsdp:
        plugin = dataclasses.FullyShardedDataParallelPlugin()
        return {
            "recipe": f"fsdp{plugin.fsdp_version}",
            "recompute": "full" if plugin.activation_checkpointing else "none",
            "offload": "optimizer=host" in _offload(plugin.cpu_offload),
        }
    if args.use_deepspeed:
        config = dataclasses.DeepSpeedPlugin().deepspeed_config
        clip = config.get("gradient_clipping", 1.0)
        return {"stage": config["zero_optimization"]["stage"], "clip_norm": 1.0 if clip == "auto" else clip}
    return {}


def _offload(policy: Any) -> str:
    is_on = getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy")
    return "optimizer=host" if is_on else ""


def check(ours: Reading, by: str, theirs: dict[str, Any] | Exception) -> None:
    """Compare whether both take a file, and the options that the framework's own object shows."""
    refused = [one for one in ours.refusals if one.by == by]
    assert bool(refused) == isinstance(theirs, Exception), (refused, theirs, dict(ours.document.keys))
    if not ours.refusals and not isinstance(theirs, Exception):
        values = {"recompute": "none", **ours.values, "offload": bool(ours.values.get("offload"))}
        assert {name: values[name] for name in theirs if values["stage"] or name == "stage"} == {
            name: value for name, value in theirs.items() if values["stage"] or name == "stage"
        }


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one: nothing is computed."""
    assert deepspeed is not None
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(dataclasses, "is_cuda_available", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(environment, "is_port_in_use", lambda *_: False)
    monkeypatch.setattr(training, "is_torch_bf16_gpu_available", lambda *_: True)


@pytest.mark.parametrize("seed", DRAWN)
def test_accelerate_takes_what_we_take(seed: int, tmp_path: Path, a_gpu: None) -> None:
    values, path = launch_file(seed), tmp_path / "launch.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    try:
        theirs: dict[str, Any] | Exception = of_accelerate(path)
    except (ValueError, KeyError, AttributeError, TypeError, AssertionError) as error:
        theirs = error
    check(accelerate.read(Document("launch.json", "accelerate", flat(values)), Context()), accelerate.BY, theirs)


@pytest.mark.parametrize("seed", DRAWN)
def test_training_arguments_take_what_we_take(seed: int, tmp_path: Path, a_gpu: None) -> None:
    values = {"output_dir": str(tmp_path), **arguments(seed)}
    theirs: dict[str, Any] | Exception
    try:
        made = training.TrainingArguments(**json.loads(json.dumps(values)))
        plugin = made.fsdp_plugin_args or {}
        theirs = {"recipe": f"fsdp{plugin['fsdp_version']}" if plugin else "ddp", "offload": "cpu_offload" in plugin}
        theirs["recompute"] = (
            "full" if made.activation_checkpointing or plugin.get("activation_checkpointing") else "none"
        )
    except (ValueError, TypeError) as error:
        theirs = error
    context = Context(versions={"transformers": (5, 24)})
    check(trainer.read(Document("a.json", "trainer", flat(values)), context), trainer.NEW, theirs)
