"""torchtitan alone, without ReCoVer: one replica that takes all B microbatches, never disturbed.

Rank 0 prints what torchtitan logs, one JSON line per step. Reads RANK and the like, as torchtitan.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests_torchtitan import on_cpu  # noqa: F401

# isort: split
from tests_torchtitan import tiny


def main() -> None:
    """Train and print what torchtitan logs."""
    settings = json.loads(sys.argv[1])
    microbatches = settings.pop("microbatches")
    config = tiny.config(**settings)
    split = config.parallelism.tensor_parallel_degree * config.parallelism.pipeline_parallel_degree
    rows = config.training.local_batch_size * int(os.environ["WORLD_SIZE"]) // split
    config.training.global_batch_size = rows * microbatches
    trainer = config.build()

    def log(step: int, loss: float, _: float, norm: float, **__: Any) -> None:
        print("logged " + json.dumps({"step": step, "loss": loss, "norm": norm}), flush=True)

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()


main()
