"""A script that makes one mistake after the other and writes down what it is told.

Started by `recover run` on two replicas. A mistake ends in an exception that reaches the script on
each replica alike, so the next one can follow in the same job.
"""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recover

JOB = recover.init(microbatches=4)
DATA = [torch.full((1, 2), float(number)) for number in range(8)]


def trainer(model: nn.Module | None = None, job: recover.Job = JOB) -> recover.Trainer:
    model = nn.Linear(2, 1) if model is None else model
    return recover.Trainer(job, model, torch.optim.SGD(model.parameters(), lr=0.1))


def loss_of(one: recover.Trainer, microbatch: Tensor) -> Tensor:
    loss: Tensor = one.stack.parts[0](microbatch).sum()
    return loss


def commit_before_the_loop() -> None:
    for step in trainer().steps(DATA, until=1):
        step.commit()


def commit_inside_the_loop() -> None:
    one = trainer()
    for step in one.steps(DATA, until=1):
        for microbatch in step:
            step.backward(loss_of(one, microbatch))
            step.commit()


def no_backward() -> None:
    for step in trainer().steps(DATA, until=1):
        for _ in step:
            pass
        step.commit()


def no_last_backward() -> None:
    one = trainer()
    for step in one.steps(DATA, until=1):
        microbatches = iter(step)
        step.backward(loss_of(one, next(microbatches)))
        next(microbatches)
        step.commit()


def backward_twice() -> None:
    one = trainer()
    for step in one.steps(DATA, until=1):
        for microbatch in step:
            step.backward(loss_of(one, microbatch))
            step.backward(loss_of(one, microbatch))


def loop_begun_again() -> None:
    one = trainer()
    for step in one.steps(DATA, until=1):
        for _ in range(2):
            for microbatch in step:
                step.backward(loss_of(one, microbatch))
                break
        step.commit()


def no_commit() -> None:
    one = trainer()
    for step in one.steps(DATA, until=2):
        for microbatch in step:
            step.backward(loss_of(one, microbatch))


def steps_again() -> None:
    one = trainer()
    next(iter(one.steps(DATA, until=1)))
    next(iter(one.steps(DATA, until=1)))


def stream_that_ends() -> None:
    one = trainer()
    for step in one.steps(iter(DATA[:3]), until=4):
        for microbatch in step:
            step.backward(loss_of(one, microbatch))
        step.commit()


def empty_data() -> None:
    next(iter(trainer().steps([], until=1)))


def no_steps() -> None:
    next(iter(trainer().steps(DATA, until=0)))


def nothing_to_train() -> None:
    trainer(nn.Linear(2, 1).requires_grad_(False))


def no_clipping() -> None:
    model = nn.Linear(2, 1)
    recover.Trainer(JOB, model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.0)


def no_microbatches() -> None:
    recover.init(microbatches=0)


def unknown_policy() -> None:
    recover.init(microbatches=4, policy="dynamic")


def unknown_restore() -> None:
    recover.init(microbatches=4, restore="later")


def another_group() -> None:
    assert dist.is_initialized(), "the replica's own world, which is what DDP takes by itself"
    trainer(DistributedDataParallel(nn.Linear(2, 1)))


def gradients_in_buckets_of_ddp() -> None:
    group = JOB.process_group
    model = nn.Linear(2, 1)
    trainer(DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True))


def overlap_in_place() -> None:
    recover.Trainer(JOB, nn.Linear(2, 1), None, overlap=True, in_place=True)


def overlap_under_ddp() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=JOB.process_group)
    recover.Trainer(JOB, model, None, overlap=True)


def unequal_models() -> None:
    next(iter(trainer(nn.Linear(2, 1 + JOB.replica)).steps(DATA, until=1)))


def unequal_batches() -> None:
    job = recover.init(microbatches=4 + JOB.replica)
    next(iter(trainer(job=job).steps(DATA, until=1)))


def unequal_ends() -> None:
    next(iter(trainer().steps(DATA, until=1 + JOB.replica)))


def unequal_data() -> None:
    stream = itertools.cycle(DATA)
    next(iter(trainer().steps(stream if JOB.replica else DATA, until=1)))


MISTAKES: tuple[Callable[[], None], ...] = (
    *(commit_before_the_loop, commit_inside_the_loop, no_backward, no_last_backward),
    *(backward_twice, loop_begun_again, no_commit, steps_again, stream_that_ends, empty_data),
    *(no_steps, nothing_to_train, no_clipping, no_microbatches, unknown_policy, unknown_restore),
    *(another_group, gradients_in_buckets_of_ddp, unequal_models, unequal_batches, unequal_ends),
    *(unequal_data, overlap_in_place, overlap_under_ddp),
)

if __name__ == "__main__":
    told = {}
    for mistake in MISTAKES:
        try:
            mistake()
            told[mistake.__name__] = "nothing"
        except (recover.RecoverError, ValueError) as error:
            told[mistake.__name__] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1], f"told-{JOB.replica}.json").write_text(json.dumps(told), encoding="utf-8")
    raise recover.RecoverError("this was the last mistake")
