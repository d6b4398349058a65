"""One rank of the benchmark of replicas of several ranks; see :mod:`benchmarks.unit_kills`."""

import json
import time

from torch import Tensor

import recover
from benchmarks.measuring import arguments
from benchmarks.recovery_time_ranks import noting_killer
from recover.train.config import TrainConfig
from recover.train.model import preset
from recover.train.optim import adamw
from recover.train.stacks import ReferenceReplica, make_replica
from recover.train.text import TextWindows, load_text


def main() -> None:
    """Train, and die where the fault schedule says so."""
    told = arguments()
    job = recover.init(microbatches=told["microbatches"])
    config = TrainConfig(
        replicas=job.replicas,
        microbatches=job.microbatches,
        parallel="3d" if told["stack"] == "pp" else told["stack"],
        pp=job.ranks_per_replica if told["stack"] == "pp" else 1,
    )
    sequence = preset(config.preset).sequence
    text = TextWindows(
        load_text(), sequences_per_microbatch=config.sequences, sequence=sequence, seed=0
    )
    replica = make_replica(config, job)
    trainer = recover.Trainer(
        job,
        replica.parts,
        adamw(replica.module, peak=1e-3, matrices=replica.matrices),
        tied=replica.tied,
        clip_norm=1.0,
        bucket_mb=told["bucket_mb"],
    )
    place = f"{job.replica}-{job.shard}"
    trainer.injector.die = noting_killer(job.out / f"killed-{place}")
    with (job.out / f"times-{place}.jsonl").open("ab", buffering=0) as journal:
        for step in trainer.steps(text, until=told["steps"]):
            done = trained(replica, step)
            step.commit()
            line = {"done": done, "committed": time.monotonic()}
            journal.write(f"{json.dumps(line)}\n".encode())


def trained(replica: ReferenceReplica, step: "recover.Step[Tensor]") -> list[float]:
    """Run a step up to its commit; return when each microbatch, or the pass it is in, was done."""
    done: list[float] = []
    if replica.pipeline is not None:
        for tokens in step.passes():
            step.ran(replica.pipeline(tokens))
            done += [time.monotonic()] * len(tokens)
    else:
        for microbatch in step:
            step.backward(replica.loss(microbatch))
            done.append(time.monotonic())
    return done


if __name__ == "__main__":
    main()
