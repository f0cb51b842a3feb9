"""Exercise 18: as many forwards first as stages follow, then one forward, one backward."""

from zerosim.grading import Action, Backward, Forward


def my_1f1b(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    ahead = min(num_stages - stage - 1, micro_batches)
    actions: list[Action] = [Forward(slot) for slot in range(ahead)]
    for slot in range(ahead, micro_batches):
        actions += [Forward(slot), Backward(slot - ahead)]
    return actions + [Backward(slot) for slot in range(micro_batches - ahead, micro_batches)]
