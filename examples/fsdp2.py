"""FSDP2 under ReCoVer: each replica shards the model over its own ranks; stock torch inside.

Run it:  recover run --replicas 2 --ranks-per-replica 2 examples/fsdp2.py
and kill any rank: its replica goes, the others finish the same step with the same 16 microbatches.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import recover


class Lines(nn.Module):
    """Fits sums of sines; stands for your model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean squared error on inputs x, (rows, 8)."""
        error: Tensor = self.layers(x) - x.sin().sum(1, keepdim=True)  # (rows, 1)
        return error.square().mean()


class Points:
    """Data addressed by index: microbatch k is the same on every replica."""

    def __getitem__(self, k: int) -> Tensor:
        return torch.randn(32, 8, generator=torch.Generator().manual_seed(k))


def main() -> None:
    """Train for 40 steps of B = 16 microbatches."""
    job = recover.init(microbatches=16)  # recover: opens the replica's own torch.distributed world
    torch.manual_seed(0)
    model = Lines()
    mesh = init_device_mesh("cpu", (job.ranks_per_replica,))  # as ever: the replica's ranks
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = recover.Trainer(job, model, optimizer, clip_norm=1.0)  # recover
    for step in trainer.steps(Points(), until=40):  # recover: each step is this replica's share
        for x in step:
            mine = x.chunk(job.ranks_per_replica)[job.shard]  # as ever: this rank's part of it
            step.backward(model(mine))
        record = step.commit()  # recover: instead of optimizer.step()
        print(f"step {record.step}: loss {record.loss:.4f}, {len(record.survivors)} replicas")


if __name__ == "__main__":
    main()
