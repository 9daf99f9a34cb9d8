"""Training scripts in the shapes in which people write them; `SHAPE` says which.

`HURT` names a moment, such as `step 7`, at which the last rank is told to end.
"""

# ruff: noqa: T201
from __future__ import annotations

import hashlib
import os
import signal
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, mse_loss

import spotguard.runtime as spotguard

run = spotguard.init(save_every="4 steps")
data = torch.utils.data.TensorDataset(torch.randn(26, 3), torch.randn(26, 1))
text = torch.randint(7, (90,))
best = 1e9
history: list[int] = []


def moment(name: str) -> None:
    """Be told to end, if this is when."""
    if name == os.environ.get("HURT") and run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if name == os.environ.get("HURT"):
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)


def perceptron(inputs: int, outputs: int) -> torch.nn.Module:
    """Return a small model that draws random numbers as it trains."""
    parts = torch.nn.Linear(inputs, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, outputs)
    return torch.nn.Sequential(*parts)


def evaluate(name: str) -> float:
    """Return a loss; its loop holds collectives."""
    model.eval()
    total = torch.zeros(1)
    for part in run.evaluate(range(6)):
        if part == 3:
            moment(f"evaluation {name}")
        if run.world_size > 1:
            dist.all_reduce(torch.ones(1))
        with torch.no_grad():
            total += mse_loss(model(data[part::6][0]), data[part::6][1])
    model.train()
    moment(f"tail {name}")
    if os.environ.get("HURT") == f"tail {name}":
        raise SystemExit(0)
    print("evaluated", name, flush=True)
    return float(total)


def train(step: spotguard.Step) -> None:
    """Do one step, as most do."""
    for x, y in step:
        step.backward(mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    moment(f"step {step.number}")


def by_steps() -> None:
    """Have our loop."""
    for step in run.steps(loader, total=14):
        train(step)


def by_a_framework() -> None:
    """Own the loop; draw one by one, go backward elsewhere, never ask for the item after the last.

    In the same places as `by_steps`, so that it ends with the same weights.
    """
    done = run.restore(loader, total=14)
    print("done", done, "cut", run.evaluation_was_cut, flush=True)
    if run.evaluation_was_cut:
        evaluate(str(done))
    for number in range(done, 14):
        step = run.begin_step()
        assert step is not None
        assert step.number == number
        batches = iter(step)
        for _ in range(len(step)):
            x, y = next(batches)
            with step.weighted(mse_loss(model(x), y)) as loss:
                torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.end_step()
        moment(f"step {number}")
        if (number + 1) % 5 == 0:
            evaluate(str(number + 1))
    run.finish()
    run.finish()


def by_epochs() -> None:
    """Evaluate, step the scheduler and keep the best at the end of each epoch.

    Draw at random what an epoch needs, before its steps and after them.
    """
    global best
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    run.track(scheduler=scheduler)
    run.track_values(globals(), "best", "history")
    torch.rand(run.rank + 2 * int(os.environ.get("SPOTGUARD_ATTEMPT", 1)))  # as a set-up may
    for epoch in run.epochs(loader, total=3):
        order = torch.randperm(len(epoch))
        assert (len(epoch), len(epoch.dataset)) == (6, 26)
        for number, step in enumerate(epoch, epoch.done):
            assert step.number == epoch.steps[number]
            optimizer.param_groups[0]["weight_decay"] = 0.1 * int(order[number])
            train(step)
        assert epoch.done == len(epoch)
        history.append(epoch.number)
        drawn = float(torch.rand(()))
        value = drawn + evaluate(str(epoch.number))
        scheduler.step(value)
        run.best(value)
        best = min(best, value)
        moment(f"end {epoch.number}")


def by_get_batch() -> None:
    """Draw places of one long text with replacement."""

    def get_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.randint(len(text) - 4, (samples,))
        return torch.stack([text[i : i + 3] for i in places]).float(), text[places + 3]

    drawn = run.draws(get_batch, global_batch_size=5, micro_batch_size=2)
    for step in run.steps(drawn, total=14):
        for x, y in step:
            step.backward(cross_entropy(classifier(x), y))
        of_classifier.step()
        of_classifier.zero_grad()
        moment(f"step {step.number}")


def by_episodes() -> None:
    """Learn by reinforcement: episodes of unequal length, of which ranks play unequal numbers."""
    for step in run.steps(run.episodes(5), total=14):
        for numbers in step:
            losses = []
            for number in numbers:
                state = torch.full((3,), number % 3 - 1.0)
                for _ in range(int(torch.randint(1, 5, ()))):
                    chances = classifier(state).softmax(-1)
                    action = int(chances.multinomial(1))
                    losses.append(-chances[action].log() * (action - 3))
                    state = state + torch.randn(3) * 0.1
            step.backward(torch.stack(losses).sum(), reduction="part")
        of_classifier.step()
        of_classifier.zero_grad()
        moment(f"step {step.number}")


def by_tokens() -> None:
    """Take the mean over what counts in the whole global batch, not over samples."""
    for step in run.steps(loader, total=14):
        count = step.count(lambda batch: (batch[1] > 0).sum())
        for x, y in step:
            loss = (mse_loss(model(x), y, reduction="none") * (y > 0)).sum() / count
            step.backward(loss, reduction="part")
        optimizer.step()
        optimizer.zero_grad()
        moment(f"step {step.number}")


class Trainer:
    """A class of one's own, with the loop in a method and counters in attributes."""

    def __init__(self) -> None:
        self.seen = 0
        self.losses: list[float] = []
        self.state = SimpleNamespace(patience=3)

    def fit(self) -> None:
        """Train, by closures."""
        run.track_values(self, "seen", "losses")
        run.track_values(self.state, "patience")
        for step in run.steps(loader, total=14):

            def closure(step: spotguard.Step = step) -> torch.Tensor:
                optimizer.zero_grad()
                with step.phase("closure"):
                    for x, y in step:
                        step.backward(mse_loss(model(x), y))
                return step.mean_loss()

            self.losses.append(round(float(optimizer.step(closure)), 3))
            self.seen += 1
            self.state.patience -= 1
            moment(f"step {step.number}")
        print("seen", self.seen, len(self.losses), self.state.patience, flush=True)


model: Any = perceptron(3, 1)
classifier: Any = perceptron(3, 7)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
of_classifier = torch.optim.AdamW(classifier.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
run.track(classifier=classifier, of_classifier=of_classifier)
loader = run.loader(data, global_batch_size=5, micro_batch_size=2)
{
    "steps": by_steps,
    "framework": by_a_framework,
    "epochs": by_epochs,
    "get_batch": by_get_batch,
    "episodes": by_episodes,
    "tokens": by_tokens,
    "trainer": Trainer().fit,
}[os.environ["SHAPE"]]()
state = [p.detach() for p in (*model.parameters(), *classifier.parameters())]
print("norm", sum(float(p.double().square().sum()) for p in state))
lr = optimizer.param_groups[0]["lr"]
print(
    "digest",
    hashlib.sha256(b"".join(p.numpy().tobytes() for p in state)).hexdigest(),
    *(best, history, lr),
)
