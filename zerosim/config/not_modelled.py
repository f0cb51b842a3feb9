"""Features of other frameworks that are not modelled, and the answer to a flag or key that zerosim does not have.

An unknown flag or scenario key is looked up here and in `other_words.py`. Only then is a similarly spelled word
suggested.
"""

from __future__ import annotations

from zerosim.config.other_words import called, row_of

LACKING = (
    (
        "cp cp_size *context_parallel* ring_attention ulysses*",
        "context parallelism",
        "--tp with --sequence-parallel cuts a part of the activations by rows",
    ),
    (
        "ep ep_size *expert* moe* num_experts*",
        "expert parallelism or mixtures of experts",
        "Every model here is dense",
    ),
    (
        "peft* use_dora use_galore use_apollo use_badam",
        "PEFT's other methods",
        "--lora-rank trains adapters, and --base nf4 keeps the frozen base in 4 bits",
    ),
    (
        "zero_quantized_nontrainable_weights zeropp_loco* quantiz* load_in_8bit",
        "frozen weights in int8, or error feedback for ZeRO++'s codes (LoCo)",
        "--base nf4 keeps a frozen base in 4 bits, and --compress has error feedback",
    ),
    ("fp8 fp8_* float8* fp4* te_*", "FP8 training", "--precision bf16 is the smallest format for training"),
    ("sliding_window* window_size", "attention in windows", "Attention always covers the whole context"),
    (
        "*optimizer_offload_fraction super_offload zenflow*",
        "an optimizer that is offloaded in part",
        "--offload optimizer=host moves all of it",
    ),
    (
        "use_precision_aware_optimizer exp_avg*dtype main_params_dtype",
        "optimizer states in 16 bits",
        "--optimizer adam8bit has states of 8 bits",
    ),
    ("*early_step_in_backward", "optimizer steps in backward", "The optimizer steps after backward"),
    ("rampup_batch_size step_batch_size_schedule", "a batch that grows", "--accumulate is the same in every step"),
    ("*disable_loss_parallel", "a whole loss beside --tp", "With --tp the vocabulary of the loss is divided"),
    ("*memory_budget", "a compiler's memory budget", "--recompute selective:op saves what a policy names"),
)
"""Names; the feature that is not modelled; the nearest feature."""
WITHOUT_EFFECT = (
    "output_dir overwrite_output_dir save_steps save_strategy save_interval save_total_limit load checkpoint.*",
    "logging_steps logging_dir logging_strategy log_interval log_level report_to run_name wandb* metrics.* debug.*",
    "eval_* evaluation_strategy validation.* profiling.* steps_per_print wall_clock_breakdown",
    "dataset dataset_* data_path data_impl dataloader_* split tokenizer* template do_train",
    "local_rank master_addr master_port distributed_backend comm.* use_mcore_models ckpt_format zero3_init_flag",
    "use_reentrant gradient_checkpointing_kwargs *contiguous_gradients *allgather_partitions stage3_gather_*",
    "zero_allow_untested_optimizer",
)
"""Names of values on which no byte and no second depends that zerosim counts."""


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
