"""One rank of the recovery benchmark; see :mod:`benchmarks.recovery_time`.

Every process writes down when things happened on ``time.monotonic``, a clock that all processes of
a machine share: the victim right before it kills itself, the others after each step.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import recover
from benchmarks.measuring import arguments
from recover.train.model import build, preset
from recover.train.optim import adamw
from recover.train.text import TextWindows, load_text


def main() -> None:
    """Train, and die where the fault schedule says so."""
    told = arguments()
    job = recover.init(microbatches=told["microbatches"])
    shape = preset("tiny")
    text = TextWindows(load_text(), sequences_per_microbatch=2, sequence=shape.sequence, seed=0)
    model = build(shape, seed=0)
    trainer = recover.Trainer(
        job, model, adamw(model, peak=1e-3), clip_norm=1.0, bucket_mb=told["bucket_mb"]
    )
    trainer.injector.die = noting_killer(job.out / f"killed-{job.replica}")
    with (job.out / f"times-{job.replica}.jsonl").open("ab", buffering=0) as journal:
        for step in trainer.steps(text, until=told["steps"]):
            begun, done = [], []
            for microbatch in step:
                begun.append(time.monotonic())
                step.backward(model(microbatch))
                done.append(time.monotonic())
            step.commit()
            line = {"begun": begun, "done": done, "committed": time.monotonic()}
            journal.write(f"{json.dumps(line)}\n".encode())


def noting_killer(file: Path) -> Callable[[str], NoReturn]:
    """Return what kills this process, and writes the time into ``file`` as the last thing."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT)
    me = os.getpid()

    def kill(reason: str) -> NoReturn:
        os.write(opened, f"{time.monotonic():.9f}".encode())
        os.kill(me, signal.SIGKILL)
        raise AssertionError("SIGKILL does not return")

    return kill


if __name__ == "__main__":
    main()
