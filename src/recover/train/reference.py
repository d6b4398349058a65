"""The reference trainer: what `recover train` runs on every rank. Layer: train.

A LLaMA-style decoder on real text, written as a user would write it: the only lines that are about
ReCoVer are ``init``, ``Trainer`` and the step loop.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recover
from recover.train.config import TrainConfig
from recover.train.model import build, parameter_count, preset
from recover.train.optim import adamw, learning_rate, set_learning_rate
from recover.train.text import TextWindows, load_text


def main(config: TrainConfig) -> None:
    """Train as ``config`` says."""
    job = recover.init(
        microbatches=config.microbatches, policy=config.policy, restore=config.restore
    )
    shape = preset(config.preset)
    text = TextWindows(
        load_text([Path(file) for file in config.text] or None),
        sequences_per_microbatch=config.sequences,
        sequence=shape.sequence,
        seed=config.seed,
    )
    decoder = build(shape, seed=config.seed, dtype=getattr(torch, config.dtype))
    model: nn.Module = decoder
    if config.stack == "ddp":
        model = DistributedDataParallel(decoder, process_group=job.process_group)
    optimizer = adamw(decoder, peak=config.learning_rate)
    trainer = recover.Trainer(
        job,
        model,
        optimizer,
        clip_norm=config.clip_norm,
        bucket_mb=config.bucket_mb,
        in_place=config.in_place,
        config=asdict(config) | {"text_sha256": text.corpus.content_hash},
    )
    print(f"{parameter_count(decoder):,} parameters, {len(trainer.buckets)} buckets", flush=True)
    data: TextWindows | Iterable[Tensor] = text
    if config.data == "stream":
        data = own_stream(text, job.replica, job.replicas)
    for step in trainer.steps(data, until=config.steps):
        for tokens in step:  # (sequences, sequence + 1) int64
            step.backward(model(tokens), tokens=text.tokens_per_microbatch)
        set_learning_rate(optimizer, rate(config, step.number))
        record = step.commit()
        print(f"step {record.step} loss {record.loss:.4f} world {len(record.survivors)}")


def rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step."""
    return learning_rate(
        step,
        peak=config.learning_rate,
        warmup=min(config.warmup, config.steps),
        steps=config.steps,
        floor_fraction=0.1,
    )


def own_stream(text: TextWindows, replica: int, replicas: int) -> Iterator[Tensor]:
    """Yield one replica's slice of the text, without end."""
    return (text[i] for i in itertools.count(replica, replicas))


if __name__ == "__main__":
    main(TrainConfig.from_json(sys.argv[1]))
