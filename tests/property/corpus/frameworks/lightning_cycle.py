"""A schedule that counts steps, and one that follows the validation."""
# property: server=lightning elastic=samples

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
        return {"loss": nn.functional.mse_loss(self.net(batch[0]), batch[1])}

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


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
    callbacks=[SpotguardCallback(global_batch_size=14)],
)
trainer.fit(
    Regression(),
    DataLoader(samples, batch_size=4, shuffle=True),
    DataLoader(samples, batch_size=21),
)
