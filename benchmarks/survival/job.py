"""The survival matrix's job for spotguard."""

from torch import nn

import spotguard.runtime as spotguard
from benchmarks.survival import model as survival_model

run = spotguard.init(seed=3)
progress = survival_model.Progress()
model = survival_model.Model()
optimizer, scheduler = survival_model.optimizer_of(model)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
loader = run.loader(
    survival_model.dataset(),
    global_batch_size=survival_model.GLOBAL_BATCH,
    micro_batch_size=survival_model.GLOBAL_BATCH // 2,
    num_workers=survival_model.workers(),
)
for step in run.steps(loader, total=survival_model.total_steps()):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    progress.note(step.number + 1)
