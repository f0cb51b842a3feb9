"""The layers of each pipeline stage: runs of the model's units, in order; several runs are called chunks.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zerosim.errors import wrong


def number_of(unit: str) -> int:
    """Return the number of a block, by its unit's name."""
    return int(unit.rpartition(".")[2])


@dataclass(frozen=True, slots=True)
class Chunks:
    """The placement of a model's chunks: `each` per pipeline stage, on this number of `stages`, numbered in the model's
    order.

    in rounds        on stages 0 1 .. p-1, then 0 1 .. p-1 again   (interleaved 1F1B)
    back and forth   on stages 0 1 .. p-1, then p-1 .. 1 0         (`turns_back`: ZB-V)
    """

    stages: int = 1
    each: int = 1
    turns_back: bool = False

    @property
    def last(self) -> int:
        """The number of the model's last chunk."""
        return self.stages * self.each - 1

    @property
    def last_stage(self) -> int:
        """The stage with the loss. The first chunk is always on stage 0."""
        return self.stage(self.last)

    def number(self, stage: int, chunk: int) -> int:
        """Return the model's number, from 0, of a stage's chunk."""
        return chunk * self.stages + self._turned(chunk, stage)

    def stage(self, number: int) -> int:
        """Return the pipeline stage of a chunk of the model."""
        return self._turned(*divmod(number, self.stages))

    def of_stage(self, stage: int) -> list[int]:
        """Return the numbers of a pipeline stage's chunks."""
        return [self.number(stage, chunk) for chunk in range(self.each)]

    def _turned(self, chunk: int, at: int) -> int:
        return self.stages - 1 - at if self.turns_back and chunk % 2 else at


def fits_group(group: int, stages: int, micro_batches: int) -> bool:
    """Return whether microbatches may pass through chunks in groups of `group`. Megatron-Core requires each group, also
    the last one, to have at least as many microbatches as there are pipeline stages
    (core/pipeline_parallel/schedules.py, interleaving)."""
    rest = micro_batches % group
    return stages <= group <= micro_batches and (not rest or rest >= stages)


def smallest_group(stages: int, micro_batches: int) -> int:
    """Return `stages` if they divide the microbatches, else the next larger group that fits. PyTorch's rounds are the
    same if PyTorch accepts that many microbatches (ScheduleInterleaved1F1B)."""
    sizes = range(stages, micro_batches)
    return next((group for group in sizes if fits_group(group, stages, micro_batches)), micro_batches)


def cut_layers(
    layers: int,
    lie: Chunks,
    *,
    given: Sequence[int] | None = None,
    balance_ends: bool = False,
    has_ends: bool = True,
    word: str = "layers",
) -> list[int]:
    """Return the layers of each chunk, in the model's order: the given numbers, or equally many.

    A chunk may have no layer and pass on its input, but every pipeline stage must have a unit. `has_ends`: a table
    comes before all layers and a head after them. `balance_ends`: these count as a layer each, so that the first chunk
    and the last one have one layer less. `word` is the model's word for its layers. Raises: InputError if they cannot
    be cut this way.
    """
    chunks, ends = lie.last + 1, (0, lie.last)
    high, more = divmod(layers, chunks)
    needy = [lie.of_stage(stage)[0] for stage in range(lie.stages) if not {*ends} & {*lie.of_stage(stage)}]
    first = [*needy, *ends] if has_ends else [*ends, *needy]  # which get one of the remaining layers
    first = list(range(chunks)) if high else [*first, *(number for number in range(chunks) if number not in first)]
    nearest = ",".join(str(high + (number in first[:more])) for number in range(chunks))
    if given is not None:
        shown = f" {','.join(map(str, given))}"
        if len(given) != chunks or sum(given) != layers:
            raise wrong(
                "stage_layers", f"{shown}: expected {chunks} numbers that make up {layers} {word}, such as {nearest}"
            )
        holds = [count > 0 or (has_ends and number in ends) for number, count in enumerate(given)]
        if not has_ends and not all(holds[number] for number in ends):
            raise wrong("stage_layers", f"{shown}: the first chunk and the last one need {word}; choose {nearest}")
        for stage in range(lie.stages):
            if not any(holds[number] for number in lie.of_stage(stage)):
                but = "; the first and the last may have none" if has_ends else ""
                raise wrong(
                    "stage_layers", f"{shown}: stage {stage} without {word} has nothing to do{but}; choose {nearest}"
                )
        return list(given)
    counted = layers + 2 * balance_ends
    each, rest = divmod(counted, chunks)
    if rest:
        of_ends = " and two ends" if balance_ends else ""
        choice = max(1 + balance_ends, round(counted / chunks)) * chunks - 2 * balance_ends
        balanced = ", pass --balance-ends" if has_ends and not (layers + 2) % chunks else ""
        raise wrong(
            word,
            f" {layers}{of_ends} do not divide into {chunks} equal chunks: choose {word} {choice}{balanced}, "
            f"or pass --stage-layers {nearest}",
        )
    sizes = [each] * chunks
    if balance_ends:
        sizes[0] -= 1
        sizes[-1] -= 1
    return sizes


def cut_units(names: Sequence[str], sizes: Sequence[int], is_block: Callable[[str], bool]) -> list[range]:
    """Return runs of units with these numbers of blocks: the first run includes the units before all blocks, the last
    those after. A run between them without blocks is empty."""
    blocks = [i for i, name in enumerate(names) if is_block(name)]
    edges = [0]
    for count in accumulate(sizes[:-1]):
        edges.append(blocks[0] + count)
    return [range(start, stop) for start, stop in pairwise([*edges, len(names)])]
