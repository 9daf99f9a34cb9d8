"""What wastes the nodes' time is said in words, with the lever; what is fine or unknown is not."""

from __future__ import annotations

import pytest

from spotguard.control.status.bottlenecks import bottlenecks, mean_of, of_all, share_of_step

STEP = {"spotguard/step_s": 2.0}


@pytest.mark.parametrize(
    ("data_s", "starved"),
    [(0.0, False), (0.4, False), (0.401, True), (1.0, True), (5.0, True), (-1.0, False)],
)
def test_a_starved_step_names_the_loader(data_s: float, starved: bool) -> None:
    """From a fifth of the step on, and not before; never more than all of it."""
    said = list(bottlenecks({**STEP, "spotguard/data_s": data_s}))
    assert bool(said) is starved
    if starved:
        assert said[0].startswith("the data loader starves the step: ")
        assert "num_workers of run.loader" in said[0]
        assert f"{min(100.0, 50 * data_s):.0f} % of each step" in said[0]


@pytest.mark.parametrize(
    ("busy", "idles"), [(0.0, True), (39.9, True), (40.0, False), (99.0, False)]
)
def test_an_idle_gpu_names_its_lever(busy: float, idles: bool) -> None:
    """Below 40 %; the lever is the loader where that is what starves it, else the work itself."""
    gpu = {"spotguard/node0/gpu0/utilization_pct": busy}
    said = list(bottlenecks(gpu))
    assert bool(said) is idles
    if idles:
        assert f"busy {busy:.0f} % of the time" in said[0]
        assert "micro_batch_size" in said[0]
        [_, idle] = bottlenecks({**STEP, "spotguard/data_s": 1.9, **gpu})
        assert "feed it faster, as said above" in idle
        assert "micro_batch_size" not in idle


def test_gpus_of_all_nodes_count_alike() -> None:
    """One busy GPU of four does not hide three that idle; a name that only looks alike is none."""
    metrics = {
        "spotguard/node0/gpu0/utilization_pct": 100.0,
        "spotguard/node0/gpu1/utilization_pct": 0.0,
        "spotguard/node1/gpu0/utilization_pct": 0.0,
        "spotguard/node2/gpu0/utilization_pct": 0.0,
        "mine/utilization_pct": 100.0,
        "spotguard/node0/cpu_pct": 80.0,
    }
    assert mean_of(metrics, "utilization_pct") == 25.0
    assert of_all(metrics, "cpu_pct") == [80.0]
    [said] = bottlenecks(metrics)
    assert "busy 25 %" in said


def test_what_is_unknown_is_not_said() -> None:
    """A step without a length, parts without a step, no GPU: nothing is a guess."""
    assert list(bottlenecks({})) == []
    assert share_of_step({"spotguard/data_s": 1.0}, "spotguard/data_s") is None
    assert share_of_step(STEP, "spotguard/data_s") is None
    assert (
        share_of_step({"spotguard/step_s": 0.0, "spotguard/data_s": 1.0}, "spotguard/data_s")
        is None
    )
    assert mean_of({"loss": 1.0}, "utilization_pct") is None
