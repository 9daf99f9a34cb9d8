"""A Lightning script as people write them, and what a test asks of it by the environment.

PRECISION, ACCUMULATE, EPOCHS, STEPS and WORKERS go to the Trainer and its loader; PACE_S and
VAL_PACE_S are added to each batch; CKPT goes to `fit`; STOP_AT stops the Trainer at a step.
INTERVAL is that of a schedule which follows the validation's loss, and is the only one.
PATIENCE and MIN_DELTA go to EarlyStopping; VALIDATE has `Trainer.validate` come before the fit and
after it. CALLBACK names one more callback of Lightning's.
TEMPLATE does two things as lightning-hydra-template does: its data module shares out a batch over
the ranks, and the callbacks are in a sequence that is no list.
"""

import os
import sys
import time
from collections import UserList
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spotguard.integrations.lightning import SpotguardCallback

FOLDER = os.environ.get("FOLDER", "files")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(50, 8, generator=generator)
        self.all = TensorDataset(x, x @ torch.randn(8, 1, generator=generator))

    def train_dataloader(self) -> Any:
        workers = int(os.environ.get("WORKERS", "0"))
        size = 16 // self.trainer.world_size if os.environ.get("TEMPLATE") else 4  # type: ignore[union-attr]
        loader = DataLoader(self.all, batch_size=size, shuffle=True, num_workers=workers)
        if os.environ.get("MODEL") == "combined":
            return CombinedLoader({"a": loader, "b": self.val_dataloader()}, "max_size_cycle")
        return [loader, self.val_dataloader()] if os.environ.get("MODEL") == "two" else loader

    def val_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.all, range(24)), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Base(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)
        )
        self.seen = 0

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def validation_step(self, batch: Any, _: int) -> None:
        time.sleep(float(os.environ.get("VAL_PACE_S", "0")))
        say(f"validating after {self.trainer.global_step}")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1
        self.trainer.datamodule.asked += 1  # type: ignore[attr-defined]
        say(f"step {self.trainer.fit_loop.total_batch_idx + 1} epoch {self.current_epoch}")
        if self.seen == int(os.environ.get("STOP_AT", "0")):
            self.trainer.should_stop = True
        time.sleep(float(os.environ.get("PACE_S", "0")))

    def on_train_epoch_end(self) -> None:
        say(f"epoch {self.current_epoch} ends at {self.trainer.global_step}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Regression(Base):
    """It has one parameter in a list, where no `state_dict()` finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = [nn.Parameter(torch.ones(1))]

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float() * self.beside[0], y)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([*self.parameters(), *self.beside], 1e-2)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, 1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
                ),
                "interval": "step",
            },
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
                "monitor": "val_loss",
            },
        ]


class Following(Regression):
    """Its rate follows the loss of the validation at each epoch's end; none is good enough."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([*self.parameters(), *self.beside], 1e-2)
        interval = os.environ["INTERVAL"]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, mode="max", patience=1, threshold=1000.0
                ),
                "monitor": "val_loss",
                "interval": interval,
                "frequency": 13 if interval == "step" else 1,  # batches of an epoch
            },
        }


class Silent(Regression):
    """Leaves its third batch out."""

    def training_step(self, batch: Any, number: int) -> Any:
        return None if number == 2 else super().training_step(batch, number)


class Adversarial(Base):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: Any, _: int) -> None:
        _, y = batch
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(first)
        loss = self.loss(batch) - 0.01 * self.critic(self.net(batch[0])).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = self.critic(self.net(batch[0]).detach()).mean() - self.critic(y).mean()
        judged = judged + self.critic.weight.square().mean()
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        self.schedule.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        second = torch.optim.SGD(self.critic.parameters(), 1e-2, momentum=0.9)
        # Lightning is not told of it.
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
        return [torch.optim.AdamW(self.net.parameters(), 1e-2), second]


def main() -> None:
    pl.seed_everything(7, verbose=False)
    kinds = {"adversarial": Adversarial, "following": Following, "silent": Silent}
    model = kinds.get(os.environ.get("MODEL", ""), Regression)()
    keeps = ModelCheckpoint(dirpath=f"{FOLDER}/kept", monitor="val_loss", save_last=True)
    more: list[Any] = []
    if name := os.environ.get("CALLBACK"):
        more.append(
            getattr(pl.callbacks, name)(**({"swa_lrs": 1e-2} if "Averaging" in name else {}))
        )
    sequence: Any = UserList if os.environ.get("TEMPLATE") else list  # Hydra has its ListConfig
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ddp_find_unused_parameters_true" if isinstance(model, Adversarial) else "auto",
        max_epochs=int(os.environ.get("EPOCHS", "3")),
        max_steps=int(os.environ.get("STEPS", "-1")),
        accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
        precision=os.environ.get("PRECISION", "32-true"),  # type: ignore[arg-type]
        reload_dataloaders_every_n_epochs=int(os.environ.get("MODEL") == "reloading"),
        gradient_clip_val=None if isinstance(model, Adversarial) else 0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
        callbacks=sequence(
            [
                *more,
                SpotguardCallback(save_every="3 steps"),
                keeps,
                EarlyStopping(
                    "val_loss",
                    patience=int(os.environ.get("PATIENCE", "50")),
                    min_delta=float(os.environ.get("MIN_DELTA", "0")),
                ),
            ]
        ),
    )
    data = Data()
    if os.environ.get("VALIDATE"):
        say(f"before {trainer.validate(model, data, verbose=False)}")
    trainer.fit(model, datamodule=data, ckpt_path=os.environ.get("CKPT"))
    if trainer.is_global_zero:
        torch.save({**model.state_dict()}, f"{FOLDER}/final.pt")
    rates = [group["lr"] for o in trainer.optimizers for group in o.param_groups]
    say(f"done {trainer.global_step} {trainer.current_epoch} {model.seen} {data.asked} {rates}")
    say(f"mean {float(trainer.callback_metrics.get('loss_epoch', 0))}")
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            state = config.scheduler.state_dict()
            say(f"best followed {state['last_epoch']} {state['num_bad_epochs']} {state['best']}")
    say(f"best {Path(keeps.best_model_path).name} {keeps.best_model_score}")
    if os.environ.get("VALIDATE"):
        say(f"after {trainer.validate(model, data, verbose=False)}")


if __name__ == "__main__":
    main()
