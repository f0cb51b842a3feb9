"""Products in 8 bits on a Megatron command line: Transformer Engine's scaling, and which blocks stay in 16 bits.

Read in Megatron-LM d98e8a6, training/arguments.py, core/transformer/transformer_config.py and core/fp8_utils.py.
"""

from __future__ import annotations

from zerosim.dialects.fp8 import history_of, keeps_codes, of_te
from zerosim.dialects.megatron.args import Arguments
from zerosim.dialects.megatron.layout import Layout

FORMAT, GATHER = "--fp8-format", "--fp8-param-gather"
_DELAYED = ("--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--no-fp8-wgrad")
"""What get_fp8_recipe passes to TEDelayedScaling alone."""
_ATTENTION = ("--fp8-dot-product-attention", "--fp8-multi-head-attention")
EXACT = ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")


def eight_bits(arguments: Arguments, layout: Layout) -> None:
    """Set the products in 8 bits; refuse 4 bits."""
    forms = [name for name in (FORMAT, "--fp4-format") if arguments.has(name)]
    gathers = [name for name in (GATHER, "--fp4-param-gather") if arguments.has(name)]
    if len(forms) > 1:
        arguments.refuse(", ".join(forms), "ValueError: cannot be used simultaneously", "keep one")
    divides = arguments["--use-distributed-optimizer"] or arguments["--use-megatron-fsdp"]
    if gathers and not divides and not arguments["--use-torch-fsdp2"]:
        why = f"AssertionError: {gathers[0]} only supported with distributed optimizer, torch fsdp2, megatron fsdp"
        arguments.refuse(gathers[0], why, "add --use-distributed-optimizer")
    if "--fp4-param-gather" in gathers and "--fp4-format" not in forms:
        why = "ValueError: --fp4-param-gather must be used together with --fp4-format"
        arguments.refuse("--fp4-param-gather", why, "--without fp4-param-gather plans the rest")
    if forms == [FORMAT]:
        _products(arguments)
        _exact(arguments, layout)
    elif forms:
        why = "4 bits (NVFP4): saved inputs of linear maps, gathers and products of 4 bits are not modelled"
        names = [name for name in (*forms, *gathers) if name != GATHER]
        arguments.refuse(", ".join(names), why, "--without fp4-format plans bf16", by="zerosim")
    if FORMAT not in forms:
        for name in ("--fp8-recipe", GATHER, *_DELAYED, *_ATTENTION, *EXACT, "--tp-only-amax-red"):
            arguments.tell(name, "ignored", f"without {FORMAT} no effect")


def _products(arguments: Arguments) -> None:
    recipe = arguments["--fp8-recipe"]
    if recipe == "custom":
        arguments.lacks("--fp8-recipe", "custom: products of a function of one's own", costs=True)
        recipe = "delayed"
    if arguments["--transformer-impl"] == "local":
        why = "local blocks multiply in 16 bits: products in 8 bits are Transformer Engine's"
        arguments.refuse(f"{FORMAT}, --transformer-impl", why, "--without transformer-impl", by="zerosim")
    if arguments["--num-experts"]:
        why = "experts' maps in 8 bits are not modelled"
        arguments.refuse(FORMAT, why, f"--without {FORMAT.lstrip('-')} plans bf16", by="zerosim")
        return
    arguments.sets(FORMAT, **of_te(recipe, arguments[FORMAT]))
    arguments.tell("--fp8-recipe", "understood", f"fp8 {recipe}")
    margin, history, algorithm, wgrad = (arguments[name] for name in _DELAYED)
    if recipe != "delayed":
        for name in _DELAYED:
            arguments.tell(name, "ignored", f"only --fp8-recipe delayed reads it, not {recipe}")
    else:
        arguments.sets("--fp8-amax-history-len", **history_of(history, algorithm, margin))
        for name in _DELAYED[:-1]:
            arguments.tell(name, "understood", f"{arguments[name]}")
        if wgrad:
            arguments.sets("--no-fp8-wgrad", fp8_exact_wgrad=True)
    if arguments.has(GATHER) and arguments.key(GATHER) not in arguments.notes.said:
        keeps_codes(arguments.notes, arguments.key(GATHER))
    arguments.lacks("--tp-only-amax-red", "amaxes of the ranks along dp are reduced here too", costs=False)


def _exact(arguments: Arguments, layout: Layout) -> None:
    """Set the first and the last blocks that stay in 16 bits."""
    switch, *names = EXACT
    if not arguments[switch]:
        for name in names:
            arguments.tell(name, "ignored", f"without {switch} no effect")
        return
    if arguments["--fp8-recipe"] == "delayed":
        why = "ValueError: Delayed scaling does not support first / last layer in BF16."
        arguments.refuse(switch, why, "add --fp8-recipe tensorwise")
        return
    layers, counts = arguments["--num-layers"], [arguments[name] for name in names]
    for name, count in zip(names, counts, strict=True):
        if layers and not 0 <= count <= layers // layout.pp:
            most = f"between 0 and number of layers per pipeline stage ({layers // layout.pp})"
            arguments.refuse(name, f"ValueError: {name[2:].replace('-', '_')} ({count}) must be {most}.")
            return
        arguments.tell(name, "understood", f"{count} blocks")
    arguments.sets(switch, fp8_exact_first=counts[0], fp8_exact_last=counts[1])
