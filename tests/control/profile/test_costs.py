"""Where the time of recorded steps went: every instant belongs to one kind, and has its lever."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from spotguard.control.report.profile import levers
from spotguard.control.report.profile.costs import CostKind, Costs, costs_of
from spotguard.control.report.profile.document import make_profile
from spotguard.control.report.profile.levers import StepEvidence
from spotguard.control.report.profile.trace import read_trace, unpack
from spotguard.events.profile import ProfileAnswer
from spotguard.events.untrusted import Refused

LOOP, ENGINE = 1, 2


def event(name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """Return an event of a trace; instants are milliseconds."""
    plain = {"ph": "X", "cat": "cpu_op", "pid": 9, "tid": LOOP, "name": name}
    return {**plain, "ts": 1000.0 * start, "dur": 1000.0 * (end - start), **more}


def kernel(name: str, start: float, end: float) -> dict[str, Any]:
    """Return what the GPU did."""
    return event(name, start, end, cat="kernel", pid=0, tid=7)


def step(start: float = 0.0, end: float = 100.0) -> dict[str, Any]:
    """Return a step."""
    return event("spotguard/step", start, end, cat="user_annotation")


def trace(*events: dict[str, Any]) -> bytes:
    """Return these events as torch writes them."""
    noise = [{"ph": "M", "name": "process_name"}, {"ph": "X", "name": 3}, "nonsense"]
    return json.dumps({"traceEvents": [*noise, *events]}).encode()


def spent(*events: dict[str, Any]) -> dict[CostKind, float]:
    """Return the milliseconds of each kind of cost; they add up to the steps."""
    costs = costs_of(read_trace(trace(*events)))
    found = {kind: round(each.us / 1000, 3) for kind, each in costs.spent.items() if each.us}
    assert sum(found.values()) == pytest.approx(costs.total_us / 1000)
    return found


def answer(rank: int = 0, **more: Any) -> ProfileAnswer:
    """Return what a rank answered."""
    facts = {
        "loader": {"num_workers": 0, "global_batch_size": 64, "micro_batch_size": 8},
        "optimizers": [{"name": "AdamW", "fused": None, "foreach": None}],
        "compiled": False,
        "parameter_kinds": ["float32"],
        "threads": 4,
    }
    plain: dict[str, Any] = {
        "rank": rank,
        "node": 0,
        "world_size": 1,
        "first_step": 10,
        "steps": 1,
        "duration_s": 0.1,
        "cpu_s": 0.1,
        "cores": 4,
        "load": 1.0,
        "device": "cpu",
        "trace_bytes": 9,
        "facts": facts,
    }
    return ProfileAnswer(**{**plain, **more})


def now(*events: dict[str, Any], **more: Any) -> StepEvidence:
    """Return what levers depend on."""
    return StepEvidence(costs_of(read_trace(trace(*events))), answer(**more))


def test_each_instant_of_a_cpu_step_belongs_to_what_is_innermost() -> None:
    """What is marked covers all within it; so does the optimizer, but for a wait for ranks."""
    assert spent(
        step(),
        event("spotguard/data", 0, 30),
        event("aten::copy_", 5, 10),
        event("aten::linear", 30, 60),
        event("aten::addmm", 32, 58),
        event("aten::view", 31, 31.005),
        event("Optimizer.step#AdamW.step", 60, 90),
        event("aten::mul_", 61, 80),
        event("spotguard/ranks", 80, 85),
        event("aten::gelu", 90, 95),
    ) == {
        CostKind.DATA: 30,
        CostKind.PRODUCTS: 30,
        CostKind.OPTIMIZER: 25,
        CostKind.RANKS: 5,
        CostKind.OTHER: 5,
        CostKind.PYTHON: 5,
    }


def test_what_lies_between_two_steps_is_nobodys() -> None:
    """And other threads of the process are not the loop's."""
    assert spent(
        step(0, 10),
        event("aten::gelu", 11, 19),
        event("gloo:all_reduce", 0, 20, tid=5),
        step(20, 30),
    ) == {CostKind.PYTHON: 20}


def test_small_operations_are_those_that_are_over_at_once() -> None:
    """A thousand of two microseconds cost two milliseconds, by their number."""
    many = [event("aten::add", n * 0.01, n * 0.01 + 0.002) for n in range(1000)]
    assert spent(step(0, 10), *many) == {CostKind.SMALL: 2, CostKind.PYTHON: 8}


def test_a_gpus_time_is_what_it_does_and_else_what_the_loop_does() -> None:
    """Sums over ranks beside other kernels cost nothing; idle while operations begin is `small`."""
    found = spent(
        step(),
        event("spotguard/data", 0, 20),
        event("aten::addmm", 20, 40),
        event("aten::item", 90, 100),
        kernel("ampere_sgemm_128x64", 30, 60),
        kernel("ncclDevKernel_AllReduce", 50, 70),
        kernel("Memcpy HtoD (Pageable -> Device)", 70, 72),
        kernel("flash_fwd_kernel", 72, 80),
        event("spotguard/step", 0, 100, cat="gpu_user_annotation", pid=0, tid=7),
    )
    assert found == {
        CostKind.DATA: 20,
        CostKind.SMALL: 10,
        CostKind.PRODUCTS: 30,
        CostKind.RANKS: 10,
        CostKind.COPIES: 2,
        CostKind.ATTENTION: 8,
        CostKind.SYNC: 10,
        CostKind.PYTHON: 10,
    }


def test_a_backward_pass_on_a_gpu_is_begun_by_another_thread() -> None:
    """The loop's waits for it meanwhile, which is not its own Python."""
    engine = event("autograd::engine::evaluate_function: MulBackward0", 10, 60, tid=ENGINE)
    assert spent(step(), engine, kernel("elementwise_kernel", 50, 60)) == {
        CostKind.SMALL: 40,
        CostKind.OTHER: 10,
        CostKind.PYTHON: 50,
    }


@pytest.mark.parametrize(
    ("kind", "name", "more", "words"),
    [
        (CostKind.DATA, "spotguard/data", {}, "num_workers=3"),
        (CostKind.DATA, "spotguard/data", {"facts": {}}, "StatefulDataLoader"),
        (CostKind.DATA, "spotguard/data", {"facts": {"loader": {"num_workers": 3}}}, "decode"),
        (CostKind.SAVING, "spotguard/save", {}, "save_every"),
        (CostKind.RANKS, "spotguard/ranks", {}, "global_batch_size=128"),
        (CostKind.OPTIMIZER, "Optimizer.step#AdamW.step", {}, "fused=True"),
        (CostKind.OPTIMIZER, "Optimizer.step#X", {"facts": {}}, "8-bit"),
        (CostKind.ATTENTION, "aten::_softmax", {}, "scaled_dot_product_attention instead"),
        (CostKind.ATTENTION, "aten::_scaled_dot_product_attention_math", {}, "flash"),
        (CostKind.PRODUCTS, "aten::mm", {"facts": {"threads": 1}}, "OMP_NUM_THREADS=4"),
        (CostKind.COPIES, "aten::copy_", {}, "dtype"),
        (CostKind.SYNC, "aten::item", {}, "run.log(loss=loss)"),
        (CostKind.OTHER, "aten::gelu", {}, "torch.compile"),
        (CostKind.OTHER, "aten::gelu", {"facts": {"compiled": True}}, "autocast"),
        (CostKind.PYTHON, "", {}, "into the dataset"),
        (CostKind.PYTHON, "", {"cpu_s": 0.001}, "network"),
    ],
)
def test_each_cost_has_its_lever(
    kind: CostKind, name: str, more: dict[str, Any], words: str
) -> None:
    """By what the job said of itself: one that is pulled already is not named again."""
    told = now(step(), *([event(name, 0, 100)] if name else []), **more)
    assert told.costs.share(kind) > 0.9
    assert words in levers.lever(kind, told)
    assert levers.title(kind, told)


def test_levers_of_a_gpu() -> None:
    """Copies from pageable memory want pinning; products in fp32 want TF32; gaps, compilation."""
    gpu = kernel("Memcpy HtoD (Pageable -> Device)", 50, 60)
    products = kernel("sgemm", 60, 100)
    told = now(step(), gpu, products, device="NVIDIA H100")
    assert "pin_memory=True" in levers.lever(CostKind.COPIES, told)
    assert "set_float32_matmul_precision" in levers.lever(CostKind.PRODUCTS, told)
    assert "torch.compile" in levers.lever(CostKind.SMALL, told)
    compiled = now(step(), gpu, facts={"compiled": True})
    assert "reduce-overhead" in levers.lever(CostKind.SMALL, compiled)


@pytest.mark.parametrize(
    ("events", "more", "words"),
    [
        ([kernel("sgemm", 5, 100)], {}, "the GPU is what limits it"),
        ([kernel("sgemm", 90, 100), event("spotguard/data", 0, 80)], {}, "so the loader"),
        ([kernel("sgemm", 90, 100), event("aten::mm", 0, 80)], {}, "so Python"),
        ([kernel("k", 90, 100), event("spotguard/ranks", 0, 80)], {"cpu_s": 0.0}, "other ranks"),
        ([event("aten::mm", 0, 90)], {}, "no GPU, 1.0 of 4 cores busy"),
        ([event("spotguard/data", 0, 90)], {}, "waits for data 90 %"),
        ([], {"cpu_s": 0.0}, "a sleep"),
        ([], {"cpu_s": 0.0, "load": 20.0}, "crowded node (load 20)"),
    ],
)
def test_the_signature(events: list[dict[str, Any]], more: dict[str, Any], words: str) -> None:
    """Low GPU and high CPU is the loader or Python; low both is a wait for somebody else."""
    assert words in levers.signature(now(step(), *events, **more))


def test_the_slowest_rank_is_named_and_told_of() -> None:
    """The others wait for it: their wait is no work of their own."""
    slow = trace(step(), event("aten::mm", 0, 95), event("spotguard/ranks", 95, 100))
    fast = trace(step(), event("aten::mm", 0, 40), event("spotguard/ranks", 40, 100))
    answers = [answer(rank) for rank in range(3)]
    places = {rank: f"trace {rank}" for rank in range(3)}
    traces = {0: fast, 1: fast, 2: slow}
    told = make_profile("r", 1, 1, answers, traces.__getitem__, rank=None, trace_key=places)
    assert told.rank == 2
    assert told.trace == "trace 2"
    assert "wait for rank 2" in told.balance
    assert [cost.kind for cost in told.costs] == ["products", "ranks"]
    assert [rank.own_s for rank in told.ranks] == [0.04, 0.04, 0.095]

    even = make_profile("r", 1, 1, answers, lambda _: slow, rank=None, trace_key=places)
    assert even.rank == 0
    assert "even" in even.balance
    asked = make_profile("r", 1, 1, answers, traces.__getitem__, rank=0, trace_key=places)
    assert asked.rank == 0


def test_a_step_that_an_evaluation_cut_does_not_count() -> None:
    """The answer says how many are whole."""
    raw = trace(step(0, 100), event("aten::mm", 0, 90), step(100, 103), event("aten::mm", 100, 103))
    told = make_profile("r", 1, 1, [answer(steps=1)], lambda _: raw, rank=None, trace_key={0: ""})
    assert (told.steps, told.step_s) == (1, 0.1)
    assert told.costs[0].step_s == 0.09


def test_no_more_than_five_costs() -> None:
    """The largest first."""
    names = [
        "aten::mm",
        "aten::gelu",
        "aten::copy_",
        "aten::item",
        "spotguard/data",
        "aten::_softmax",
    ]
    events = [event(f"aten::{name}", 10.0 * n, 10.0 * n + n + 1) for n, name in enumerate(names)]
    raw = trace(step(), *events)
    told = make_profile("r", 1, 1, [answer()], lambda _: raw, rank=None, trace_key={0: ""})
    shares = [cost.share_pct for cost in told.costs]
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"traceEvents": 3}',
        b'{"traceEvents": []}',
        b"[" * 100_000,
        trace(step(5, 5), event("aten::mm", 5, 5)),  # steps of no length
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(raw: bytes) -> None:
    """Whoever can write into the store wrote it."""
    with pytest.raises(Refused):
        read_trace(raw)


def test_a_packed_trace_is_unpacked_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a bomb nor a piece is taken for a trace."""
    packed = gzip.compress(b"x" * 1000)
    assert unpack(packed) == b"x" * 1000
    for bad in (b"rubbish", packed[:-9]):
        with pytest.raises(Refused):
            unpack(bad)
    monkeypatch.setattr("spotguard.control.report.profile.trace.MOST_RAW_BYTES", 999)
    with pytest.raises(Refused):
        unpack(packed)


def test_an_answer_comes_back_as_it_was_written() -> None:
    """All of it, also what is unknown."""
    told = answer(3, load=None, problem="none")
    assert ProfileAnswer.from_json(told.to_json()) == told
    with pytest.raises(Refused):
        ProfileAnswer.from_json(b'{"rank": "x"}')
    assert isinstance(now(step()).costs, Costs)
