"""Buffers of constant size, and overlap of collectives: options of `reduction.py`."""

from __future__ import annotations

from collections.abc import Mapping

from zerosim.config.option import Draft, Exclusion

BUCKET = "a bucket gathers new parameters in the optimizer step"
EXCLUSIONS = (
    Exclusion("reduce_bucket", "partition", "the owner reduces gradients in place"),
    Exclusion("allgather_bucket", "partition", "the owner sends parameters in place"),
    Exclusion("overlap_param_gather", "allgather_bucket", BUCKET),
    Exclusion("overlap_reduction", "reduce_bucket", "with a reduction buffer, choose reduce_buffers 2 to overlap"),
)


def settles(draft: Draft) -> Mapping[str, str]:
    """Set in detail what `--overlap` asks for, except given details, and what overlaps in the end. Return whether
    nothing can."""
    values, _, given, stage = draft
    wish, has_bucket = given.get("overlap"), bool(values.get("reduce_bucket"))
    if stage < 3 and values.pop("overlap_comm", False):  # only stage 3 has one bucket and a side stream
        values.setdefault("reduce_buffers", 2)
    if wish is not None:
        reduces, gathers = wish in ("reduce", "all"), wish in ("gather", "all")
        row = {"overlap_reduction": reduces and not has_bucket, "reduce_buffers": 1 + (reduces and has_bucket)}
        if not reduces:
            row["overlap_comm"] = False
        if stage == 3 and not (gathers and values.get("prefetch_elements")):
            row |= {"prefetch": int(gathers), "prefetch_elements": 0, "max_live": 0}
        if stage in (1, 2):
            row["overlap_param_gather"] = gathers and not values.get("allgather_bucket")
        values |= {name: value for name, value in row.items() if name not in given}
    reduces = values.get("reduce_buffers") == 2 if has_bucket else bool(values.get("overlap_reduction"))
    gathers = any(values.get(name) for name in ("prefetch", "prefetch_elements", "overlap_param_gather"))
    values["overlap"] = ("none", "reduce", "gather", "all")[reduces + 2 * gathers]
    if wish == "gather" and stage == 0:
        return {"overlap": "overlap 'gather', stage 0 gathers nothing"}
    if wish in ("gather", "all") and stage in (1, 2) and (bucket := values.get("allgather_bucket")):
        return {"overlap": f"overlap {wish!r}, not with allgather_bucket {bucket}: {BUCKET}"}
    return {}
