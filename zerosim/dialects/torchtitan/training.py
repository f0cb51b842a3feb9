"""torchtitan's optimizer, schedule, recompute, compiler and loss."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.torchtitan.mesh import BY, Setup


def optimizer(setup: Setup) -> None:
    """Set the optimizer, its kernels and clipping; torchtitan's defaults where the file has none."""
    notes, keys = setup.notes, setup.keys
    default = "torchtitan's default: "
    setup.sets("optimizer.name", optimizer=keys["optimizer.name"].lower())
    betas = (keys["optimizer.beta1"], keys["optimizer.beta2"])
    for key in ("optimizer.beta1", "optimizer.beta2"):
        notes.tell(key, "understood", f"betas {betas}")
    sources = [key for key in ("optimizer.beta1", "optimizer.beta2") if setup.has(key)]
    notes.usually(" and ".join(sources) or f"{default}beta1 0.9, beta2 0.95", betas=betas)
    for option in ("lr", "eps", "weight_decay"):
        setup.sets(f"optimizer.{option}", **{option: keys[f"optimizer.{option}"]})
    how = keys["optimizer.implementation"]
    kernels: dict[str, Any] = {"foreach": how == "foreach"} | ({"for_loop": True} if how == "for-loop" else {})
    setup.sets("optimizer.implementation", **kernels)
    notes.usually("PyTorch's optimizers: states at the first step", lazy_states=True)
    early = "optimizer.early_step_in_backward"
    if keys[early]:
        for degree, name in ((setup.degrees.pp, "Pipeline Parallel"), (setup.degrees.ep, "Expert Parallel")):
            if degree > 1:
                notes.refuse(early, BY, f"NotImplementedError: Optimizers in backward is not supported with {name}")
        notes.sets(early, optimizer_in_backward=True)
        text = "no gradient is left to clip: early_step_in_backward"
        notes.values["clip_norm"], notes.sources["clip_norm"] = 0.0, early
        notes.tell("training.max_norm", "ignored", text)
    else:
        notes.tell(early, "understood", "after backward")
        setup.sets("training.max_norm", clip_norm=keys["training.max_norm"])


def schedule(setup: Setup) -> None:
    """Set warm-up and a cosine; other decays change no byte and no second."""
    notes, keys = setup.notes, setup.keys
    section = "lr_scheduler."
    warmup = f"{section}warmup_steps"
    notes.usually(
        warmup if warmup in notes.document.keys else "torchtitan's default: warmup_steps 200", warmup=keys[warmup]
    )
    kind, factor, ratio = (keys[f"{section}{name}"] for name in ("decay_type", "min_lr_factor", "decay_ratio"))
    if factor == 1 or ratio == 0:
        text = "the rate stays: a constant schedule"
        for name in ("decay_type", "min_lr_factor", "decay_ratio"):
            notes.tell(f"{section}{name}", "understood", text)
    elif kind == "cosine":
        setup.sets(f"{section}decay_type", schedule="cosine")
        least = float(f"{factor * keys['optimizer.lr']:.12g}")
        setup.sets(f"{section}min_lr_factor", min_lr=least)
        if ratio is not None:
            text = f"the rate stays until the last {ratio:.0%} of the steps; here the cosine begins after the warm-up"
            notes.tell(f"{section}decay_ratio", "lacking", text)
    else:
        text = f"{kind} decay to {factor:g} lr; zerosim has constant and cosine, and a step's bytes and time are equal"
        notes.note(text[0].upper() + text[1:] + ".")
        for name in ("decay_type", "min_lr_factor", "decay_ratio"):
            notes.tell(f"{section}{name}", "lacking", text)
    if setup.has(f"{section}total_steps"):
        notes.tell(f"{section}total_steps", "understood", f"{keys[section + 'total_steps']:,} steps; a plan has one")
    notes.tell("training.steps", "understood", f"{keys['training.steps']:,} steps; a plan has one")


def recompute(setup: Setup) -> None:
    """Set what backward recomputes."""
    notes, keys = setup.notes, setup.keys
    key, of_option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode, option = keys[key], keys[of_option]
    if mode == "memory_budget":
        if not (keys["compile.enable"] and "model" in keys["compile.components"]):
            notes.refuse(key, BY, "AssertionError: Memory budget mode requires model to be compiled")
        notes.lacks(key, f"a compiler's budget of {keys['activation_checkpoint.memory_budget']:g}", costs=True)
        return
    notes.tell("activation_checkpoint.memory_budget", "ignored", f"mode is {mode}")
    if mode not in ("selective", "full", "none"):
        notes.refuse(key, BY, f"ValueError: Invalid AC mode: {mode}", "write selective, full or none")
        return
    if mode != "selective":
        notes.tell(of_option, "ignored", f"mode is {mode}")
        notes.sets(key, recompute=mode)
    elif not isinstance(option, str):
        why = f"AttributeError: {type(option).__name__!r} object has no attribute 'isdigit'"
        notes.refuse(of_option, BY, why, f'write "{option}"')
    elif option != "op" and not (option.isascii() and option.isdigit()):
        notes.refuse(of_option, BY, f"ValueError: Invalid selective AC option: {option}", 'write "op", or "2"')
    else:
        every = 1 if option == "op" else int(option)
        value = "selective:op" if option == "op" else f"full:{every}" if every else "full"
        none = 0 < setup.layers < every
        text = f"every {every}th of {setup.layers} blocks: none" if none else ""
        setup.sets(of_option, text, recompute="none" if none else value)
        notes.tell(key, "understood", f"recompute {notes.values['recompute']}")
    shapes = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    if keys[shapes] and keys[shapes] != ["moe.router.gate"] and mode == "selective" and option == "op":
        notes.lacks(shapes, "recomputes further matmuls")
    else:
        notes.tell(shapes, "ignored", "recomputes the router's small matmul, under op alone")


def compiler(setup: Setup) -> None:
    """Set the kernels and the loss: torchtitan casts logits to fp32, and the compiled loss fuses this copy."""
    notes, keys = setup.notes, setup.keys
    parts = keys["compile.components"] if keys["compile.enable"] and keys["compile.backend"] == "inductor" else []
    key = "compile.components" if setup.has("compile.components") else "compile.enable"
    setup.sets(key, kernels="compiled" if "model" in parts else "eager", loss="lean" if "loss" in parts else "torch")
    if "loss" in parts:
        text = "the compiled loss reads half-type logits without an fp32 copy"
    else:
        text = "the loss casts the logits to fp32"
    notes.tell("compile.enable", "understood", f"{text}{'; blocks stay eager' if 'model' not in parts else ''}")
    if parts and "model" not in parts:
        notes.note("compile covers the loss only: the blocks stay eager.")
    notes.tell("compile.components", "understood" if keys["compile.enable"] else "ignored", "with compile.enable")
    notes.tell("compile.backend", "understood", "inductor fuses" if parts else "nothing is fused")
