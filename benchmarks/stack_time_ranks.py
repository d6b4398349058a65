"""One rank of the benchmark of stacks without failures; see :mod:`benchmarks.stack_time`."""

import json
import resource
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import recover
from recover.parallel.shape import AXES, ReplicaShape
from recover.tensors.holders import local
from recover.train.config import TrainConfig
from recover.train.job import Job
from recover.train.model import Block, Decoder, ModelConfig, build, preset
from recover.train.optim import adamw, matrix_names
from recover.train.stacks import make_replica
from recover.train.text import TextWindows, load_text
from recover.train.three_d import build_replica

RANKS, CLIP_NORM, LEARNING_RATE = 2, 1.0, 1e-3
Steps = Iterator[float | Tensor]
"""Runs one step each time that its next item, the mean loss, is asked for."""


# --- with ReCoVer --------------------------------------------------------------------------


def with_recover(told: dict[str, Any], job: Job, shape: ModelConfig) -> "Contender":
    """Train with the product's own loop."""
    if told["stack"] == "3d":
        replica: Any = build_replica(
            shape, ReplicaShape(pp=RANKS), sequences=told["sequences"], seed=0, schedule="1f1b"
        )
        model, run = replica.parts[0], replica.run
    else:
        config = TrainConfig(
            replicas=job.replicas,
            microbatches=job.microbatches,
            preset=told["preset"],
            sequences=told["sequences"],
            parallel=told["stack"],
        )
        replica = make_replica(config, job)
        model, run = replica.module, None
    optimizer = optimizer_of(model, shape)
    trainer = recover.Trainer(
        job, model, optimizer, clip_norm=CLIP_NORM, bucket_mb=told["bucket_mb"]
    )

    def steps() -> Steps:
        for step in trainer.steps(text(told, shape), until=told["steps"]):
            if run is not None:
                for microbatches in step.passes():
                    step.ran(run(microbatches))
            else:
                for microbatch in step:
                    step.backward(replica.loss(microbatch))
            yield step.commit().loss

    parameters = list(trainer.stack.parameters())
    return Contender(steps(), parameters, optimizer, lambda: trainer.buckets.nbytes)


# --- stock ---------------------------------------------------------------------------------


def stock_sharded(told: dict[str, Any], mesh: DeviceMesh, shape: ModelConfig) -> "Contender":
    """Train with FSDP over (replicate, shard), as its documentation recommends."""
    decoder: nn.Module = build(shape, seed=0)
    every = told["contender"] == "stock, every microbatch"
    if told["stack"] == "fsdp2":
        for block in decoder.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        model: Any = fully_shard(decoder, mesh=mesh)
    else:
        model = FSDP(
            decoder,
            process_group=(mesh.get_group("shard"), mesh.get_group("replicate")),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    optimizer = optimizer_of(model, shape)

    def steps() -> Steps:
        for numbers in shares(told, mesh["replicate"].get_local_rank()):
            optimizer.zero_grad()
            losses = []
            for number in numbers:
                last = number == numbers[-1]
                if told["stack"] == "fsdp2":
                    model.set_requires_all_reduce(last)
                quiet = told["stack"] == "hybrid" and not last and not every
                with model.no_sync() if quiet else nullcontext():
                    tokens = windows[number].chunk(RANKS)[mesh["shard"].get_local_rank()]
                    loss = model(tokens) / len(numbers)
                    loss.backward()
                losses.append(loss.detach())
            if isinstance(model, FSDP):
                model.clip_grad_norm_(CLIP_NORM)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            yield torch.stack(losses).sum()

    windows = text(told, shape)
    return Contender(steps(), list(model.parameters()), optimizer, lambda: 0)


class _Within(ReplicaShape):
    """A shape whose mesh is a part of a larger one."""

    world: DeviceMesh

    def mesh(self, device_type: str) -> DeviceMesh:
        return self.world[AXES]


def stock_pipeline(told: dict[str, Any], mesh: DeviceMesh, shape: ModelConfig) -> "Contender":
    """Train a pipeline of stages under DDP."""
    _Within.world = mesh
    replica = build_replica(
        shape, _Within(pp=RANKS), sequences=told["sequences"], seed=0, schedule="1f1b"
    )
    (part,), (stage,) = replica.parts, replica.pipeline.stages
    group = mesh.get_group("replicate")
    wrapped = DistributedDataParallel(part, process_group=group, gradient_as_bucket_view=True)
    stage.submod = wrapped
    optimizer = optimizer_of(part, shape)
    parameters = list(part.parameters())

    def steps() -> Steps:
        for numbers in shares(told, mesh["replicate"].get_local_rank()):
            optimizer.zero_grad()
            losses = replica.run([windows[number] for number in numbers])
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_div_(gradients, len(numbers))
            squares = nn.utils.get_total_norm(gradients).square()
            dist.all_reduce(squares, group=mesh.get_group("pp"))
            nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, squares.sqrt())
            optimizer.step()
            yield torch.stack(losses).mean() if losses else torch.tensor(0.0)

    windows = text(told, shape)
    return Contender(steps(), parameters, optimizer, lambda: 0)


def shares(told: dict[str, Any], replica: int) -> Iterator[range]:
    """Yield the microbatches of a replica, step by step."""
    accumulation = told["microbatches"] // told["replicas"]
    for step in range(told["steps"]):
        first = step * told["microbatches"] + replica * accumulation
        yield range(first, first + accumulation)


# --- both ----------------------------------------------------------------------------------


class Contender:
    """One way to train, on this rank."""

    def __init__(
        self,
        steps: Steps,
        parameters: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        buckets: Any,
    ) -> None:
        self.steps, self._optimizer, self._buckets = steps, optimizer, buckets
        self._parameters = list(parameters)

    def mb(self) -> dict[str, float]:
        """Return the MiB of this rank's tensors."""
        state = [
            value
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return {
            "parameters": _mb(self._parameters),
            "optimizer": _mb(state),
            "gradients": self._buckets() / 2**20 or _mb(gradients),
        }


def optimizer_of(model: nn.Module, shape: ModelConfig) -> torch.optim.Optimizer:
    """Return the optimizer; only the whole model tells matrices, which FSDP1 flattens."""
    with torch.device("meta"):
        matrices = matrix_names(Decoder(shape))
    return adamw(model, peak=LEARNING_RATE, matrices=matrices)


def _mb(tensors: Iterable[Tensor]) -> float:
    return sum(local(tensor).nbytes for tensor in tensors) / 2**20


def text(told: dict[str, Any], shape: ModelConfig) -> TextWindows:
    """Return the text in microbatches."""
    return TextWindows(
        load_text(), sequences_per_microbatch=told["sequences"], sequence=shape.sequence, seed=0
    )


def resident_mb() -> float:
    """Return the largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Train whenever it is this set's turn."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    shape = preset(told["preset"])
    if told["stack"] == "3d":  # DDP knows nothing of weights that two stages share
        shape = replace(shape, tie_embeddings=False)
    if told["contender"] == "recover":
        job = recover.init(microbatches=told["microbatches"])
        imported_mb = resident_mb()
        contender = with_recover(told, job, shape)
    else:
        ranks = told["replicas"] * RANKS
        dist.init_process_group(
            "gloo", init_method=f"file://{told['store']}", rank=told["rank"], world_size=ranks
        )
        imported_mb = resident_mb()
        sizes = (told["replicas"], RANKS, 1, 1)
        if told["stack"] == "3d":
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", *AXES))
            contender = stock_pipeline(told, mesh, shape)
        else:
            mesh = init_device_mesh("cpu", sizes[:2], mesh_dim_names=("replicate", "shard"))
            contender = stock_sharded(told, mesh, shape)
    connection = socket.create_connection(("127.0.0.1", told["port"]))
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        stream.write(f"{told['contender']}\n")
        stream.flush()
        for word in stream:
            if word.strip() == "end":
                break
            for _ in range(told["block"]):
                loss = next(contender.steps)
            stream.write("done\n")
            stream.flush()
        if told["contender"] != "recover":  # each rank knows its own part only
            loss = torch.as_tensor(loss)
            dist.all_reduce(loss)
            parts = told["replicas"] * (1 if told["stack"] == "3d" else RANKS)
            loss = float(loss) / parts
        for _ in contender.steps:
            pass
        said = {"loss": loss, "mb": contender.mb(), "resident_mb": resident_mb() - imported_mb}
        stream.write(json.dumps(said | {"threads": torch.get_num_threads()}) + "\n")
        stream.flush()
    if told["contender"] != "recover":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
