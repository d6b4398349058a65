"""A pipeline that takes a whole pass of microbatches, of any length. Layer: parallel. Paper: C.

A replica's share changes when another replica dies, and the extra pass that repairs a step is as
short as one microbatch. So the stages, which hold the model, are built once; the schedule, which
holds nothing but an order, is made anew whenever the length of the pass changes:

- A stage keeps its receive buffers per microbatch of the *current* schedule, and their number.
  Preparing a schedule overwrites both, so one stage object serves one schedule at a time.
- Shapes are declared (static) rather than inferred. Inference would run a forward and a backward
  for nothing at the start of every extra pass, inside the time that a recovery takes.
- 1F1B needs as many microbatches as there are stages, interleaved 1F1B whole rounds. A pass that
  does not fit runs forward-all, backward-all instead: the same sum in another order.

Gradients are plainly accumulated: ``weight`` x the gradient of the loss, summed over microbatches.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved")
Loss = Callable[[Tensor, Tensor], Tensor]
"""From the last stage's output and the target to the scalar mean loss of one microbatch."""


class Pipeline:
    """Runs passes through ``stages``, this rank's stages of one pipeline in increasing order.

    Every rank of the pipeline constructs one, with as many stages as the others, and calls ``run``
    with passes of the same lengths. "gpipe" and "1f1b" take one stage per rank; "interleaved" any
    number, laid out in loops (stage i on pipeline rank i mod ranks). A gradient counts ``weight``
    times; the losses that ``run`` returns do not. Raises ValueError for a wrong setting.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        loss: Loss,
        schedule: str = "gpipe",
        *,
        weight: float = 1.0,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if not stages or (schedule != "interleaved" and len(stages) > 1):
            raise ValueError(f"{len(stages)} stages on a rank do not fit the schedule {schedule!r}")
        self.stages = tuple(stages)
        self.schedule = schedule
        self._loss, self._weight = loss, weight
        self._runner: _PipelineSchedule | None = None
        self._length = 0
        self._losses: list[Tensor] = []

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Run forward and backward of a pass; return its losses, in order.

        One input and one target per microbatch, equally shaped, on every rank: the first stage
        reads the inputs, the last stage the targets. Losses are detached scalars; they come out on
        the ranks that hold the last stage, the others return []. Raises ValueError for an empty
        pass.
        """
        if not inputs or len(inputs) != len(targets):
            raise ValueError(
                "a pass needs one target per input and at least one of them, "
                f"got {len(inputs)} inputs and {len(targets)} targets"
            )
        self._losses = []
        if self.stages[0].num_stages == 1:
            for x, target in zip(inputs, targets, strict=True):
                torch.autograd.backward(self._weighted_loss(self.stages[0].submod(x), target))
        else:
            given = (torch.cat(list(inputs)),) if self.stages[0].is_first else ()
            wanted = torch.cat(list(targets)) if self.stages[-1].is_last else None
            self._prepared(len(inputs)).step(*given, target=wanted, return_outputs=False)
        losses, self._losses = self._losses, []
        return losses[-len(inputs) :]  # stages without declared shapes computed one more, to infer

    def _weighted_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self._loss(output, target)
        self._losses.append(loss.detach())
        return loss * self._weight

    def _prepared(self, microbatches: int) -> _PipelineSchedule:
        """Return the schedule for passes of this length, which is that of the last pass or new."""
        if self._runner is None or self._length != microbatches:
            for stage in self.stages:  # let go of buffers that a longer pass left behind
                stage.clear_runtime_states()
                stage.args_recv_info.clear()
                stage.grad_recv_info.clear()
            self._runner, self._length = self._scheduled(microbatches), microbatches
        return self._runner

    def _scheduled(self, microbatches: int) -> _PipelineSchedule:
        stages: list[_PipelineStageBase] = list(self.stages)
        first, loss = stages[0], self._weighted_loss
        if self.schedule == "interleaved":
            rounds = max(1, microbatches // first.group_size)
            order = ScheduleLoopedBFS if microbatches % rounds else ScheduleInterleaved1F1B
            return order(stages, microbatches, loss_fn=loss, scale_grads=False)
        short = self.schedule == "1f1b" and microbatches < first.num_stages
        single = Schedule1F1B if self.schedule == "1f1b" and not short else ScheduleGPipe
        return single(first, microbatches, loss_fn=loss, scale_grads=False)
