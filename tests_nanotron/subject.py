"""A training script over Nanotron's parts, as a user writes one; killed by the tests.

Each rank keeps, in a file per step, its fp32 weights before the step, its 16-bit parameters, the
reduced fp32 gradients, and the parameters after the step.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run does."""

    engine: str = "afab"
    stages: int = 2
    microbatches: int = 8
    steps: int = 5
    tie: bool = False
    zero: bool = False
    ddp: bool = False
    bucket_mb: float = 25.0
    kept: str = ""

    def to_json(self) -> str:
        """Return the script's argument."""
        return json.dumps(asdict(self))


def main(settings: Settings) -> None:
    """Train the tiny model."""
    from tests_nanotron import on_cpu

    torch.set_num_threads(1)
    on_cpu.install()
    from nanotron.optim.clip_grads import clip_grad_norm
    from nanotron.parallel.pipeline_parallel import engine as engines
    from nanotron.parallel.tied_parameters import sync_tied_weights_gradients

    from recover.adapters import nanotron
    from tests_nanotron.tiny import Rows

    job = nanotron.init(microbatches=settings.microbatches)
    context = nanotron.parallel_context(job, pipeline_parallel_size=settings.stages)
    model = build(settings, context)
    optimizer, accumulator, wrapped = optimizer_of(settings, model, context)
    engine = {
        "afab": engines.AllForwardAllBackwardPipelineEngine,
        "1f1b": engines.OneForwardOneBackwardPipelineEngine,
    }[settings.engine]()
    trainer = nanotron.trainer(job, wrapped, accumulator, bucket_mb=settings.bucket_mb)
    pipeline = nanotron.Pipeline(engine, wrapped, context, accumulator)
    data = Rows(context.pp_pg.rank(), model.output_pp_rank)
    for step in trainer.steps(data, until=settings.steps):
        kept: dict[str, Any] = {"masters": masters(accumulator), "half": halves(accumulator)}
        for microbatches in step.passes():
            step.ran(pipeline(microbatches), tokens=3 * len(microbatches))
        step.commit()
        sync_tied_weights_gradients(model, context, accumulator)
        kept["gradients"] = {
            name: accumulator.get_grad_buffer(name).clone()
            for name in accumulator.fp32_grad_buffers
        }
        clip_grad_norm(
            mp_pg=context.mp_pg,
            named_parameters=list(model.get_named_params_with_correct_tied()),
            max_norm=1.0,
            grad_accumulator=accumulator,
        )
        optimizer.step()
        optimizer.zero_grad()
        kept["after"] = halves(accumulator)
        file = Path(settings.kept) / f"step-{step.number}-replica-{job.replica}-{job.shard}.pt"
        torch.save(kept, file)


def build(settings: Settings, context: Any) -> Any:
    """Build the model as Nanotron's trainer does."""
    from nanotron.models import build_model
    from nanotron.trainer import mark_tied_parameters

    from tests_nanotron.tiny import Tiny, as_nanotron_parameters, fill

    model = build_model(
        lambda: Tiny(context, settings.tie), context, torch.bfloat16, device=torch.device("cpu")
    )
    as_nanotron_parameters(model)
    mark_tied_parameters(model=model, parallel_context=context)
    model.module_id_to_prefix = {id(m): f"{name}." for name, m in model.named_modules()}
    model.module_id_to_prefix[id(model)] = ""
    fill(model)
    return model


def optimizer_of(settings: Settings, model: Any, context: Any) -> tuple[Any, Any, Any]:
    """Return the optimizer, its accumulator, and the model, under DDP if it is asked for."""
    from nanotron.config import LRSchedulerArgs, OptimizerArgs
    from nanotron.helpers import init_optimizer_and_grad_accumulator

    rate = LRSchedulerArgs(0.01, lr_warmup_style="linear", lr_decay_style="linear")
    asked = OptimizerArgs(
        zero_stage=int(settings.zero),
        weight_decay=0.0,
        clip_grad=None,
        accumulate_grad_in_fp32=True,
        adam_eps=1e-8,
        adam_beta1=0.9,
        adam_beta2=0.95,
        torch_adam_is_fused=False,
        learning_rate_scheduler=rate,
    )
    wrapped = model
    if settings.ddp:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=context.dp_pg)
    optimizer, accumulator = init_optimizer_and_grad_accumulator(
        model=wrapped, optimizer_args=asked, parallel_context=context
    )
    return optimizer, accumulator, wrapped


def masters(accumulator: Any) -> dict[str, Tensor]:
    """Return copies of the fp32 weights."""
    return {name: w["fp32"].detach().clone() for name, w in accumulator.parameters.items()}


def halves(accumulator: Any) -> dict[str, Tensor]:
    """Return copies of the 16-bit parameters."""
    buffers = accumulator.fp32_grad_buffers.items()
    return {name: buffer["half"].detach().clone() for name, buffer in buffers}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(Settings(**json.loads(sys.argv[1])))
