"""What a user would write, with the tiny job; run by ``recover run``. Argument: JSON settings."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recover
from tests_torchtitan import on_cpu  # noqa: F401

# isort: split
from torchtitan.tools.logging import init_logger

from recover.adapters import torchtitan
from tests_torchtitan import tiny


def main() -> None:
    """Train."""
    settings = json.loads(sys.argv[1])
    data = settings.pop("data", "exact")
    job = recover.init(microbatches=settings.pop("microbatches"))
    init_logger()
    trainer = torchtitan.trainer(job, tiny.config(**settings), data=data)

    def log(step: int, loss: float, _: float, norm: float, **__: Any) -> None:
        print("logged " + json.dumps({"step": step, "loss": loss, "norm": norm}), flush=True)

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()


main()
