"""Lightning's ``Trainer`` over ReCoVer's step. Layer: adapters.

    job = recover.init(microbatches=32)
    trainer = L.Trainer(strategy=RecoverStrategy(job), max_steps=10_000)
    trainer.fit(model, loader)

The strategy replaces the training loader by steps, one :class:`Share` per update. Its
``training_step`` runs the module's own on every microbatch of the share; its ``backward``, which
Lightning calls after it has zeroed the gradients, commits the step and so puts the agreed gradient
into ``param.grad``. Clipping, optimizer, schedulers, logging and callbacks stay Lightning's.

To Lightning a replica is the whole world. Rank zero is the lowest replica that is left.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from recover.adapters.feed import Feed, Microbatches, Share, drawn, own_stream
from recover.errors import RecoverError
from recover.records import StepRecord
from recover.train.job import Job
from recover.train.step import Step
from recover.train.trainer import Trainer


class RecoverStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # without its types
    """One update is one step of ``job``, with exactly B microbatches: B items of your loader.

    ``device`` is the current GPU, or the CPU where there is none. ``bucket_mb`` bounds a gradient
    bucket (MiB of fp32). ``fit`` raises ValueError for settings that cannot work here.
    """

    strategy_name = "recover"

    def __init__(self, job: Job, *, device: str | None = None, bucket_mb: float = 25.0) -> None:
        if device is None:
            on_gpu = torch.cuda.is_available()
            device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        super().__init__(device)
        self.cluster_environment = LightningEnvironment()  # or it would take MPI for its own
        self.record: StepRecord | None = None
        """The record of the last committed step."""
        self._job, self._bucket_mb = job, bucket_mb
        self._feed: Feed[Any] | None = None
        self._share: Share[Any] | None = None
        self._take_place(tuple(range(job.replicas)))

    @property
    def is_global_zero(self) -> bool:
        """Whether this replica writes: it is the lowest one left."""
        return bool(self.global_rank == 0)

    # --- the loop ------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, once nothing speaks against it."""
        if trainer.state.fn == "fit":
            _refuse(trainer, self._job)
        super().setup(trainer)

    def training_step(self, batch: Any, *more: Any, **named: Any) -> Any:
        """Run this replica's share of a step; return its own mean loss, and the last extras."""
        if not isinstance(batch, Share) or self._share is not None or batch.ran:
            raise RecoverError(
                "a step was run in another way than once, by automatic optimization; optimizers "
                "that evaluate their closure again, and training_step(dataloader_iter), cannot work"
            )
        self._share = batch
        output: Any = None
        losses = []
        for microbatch in batch.step:
            output = self._run(batch.step, microbatch, *more, **named)
            losses.append((output["loss"] if isinstance(output, Mapping) else output).detach())
            batch.ran += 1
        loss = torch.stack(losses).mean() if losses else torch.tensor(math.nan)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *_: Any, **__: Any) -> Tensor:
        """Commit the step: afterwards the agreed gradient is in ``param.grad``."""
        assert self._share is not None, "Lightning runs the training step first"
        self.record = self._share.step.commit()
        self._share = None
        self._take_place(self.record.survivors)
        loss: Tensor = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        return loss

    def on_train_end(self) -> None:
        """End the run together with all survivors."""
        super().on_train_end()
        if self._feed is not None:
            self._feed.finish()

    def batch_to_device(self, batch: Any, *more: Any, **named: Any) -> Any:
        """Move a batch; a share holds none yet."""
        return batch if isinstance(batch, Share) else super().batch_to_device(batch, *more, **named)

    def _run(self, step: Step[Any], microbatch: Any, *more: Any, **named: Any) -> Any:
        module, precision = self.lightning_module, self.precision_plugin
        microbatch = precision.convert_input(microbatch)
        microbatch = module._on_before_batch_transfer(microbatch, dataloader_idx=0)
        microbatch = super().batch_to_device(microbatch)
        results = module.trainer._results
        results.batch, results.batch_size = microbatch, None  # self.log weighs by its size
        output = super().training_step(microbatch, *more, **named)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise RecoverError(
                f"training_step returned {loss!r} for a microbatch: without a loss its gradient "
                "would be missing from the sum; return a loss of 0 that depends on the parameters"
            )
        step.backward(precision.pre_backward(loss, module))
        return output

    # --- data ----------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replace the training loader by the steps of the run."""
        trainer = self.lightning_module.trainer
        if not (trainer.state.fn == "fit" and trainer.training):
            return dataloader
        if self._feed is not None:
            raise RecoverError("a job trains once, with one loader: fit cannot load it again")
        if not isinstance(dataloader, DataLoader):
            raise ValueError(f"the training loader must be a torch DataLoader, got {dataloader!r}")
        if isinstance(dataloader.dataset, IterableDataset):
            if trainer.max_steps < 1:
                raise ValueError("a training set without a length needs Trainer(max_steps=...)")
            length = trainer.max_steps
        else:
            length = max(1, len(dataloader) // self._job.microbatches)
        self._feed = Feed(length, lambda: self._steps(dataloader))
        return self._feed

    def _steps(self, loader: DataLoader[Any]) -> Iterator[Step[Any]]:
        trainer = self.lightning_module.trainer
        until = trainer.estimated_stepping_batches
        if until == math.inf:
            raise ValueError("say how long to train: Trainer(max_steps=...) or max_epochs")
        data = self._data(loader, skipped=trainer.global_step * self._job.microbatches)
        ours = Trainer(self._job, self.model, None, bucket_mb=self._bucket_mb)
        return iter(ours.steps(data, until=int(until) - trainer.global_step))

    def _data(self, loader: DataLoader[Any], *, skipped: int) -> Any:
        dataset: Any = loader.dataset
        if isinstance(dataset, IterableDataset):
            return own_stream(loader, self._job.replica, self._job.replicas)
        if loader.batch_sampler is None:
            raise ValueError("the training loader must make batches: batch_size is None")
        sampler, seed = loader.batch_sampler, int(os.environ.get("PL_GLOBAL_SEED", "0"))

        def order(number: int) -> list[list[int]]:
            return drawn(sampler, seed + number)

        return Microbatches(dataset, loader.collate_fn, order, length=len(loader), skipped=skipped)

    def _take_place(self, survivors: tuple[int, ...]) -> None:
        self.global_rank = survivors.index(self._job.replica)
        rank_zero_only.rank = self.global_rank


def _refuse(trainer: Any, job: Job) -> None:
    """Raise ValueError for settings that would be wrong here, with what to do."""
    module = trainer.lightning_module
    wrong = {
        "a replica must be one rank (--ranks-per-replica 1) for this adapter": (
            job.ranks_per_replica > 1
        ),
        f"accumulate_grad_batches must be 1, got {trainer.accumulate_grad_batches}: the "
        "microbatches of an update are recover.init(microbatches=...)": (
            trainer.accumulate_grad_batches != 1
        ),
        "manual optimization is not supported; set automatic_optimization": (
            not module.automatic_optimization
        ),
        "precision 16-mixed scales the loss, each replica by itself; use bf16-mixed": (
            getattr(trainer.precision_plugin, "scaler", None) is not None
        ),
        "LightningModule.backward is overridden, but backward is the step's": (
            is_overridden("backward", module)
        ),
        "on_before_batch_transfer is overridden and would be given steps; use "
        "on_after_batch_transfer": is_overridden("on_before_batch_transfer", module),
        "reload_dataloaders_every_n_epochs must be 0": trainer.reload_dataloaders_every_n_epochs,
    }
    if problems := [problem for problem, found in wrong.items() if found]:
        raise ValueError("; ".join(problems))
