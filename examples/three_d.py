"""Tensor x pipeline x data parallel: each replica is a 2 x 2 mesh of stages and slices.

Run it:  recover run --replicas 2 --ranks-per-replica 4 examples/three_d.py
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recover
from recover.parallel.pipeline import Pipeline

WIDTH, ROWS = 16, 32


class Points:
    """Data addressed by index: microbatch k is the same on every replica."""

    def __getitem__(self, k: int) -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(k))


def error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of output and target, (rows, width) both."""
    return (output - target).square().mean()


def main() -> None:
    """Train for 40 steps of B = 16 microbatches."""
    job = recover.init(microbatches=16)  # recover: opens the replica's own torch.distributed world
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))  # as ever
    index = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    whole = nn.ModuleDict(  # two stages; each keeps one of them, under its name in the whole
        {
            str(stage): nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for stage in range(2)
        }
    )
    part = nn.ModuleDict({str(index): whole[str(index)]})
    part.forward = part[str(index)].forward
    plan = {f"{index}.0": ColwiseParallel(), f"{index}.2": RowwiseParallel()}
    parallelize_module(part, mesh["tp"], plan)
    rows = torch.empty(ROWS, WIDTH, device="meta").requires_grad_()
    group = mesh["pp"].get_group()
    stage = PipelineStage(part, index, 2, torch.device("cpu"), (rows,), rows, group=group)
    pipeline = Pipeline([stage], error, "1f1b")  # recover: passes of any length
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    trainer = recover.Trainer(job, part, optimizer, clip_norm=1.0)  # recover
    for step in trainer.steps(Points(), until=40):  # recover: each step is this replica's share
        for xs in step.passes():  # recover: all microbatches of a pass at once
            step.ran(pipeline.run(xs, [x.sin() for x in xs]))
        record = step.commit()  # recover: instead of optimizer.step()
        print(f"step {record.step}: loss {record.loss:.4f}, {len(record.survivors)} replicas")


if __name__ == "__main__":
    main()
