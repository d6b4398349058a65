"""ReCoVer: pre-training that does not stop when hardware dies.

    import recover

    job = recover.init(microbatches=32)
    trainer = recover.Trainer(job, model, optimizer)
    for step in trainer.steps(data, until=10_000):
        for microbatch in step:
            step.backward(model(microbatch))
        record = step.commit()

Started with ``recover run --replicas 4 script.py``. The names below are imported on first use, so
that the launcher need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from recover.errors import NotLaunchedError, RecoverError

if TYPE_CHECKING:
    from recover.parallel.tied import Tied as Tied
    from recover.records import StepRecord as StepRecord
    from recover.records import read_run as read_run
    from recover.train.job import Job as Job
    from recover.train.job import init as init
    from recover.train.step import Step as Step
    from recover.train.trainer import Trainer as Trainer

_HOMES = {
    "Job": "recover.train.job",
    "Step": "recover.train.step",
    "StepRecord": "recover.records",
    "Tied": "recover.parallel.tied",
    "Trainer": "recover.train.trainer",
    "init": "recover.train.job",
    "read_run": "recover.records",
}

__all__ = [
    "Job",
    "NotLaunchedError",
    "RecoverError",
    "Step",
    "StepRecord",
    "Tied",
    "Trainer",
    "init",
    "read_run",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'recover' has no attribute {name!r}")
    return getattr(import_module(home), name)
