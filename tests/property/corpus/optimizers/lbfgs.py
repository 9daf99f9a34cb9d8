"""L-BFGS, which goes over the batch several times a step."""
# property: elastic=bits

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=2, exact="bitwise")
torch.manual_seed(0)
x = torch.randn(56, 4)
data = torch.utils.data.TensorDataset(x, x @ torch.randn(4, 1))
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=28, micro_batch_size=4), total=8):

    def closure(step=step):
        optimizer.zero_grad()
        with step.phase("closure"):
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(model(inputs), targets))
        return step.loss

    optimizer.step(closure)
