"""The task in the words of the reference trainer, equal for all contenders. Layer: evaluation.

:class:`Recipe` is what a rank without ReCoVer needs to train as `recover train` does: the same
weights, microbatches by global index, optimizer, learning rate, clipping and emulated device.
"""

import json
from collections.abc import Collection
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from recover.evaluation.contender import Kill, Task
from recover.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from recover.train.model import Decoder

BUCKET_MB: Final = {"nano": 0.1, "tiny": 0.35, "tiny_moe": 0.55, "small": 12.5}
"""About a quarter of each model, so that there is a second bucket to die in."""
DEADLY_BUCKET: Final = 1
"""The bucket that a killed replica never brings."""


def train_config(task: Task, policy: str = "static") -> TrainConfig:
    """Return the settings of the reference trainer for this task."""
    return TrainConfig(
        replicas=task.replicas,
        microbatches=task.microbatches,
        steps=task.steps,
        preset=task.preset,
        sequences=task.sequences,
        seed=task.seed,
        learning_rate=task.learning_rate,
        policy=policy,
        bucket_mb=BUCKET_MB[task.preset],
        microbatch_ms=task.microbatch_ms,
        bandwidth_mbps=task.bandwidth_mbps,
    )


def settings(task: Task) -> dict[str, object]:
    """Return what a trace says about its task."""
    plain: dict[str, object] = json.loads(to_json(task))
    return plain | {
        "microbatches": task.microbatches,
        "bucket_mb": BUCKET_MB[task.preset],
        "torch": version("torch"),
        "emulated": bool(task.microbatch_ms or task.bandwidth_mbps),
    }


def to_json(task: Task) -> str:
    """Return the task as one argument for a rank's command line."""
    return json.dumps(asdict(task))


def from_json(text: str) -> Task:
    """Read what :func:`to_json` wrote."""
    values = json.loads(text)
    return Task(**values | {"kills": tuple(Kill(**kill) for kill in values["kills"])})


def own_ids(step: int, microbatches: int, position: int, ranks: int) -> range:
    """Return the ids that one of ``ranks`` runs in a step: its block of the step's microbatches."""
    each, more = divmod(microbatches, ranks)
    first = position * each + min(position, more)
    start = step * microbatches + first
    return range(start, start + each + (position < more))


class Recipe:
    """Model, data and optimizer of one rank; imports torch when it is made."""

    def __init__(self, task: Task) -> None:
        from recover.train.emulation import Device
        from recover.train.model import build, preset
        from recover.train.optim import adamw
        from recover.train.text import TextWindows, load_text

        self.task, self.config = task, train_config(task)
        shape = preset(task.preset)
        self.text: TextWindows = TextWindows(
            load_text(),
            sequences_per_microbatch=task.sequences,
            sequence=shape.sequence,
            seed=task.seed,
        )
        self.model: Decoder = build(shape, seed=task.seed)
        self.optimizer: torch.optim.Optimizer = adamw(self.model, peak=task.learning_rate)
        self.device = Device(task.microbatch_ms, task.bandwidth_mbps)

    def step_optimizer(self, step: int) -> None:
        """Clip the averaged gradient and step, at the learning rate of this step."""
        self.clip()
        self.set_learning_rate(step)
        self.optimizer.step()

    def clip(self) -> None:
        """Clip the averaged gradient."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rate of a step."""
        from recover.train.optim import rate, set_learning_rate

        set_learning_rate(self.optimizer, rate(self.config, step))


def due(task: Task, replica: int, died_in: Collection[int]) -> int | None:
    """Return the step in which this replica dies next, if it does.

    ``died_in`` are the steps in which somebody has died already.
    """
    steps = [k.step for k in task.kills if k.replica == replica and k.step not in died_in]
    return min(steps, default=None)


def present(task: Task, ranks: int, died_in: Collection[int]) -> list[int]:
    """Return the replica of each rank: all of them, or only those that have not died."""
    dead = {kill.replica for kill in task.kills if kill.step in died_in}
    everyone = range(task.replicas)
    return [r for r in everyone if ranks == task.replicas or r not in dead]
