"""The second half of the lecture: what ZeRO does not divide, offload, and which stage to take."""

from __future__ import annotations

from zerosim.config.presets.hardware import find_hardware
from zerosim.grading.catalogue import find_exercise
from zerosim.lessons.lecture.counted import activations, held, on_host, over_pcie, sent
from zerosim.lessons.lecture.pieces import Bar, bars, count, options, said, size, table
from zerosim.lessons.lecture.slide import Show, Slide, claimed
from zerosim.lessons.lecture.stages import STAGES
from zerosim.report.verdict import peak_bytes

GPT = "--model gpt2-xl --ranks 8 --micro-batch 4 --gpu a100-80 --recipe paper"
FITTING = ("llama3.2-1b", "llama3.1-8b", "qwen3-32b", "llama3.1-70b")
GPU = "h100-80"


def beyond(show: Show) -> list[Slide]:
    """Make the slides after the ZeRO stages."""
    return [*_activations(show), *_offload(show), *_choice(show), *_end()]


def _activations(show: Show) -> list[Slide]:
    words = [f"{GPT} --stage {stage}" for stage in range(4)]
    again = f"{words[3]} --recompute full"
    kept = [activations(show.plans(one)) for one in words]
    less = activations(show.plans(again))
    rows = [Bar(name, [("optim", held(show.plans(one))), ("activation", kept[stage])])
            for stage, (name, one) in enumerate(zip(STAGES, words, strict=True))]  # fmt: skip
    key = ("activation",)
    return [
        Slide(
            "GPT-2 XL on 8 GPUs, 4 rows of 1,024 tokens each. Which ZeRO stage makes the activations smaller?",
            options(["ZeRO-1", "ZeRO-2", "ZeRO-3", "none"], 4, f"Counted: {size(kept[0])} at every ZeRO stage."),
            ("Activations belong to a GPU's own rows. Nobody else has a copy of them.",),
            (words[0], words[3]), kind="guess",
        ),
        Slide(
            claimed("ZeRO divides states. It does not divide activations.", len(set(kept)) == 1),
            bars([Bar(row.label, row.parts) for row in rows], key=())
            + '<ul class="key"><li class="optim">model states</li><li class="activation">activations</li></ul>'
            + said("Model states when backward ends, and activations when forward ends. The peak is another number."),
            ("A larger batch makes only the right part of a bar longer. Smaller microbatches, recompute, tensor and "
             "context parallelism make it shorter.",),
            tuple(words),
        ),
        Slide(
            claimed(f"Recompute keeps 1/{kept[3] // less} of the activations", 2 * less < kept[3]),
            bars([Bar("all kept", [("activation", kept[3])]), Bar("recompute", [("activation", less)])], key=key)
            + said("Each block keeps only its input. Backward runs the block's forward again."),
            ("Full recompute costs a second forward. ZeRO-3 has gathered the block for its backward anyway.",
             "Recompute and ZeRO do different things, and most runs of large models use both."),
            (words[3], again),
        ),
    ]  # fmt: skip


def _offload(show: Show) -> list[Slide]:
    plain = f"{GPT} --stage 2"
    moved = f"{plain} --offload optimizer=host"
    before, after = show.plans(plain), show.plans(moved)
    left, pcie = held(before) - held(after), over_pcie(after)
    return [
        Slide(
            claimed(f"Offload takes {size(left)} off each GPU, for {size(pcie)} over PCIe a step", left > 0),
            bars([Bar("on the GPU", [("param", held(before))]), Bar("with offload", [("param", held(after))]),
                  Bar("in host memory", [("optim", on_host(after))])], key=())
            + said("The host keeps the optimizer states and runs Adam. Gradients go down, new parameters come back."),
            ("ZeRO-Offload: a step reads and writes the optimizer states once, so slow memory is good enough.",
             "The host needs the bytes for all of its GPUs together. Count eight of these bars in a node of eight."),
            (plain, moved),
        ),
    ]  # fmt: skip


def _choice(show: Show) -> list[Slide]:
    words = {model: [f"--model {model} --ranks 64 --gpu {GPU} --recompute full --stage {stage}" for stage in range(4)]
             for model in FITTING}  # fmt: skip
    fit = {model: [show.plans.fits(one) for one in each] for model, each in words.items()}
    lowest = {model: each.index(True) for model, each in fit.items() if True in each}
    rows = [
        (model, *(_cell(show, one, fits=fit[model][stage], best=stage == lowest.get(model))
                  for stage, one in enumerate(each)))
        for model, each in words.items()
    ]  # fmt: skip
    eight = words["llama3.1-8b"]
    return [
        Slide(
            "Llama 3.1 8B on 64 H100s. How many GB does a GPU need at its peak with ZeRO-3?",
            count("GB", peak_bytes(show.plans(eight[3])), f"Counted: {size(peak_bytes(show.plans(eight[3])))}."),
            (f"States are {size(held(show.plans(eight[3])))} when backward ends. What else is there at the peak?",
             "Gathered units, logits and their gradients, inputs kept for recompute."),
            (eight[3],), kind="guess",
        ),
        Slide(
            claimed("Take the lowest ZeRO stage that fits", all(sorted(each) == each for each in fit.values())),
            table(("peak on 64 GPUs", *STAGES), rows)
            + said(f"✓ fits an H100 of {size(find_hardware(GPU).memory_bytes)}, with what CUDA reserves. ✗ does not."),
            ("Every ZeRO stage runs here as people run it (<code>--recipe usual</code>), with one row a GPU and full "
             "recompute.",
             "A higher ZeRO stage waits for more collectives. Take ZeRO-3 for a model that does not fit otherwise.",
             f"Llama 3.1 8B sends {size(sent(show.plans(eight[1])))} with ZeRO-1, and "
             f"{size(sent(show.plans(eight[3])))} with ZeRO-3."),
            tuple(one for each in words.values() for one in each),
        ),
    ]  # fmt: skip


def _cell(show: Show, words: str, *, fits: bool, best: bool) -> str:
    text = f"{'✓' if fits else '✗'} {size(peak_bytes(show.plans(words)))}"
    return f"<strong>{text}</strong>" if best else text


def _end() -> list[Slide]:
    first, last = (find_exercise(name).number for name in ("ddp", "zero3"))
    return [
        Slide(
            "Your model, your GPUs: ask the calculator, then count",
            said('<a href="calculator.html">The calculator</a> has sliders for model, GPUs, ZeRO stage, precision, '
                 "recompute, batch, sequence and tensor parallelism.",
                 "Its bars are states and activations. The command below them counts the peak.",
                 'Watch a step: <a href="player.html#lecture">the player</a>.'),
            ("Let the room name a model and a cluster. Guess the lowest stage that fits before you move a slider.",),
            ("page calculator -o calculator.html",),
        ),
        Slide(
            f"Now write it: exercises {first} to {last} are DDP and ZeRO",
            said('<a href="handouts.html">The handouts</a> have a page for each lesson: its question, its exercises, '
                 "and the words of the API that they need.",
                 "<code>zerosim course DIR</code> writes the notebooks. <code>zerosim grade hw.py</code> grades an "
                 "answer: a failure names the rank, the event and the buffers."),
            ("Print handouts.html, one page a lesson. The notebooks have hints, and so has a failed grade.",),
        ),
    ]  # fmt: skip
