"""The reference trainer: what `recover train` runs on every rank. Layer: train.

A LLaMA-style decoder on real text, written as a user would write it: the only lines that are about
ReCoVer are ``init``, ``Trainer`` and the step loop.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

import recover
from recover.train.config import TrainConfig
from recover.train.emulation import Device
from recover.train.model import preset
from recover.train.optim import adamw, rate, set_learning_rate
from recover.train.stacks import make_replica
from recover.train.text import TextWindows, load_text


def main(config: TrainConfig) -> None:
    """Train as ``config`` says."""
    job = recover.init(
        microbatches=config.microbatches, policy=config.policy, restore=config.restore
    )
    text = TextWindows(
        load_text([Path(file) for file in config.text] or None),
        sequences_per_microbatch=config.sequences,
        sequence=preset(config.preset).sequence,
        seed=config.seed,
    )
    replica = make_replica(config, job)
    optimizer = adamw(replica.module, peak=config.learning_rate, matrices=replica.matrices)
    trainer = recover.Trainer(
        job,
        replica.parts,
        optimizer,
        tied=replica.tied,
        clip_norm=config.clip_norm,
        bucket_mb=config.bucket_mb,
        in_place=config.in_place,
        overlap=config.overlap,
        config=asdict(config) | {"text_sha256": text.corpus.content_hash},
    )
    device = Device(config.microbatch_ms, config.bandwidth_mbps)
    trainer.device = device
    print(f"{replica.parameters:,} parameters, {len(trainer.buckets)} buckets", flush=True)
    data: TextWindows | Iterable[Tensor] = text
    if config.data == "stream":
        data = own_stream(text, job.replica, job.replicas)
    for step in trainer.steps(data, until=config.steps):
        if replica.pipeline is not None:  # runs forward and backward of a whole pass
            for tokens in step.passes():  # list of (sequences, sequence + 1) int64
                with device.passes(len(tokens)):
                    losses = replica.pipeline(tokens)
                step.ran(losses, tokens=text.tokens_per_microbatch * len(tokens))
        else:
            for microbatch in step:  # (sequences, sequence + 1) int64
                with device.forward():
                    loss = replica.loss(microbatch)
                with device.backward():
                    step.backward(loss, tokens=text.tokens_per_microbatch)
        set_learning_rate(optimizer, rate(config, step.number))
        record = step.commit()
        print(f"step {record.step} loss {record.loss:.4f} world {len(record.survivors)}")


def own_stream(text: TextWindows, replica: int, replicas: int) -> Iterator[Tensor]:
    """Yield one replica's slice of the text, without end."""
    return (text[i] for i in itertools.count(replica, replicas))


if __name__ == "__main__":
    main(TrainConfig.from_json(sys.argv[1]))
