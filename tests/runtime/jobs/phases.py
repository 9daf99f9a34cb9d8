"""Steps of several backward passes; prints each step's losses and the weights at the end.

ALGORITHM is gan, sam, closure, lbfgs or actor-critic; WRAP is none, ddp or fsdp. Where there is
no WORLD_SIZE it is plain torch, which knows nothing of spotguard, on the whole global batch.
"""

import contextlib
import copy
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

STEPS, BATCH, MICRO, SAMPLES = 5, 14, 2, 36  # 7 micro-batches a step, the third has 4
ALGORITHM = os.environ["ALGORITHM"]
WRAP = os.environ.get("WRAP", "none")
PLAIN = "WORLD_SIZE" not in os.environ
GENERATOR = torch.Generator().manual_seed(3)
DATA = [torch.randn(SAMPLES, width, generator=GENERATOR) for width in (4, 3, 1)]


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=GENERATOR) * 0.5)
    return net


def wrapped(net: nn.Module, run: Any, unused: bool = False) -> nn.Module:
    if WRAP == "ddp":
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=unused)
    if WRAP == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (run.world_size,)))
    return net


class Whole:
    """Stands for a step in plain torch: one batch, in each phase."""

    def __init__(self, number: int) -> None:
        start = BATCH * (number % 3)
        self.batch = [part[start : start + BATCH] for part in DATA]
        self.number = number
        self.last = torch.tensor(0.0)

    def __iter__(self) -> Iterator[Any]:
        yield self.batch

    @contextlib.contextmanager
    def phase(self, *_: Any) -> Iterator[None]:
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.last = loss.detach()
        torch.autograd.backward(loss)

    def mean_loss(self) -> torch.Tensor:
        return self.last


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


Body = Callable[[Any], list[torch.Tensor]]


def gan(run: Any) -> tuple[dict[str, Any], Body]:
    """The gradients that the discriminator gets in the generator's phase are thrown away."""
    maker, judge = wrapped(network(3, 8, 4), run), wrapped(network(4, 8, 1), run)
    make = torch.optim.Adam(maker.parameters(), lr=0.02)
    judging = torch.optim.Adam(judge.parameters(), lr=0.02)

    def body(step: Any) -> list[torch.Tensor]:
        with step.phase("discriminator", judging):
            for real, noise, _ in step:
                fake = maker(noise).detach()
                step.backward((functional.softplus(judge(fake)) - judge(real)).mean())
        losses = [step.mean_loss()]
        judging.step()
        judging.zero_grad()
        with step.phase("generator", make):
            for _, noise, _ in step:
                step.backward(-judge(maker(noise)).mean())
        losses.append(step.mean_loss())
        make.step()
        make.zero_grad()
        if PLAIN:
            judging.zero_grad()
        return losses

    return {"maker": maker, "judge": judge, "make": make, "judging": judging}, body


def sam(run: Any) -> tuple[dict[str, Any], Body]:
    """The gradients of the first pass say where to; those of the second one are stepped on."""
    net = wrapped(network(4, 8, 1), run)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def pass_(step: Any, name: str) -> torch.Tensor:
        with step.phase(name):
            for x, _, y in step:
                step.backward(functional.mse_loss(net(x), y))
        loss: torch.Tensor = step.mean_loss()
        return loss

    def body(step: Any) -> list[torch.Tensor]:
        losses = [pass_(step, "ascent")]
        moved = []
        with torch.no_grad():
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                moved.append(gradient * (0.1 / norm))
                parameter.add_(moved[-1])
        optimizer.zero_grad()
        losses.append(pass_(step, "descent"))
        with torch.no_grad():
            for parameter, by in zip(net.parameters(), moved, strict=True):
                parameter.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return {"net": net, "optimizer": optimizer}, body


def closure(run: Any) -> tuple[dict[str, Any], Body]:
    """L-BFGS evaluates it several times a step, Adam once; each returns this rank's own loss."""
    net = wrapped(network(4, 8, 1), run)
    optimizer: Any
    if ALGORITHM == "lbfgs":
        optimizer = torch.optim.LBFGS(
            net.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe"
        )
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def body(step: Any) -> list[torch.Tensor]:
        evaluations = 0

        def evaluate() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            with step.phase("closure"):
                for x, _, y in step:
                    loss = functional.mse_loss(net(x), y)
                    step.backward(loss)
            return loss

        return [optimizer.step(evaluate), torch.tensor(float(evaluations))]

    return {"net": net, "optimizer": optimizer}, body


def actor_critic(run: Any) -> tuple[dict[str, Any], Body]:
    """Two losses, one after the other, through one trunk that both optimizers leave to a third."""
    parts = nn.ModuleDict({"trunk": network(4, 8), "actor": network(8, 3), "critic": network(8, 1)})

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor, head: str) -> Any:
            return self.parts[head](self.parts["trunk"](x).tanh())

    agent = wrapped(Agent(), run, unused=True)
    optimizers = {
        name: torch.optim.Adam(part.parameters(), lr=0.02) for name, part in parts.items()
    }

    def body(step: Any) -> list[torch.Tensor]:
        losses = []
        with step.phase("critic"):
            for x, _, y in step:
                step.backward(functional.mse_loss(agent(x, "critic"), y))
        losses.append(step.mean_loss())
        with step.phase("actor"):
            for x, weights, _ in step:
                step.backward(-(agent(x, "actor").log_softmax(1) * weights).sum(1).mean())
        losses.append(step.mean_loss())
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return {"agent": agent, **{f"{name}_steps": o for name, o in optimizers.items()}}, body


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main() -> None:
    torch.set_num_threads(1)
    made = {
        "gan": gan, "sam": sam, "closure": closure, "lbfgs": closure, "actor-critic": actor_critic
    }[ALGORITHM]  # fmt: skip
    if PLAIN:
        objects, body = made(None)
        steps: Any = map(Whole, range(STEPS))
    else:
        import spotguard.runtime as spotguard

        run = spotguard.init(seed=1, save_every="100 steps", exact=os.environ.get("EXACT"))
        objects, body = made(run)
        data = torch.utils.data.TensorDataset(*DATA)
        loader = run.loader(data, global_batch_size=BATCH, micro_batch_size=MICRO, shuffle=False)
        run.track(**objects)
        steps = run.steps(loader, total=STEPS)
    for step in steps:
        losses = [float(whole(torch.as_tensor(loss))) for loss in body(step)]
        say(f"losses {step.number} {losses}")
        time.sleep(float(os.environ.get("PACE_S", "0")))
    models = {name: copy.copy(o) for name, o in objects.items() if isinstance(o, nn.Module)}
    for name, model in models.items():
        values = [whole(p.detach()).flatten() for p in model.parameters()]
        say(f"weights {name} {torch.cat(values).tolist()}")


if __name__ == "__main__":
    main()
