"""Words that people type from other frameworks, and what they are here: options and capabilities say it (`parts/`).

The command line takes a flag that means one thing here, and answers any other with zerosim's own, or with the nearest
feature where zerosim models none. The words are those of Hugging Face's Trainer, accelerate, LLaMA-Factory, axolotl,
DeepSpeed, Megatron-LM and torchtitan (with dots).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from zerosim.config.parts import CAPABILITIES, OPTIONS

OF_VERBS: Mapping[str, str] = MappingProxyType(
    {"gpu": "gpu_name gpu_type", "global_batch": "global_batch_size"}  # of a search; elsewhere answered
)
"""By flag of a verb that is no option of a run, the words that have the same value."""
TAKEN: Mapping[str, str] = MappingProxyType(
    {**{name: option.words for name, option in OPTIONS.items() if option.words}, **OF_VERBS}
)
"""By option, the words that have the same value."""
SWITCHES: Mapping[str, tuple[str, str | bool]] = MappingProxyType(
    {word: (name, value) for name, option in OPTIONS.items() for word, value in option.switches.items()}
)
"""Switches that mean one value of one option."""
CALLED = tuple(row for capability in CAPABILITIES for row in capability.words)
"""Names in underscores, with shell wildcards, and their equivalent here."""
LACKING = tuple(row for capability in CAPABILITIES for row in capability.lacking)
"""Names; the feature that is not modelled; the nearest feature."""
WITHOUT_EFFECT = (
    "output_dir overwrite_output_dir save_strategy checkpoint.*",
    "logging_steps logging_dir logging_strategy log_interval log_level report_to run_name wandb* metrics.* debug.*",
    "eval_* evaluation_strategy validation.* profiling.* steps_per_print wall_clock_breakdown",
    "dataset dataset_* data_path data_impl dataloader_* split tokenizer* template do_train",
    "local_rank master_addr master_port distributed_backend comm.* use_mcore_models ckpt_format zero3_init_flag",
    "gradient_checkpointing_kwargs *contiguous_gradients *allgather_partitions stage3_gather_*",
    "zero_allow_untested_optimizer",
)
"""Names of values on which no byte and no second depends that zerosim counts."""


def taken(name: str) -> tuple[str, str | bool | None]:
    """Return the option that another framework's flag or key sets, and a switch's value: None if the value follows.

    The option is '' for a word that does not mean one thing here.
    """
    plain = plain_word(name)
    option = next((option for option, words in TAKEN.items() if plain in words.split()), "")
    return (option, None) if option else SWITCHES.get(plain, ("", None))


def called(name: str) -> str:
    """Return, in words, the flags that another framework's flag or key is here; '' for other names."""
    if (here := row_of(name, CALLED)) is not None:
        return here[0]
    option, value = taken(name)
    if not option:
        return ""
    return f"--{'no-' if value is False else ''}{option.replace('_', '-')}" + (f" {value}" * isinstance(value, str))


def row_of(name: str, rows: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the rest of the first row that names this flag or key; None if none does."""
    plain = plain_word(name)
    return next((row[1:] for row in rows if any(fnmatchcase(plain, pattern) for pattern in row[0].split())), None)


def plain_word(name: str) -> str:
    """Return a flag or key as the tables spell it: '--num-layers' is num_layers."""
    return name.lstrip("-").replace("-", "_").lower()


def not_modelled(name: str) -> str | None:
    """Return in a sentence the feature that a flag or key asks for, if zerosim does not model it or names it
    differently; None for other names."""
    if here := called(name):
        return f"here it is {here}"
    if (row := row_of(name, LACKING)) is not None:
        what, near = row
        return f"zerosim does not model {what} yet. {near}."
    if row_of(name, [(names,) for names in WITHOUT_EFFECT]) is not None:
        return "it changes nothing that zerosim counts; leave it out"
    return None
