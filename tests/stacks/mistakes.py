"""A script that makes one mistake after the other and writes down what it is told.

Started by `recover run` on two replicas of two ranks. A mistake ends in an exception that reaches
the script on every rank alike, so the next one can follow in the same job.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

import recover


def own_world_before_init() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        recover.init(microbatches=4)
    finally:
        dist.destroy_process_group()


def equal_names(job: recover.Job) -> None:
    recover.Trainer(job, [nn.Linear(2, 1), nn.Linear(2, 1)], None)


def sharded_over_replicas(job: recover.Job) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(8, 8), process_group=job.process_group, device_id=torch.device("cpu")
    )
    recover.Trainer(job, model, None)


def unequal_shards(job: recover.Job) -> None:
    """Shard 1 of replica 1 holds one row more than shard 1 of replica 0."""
    mesh = init_device_mesh("cpu", (job.ranks_per_replica,))
    rows = 3 + (job.replica == 1 and job.shard == 1)
    local = torch.zeros(rows, 2)
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    for _ in recover.Trainer(job, model, None).steps([torch.zeros(1)], until=1):
        raise AssertionError("the start compares the shards")


def main(directory: Path) -> None:
    """Make all mistakes; the last one ends the job."""
    told = {}
    try:
        own_world_before_init()
    except recover.RecoverError as error:
        told["own_world_before_init"] = str(error)
    job = recover.init(microbatches=4)
    for mistake in (equal_names, sharded_over_replicas):
        try:
            mistake(job)
        except (ValueError, recover.RecoverError) as error:
            told[mistake.__name__] = str(error)
    file = directory / f"told-{job.replica}-{job.shard}.json"
    file.write_text(json.dumps(told), encoding="utf-8")
    unequal_shards(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
