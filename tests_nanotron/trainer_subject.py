"""Nanotron's own DistributedTrainer, as a user of it writes a script; killed by the tests."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def main(directory: Path, steps: int, microbatches: int, by_id: bool) -> None:
    """Train the tiny model with Nanotron's trainer; its gradients are kept as in `subject`."""
    from tests_nanotron import on_cpu

    torch.set_num_threads(1)
    on_cpu.install()
    from nanotron.trainer import DistributedTrainer

    from recover.adapters import nanotron
    from tests_nanotron import subject
    from tests_nanotron.tiny import Rows, Tiny, as_nanotron_parameters

    class Small(Tiny):
        """The tiny model, with parameters of Nanotron's kind as soon as they are built."""

        def tie_custom_params(self) -> None:
            as_nanotron_parameters(self)

    job = nanotron.init(microbatches=microbatches)
    trainer = DistributedTrainer(config(directory, steps, job.replica), model_class=Small)
    context, model = trainer.parallel_context, trainer.unwrapped_model
    rows = Rows(context.pp_pg.rank(), model.output_pp_rank)
    nanotron.attach(job, trainer, data=rows if by_id else None)

    step_optimizer = trainer.optimizer.step
    numbers = itertools.count()

    def step_and_keep(*given: Any, **named: Any) -> Any:
        accumulator = trainer.grad_accumulator
        kept: dict[str, Any] = {
            "masters": subject.masters(accumulator),
            "half": subject.halves(accumulator),
            "gradients": {
                name: accumulator.get_grad_buffer(name).clone()
                for name in accumulator.fp32_grad_buffers
            },
        }
        stepped = step_optimizer(*given, **named)
        kept["after"] = subject.halves(accumulator)
        name = f"step-{next(numbers)}-replica-{job.replica}-{job.shard}.pt"
        torch.save(kept, directory / "kept" / name)
        return stepped

    trainer.optimizer.step = step_and_keep
    trainer.train(loader(rows))


def loader(rows: Any) -> Iterator[Any]:
    """Yield the same microbatches on every replica."""
    return (rows[number] for number in itertools.count())


def config(directory: Path, steps: int, replica: int) -> str:
    """Write Nanotron's configuration and return its file."""
    import yaml

    rate = {
        "learning_rate": 0.01,
        "lr_warmup_steps": 1,
        "lr_warmup_style": "linear",
        "lr_decay_style": "linear",
        "min_decay_lr": 0.001,
    }
    told = {
        "general": {"project": "tiny", "run": "tiny", "seed": 1, "ignore_sanity_checks": False},
        "parallelism": {"dp": 1, "pp": 2, "tp": 1, "pp_engine": "1f1b"},
        "model": {
            "dtype": "bfloat16",
            "init_method": {"std": 0.02},
            "model_config": {"is_llama_config": True, "max_position_embeddings": 8},
        },
        "tokenizer": {},
        "checkpoints": {
            "checkpoints_path": str(directory / "checkpoints"),
            "checkpoint_interval": steps,
        },
        "logging": {"iteration_step_info_interval": 1},
        "tokens": {
            "sequence_length": 8,
            "train_steps": steps,
            "micro_batch_size": 3,
            "batch_accumulation_per_replica": 1,
        },
        "optimizer": {
            "zero_stage": 0,
            "weight_decay": 0.0,
            "clip_grad": 100.0,
            "accumulate_grad_in_fp32": True,
            "adam_eps": 1e-8,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "torch_adam_is_fused": False,
            "learning_rate_scheduler": rate,
        },
    }
    file = directory / f"config-{replica}.yaml"
    file.write_text(yaml.safe_dump(told), encoding="utf-8")
    return str(file)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    settings = json.loads(sys.argv[1])
    main(
        Path(settings["directory"]), settings["steps"], settings["microbatches"], settings["by_id"]
    )
