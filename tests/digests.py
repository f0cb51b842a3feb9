"""digests.py take FILE.json [COUNT], digests.py compare FILE.json [CASE]: what runs and plans leave, as digests.

For a change of structure, which may change no bit, no byte and no event: take digests before it, compare after it.
Cases are drawn at random, by their number: runs and plans of stages, recipes, precisions, partitions, meshes,
recompute, accumulation, prefetch, buckets, optimizers. Ways and pages (`digest_ways.py`) are taken too, all of them.
The file keeps each case's configuration or command beside its digests, so that a later version runs the same. Exit
code 1 where a digest differs; each difference is named with its case. CASE may be the beginning of a name.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "parallel"))

import numpy as np
from digest_ways import PAGES, REFUSED, of_page, of_way, ways
from test_mesh_fuzz import MOST_RANKS, _fields

from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError, RankFailed
from zerosim.train.memory import RankMemory
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SEED = 5
RECIPES = ("paper", "paper", "ddp", "deepspeed", "fsdp2", "megatron")
OPTIMIZERS = ("adam", "adam", "adam", "sgd", "lion", "adam8bit", "adafactor", "muon", "sophia")
OTHERS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"prefetch": 1},
    {"overlap_reduction": True},
    {"reduce_bucket": 600},
    {"reduce_buffers": "copies"},
    {"grad_reduction": "all_reduce"},
    {"persistent_numel": 100},
    {"clip_norm": 0.5},
    {"precision": "bf16-pure"},
    {"allocator": "caching"},
)


def fields_of(case: int) -> dict[str, Any]:
    """The flat names and values of a case; every third is a plan of a model of real size."""
    rng = random.Random(f"{SEED} {case}")
    while True:
        fields = _fields(rng)
        fields |= {"recipe": rng.choice(RECIPES), "optimizer": rng.choice(OPTIMIZERS), **rng.choice(OTHERS)}
        if fields["optimizer"] != "sgd":
            fields.pop("momentum", None)
        work = fields["ranks"] * fields["accumulate"] * int(fields.get("layers", 1))
        if fields["ranks"] <= MOST_RANKS // 2 and work <= 48:
            break
    if case % 3 == 2 and fields["model"] == "gpt":
        kept = (
            "ranks",
            "pp",
            "tp",
            "dp_replicate",
            "stage",
            "accumulate",
            "partition",
            "recipe",
            "optimizer",
            "gather",
        )
        fields = {name: fields[name] for name in kept if name in fields} | {"model": "gpt2", "recompute": "full"}
        fields["ranks"] *= 8
    return fields


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def of_words(value: object) -> str:
    return short(repr(value).encode())


def digest(case: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a case by what they are of."""
    if "page" in case:
        return _named(of_page, case["page"])
    return _named(of_way, case["way"]) if "way" in case else _drawn(case["fields"])


def _named(found: Callable[[Any], dict[str, Any]], how: Any) -> dict[str, str]:
    try:
        return {name: of_words(value) for name, value in found(how).items()}
    except Exception as error:  # also a defect of that version, which its successor may not hide
        return {"ends": f"{type(error).__name__}: {error}"}


def _drawn(fields: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a run or a plan."""
    is_plan = "layers" not in fields and fields["model"] != "flat"
    try:
        result = plan(plan_config(**fields)) if is_plan else run(RunConfig(**fields), keep_events=True)
    except (InputError, RankFailed) as error:
        return {"ends": type(error).__name__}
    return {"ends": "well", **_of_result(result)}


def _of_result(result: RunResult) -> dict[str, str]:
    weights = sorted((result.weights or {}).items())
    return {
        "weights": short(b"".join(name.encode() + np.ascontiguousarray(value).tobytes() for name, value in weights)),
        "losses": of_words((result.losses, [report.grad_norm for report in result.steps])),
        "memory": of_words([_memory(memory) for memory in result.memory]),
        "traffic": of_words([[tuple(row) for row in rows] for rows in result.traffic]),
        "classes": of_words(result.stands_for),
        "left": of_words(result.live_bytes_after),
        "events": of_words({rank: result.events[rank] for rank in result.ran} if result.events else None),
    }


def _memory(memory: RankMemory) -> dict[str, Any]:
    """Leave out what older files of digests have none of; the events say it too."""
    values = memory.to_dict()
    values.get("allocator", {}).pop("marks", None)
    return values


def take(path: Path, count: int) -> int:
    found: dict[str, Any] = {}
    case = 0
    while len(found) < count:
        one: dict[str, Any] = {"fields": fields_of(case)}
        one["digests"] = digest(one)
        if one["digests"]["ends"] == "well":  # most that is drawn at random is refused, and shows nothing
            found[str(case)] = one
        case += 1
    for name, fields in ways():
        found[f"way {name}"] = {"way": fields, "digests": digest({"way": fields})}
    for name, line in {**PAGES, **{f"refused {line}": line for line in REFUSED.strip().splitlines()}}.items():
        found[f"page {name}"] = {"page": line, "digests": digest({"page": line})}
    path.write_text(json.dumps(found, indent=0), encoding="utf-8")
    print(f"{count} of {case} cases drawn ran; {len(found)} in all")
    return 0


def compare(path: Path, only: str | None) -> int:
    before = json.loads(path.read_text("utf-8"))
    num_equal = wanted = 0
    for case, one in before.items():
        if only is None or case == only or (case.startswith(only) and not only.isdigit()):
            wanted += 1
            found = digest(one)
            differs = [name for name, value in one["digests"].items() if found.get(name) != value]
            num_equal += not differs
            if differs:
                what = {name: value for name, value in one.items() if name != "digests"}
                print(f"case {case} differs in {', '.join(differs)}: {what}", flush=True)
    print(f"{num_equal} of {wanted} cases are equal")
    return int(num_equal < wanted)


if __name__ == "__main__":
    verb, where, *rest = sys.argv[1:]
    if verb == "take":
        sys.exit(take(Path(where), int(rest[0]) if rest else 300))
    sys.exit(compare(Path(where), rest[0] if rest else None))
