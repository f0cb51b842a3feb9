"""Buffers of constant size, and overlap of collectives: options of `reduction.py`."""

from __future__ import annotations

from zerosim.config.option import Exclusion

BUCKET = "a bucket gathers new parameters in the optimizer step"
EXCLUSIONS = (
    Exclusion("reduce_bucket", "partition", "the owner reduces gradients in place"),
    Exclusion("allgather_bucket", "partition", "the owner sends parameters in place"),
    Exclusion("overlap_param_gather", "allgather_bucket", BUCKET),
    Exclusion("overlap_reduction", "reduce_bucket", "with a reduction buffer, choose reduce_buffers 2 to overlap"),
)
