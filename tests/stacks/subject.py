"""The script that is trained and killed: one tiny model, made parallel by any stack.

Started by `recover run` with its settings as one argument. A rank that reaches the end keeps, in
one file, what its replica had in every step: gradients as the optimizer got them and parameters at
the end, put together from the shards, and for each step a digest of its own shards.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import recover
from recover.parallel.tied import Tied

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.stacks.gathering import whole
from tests.stacks.model import (
    MICROBATCH_TOKENS,
    SENTENCE,
    SENTENCES,
    WIDTH,
    WORDS,
    Block,
    Frozen,
    Momentum,
    Sentences,
    Tiny,
    build,
    loss_of,
)

Pass = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run does; everything that is not the launcher's business."""

    stack: str
    steps: int = 20
    microbatches: int = 12
    clip_norm: float | None = None
    in_place: bool = False
    overlap: bool = False
    kept: str = ""
    """Directory for what each rank keeps."""

    def to_json(self) -> str:
        """Return the script's argument."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of the model."""

    module: nn.Module
    pipeline: Pass | None = None
    """Runs a whole pass, where the stack is a pipeline."""
    tied: Sequence[Tied] = ()
    shared: bool = True
    """Whether the ranks of the replica share the sentences of a microbatch."""


def make_parallel(model: Tiny, stack: str, job: recover.Job) -> Part:
    """Return this rank's part of the model."""
    match stack:
        case "fsdp2" | "fsdp2-bf16":
            return Part(sharded_by_fsdp2(model, narrow=stack.endswith("bf16")))
        case "fsdp1" | "fsdp1-orig" | "hybrid":
            return Part(sharded_by_fsdp1(model, stack, job))
        case "tp":
            return Part(tensor_parallel(model), shared=False)
        case "pp":
            return staged(model)
        case "plain":
            return Part(model, shared=False)
    raise ValueError(f"unknown stack {stack!r}")


def sharded_by_fsdp2(model: Tiny, *, narrow: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else None
    policy = policy or MixedPrecisionPolicy()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def sharded_by_fsdp1(model: Tiny, stack: str, job: recover.Job) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    own = dist.group.WORLD
    assert own is not None
    hybrid = stack == "hybrid"
    return FSDP(
        model,
        process_group=(own, job.process_group) if hybrid else own,
        sharding_strategy=(
            ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        ),
        auto_wrap_policy=ModuleWrapPolicy({Block, Frozen}),
        use_orig_params=stack == "fsdp1-orig",
        device_id=torch.device("cpu"),
    )


def tensor_parallel(model: Tiny) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def staged(model: Tiny) -> Part:
    """Split in two; both stages hold the matrix that embedding and head are."""
    from torch.distributed.pipelining import PipelineStage

    from recover.parallel.pipeline import Pipeline

    last = dist.get_rank() == 1
    assert model.embed is not None
    assert model.head is not None
    group, shared = dist.group.WORLD, model.embed.get_parameter("weight")
    assert group is not None
    if last:
        model.embed = model.frozen = None
        del model.blocks["0"]
    else:
        model.norm = model.unused = model.head = None
        del model.blocks["1"], model.blocks["2"]
    words = torch.empty(SENTENCES, SENTENCE, dtype=torch.int64, device="meta")
    hidden = torch.empty(SENTENCES, SENTENCE, WIDTH, device="meta").requires_grad_()
    logits = torch.empty(SENTENCES, SENTENCE, WORDS, device="meta").requires_grad_()
    stage = PipelineStage(
        model,
        int(last),
        2,
        torch.device("cpu"),
        input_args=(hidden if last else words,),
        output_args=(logits if last else hidden,),
        group=group,
    )
    pipeline = Pipeline([stage], loss_of, "gpipe")

    def run(microbatches: Sequence[Tensor]) -> Sequence[Tensor]:
        return pipeline.run([m[:, :-1] for m in microbatches], [m[:, 1:] for m in microbatches])

    return Part(model, run, (Tied([shared], group),), shared=False)


def digest(module: nn.Module) -> str:
    """Return a digest of what this rank holds of the parameters."""
    from recover.tensors.holders import local

    found = hashlib.sha256()
    for parameter in module.parameters():
        found.update(local(parameter).contiguous().numpy().tobytes())
    return found.hexdigest()


def main(settings: Settings) -> None:
    """Train as ``settings`` say."""
    torch.set_num_threads(1)
    job = recover.init(microbatches=settings.microbatches)
    part = make_parallel(build(seed=job.replica), settings.stack, job)
    trainer = recover.Trainer(
        job,
        part.module,
        Momentum(part.module.parameters()),
        clip_norm=settings.clip_norm,
        bucket_mb=512 / 2**20,
        in_place=settings.in_place,
        overlap=settings.overlap,
        tied=part.tied,
    )
    steps = []
    for step in trainer.steps(Sentences(), until=settings.steps):
        if part.pipeline is not None:
            for microbatches in step.passes():
                losses = part.pipeline(microbatches)
                step.ran(losses, tokens=MICROBATCH_TOKENS * len(microbatches))
        else:
            for microbatch in step:
                own = microbatch
                if part.shared:
                    own = microbatch.chunk(job.ranks_per_replica)[job.shard]
                loss = loss_of(part.module(own[:, :-1]), own[:, 1:])
                step.backward(loss, tokens=MICROBATCH_TOKENS)
        record = step.commit()
        gradients = whole(part.module, gradients=True)
        steps.append({"gradients": gradients, "digest": digest(part.module)})
        print(f"step {record.step} loss {record.loss:.6f}")
    kept = {"steps": steps, "parameters": whole(part.module, gradients=False)}
    torch.save(kept, kept_file(Path(settings.kept), job.replica, job.shard))


def kept_file(directory: Path, replica: int, shard: int) -> Path:
    """Where a rank keeps what it saw."""
    return directory / f"replica-{replica}-shard-{shard}.pt"


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
