"""The optimizer, and the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Exclusion, Part, option
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PURE, PrecisionConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong
from zerosim.units import parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig(Part):
    """The optimizer, the learning rate over the steps, and clipping."""

    group = "training"

    steps: int | None = option(
        None, "optimizer steps", low=1, high=10**8, metavar="S", shown="60, or all that --tokens holds",
        words="max_steps train_iters training.steps",
    )  # fmt: skip
    optimizer: str = option("adam", "which optimizer", choices=tuple(OPTIMIZERS))
    lr: float = option(
        3e-3, "learning rate", above=0, metavar="LR", follows="the optimizer's own, Adam's 3e-3",
        words="learning_rate optimizer.lr",
    )  # fmt: skip
    relative_step: bool = option(
        False, "adafactor-hf: a step is at most 1/sqrt(its number)", follows="on for it where no --lr is given"
    )
    betas: tuple[float, float] = option(
        (0.9, 0.999), "decay rates of the two moving averages of Adam and related optimizers", below=1,
        metavar=("B1", "B2"), follows="the optimizer's own",
    )  # fmt: skip
    eps: float = option(
        1e-8, "epsilon, added outside the square root", above=0, metavar="EPS",
        follows="the optimizer's own, Adam's 1e-8", words="adam_epsilon adam_eps optimizer.eps",
    )  # fmt: skip
    aux_lr: float = option(
        3e-3, "muon: learning rate of AdamW, which trains the table, the head, norms and "
        "biases", above=0, metavar="LR", follows="3e-3", after="relative_step",
    )  # fmt: skip
    momentum: float = option(
        0.0, "momentum of SGD and Muon; beta1 of adafactor-hf", below=1, metavar="M", follows="0; Muon's 0.95"
    )
    nesterov: bool = option(False, "sgd with momentum: Nesterov's form, a step along g + momentum * buffer")
    momentum_form: str = option(
        "torch", "torch: buffer = momentum * buffer + g. ema: the textbook's average, which adds (1 - momentum) * g",
        choices=("torch", "ema"),
    )  # fmt: skip
    scale_parameter: bool = option(True, "adafactor-hf: steps are multiples of the RMS of each tensor's weights")
    weight_decay: float = option(
        0.0, "weight decay", low=0, metavar="W", follows="0.01 for adamw, 0.1 for sophia, else 0",
        words="optimizer.weight_decay",
    )  # fmt: skip
    decay: str = option("all", "which parameters have weight decay", choices=("all", "matrices"))
    lr_schedule: str = option(
        "constant", "how the learning rate changes over the steps", flat="schedule", choices=("constant", "cosine"),
        words="lr_scheduler_type lr_decay_style",
    )  # fmt: skip
    warmup: int = option(
        0, "number of steps of linear warm-up", low=0, metavar="STEPS",
        words="warmup_steps lr_warmup_iters lr_scheduler.warmup_steps",
    )  # fmt: skip
    min_lr: float = option(0.0, "learning rate at the end of the cosine schedule", low=0, metavar="LR")
    clip_norm: float = option(
        0.0, "clip gradients to this global norm. 0: no clipping", low=0, metavar="NORM", follows="the recipe's, or 0",
        words="max_grad_norm clip_grad gradient_clipping training.max_norm",
    )  # fmt: skip

    sub_group: int = option(
        0, "stage 3: number of a rank's elements that the optimizer updates at a time; 0: all", low=0, high=10**12,
        metavar="COUNT", parse=parse_count, also=("--sub-group-size",), stages=(3,), follows=OF_RECIPE, group="recipe",
        after="keep_upcast",
    )  # fmt: skip
    foreach: bool = option(
        False, "the optimizer updates all tensors together, with temporaries of their size (PyTorch's default)",
        follows=OF_RECIPE, group="recipe", after="sub_group",
    )  # fmt: skip

    for_loop: bool = option(
        False, "the optimizer updates one tensor after the other, with the temporaries of PyTorch's loop. DeepSpeed's "
        "tensor is the whole local slice (--flatten-grads)", group="recipe", after="foreach",
    )  # fmt: skip

    lazy_states: bool = option(
        False, "create the optimizer's states in the first step, as PyTorch does. The second step may then run out of "
        "memory, so a plan runs two steps", follows=OF_RECIPE,
    )  # fmt: skip

    def _check(self) -> None:
        title, own = self.optimizer, OPTIMIZERS[self.optimizer]
        if self.nesterov and own.aux_lr is not None:
            raise wrong("nesterov", f": {title} always uses Nesterov's form; leave it out")
        if self.nesterov and (not self.momentum or title != "sgd"):
            raise wrong("nesterov", ": expected sgd with momentum, such as 0.9")
        if self.momentum_form != "torch" and (not self.momentum or title != "sgd"):
            raise wrong("momentum_form", f" {self.momentum_form!r}: expected sgd with momentum, such as 0.9")
        for name, has in (("scale_parameter", not self.scale_parameter), ("relative_step", self.relative_step)):
            if has and title != "adafactor-hf":
                raise wrong(name, f": {title} does not use it; choose adafactor-hf")
        if self.min_lr > self.lr:
            raise wrong("min_lr", f" {self.min_lr}: expected at most lr = {self.lr}")


def rules(
    optim: OptimConfig, mesh: MeshConfig, parallel: ParallelConfig, precision: PrecisionConfig
) -> Iterator[InputError]:
    """Yield what the optimizer refuses of the partition, the mesh and the precision."""
    tp, name = mesh.tp, optim.optimizer
    cut = OPTIMIZERS[name].cut
    if optim.for_loop and cut != "elements":
        yield wrong("for_loop", f": {name} is not modelled as PyTorch's loop; choose adamw, or leave it out")
    if cut == "matrices" and parallel.partition == "slices":
        yield wrong("partition", f" 'slices': {name} needs whole matrices; choose owner, or leave it out")
    if cut in ("sums", "matrices") and tp > 1:
        yield wrong("tp", f" {tp}: {name} needs whole matrices, which tensor parallelism cuts; choose tp 1")
    if cut == "sums" and mesh.axes.is_folded:
        field = "ep" if mesh.ep > 1 else "etp"
        why = f"{name} needs the sums of whole stacks of experts, which {field} cuts; choose {field} 1, or adamw"
        yield wrong(field, f" {getattr(mesh, field)}: {why}")
    if OPTIMIZERS[name].estimates_every and tp > 1:
        yield wrong("tp", f" {tp}: {name} draws labels from logits, which tensor parallelism cuts; choose tp 1")
    if precision.is_pure and cut == "matrices":
        yield wrong(
            "precision", f" {PURE!r}: {name} needs fp32 masters here; choose bf16, or adamw, lion or adafactor-hf"
        )


EXCLUSIONS = (Exclusion("for_loop", "foreach", "PyTorch has one implementation of a step"),)
WORDS = (
    ("num_train_epochs epochs train_samples", "--steps S"),
    (
        "optim optimizer.name optimizer.type",
        "--optimizer adamw for adamw_torch, adam8bit for adamw_bnb_8bit, adam8bit-torchao for "
        "adamw_torch_8bit, adafactor-hf for adafactor; with "
        "--paged-states for paged_adamw_32bit and paged_adamw_8bit; sgd with --optimizer-in-backward for lomo",
    ),
    ("optimizer.implementation", "--foreach, --for-loop or --no-foreach; fused is --no-foreach"),
    ("adam_beta1 adam_beta2 optimizer.beta1 optimizer.beta2", "--betas B1 B2"),
    ("warmup_ratio lr_warmup_fraction", "--warmup STEPS"),
    ("lr_scheduler.decay_type", "--schedule cosine or constant"),
)


LACKING = (
    (
        "use_precision_aware_optimizer exp_avg*dtype main_params_dtype",
        "optimizer states in 16 bits",
        "--optimizer adam8bit has states of 8 bits",
    ),
    ("*early_step_in_backward", "optimizer steps in backward", "The optimizer steps after backward"),
)
