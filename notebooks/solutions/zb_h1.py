"""Exercise 28: on stage i weight gradients run i microbatches behind input gradients; the rest comes at the end."""

from zerosim.grading import Action, Forward, InputGrad, WeightGrad


def my_zb_h1(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    ahead = num_stages - stage - 1
    actions: list[Action] = [Forward(slot) for slot in range(ahead)]
    for slot in range(micro_batches):
        if slot + ahead < micro_batches:
            actions += [Forward(slot + ahead)]
        actions += [InputGrad(slot)]
        if slot >= stage:
            actions += [WeightGrad(slot - stage)]
    return actions + [WeightGrad(slot) for slot in range(micro_batches - stage, micro_batches)]
