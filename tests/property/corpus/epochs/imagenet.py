"""Epochs as in pytorch/examples: train, validate, step the schedule, remember the best."""
# property: elastic=samples

import torch
from torch import nn

import spotguard.runtime as spotguard

best = 0.0
run = spotguard.init(seed=1)
x = torch.randn(46, 6)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, 0]), batch_size=12)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
run.track_values(globals(), "best")


def train(epoch):
    model.train()
    for step in epoch:
        for inputs, labels in step:
            step.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()


def validate():
    model.eval()
    right = 0.0
    with torch.no_grad():
        for inputs, _ in run.evaluate(held_out):
            right += float((model(inputs).argmax(1) == 0).sum())
    return right


for epoch in run.epochs(
    run.loader(data, global_batch_size=15, micro_batch_size=5, drop_last=True), total=4
):
    train(epoch)
    accuracy = validate()
    scheduler.step()
    run.best(accuracy, mode="max")
    best = max(best, accuracy)
