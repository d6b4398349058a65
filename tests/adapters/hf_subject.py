"""A script with Hugging Face's Trainer: under `recover run`, or alone with its own accumulation.

Its argument is a JSON object: where to write (`out`), B (`microbatches`), and whether it runs alone
(`alone`). It imports nothing from the tests.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

WORDS, WIDTH, SENTENCE, SENTENCES = 13, 16, 8, 128


class TinyConfig(PretrainedConfig):  # type: ignore[misc]  # without their types
    """Nothing to configure."""

    model_type = "tiny"


class Tiny(PreTrainedModel):  # type: ignore[misc]
    """Two layers that guess the next word."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(self.embed(input_ids))))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Words that follow a rule with exceptions."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(0, WORDS, (count, 1), generator=generator)
        noise = torch.randint(0, 2, (count, SENTENCE), generator=generator)
        self.words = (first + 3 * torch.arange(SENTENCE) + noise) % WORDS  # (count, SENTENCE)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    """Return settings under which clipping and the schedule make a difference."""
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "max_grad_norm": 0.05,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "report_to": [],
        "seed": 7,
        "include_num_input_tokens_seen": "all",
    }
    return TrainingArguments(**settings | changes)


def mistakes(job: Any, out: Path) -> dict[str, str]:
    """Return what each wrong setting is answered with."""
    from recover.adapters.huggingface import RecoverTrainer

    wrong: dict[str, dict[str, Any]] = {
        "accumulation": {"gradient_accumulation_steps": 4},
        "batch size": {"auto_find_batch_size": True},
        "hub": {"push_to_hub": True},
    }
    told = {}
    for name, changes in wrong.items():
        try:
            RecoverTrainer(Tiny(TinyConfig()), arguments(out, **changes), job=job)
        except ValueError as error:
            told[name] = str(error)
    return told


def main(out: Path, microbatches: int, alone: bool) -> None:
    """Train, and keep what happened."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    data: dict[str, Any] = {
        "train_dataset": Sentences(SENTENCES, 1),
        "eval_dataset": Sentences(8, 2),
    }
    told: dict[str, str] = {}
    name = "alone"
    if alone:
        settings = arguments(out / "alone", gradient_accumulation_steps=microbatches)
        trainer = Trainer(Tiny(TinyConfig()), settings, **data)
    else:
        import recover
        from recover.adapters.huggingface import RecoverTrainer

        job = recover.init(microbatches=microbatches)
        told = mistakes(job, out / "mistakes")
        name = f"replica-{job.replica}"
        torch.manual_seed(3 + job.replica)  # the start makes them equal
        trainer = RecoverTrainer(Tiny(TinyConfig()), arguments(out / "job"), **data, job=job)
    trainer.train()
    kept = {
        "history": trainer.state.log_history,
        "first": trainer.is_world_process_zero(),
        "best": trainer.state.best_model_checkpoint,
        "tokens": trainer.state.num_input_tokens_seen,
        "flops": trainer.state.total_flos,
        "told": told,
    }
    (out / f"{name}.json").write_text(json.dumps(kept), encoding="utf-8")
    torch.save(trainer.model.state_dict(), out / f"{name}.pt")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["out"]), given["microbatches"], given["alone"])
