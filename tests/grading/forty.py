"""The answers of `test_forty.py`: right ones, typical mistakes, copies and cheats. A row says what is handed in.

Beside the rows here `four.toml` completes four for each exercise: a right answer in another form, two usual mistakes
of the instructors' notes, and one in one unit, one rank or one case only.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOLUTIONS = ROOT / "notebooks" / "solutions"


class Row(NamedTuple):
    """One answer, and what the grader says of it.

    kind     right, unsolved, mistake, copy or cheat
    what     what the student did
    source   the file that is handed in; '' for the answer as the exercise gives it
    points   of the possible ones; '' for all of a right answer, and fewer of another one
    says     words of the short report, in their order: the first failure and its hint
    never    words that it must not say: they would lead elsewhere
    apart   whether it must run in a process of its own, for what it would do to this one
    """

    kind: str
    what: str
    exercise: str
    source: str
    points: str
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    apart: bool = False
    seed: int | None = None


def solution(name: str, *changes: tuple[str, str]) -> str:
    """A published solution with some of its text replaced."""
    source = (SOLUTIONS / f"{name}.py").read_text("utf-8")
    for old, new in changes:
        assert old in source, (name, old)
        source = source.replace(old, new)
    return source


def without(name: str, method: str) -> str:
    """A published solution without its last method."""
    source = solution(name)
    return source[: source.index(f"    def {method}")]


def body(method: str, *lines: str) -> str:
    """A method's lines, below its head."""
    return method + "".join(f"\n        {line}" for line in lines)


PUBLISHES = "self.comm.all_gather(flat.shard(), out=flat.whole_param())"
GATHERS = "unit.flat.unshard(self.comm.all_gather(unit.flat.shard()))"
REDUCES2 = "unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))"
PIPE = 'import os; os.write(3, b\'["verdict", "x"]\\n\'); os.write(1, b\'["verdict", "x"]\\n\')'
EMPTY = solution("zero2").split("    keeps_grads")[0]

RIGHT = [
    Row("right", "ZeRO-2 as published", "zero2", solution("zero2"), "6/6", ("solved",)),
    Row(
        "right",
        "ZeRO-2, a window of the whole parameters passed on by a dataclass",
        "zero2",
        solution(
            "zero2",
            (
                "class MyZero2",
                "from dataclasses import dataclass\n\n\n@dataclass\nclass Cut:\n    size: int\n\n\nclass MyZero2",
            ),
            ("if unit.reduces", "if unit.reduces and Cut(1).size"),
        ),
        "6/6",
        ("solved",),
    ),
    Row(
        "right",
        "ZeRO-3 with one function for both gathers",
        "zero3",
        solution(
            "zero3",
            (GATHERS, "self.gather(unit.flat)"),
            (
                "    def pre_forward",
                "    def gather(self, flat):\n"
                "        flat.unshard(self.comm.all_gather(flat.shard()))\n\n    def pre_forward",
            ),
        ),
        "7/7",
        ("solved",),
    ),
    Row(
        "right",
        "slices by another formula",
        "bounds",
        "def slice_of(numel, rank, world_size):\n    size = (numel + world_size - 1) // world_size\n"
        "    return rank * size, rank * size + size\n",
        "8/8",
        ("solved",),
    ),
    Row(
        "right",
        "PowerSGD with another orthonormal basis",
        "powersgd",
        solution("powersgd", ("p, _ = np.linalg.qr(p)", "p = np.linalg.svd(p, full_matrices=False)[0]")),
        "1/1",
        ("solved",),
    ),
    Row(
        "right",
        "the second shard, cut out of what the base has gathered",
        "second_shard",
        solution(
            "second_shard",
            ("full = self.comm.all_gather(flat.shard())", "super().pre_forward(unit)"),
            ("flat.unshard(full)", "full = flat.whole_param()"),
        ),
        "5/5",
        ("solved",),
    ),
    Row(
        "right",
        "CPU Adam, whose CPU waits for gradients when the step begins",
        "cpu_adam",
        solution(
            "cpu_adam",
            ("            self.carry(own, there)\n", "            self.launch(own, there)\n"),
            ("    def step(self) -> None:\n", "    def step(self) -> None:\n        self.wait()\n"),
            (
                "    def post_backward",
                "    def launch(self, source, target):\n"
                "        copy = launch_copy(source, target)\n"
                "        copy.wait()\n"
                "        self.coming = [*getattr(self, 'coming', ()), copy]\n\n"
                "    def wait(self):\n"
                "        while self.coming:\n"
                "            self.coming.pop().wait('cpu')\n\n    def post_backward",
            ),
        ),
        "9/9",
        ("solved",),
    ),
    Row(
        "right",
        "1F1B, one action at a time",
        "one_f_one_b",
        "from zerosim.grading import Backward, Forward\n\n\ndef my_1f1b(stages, stage, batches, chunks=1):\n"
        "    actions, ran, back = [], 0, 0\n    while back < batches:\n"
        "        if ran < batches and ran - back < stages - stage:\n"
        "            actions, ran = [*actions, Forward(ran)], ran + 1\n"
        "        else:\n            actions, back = [*actions, Backward(back)], back + 1\n    return actions\n",
        "4/4",
        ("solved",),
    ),
    Row(
        "right",
        "rounding by a carry out of the bits that are cut off",
        "rounding",
        "import numpy as np\n\n\ndef my_rounding(values, drawn):\n"
        "    bits = values.view(np.uint32).astype(np.uint64) + (0xFFFF - drawn.astype(np.uint64))\n"
        "    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)\n",
        "1/1",
        ("solved",),
    ),
    Row(
        "right",
        "NF4 by the smallest distance to an entry",
        "nf4",
        "import numpy as np\n\n\ndef my_nf4(values, table):\n    absmax = float(max(abs(values)))\n"
        "    unit = values.astype(float) / absmax if absmax else 0.0 * values\n"
        "    codes = [int(abs(one - table.astype(float)).argmin()) for one in unit]\n"
        "    codes += [15] * (len(codes) % 2)\n"
        "    return np.array([16 * a + b for a, b in zip(codes[::2], codes[1::2])], np.uint8), absmax\n",
        "1/1",
        ("solved",),
    ),
    Row(
        "right",
        "what to offload, link by link",
        "offload",
        "from itertools import product\n\n\ndef my_offload(psi, room, links, compute, update):\n"
        "    def phase(seconds, *moves):\n"
        "        at = {}\n"
        "        for size, source, target in moves:\n"
        "            way = ['device', 'host', 'nvme']\n"
        "            a, b = way.index(source), way.index(target)\n"
        "            for here in range(min(a, b), max(a, b)):\n"
        "                key = ('pcie', 'nvme')[here], a < b\n"
        "                at[key] = at.get(key, 0) + size * psi / links[key[0]]\n"
        "        return max([seconds, *at.values()])\n\n"
        "    def step(where):\n"
        "        optim, grad, param = where\n"
        "        cpu = 'device' if optim == 'device' else 'host'\n"
        "        first = phase(compute, (4, param, 'device'), (2, 'device', grad))\n"
        "        second = [(2, grad, cpu), (2, cpu, param), (12, optim, cpu), (12, cpu, optim)]\n"
        "        return first + phase(update[cpu], *second)\n\n"
        "    def fits(where):\n"
        "        used = dict.fromkeys(room, 0)\n"
        "        for size, memory in zip((12, 2, 2), where):\n"
        "            used[memory] += size * psi\n"
        "        return all(used[memory] <= room[memory] for memory in room)\n\n"
        "    allowed = [where for where in product(room, ('device', 'host'), room)]\n"
        "    allowed = [where for where in allowed if where[1] == 'device' or where[0] != 'device']\n"
        "    return min(filter(fits, allowed), key=step)\n",
        "1/1",
        ("solved",),
    ),
]

KEEPS2 = "self.kept = unit.flat.take_grad()\n            unit.flat.add_grad_shard(self.comm.reduce_scatter(self.kept))"

MISTAKES = [
    Row(
        "mistake",
        "DDP without an all_reduce",
        "ddp",
        solution("ddp", ("self.comm.all_reduce(flat.whole_grad())", "flat.whole_grad()")),
        "0/6",
        ("post_backward none 6 all_reduce", "runs", "calls no all_reduce in step 0", "reduce it over all ranks"),
        ("do not cover", "None of your code"),
    ),
    Row(
        "mistake",
        "a name keeps the whole gradient",
        "zero2",
        solution("zero2", (REDUCES2, KEEPS2)),
        "4/6",
        ("each hook calls what", "bytes", "still live: unsharded_grad of wte", "a name of yours holds the whole"),
        ("window",),
    ),
    Row(
        "mistake",
        "a sum of squares sent as model states",
        "clipping",
        solution("clipping", (', purpose="control"', "")),
        "5/7",
        ("reduce_grad_norm 1 all_reduce 1 all_reduce (purpose 'control')", "volume", "pass purpose='control'"),
        ("the reference: all_gather",),
    ),
    Row(
        "mistake",
        "a second copy made in publish_params",
        "zero2",
        solution("zero2", (PUBLISHES, "flat.unshard(self.comm.all_gather(flat.shard()))")),
        "4/6",
        ("bytes", "still live: unsharded_param;", "publish_params makes a second copy", "out=flat.whole_param()"),
        ("post_backward", "of ;"),
    ),
    Row(
        "unsolved",
        "the skeleton as it is given",
        "zero2",
        EMPTY + body("    def post_backward(self, unit):", "raise NotImplementedError('post_backward: reduce')"),
        "0/6",
        ("not solved yet", "To write: post_backward: reduce", "Hint: "),
    ),
    Row(
        "mistake",
        "forgets to publish",
        "zero2",
        without("zero2", "publish_params"),
        "0/6",
        ("weights", "publish_params calls no all_gather in step 0", "gather all slices"),
    ),
    Row(
        "mistake",
        "publishes on rank 0 alone",
        "zero2",
        solution("zero2", (PUBLISHES, f"if self.comm.rank == 0:\n            {PUBLISHES}")),
        "0/6",
        ("runs", "where rank 0 calls all_gather of 12,288 B in step 0, optimizer", "same collectives"),
    ),
    Row(
        "mistake",
        "keeps the whole gradient",
        "zero2",
        solution(
            "zero2",
            ("keeps_grads = False", "keeps_grads = True"),
            (
                REDUCES2,
                "unit.flat.add_grad_whole(unit.flat.take_grad())\n            unit.flat.grad_shard = "
                "self.comm.reduce_scatter(unit.flat.whole_grad())",
            ),
        ),
        "4/6",
        ("bytes", "8Ψ/N too many", "set keeps_grads = False"),
    ),
    Row(
        "mistake",
        "keeps its own slice without a reduction",
        "zero2",
        solution(
            "zero2",
            (
                REDUCES2,
                "own = unit.flat.own\n            "
                "unit.flat.add_grad_shard(unit.flat.take_grad()[own.start : own.stop])",
            ),
        ),
        "0/6",
        ("weights", "post_backward calls no reduce_scatter in step 0", "over all ranks"),
    ),
    Row(
        "mistake",
        "all_reduces where a slice is enough",
        "zero2",
        solution("zero2", ("self.comm.reduce_scatter", "self.comm.all_reduce")),
        "0/6",
        ("weights", "6 all_reduce in step 0, the reference 6 reduce_scatter", "where its slice has", "reduce_scatter"),
    ),
    Row(
        "mistake",
        "reduces the table at both uses",
        "zero2",
        solution("zero2", ("if unit.reduces", "if True")),
        "0/6",
        ("weights", "post_backward calls 6 reduce_scatter in step 0, the reference 5", "two units share this buffer"),
    ),
    Row(
        "mistake",
        "a name with a slip in it",
        "zero2",
        solution("zero2", ("unit.flat.add", "unti.flat.add")),
        "0/6",
        ("NameError: name 'unti' is not defined", "line:", "no such name"),
    ),
    Row(
        "mistake",
        "a method with a slip in it",
        "zero3",
        solution("zero3", (".reshard()", ".reshrad()")),
        "0/7",
        ("no attribute 'reshrad'", "did you mean reshard"),
    ),
    Row(
        "mistake",
        "says that it keeps whole parameters",
        "zero3",
        solution("zero3", ("keeps_params = False", "keeps_params = True")),
        "5/7",
        ("bytes", "6Ψ/N too many", "set keeps_params = False"),
    ),
    Row(
        "mistake",
        "does not reshard after forward",
        "zero3",
        solution("zero3", ("    def post_forward(self, unit: Unit) -> None:\n        unit.flat.reshard()\n", "")),
        "5/7",
        ("peak", "reshard"),
    ),
    Row(
        "mistake",
        "never reshards",
        "zero3",
        solution("zero3", ("unit.flat.reshard()", "pass")),
        "4/7",
        ("bytes", "8Ψ/N too many", "still live: unsharded_param", "flat.reshard()"),
    ),
    Row(
        "mistake",
        "reduces before it frees",
        "zero3",
        solution(
            "zero3",
            ("        unit.flat.reshard()\n        unit.flat.add_grad_shard", "        unit.flat.add_grad_shard"),
            ("take_grad()))", "take_grad()))\n        unit.flat.reshard()"),
        ),
        "6/7",
        ("peak", "reshard before the gradient is reduced"),
    ),
    Row(
        "mistake",
        "does not gather for backward",
        "zero3",
        solution("zero3", (f"    def pre_backward(self, unit: Unit) -> None:\n        {GATHERS}\n", "")),
        "0/7",
        ("is sharded", "Gather it before each use"),
    ),
    Row(
        "mistake",
        "sums where the mean is wanted",
        "ddp",
        solution("ddp", ("flat.whole_grad())", "flat.whole_grad(), op='sum')")),
        "0/6",
        ("weights", "4 times the reference's", "summed over ranks but not divided"),
    ),
    Row(
        "mistake",
        "adds up a norm that every rank has whole",
        "ddp",
        solution("ddp", ("sees_all_grads = True", "sees_all_grads = False")),
        "0/6",
        ("weights", "is multiplied by 0.007317, the reference's by 0.01035", "sees_all_grads = True"),
    ),
    Row(
        "mistake",
        "reduces at every microbatch",
        "zero1",
        solution("zero1", ("if self.last", "if True")),
        "0/6",
        ("18 reduce_scatter", "weights", "3 microbatches", "self.last"),
    ),
    Row(
        "mistake",
        "overwrites what earlier microbatches left",
        "accumulation",
        solution("accumulation", ("self.add(flat.grad_shard, shard)", "flat.grad_shard = shard")),
        "0/6",
        ("weights", "added exactly once"),
    ),
    Row(
        "mistake",
        "clips by the norm of its own slices",
        "clipping",
        solution("clipping", ('        self.comm.all_reduce(squares, op="sum", purpose="control")\n', "")),
        "0/7",
        ("norm", "Squares add up over ranks"),
    ),
    Row(
        "mistake",
        "waits for each gather at once",
        "prefetch",
        solution(
            "prefetch", ("        if 0 <= index < len(self.flats):\n            self.launch(self.flats[index])\n", "")
        ),
        "0/8",
        ("overlap", "0 on rank 0", "BEFORE"),
    ),
    Row(
        "mistake",
        "rounds the slices down",
        "bounds",
        "def slice_of(numel, rank, world_size):\n    size = numel // world_size\n"
        "    return rank * size, (rank + 1) * size\n",
        "0/8",
        ("slices", "belong to no rank", "which way do you round"),
    ),
    Row(
        "mistake",
        "cuts off the last slice's padding",
        "bounds",
        "def slice_of(numel, rank, world_size):\n    size = -(-numel // world_size)\n"
        "    return rank * size, min(numel, (rank + 1) * size)\n",
        "0/8",
        ("slices", "elements long", "the same length"),
    ),
    Row(
        "mistake",
        "returns the mean, and leaves grad as it was",
        "all_reduce",
        "def all_reduce(comm, grad):\n    return comm.all_gather(comm.reduce_scatter(grad))\n",
        "0/6",
        ("grad was unchanged", "change `grad` in place"),
    ),
    Row(
        "mistake",
        "takes memory of its own",
        "all_reduce",
        "def all_reduce(comm, grad):\n    comm.all_gather(comm.reduce_scatter(grad), out=grad)\n",
        "5/6",
        ("peak", "(out=)"),
    ),
    Row(
        "mistake",
        "f and g have changed places",
        "borders",
        solution("borders", ("f_", "F_"), ("g_", "f_"), ("F_", "g_")),
        "0/4",
        ("runs", "hold different values", "in the right direction"),
    ),
    Row(
        "mistake",
        "all forwards first",
        "one_f_one_b",
        solution("one_f_one_b", ("min(num_stages - stage - 1, micro_batches)", "micro_batches")),
        "0/4",
        ("live", "GPipe"),
    ),
    Row(
        "mistake",
        "more forwards first than there are microbatches",
        "one_f_one_b",
        solution("one_f_one_b", ("min(num_stages - stage - 1, micro_batches)", "num_stages - stage - 1")),
        "0/4",
        ("runs", "Forward(slot=2, chunk=0), where there are 2 microbatches", "from 0 to micro_batches - 1"),
    ),
    Row(
        "mistake",
        "takes the first hole that is large enough",
        "best_fit",
        solution("best_fit", ("min(enough)", "min(enough, key=lambda hole: hole[1])")),
        "0/3",
        ("requests", "the smallest hole that is large enough, not the first"),
    ),
    Row(
        "mistake",
        "goes through what is live in the order of the dict",
        "compaction",
        solution("compaction", ("in sorted(live)", "in live")),
        "0/3",
        ("moves", "bytes of the buffer", "draw it"),
    ),
    Row(
        "mistake",
        "eps inside of the root",
        "adagrad",
        solution("adagrad", ("(xp.sqrt(total) + self.eps)", "xp.sqrt(total + self.eps)")),
        "0/3",
        ("steps", "eps is added outside the root"),
    ),
    Row(
        "mistake",
        "no weight decay",
        "radam",
        solution("radam", ("now.weight_decay * w", "0.0 * w")),
        "0/3",
        ("steps", "with weight decay 0.01", "before you use the gradient"),
    ),
    Row(
        "mistake",
        "takes the entry above",
        "quantiser",
        solution("quantiser", ("(table[:-1] + table[1:]) / 2", "table[:-1]")),
        "0/1",
        ("codes", "nearest is", "is the entry below nearer"),
    ),
    Row(
        "mistake",
        "rounds up where the draw is equal, too",
        "rounding",
        solution("rounding", ("drawn <", "drawn <=")),
        "0/1",
        ("bits", "became", "which 16 bits"),
    ),
    Row(
        "mistake",
        "all weight gradients at the end",
        "zb_h1",
        solution(
            "zb_h1",
            ("        if slot >= stage:\n            actions += [WeightGrad(slot - stage)]\n", ""),
            ("range(micro_batches - stage, micro_batches)", "range(micro_batches)"),
        ),
        "0/4",
        ("live", "keeps its microbatch live"),
    ),
    Row(
        "mistake",
        "no gradient through the frozen weight",
        "adapter",
        solution("adapter", ("dy @ w + dt @ a", "dt @ a")),
        "0/1",
        ("dx[", "A frozen W has no gradient"),
    ),
    Row(
        "mistake",
        "the low half first",
        "nf4",
        solution("nf4", ("codes[::2] << 4 | codes[1::2]", "codes[1::2] << 4 | codes[::2]")),
        "0/1",
        ("have changed places", "high half"),
    ),
    Row(
        "mistake",
        "looks for the largest of the gradient alone",
        "top_k",
        solution("top_k", ("np.abs(total)", "np.abs(grad)")),
        "0/1",
        ("the largest are", "not sent before count too"),
    ),
    Row(
        "mistake",
        "rank 0's new Q in the place of the mean",
        "powersgd",
        solution("powersgd", ("return p @ q.T, q", "return p @ q.T, m[0].T @ p")),
        "0/1",
        ("q qᵀ[", "the new Q"),
    ),
    Row(
        "mistake",
        "a loop without an end",
        "zero3",
        solution(
            "zero3",
            (
                "        unit.flat.reshard()\n        unit.flat.add",
                "        while unit:\n            pass\n        unit.flat.add",
            ),
        ),
        "0/7",
        ("did nothing for 1.5 s", "line:", "an endless loop"),
    ),
    Row(
        "mistake",
        "CPU Adam, fp32 masters go back",
        "cpu_adam",
        solution("cpu_adam", ("self.carry(rounded, flat", "self.carry(master, flat")),
        "0/9",
        ("13,452 B device to host, 26,904 B host to device", "cast on the host, then copy"),
    ),
    Row(
        "mistake",
        "CPU Adam, new parameters stay on the host",
        "cpu_adam",
        solution("cpu_adam", ("                self.carry(rounded, flat.shard()[part])\n", "")),
        "0/9",
        ("0 B host to device", "the device still has the old parameters"),
    ),
    Row(
        "mistake",
        "CPU Adam, stepped on the device",
        "cpu_adam",
        solution(
            "cpu_adam",
            ("            self.updater.update(flat, scale)\n", ""),
            ("        with self.device", "        self.updater.update(flat, scale)\n        with self.device"),
        ),
        "0/9",
        ("on the device of rank 0", "kernels run on the CPU"),
    ),
    Row(
        "mistake",
        "CPU Adam, gradients leave when backward is over",
        "cpu_adam",
        solution(
            "cpu_adam",
            (
                "            self.carry(own, there)\n            unit.flat.add_grad_shard(there)",
                "            unit.flat.grad_shard = own",
            ),
            ('            there = self.device.alloc(own.shape, own.dtype, Kind.GRAD, memory="host")\n', ""),
        ),
        "8/9",
        ("held", "a peak of 80,652 B on the device", "copy a gradient in post_backward"),
    ),
    Row(
        "mistake",
        "CPU Adam, a slice goes back at once",
        "cpu_adam",
        solution("cpu_adam", ("tile = 512", "tile = 10**6")),
        "8/9",
        ("at most a tile of 512 elements", "copy self.tile elements"),
    ),
    Row(
        "mistake",
        "CPU Adam, copies that the CPU does not wait for",
        "cpu_adam",
        solution("cpu_adam", ('        copy.wait("cpu")\n', "")),
        "8/9",
        ("waits", "3,072 B device to host on rank 0 is never waited for by 'cpu'", "copy.wait('cpu')"),
    ),
    Row(
        "mistake",
        "CPU Adam, new parameters that leave before the CPU has made them",
        "cpu_adam",
        solution("cpu_adam", ('after="cpu" if source.memory == "host" else "compute"', 'after="compute"')),
        "8/9",
        ("waits", "1,024 B host to device on rank 0 is launched after 'compute'", "after='cpu'"),
    ),
    Row(
        "mistake",
        "the second shard, copied in every forward",
        "second_shard",
        solution("second_shard", ("            self.old.remove(flat.name)\n", "")),
        "4/5",
        ("copied", "53,808 B on rank 0 in step 0", "take the flat's name out of self.old"),
    ),
    Row(
        "mistake",
        "the second shard, written where nothing counts",
        "second_shard",
        solution(
            "second_shard",
            (
                "self.copy(full[start : start + second.numel], second)",
                "second.array[...] = full.array[start : start + second.numel]",
            ),
        ),
        "4/5",
        ("copied", "0 B on rank 0", "is counted"),
    ),
    Row(
        "mistake",
        "what to offload, drives read once",
        "offload",
        solution("offload", ("4 * far", "2 * far")),
        "0/1",
        ("a step of 28 s (8 + 20); nvme host device takes 26 s (2 + 24)", "phase 1 parameters come twice"),
    ),
    Row(
        "mistake",
        "what to offload, whatever fits or not",
        "offload",
        solution("offload", ('return float("inf")', "pass")),
        "0/1",
        ("which does not fit: 160 GB on device, room for 50",),
    ),
    Row(
        "mistake",
        "what to offload, parameters come once",
        "offload",
        solution("offload", ("4 * away", "2 * away")),
        "0/1",
        ("a step of 30 s (20 + 10); host device device takes 27 s (15 + 12)", "phase 1 parameters come twice"),
    ),
]

COPIES = [
    Row(
        "copy",
        "zerosim's class, inherited",
        "zero2",
        "from zerosim.grading import Zero2\n\n\nclass MyZero2(Zero2):\n    pass\n",
        "0/6",
        ("Zero2.publish_params, zerosim's own, did the work", "write it yourself"),
    ),
    Row(
        "copy",
        "zerosim's method, called",
        "zero2",
        solution("zero2", ("Strategy, Unit", "Strategy, Unit, Zero2"), (PUBLISHES, "Zero2.publish_params(self, flat)")),
        "0/6",
        ("Zero2.publish_params, zerosim's own, did the work",),
    ),
    Row(
        "copy",
        "zerosim's function, found in a table",
        "one_f_one_b",
        "from zerosim.parallel.pipeline import SCHEDULES\n\n\n"
        "def my_1f1b(*sizes):\n    return SCHEDULES['1f1b'](*sizes)\n",
        "0/4",
        ("parallel.pipeline._one_by_one, zerosim's own, did the work",),
    ),
    Row(
        "copy",
        "CPU Adam, whose gradients zerosim sends to the host",
        "cpu_adam",
        solution(
            "cpu_adam",
            ("            self.carry(own, there)\n", ""),
            ("unit.flat.add_grad_shard(there)", "self.shards.gradients.keep(unit.flat, own)"),
        ),
        "0/9",
        ("OffloadedGradients.send, zerosim's own, did the work",),
    ),
    Row(
        "copy",
        "a published solution under other names",
        "zero3",
        solution("zero3", ("unit", "piece")).replace("piece: Unit", "piece"),
        "7/7",
        ("solved",),
    ),
]

CHEATS = [
    Row(
        "cheat",
        "ends the process",
        "zero2",
        solution("zero2", ("if unit", "import os; os._exit(0)\n        if unit")),
        "0/6",
        ("os._exit(0)", "return from the hook instead"),
        apart=True,
    ),
    Row(
        "cheat",
        "prints a verdict",
        "zero2",
        EMPTY + body("    def post_backward(self, unit):", PIPE),
        "0/6",
        ("[no]",),
        apart=True,
    ),
    Row(
        "cheat",
        "patches the report",
        "zero2",
        EMPTY
        + body(
            "    def post_backward(self, unit):",
            "import zerosim.grading.report as report",
            "report.Grade.passed = True",
        ),
        "0/6",
        ("Grade.passed changed while it ran",),
        apart=True,
    ),
    Row(
        "cheat",
        "patches a check",
        "zero2",
        solution("zero2", (PUBLISHES, "import zerosim.grading.checks as checks; checks.weights = None")),
        "0/6",
        ("zerosim.grading.checks.weights changed while it ran",),
        apart=True,
    ),
    Row(
        "cheat",
        "takes an event out of the record",
        "zero2",
        solution("zero2", (PUBLISHES, f"{PUBLISHES}; self.device.recorder.events.pop()")),
        "0/6",
        ("record is not whole", "leave self.device.recorder alone"),
    ),
    Row(
        "cheat",
        "switches the record off",
        "zero2",
        solution("zero2", (PUBLISHES, f"self.device.recorder.enabled = False; {PUBLISHES}")),
        "0/6",
        ("cannot be switched off",),
    ),
    Row(
        "cheat",
        "passes parameters on where nothing counts",
        "zero2",
        solution(
            "zero2",
            ("class MyZero2", "BOARD = {}\n\n\nclass MyZero2"),
            (
                PUBLISHES,
                "\n        ".join(
                    (
                        "BOARD[flat.name, self.comm.rank] = flat.shard().array.copy()",
                        "self.comm.barrier()",
                        "for rank in range(self.comm.size):",
                        "    start = rank * flat.own.size",
                        "    flat.whole_param().array[start : start + flat.own.size] = BOARD[flat.name, rank]",
                        "self.comm.barrier()",
                    )
                ),
            ),
        ),
        "5/6",
        ("volume", "too few", "did not go through `self.comm`"),
    ),
    Row(
        "cheat",
        "a pair that equals every pair",
        "bounds",
        "class Agrees(tuple):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ = None\n\n\n"
        "def slice_of(numel, rank, world_size):\n    return Agrees((0, 1))\n",
        "0/8",
        ("slices", "return a pair of whole numbers"),
    ),
    Row(
        "cheat",
        "makes the listener deaf",
        "bounds",
        "import sys\nfrom zerosim.placement import partition\n\n\ndef slice_of(numel, rank, world_size):\n"
        "    sys.setprofile(None)\n    part = partition.slice_of(numel, rank, world_size)\n"
        "    return part.start, part.stop\n",
        "0/8",
        ("write it yourself",),
    ),
]


def four() -> list[Row]:
    """The rows of `four.toml`."""
    found = []
    for exercise, rows in tomllib.loads((ROOT / "tests" / "grading" / "four.toml").read_text("utf-8")).items():
        for row in rows:
            changes = [(old, new) for old, new in row.get("changes", ())]
            source = solution(exercise, *changes) if changes else ""
            source = without(exercise, row["without"]) if "without" in row else source
            is_right = row["kind"] == "right"
            says = ("solved",) if is_right else tuple(row["says"])
            kind, what = "right" if is_right else "mistake", f"{exercise}: {row['what']}"
            seed = row.get("seed", None if source else 0)  # another seed may give another bug, with words of its own
            found.append(Row(kind, what, exercise, source, "", says, seed=seed))
    return found


ANSWERS = [*RIGHT, *MISTAKES, *COPIES, *CHEATS]
FOUR = four()
