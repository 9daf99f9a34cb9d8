"""A LightningModule, one micro-batch a step and rank or more."""
# property: server=lightning

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spotguard.integrations.lightning import SpotguardCallback


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 12), nn.LayerNorm(12), nn.Dropout(0.1), nn.Tanh(), nn.Linear(12, 1)
        )

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


pl.seed_everything(7, verbose=False)
x = torch.randn(42, 8)
samples = TensorDataset(x, x.sum(1, keepdim=True).sin())
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    accumulate_grad_batches=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    callbacks=[SpotguardCallback(global_batch_size=12)],
)
trainer.fit(
    Regression(),
    DataLoader(samples, batch_size=6, shuffle=True),
    DataLoader(samples, batch_size=21),
)
