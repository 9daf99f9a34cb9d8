"""What is tracked holds a function, which no checkpoint may."""
# property: refused=track

import torch
from torch import nn

import spotguard.runtime as spotguard


class Odd:
    def state_dict(self):
        return {"call": lambda: 1}

    def load_state_dict(self, state):
        self.state = state


run = spotguard.init(seed=113)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer, odd=Odd())
