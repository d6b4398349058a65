"""A script with Lightning: under `recover run`, or alone with its own accumulation.

Its argument is a JSON object: where to write (`out`), B (`microbatches`), and whether it runs alone
(`alone`). It imports nothing from the tests.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):  # type: ignore[misc]  # without its types
    """Fits sums of sines, and notes what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
        self.rates: list[float] = []
        self.checks: list[float] = []
        self.norms: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        error: Tensor = self.layers(batch[0]) - batch[0].sin().sum(1, keepdim=True)  # (rows, 1)
        return error.square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("check", self.loss(batch))

    def on_validation_end(self) -> None:
        self.checks.append(float(self.trainer.callback_metrics["check"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(grads)))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def points(count: int, seed: int) -> TensorDataset:
    """Return inputs, (count, 4)."""
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)))


def fit(net: Net, out: Path, **settings: Any) -> lightning.Trainer:
    """Train with settings under which clipping and the schedule make a difference."""
    saves = ModelCheckpoint(out, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        gradient_clip_val=0.2,
        logger=False,
        callbacks=[saves],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )
    trainer.fit(net, DataLoader(points(128, 1), 4), DataLoader(points(8, 2), 8))
    return trainer


def mistakes(job: Any, out: Path) -> dict[str, str]:
    """Return what each wrong setting is answered with."""
    from recover.adapters.lightning import RecoverStrategy

    told = {}
    for name, changes in {"accumulation": {"accumulate_grad_batches": 4}}.items():
        try:
            fit(Net(), out, strategy=RecoverStrategy(job), **changes)
        except ValueError as error:
            told[name] = str(error)
    return told


def main(out: Path, microbatches: int, alone: bool) -> None:
    """Train, and keep what happened."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    told: dict[str, str] = {}
    if alone:
        name, net = "alone", Net()
        trainer = fit(net, out / "alone", accumulate_grad_batches=microbatches)
    else:
        import recover
        from recover.adapters.lightning import RecoverStrategy

        job = recover.init(microbatches=microbatches)
        told = mistakes(job, out / "mistakes")
        torch.manual_seed(3 + job.replica)  # the start makes them equal
        net, name = Net(), f"replica-{job.replica}"
        trainer = fit(net, out / "job", strategy=RecoverStrategy(job))
    kept = {
        "rates": net.rates,
        "norms": net.norms,
        "checks": net.checks,
        "first": trainer.is_global_zero,
        "steps": trainer.global_step,
        "told": told,
    }
    (out / f"{name}.json").write_text(json.dumps(kept), encoding="utf-8")
    torch.save(net.state_dict(), out / f"{name}.pt")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["out"]), given["microbatches"], given["alone"])
