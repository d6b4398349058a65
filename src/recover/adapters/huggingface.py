"""Hugging Face's ``Trainer`` over ReCoVer's step. Layer: adapters.

    job = recover.init(microbatches=32)
    trainer = RecoverTrainer(model, arguments, train_dataset=data, job=job)
    trainer.train()

The loader that the Trainer iterates over gives one item per update, a :class:`Share`. Its training
step is run on every microbatch of the share, with ``accelerator.backward`` leading to the step's;
then the step is committed, which leaves the agreed gradient in ``param.grad``. From there on all is
the Trainer's own: clipping, optimizer, schedule, logging, evaluation, checkpoints, callbacks.

Accelerate must not see a distributed job: a replica is the whole world to it. It is told, though,
to be process number k of one, k being the replica's place among the survivors: whoever is first
writes, and that changes when the first one dies.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers.trainer_callback import ProgressCallback

from recover.adapters.feed import Feed, Microbatches, Share, drawn, own_stream
from recover.errors import RecoverError
from recover.records import StepRecord
from recover.train.job import Job
from recover.train.step import Step
from recover.train.trainer import Trainer

_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_SIZE", "PMI_RANK")
_WORLDS = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")


class RecoverTrainer(transformers.Trainer):  # type: ignore[misc]  # without its types
    """``transformers.Trainer`` whose update is one step of ``job``, with exactly B microbatches.

    A microbatch is ``per_device_train_batch_size`` items. Takes what ``transformers.Trainer``
    takes, and ``job``. ``bucket_mb`` bounds a gradient bucket (MiB of fp32). Raises ValueError for
    settings that cannot work here.
    """

    record: StepRecord | None = None
    """The record of the last committed step."""

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *more: Any,
        job: Job,
        bucket_mb: float = 25.0,
        **named: Any,
    ) -> None:
        args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
        _refuse(args, job)
        self._job, self._bucket_mb = job, bucket_mb
        self._feed: Feed[Any] | None = None
        _stand_alone(args)
        args.distributed_state.process_index = job.replica
        args.distributed_state.local_process_index = job.replica
        super().__init__(model, args, *more, **named)

    # --- the loop ------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **named: Any) -> Any:
        """Train as the Trainer does, and end together with all survivors.

        A run that resumes goes on with the data after ``global_step`` times B microbatches.
        """
        if trial is not None:
            raise ValueError("a hyperparameter search cannot run its trials in one job")
        if resume_from_checkpoint:
            self.args.ignore_data_skip = True  # the ids of the microbatches begin later instead
        output = super().train(resume_from_checkpoint, None, **named)
        if self._feed is not None:
            self._feed.finish()
        return output

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Tensor:
        """Run this replica's share of a step and commit it; return the mean loss of all B."""
        if not isinstance(inputs, Share):
            theirs: Tensor = super().training_step(model, inputs, *more, **named)
            return theirs
        step: Step[Any] = inputs.step
        for microbatch in step:
            tokens = self._tokens(microbatch)
            inputs.flops += super().floating_point_ops(microbatch)
            inputs.ran += 1

            def backward(loss: Tensor, *, tokens: int = tokens, **_: Any) -> None:
                step.backward(loss, tokens=tokens)

            self.accelerator.backward = backward
            try:
                super().training_step(model, microbatch)
            finally:
                del self.accelerator.backward
        self.record = step.commit()
        self._take_place(self.record.survivors)
        return torch.tensor(self.record.loss, device=self.args.device)

    def get_train_dataloader(self) -> Any:
        """Return the steps of the run, as many an epoch as the training set fills."""
        if self._feed is not None:
            raise RecoverError("a job trains once: train() was called a second time")
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        per_epoch = self.args.max_steps
        if not isinstance(self.train_dataset, IterableDataset):
            per_epoch = max(1, self._per_pass() // self._job.microbatches)
        self._feed = Feed(per_epoch, self._steps)
        self._feed.dataset = self.train_dataset  # type: ignore[attr-defined]  # counted by theirs
        return self._feed

    def _steps(self) -> Iterator[Step[Any]]:
        trainer = Trainer(self._job, self.model_wrapped, None, bucket_mb=self._bucket_mb)
        until = self.state.max_steps - self.state.global_step
        return iter(trainer.steps(self._data(), until=until))

    # --- data ----------------------------------------------------------------------------

    def _data(self) -> Any:
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "remove_columns"):  # a datasets.Dataset
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        if isinstance(dataset, IterableDataset):
            loader = DataLoader(
                dataset,
                self._train_batch_size,
                collate_fn=collate,
                num_workers=self.args.dataloader_num_workers,
                drop_last=self.args.dataloader_drop_last,
            )
            return own_stream(loader, self._job.replica, self._job.replicas)
        return Microbatches(
            dataset,
            collate,
            self._pass,
            length=self._per_pass(),
            skipped=self.state.global_step * self._job.microbatches,
        )

    def _per_pass(self) -> int:
        """Return how many microbatches the training set is."""
        items: float = len(self.train_dataset) / self._train_batch_size
        return math.floor(items) if self.args.dataloader_drop_last else math.ceil(items)

    def _pass(self, number: int) -> list[list[int]]:
        """Return the indices of a pass, in the order in which accelerate would shuffle them."""
        sampler = self._get_train_sampler()
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if type(sampler) is RandomSampler:
            generator = torch.Generator().manual_seed(seed + number)
            indices = torch.randperm(len(self.train_dataset), generator=generator).tolist()
        else:
            indices = drawn(sampler, seed + number)
        size = self._train_batch_size
        return [indices[k * size : (k + 1) * size] for k in range(self._per_pass())]

    # --- who writes ----------------------------------------------------------------------

    def _take_place(self, survivors: tuple[int, ...]) -> None:
        """Be the process that writes, if this replica is the lowest one left."""
        place = survivors.index(self._job.replica)
        for state in (self.args.distributed_state, self.accelerator.state):
            state.process_index = state.local_process_index = place
        self.state.is_world_process_zero = self.state.is_local_process_zero = place == 0
        for callback in self.callback_handler.callbacks if place == 0 else ():
            if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                callback.on_train_begin(self.args, self.state, self.control)

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any, **named: Any) -> None:
        super()._save_checkpoint(model, trial, *more, **named)
        best = self.state.best_global_step
        if best and not self.args.should_save:  # may not be on the disk yet
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{best}")
            self.state.best_model_checkpoint = folder

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        if self._feed is not None:
            self._feed.finish()  # the one that writes has written when it comes to the end
        super()._load_best_model()

    # --- what is counted -----------------------------------------------------------------

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the items of an update."""
        return int(self._train_batch_size * self._job.microbatches)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return those of all B microbatches, by those that ran here."""
        if not isinstance(inputs, Share):
            return super().floating_point_ops(inputs)
        return inputs.flops * self._job.microbatches / max(inputs.ran, 1)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no" and self.record is not None:
            self.state.num_input_tokens_seen += self.record.tokens

    def _tokens(self, microbatch: Any) -> int:
        main = getattr(self.model, "main_input_name", "input_ids")
        mask = microbatch.get("attention_mask")
        if self.args.include_num_input_tokens_seen == "non_padding" and mask is not None:
            return int(mask.sum())
        found = microbatch.get(main)
        return found.numel() if isinstance(found, Tensor) else 0


def _refuse(args: transformers.TrainingArguments, job: Job) -> None:
    """Raise ValueError for settings that would be wrong here, with what to do."""
    wrong = {
        "a replica must be one rank (--ranks-per-replica 1) for this adapter": (
            job.ranks_per_replica > 1
        ),
        f"gradient_accumulation_steps must be 1, got {args.gradient_accumulation_steps}: the "
        "microbatches of an update are recover.init(microbatches=...)": (
            args.gradient_accumulation_steps != 1
        ),
        "fp16 scales the loss, each replica by itself; use bf16": args.fp16,
        "deepspeed, fsdp and parallelism_config spread a replica over ranks; leave them out": bool(
            args.deepspeed or args.fsdp or getattr(args, "parallelism_config", None)
        ),
        "auto_find_batch_size must be off: replicas cannot begin again one by one": (
            args.auto_find_batch_size
        ),
        "push_to_hub must be off: push after the training, where is_world_process_zero()": (
            args.push_to_hub
        ),
        f"optim={args.optim} steps inside backward; use another": "lomo" in str(args.optim).lower(),
        "train_sampling_strategy='batch_rebalance' is not supported": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        ),
    }
    if problems := [problem for problem, found in wrong.items() if found]:
        raise ValueError("; ".join(problems))


def _stand_alone(args: transformers.TrainingArguments) -> None:
    """Make accelerate take this process for the only one, on the device that the job gave it."""
    for name in list(os.environ):
        if name in _WORLD or name.startswith(_WORLDS):
            del os.environ[name]
    own = torch.cuda.current_device() if torch.cuda.is_available() else None
    AcceleratorState._reset_state(reset_partial_state=True)
    vars(args).pop("_setup_devices", None)  # found out when it was the job's
    if args.device.type == "cuda" and own is not None:  # theirs is the first one
        torch.cuda.set_device(own)
        vars(args)["_setup_devices"] = args.distributed_state.device = torch.device("cuda", own)
        args._n_gpu = 1
