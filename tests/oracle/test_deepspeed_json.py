"""What DeepSpeed's own parser takes and refuses, of files that are drawn from all its keys: ours says the same."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Mapping
from typing import Any

import pytest
from dialects.deepspeed_draws import WORLD, drawn, nested
from random_configs import drawn as drawn_run

from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.dialects import Context, Document, read_documents
from zerosim.dialects.reading import flat
from zerosim.dialects.writing import write

DRAWS, WRITTEN = 300, 40
VERSION = "0.19.8"


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's parser on `WORLD` pretended ranks."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed")
    if deepspeed.__version__ != VERSION:
        pytest.skip(f"deepspeed {deepspeed.__version__}: the table is that of {VERSION}")
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda *_, **__: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda *_, **__: WORLD)
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "disabled", True)
    return DeepSpeedConfig


def test_files_are_refused_where_deepspeed_refuses_them(parse: Any) -> None:
    counts = {True: 0, False: 0}
    for seed in range(DRAWS):
        values = drawn(seed)
        try:
            parse(copy.deepcopy(nested(values)))
            theirs = ""
        except Exception as error:
            theirs = f"{type(error).__name__}: {error}"
        document = Document("ds_config.json", "deepspeed", flat(nested(values)))
        reading = read_documents([document], Context({"ranks": WORLD, "model": "llama3-8b"}, launcher="deepspeed"))
        ours = [one for one in reading.refusals if one.by == f"deepspeed {VERSION}"]  # not those of a later moment
        assert bool(theirs) == bool(ours), (seed, json.dumps(values), theirs, ours)
        counts[bool(theirs)] += 1
    assert min(counts.values()) > DRAWS // 4, counts


def test_written_files_are_taken_and_mean_the_same(parse: Any) -> None:
    rng, written = random.Random(5), 0
    while written < WRITTEN:
        fields, text = drawn_run(rng, _text, dp_replicate=1)
        config, theirs = config_of(fields), json.loads(text)
        theirs.pop("sequence_parallel_size", None)  # the pretended world is all data ranks
        taken = parse(theirs)
        assert (taken.train_micro_batch_size_per_gpu, taken.gradient_clipping) == (
            config.data.micro_batch,
            config.optim.clip_norm,
        )
        zero = taken.zero_config
        assert int(zero.stage) == config.parallel.zero_stage
        if config.parallel.zero_stage == 3:
            assert zero.prefetch_bucket_size == config.value("prefetch_elements")
            assert zero.param_persistence_threshold == config.value("persistent_numel")
        written += 1


def _text(fields: Mapping[str, Any]) -> str:
    return write(config_of(fields), "deepspeed", "ds.json").text


def config_of(fields: Mapping[str, Any]) -> RunConfig:
    """Return a plan's configuration."""
    return RunConfig(**{**PLAN_DEFAULTS, **fields})
