"""The probe looks at objects of any library."""

from __future__ import annotations

import copy
import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.runtime.checks.fingerprint import Probe
from tests.runtime.harness.lab import adapters

if TYPE_CHECKING:
    from pathlib import Path


class ForeignLoader:
    """What accelerate prepares: asked for its state before it was iterated, it raises."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        """Fail as it does."""
        raise AttributeError("'NoneType' object has no attribute 'state_dict'")


class Sealed:
    """An object whose every attribute fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class BrokenModule(nn.Module):
    """A module that does not give its state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Fail."""
        raise NotImplementedError


def test_foreign_objects_that_raise_are_survived(tmp_path: Path) -> None:
    """Whatever they raise, the other variables are still looked at."""
    job: Any = SimpleNamespace(
        rank=0, attempt=1, world_size=1, keeper=SimpleNamespace(objects=adapters({"x": {}}))
    )
    probe = Probe(str(tmp_path / "probe"), job, bitwise=False)

    def loop(loader: Any, sealed: Any, broken: Any, together: Any, ema: Any) -> Any:
        probe.record(1)
        return loader, sealed, broken, together, ema

    loader = ForeignLoader()
    together = {"loader": loader, "weight": torch.ones(1)}
    loop(loader, Sealed(), BrokenModule(), together, {"weight": torch.ones(3)})

    line = json.loads((tmp_path / "probe").read_text())
    assert line["others"]["ema"]["kind"] == "tensors"
    assert {"loader.tensors", "together"} <= set(line["others"])


@pytest.mark.parametrize("bitwise", [False, True])
def test_optimizers_that_make_much_of_the_last_bits_are_named(
    tmp_path: Path, *, bitwise: bool
) -> None:
    """So that a drill can say why losses part on other ranks; with exact sums they do not."""
    model = nn.Linear(2, 1)
    objects = adapters({"a": torch.optim.LBFGS(model.parameters()), "b": model})
    job: Any = SimpleNamespace(
        rank=0, attempt=1, world_size=1, keeper=SimpleNamespace(objects=objects)
    )
    Probe(str(tmp_path / "probe"), job, bitwise=bitwise).record(1)

    line = json.loads((tmp_path / "probe").read_text())
    assert line["amplifiers"] == ([] if bitwise else ["a"])


def test_models_that_iterate_in_each_forward_pass_are_named(tmp_path: Path) -> None:
    """Torch's two spectral norms do: on other ranks there are more or fewer passes."""
    plain, old, new = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    nn.utils.spectral_norm(old)
    nn.utils.parametrizations.spectral_norm(new)
    objects = adapters({"plain": plain, "old": nn.Sequential(old), "new": nn.Sequential(new)})
    job: Any = SimpleNamespace(
        rank=0, attempt=1, world_size=1, keeper=SimpleNamespace(objects=objects)
    )
    Probe(str(tmp_path / "probe"), job, bitwise=False).record(1)

    assert json.loads((tmp_path / "probe").read_text())["iterating"] == ["old", "new"]


class Sharpened(torch.optim.Optimizer):
    """Steps by an optimizer of its own, whose momentum is not in its state, as SAM's often is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Let the other one step."""
        self.base.step()


def test_an_optimizer_within_a_tracked_one_is_looked_at(tmp_path: Path) -> None:
    """What it keeps is lost in a resume: the drill names it, instead of nothing at all."""
    model = nn.Linear(2, 1)
    sharpened = Sharpened(model.parameters())
    objects = adapters({"model": model, "optimizer": sharpened})
    job: Any = SimpleNamespace(
        rank=0, attempt=1, world_size=1, keeper=SimpleNamespace(objects=objects)
    )
    probe = Probe(str(tmp_path / "probe"), job, bitwise=False)

    def loop(optimizer: Any) -> Any:
        probe.record(1)
        return optimizer

    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        sharpened.step()
        loop(sharpened)

    first, second = (
        json.loads(line)["others"]["optimizer.base"]
        for line in (tmp_path / "probe").read_text().splitlines()
    )
    assert first["kind"] == "optimizer"
    assert first["hash"] != second["hash"]


class Wrapper(nn.Module):
    """Holds a model as DDP and compiled modules do, perhaps with something of its own."""

    def __init__(self, module: nn.Module, *, own: bool = False) -> None:
        super().__init__()
        self.module = module
        if own:
            self.register_buffer("calls", torch.zeros(1))


def test_what_only_wraps_a_tracked_model_is_no_state_of_its_own(tmp_path: Path) -> None:
    """Its weights differ where the model's do: nobody is told to track `DDP(model)`, too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    job: Any = SimpleNamespace(
        rank=0, attempt=1, world_size=1, keeper=SimpleNamespace(objects=adapters({"m": model}))
    )
    probe = Probe(str(tmp_path / "probe"), job, bitwise=False)

    def loop(net: Any, counting: Any, average: Any) -> Any:
        probe.record(1)
        return net, counting, average

    loop(Wrapper(Wrapper(model)), Wrapper(model, own=True), copy.deepcopy(model))

    found = json.loads((tmp_path / "probe").read_text())["others"]
    assert {"net", "counting", "average"} & set(found) == {"counting", "average"}
    assert found["average"]["kind"] == "average"


def test_what_differs_from_run_to_run_is_no_state(tmp_path: Path) -> None:
    """An object that says what of its state is comparable is known by that: times are left out."""

    class Trainer:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds
            self.loss = 1.0

        def state_dict(self) -> dict[str, Any]:
            return {"seconds": self.seconds, "loss": self.loss}

        def comparable_state(self) -> dict[str, Any]:
            return {"loss": self.loss}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    def fingerprint(trainer: Trainer) -> int:
        path = tmp_path / "probe"
        path.unlink(missing_ok=True)
        keeper = SimpleNamespace(objects=adapters({"trainer": trainer}))
        job: Any = SimpleNamespace(rank=0, attempt=1, world_size=1, keeper=keeper)
        probe = Probe(str(path), job, bitwise=False)
        probe.record(1)
        probe.close()
        found: int = json.loads(path.read_text())["tracked"]["trainer"]
        return found

    calm, shaken = Trainer(1.0), Trainer(2.0)
    assert fingerprint(calm) == fingerprint(shaken)
    shaken.loss = 2.0
    assert fingerprint(calm) != fingerprint(shaken)


def test_only_what_the_loop_reads_before_it_writes_it_is_state(tmp_path: Path) -> None:
    """A batch, and a dict made for `torch.save`, are no state; a generator in a transform is.

    So a drill names what was forgotten, and not what follows from it.
    """
    keeper = SimpleNamespace(objects=adapters({"x": {}}))
    job: Any = SimpleNamespace(rank=0, attempt=1, world_size=1, keeper=keeper)
    probe = Probe(str(tmp_path / "probe"), job, bitwise=False)

    class Data(torch.utils.data.Dataset[int]):
        def __init__(self) -> None:
            self.transform = SimpleNamespace(rng=random.Random(1))

    def loop() -> Any:
        data, average = Data(), {"weight": torch.ones(1)}
        for number in range(3):
            batch_data = {"x": torch.full((1,), float(number))}
            data.transform.rng.random()
            average["weight"] += batch_data["x"]
            if number == 1:
                checkpoint = {"model": batch_data}
                assert checkpoint
            probe.record(number, [("dataset", data)])
        return average, data

    loop()
    text = (tmp_path / "probe").read_text()
    lines = [json.loads(line)["others"] for line in text.splitlines()]
    assert {"batch_data", "checkpoint", "number"}.isdisjoint(lines[-1])
    assert lines[1]["average"]["hash"] != lines[2]["average"]["hash"]
    assert not lines[0]["average"]["carried"]
    assert lines[2]["average"]["carried"]
    name = "data.transform.rng"
    assert lines[1][name]["kind"] == "random of data"
    assert lines[1][name]["hash"] != lines[2][name]["hash"]
