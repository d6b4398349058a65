"""A DDP script under ReCoVer: what changes is marked with "recover".

Run it:  recover run --replicas 4 examples/ddp.py
and kill a replica while it trains: the others finish the same step, with the same 16 microbatches.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
    job = recover.init(microbatches=16)  # recover: instead of init_process_group
    torch.manual_seed(0)
    model = DistributedDataParallel(Lines(), process_group=job.process_group)  # recover: the group
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = recover.Trainer(job, model, optimizer, clip_norm=1.0)  # recover
    for step in trainer.steps(Points(), until=40):  # recover: each step is this replica's share
        for x in step:
            step.backward(model(x))
        record = step.commit()  # recover: instead of optimizer.step()
        print(f"step {record.step}: loss {record.loss:.4f}, {len(record.survivors)} replicas")


if __name__ == "__main__":
    main()
