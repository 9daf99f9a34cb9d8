"""Two optimizers stepped by hand."""
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

        self.critic = nn.Linear(1, 1)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = (
            nn.functional.mse_loss(self.net(batch[0]), batch[1])
            - 0.01 * self.critic(self.net(batch[0])).mean()
        )
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = (
            self.critic(self.net(batch[0]).detach()).mean() + self.critic.weight.square().mean()
        )
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        self.untoggle_optimizer(second)

    def validation_step(self, batch, _):
        self.net(batch[0])

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.net.parameters(), 1e-2, eps=1e-3),
            torch.optim.SGD(self.critic.parameters(), 1e-2, momentum=0.9),
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
    callbacks=[SpotguardCallback(global_batch_size=12)],
    strategy="ddp_find_unused_parameters_true",
)
trainer.fit(
    Regression(),
    DataLoader(samples, batch_size=6, shuffle=True),
    DataLoader(samples, batch_size=21),
)
