"""What a cost is called, and what is to be done against it, by what the job said of itself. Pure.

One row for each kind of cost. A lever that is pulled already is not named again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spotguard.control.report.profile.costs import CostKind
from spotguard.events.untrusted import integer, objects, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spotguard.control.report.profile.costs import Costs
    from spotguard.events.profile import ProfileAnswer

_IDLE_CORES = 0.5
"""A process that keeps less of a core busy waits for something that is not computed."""
_BUSY = 0.7
_CROWDED = 1.5
_FUSED: Final = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})


@dataclass(frozen=True)
class StepEvidence:
    """What a lever depends on."""

    costs: Costs
    answer: ProfileAnswer

    @property
    def has_gpu(self) -> bool:
        """True if the rank computes on a GPU."""
        return self.costs.gpu_busy_us is not None

    @property
    def busy_cores(self) -> float:
        """Cores that the process kept busy, its loader's workers left out."""
        answer = self.answer
        return answer.cpu_s / answer.duration_s if answer.duration_s else 0.0

    @property
    def gpu_busy(self) -> float | None:
        """Share (0..1) of the steps in which the GPU was at work; None without one."""
        busy_us, total_us = self.costs.gpu_busy_us, self.costs.total_us
        return None if busy_us is None or not total_us else min(1.0, busy_us / total_us)

    @property
    def waits(self) -> bool:
        """True if the process is idle by itself, and not because others have the cores."""
        return self.busy_cores < _IDLE_CORES and not self.is_crowded

    @property
    def is_crowded(self) -> bool:
        """True if more processes of the node want to compute than there are cores."""
        load = self.answer.load
        return load is not None and load > _CROWDED * self.answer.cores

    @property
    def loader(self) -> Mapping[str, Any]:
        """How the loader reads."""
        told = self.answer.facts.get("loader")
        return told if isinstance(told, dict) else {}

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """Name and options of each optimizer."""
        return objects(self.answer.facts, "optimizers")

    @property
    def is_compiled(self) -> bool:
        """True if a tracked model is compiled."""
        return self.answer.facts.get("compiled") is True


def title(kind: CostKind, now: StepEvidence) -> str:
    """Return a kind of cost in words."""
    if kind is CostKind.SMALL and now.has_gpu:
        return "many small operations: the GPU is done before the next one is begun"
    if kind is CostKind.PYTHON and now.waits:
        return "the loop's own code, which waits for something outside of torch"
    return _TITLES[kind]


def lever(kind: CostKind, now: StepEvidence) -> str:
    """Return what to change against a cost of this kind."""
    return _LEVERS[kind](now)


def signature(now: StepEvidence) -> str:
    """Return in one sentence what the use of GPU and processor says of the whole step."""
    gpu, data = now.gpu_busy, now.costs.share(CostKind.DATA)
    cores = f"{now.busy_cores:.1f} of {now.answer.cores} cores busy"
    if now.is_crowded:
        cores += f" on a crowded node (load {now.answer.load:.0f}), where all takes longer"
    if gpu is None:
        if data > 1 - _BUSY:
            return f"no GPU, {cores}: the step waits for data {100 * data:.0f} % of its time"
        if now.waits:
            return f"no GPU, {cores}: it mostly waits, for {_awaited(now)}"
        return f"no GPU, {cores}"
    told = f"GPU busy {100 * gpu:.0f} %, {cores}"
    if gpu >= _BUSY:
        return f"{told}: the GPU is what limits it"
    if not now.waits:
        which = "the loader" if data > 1 - _BUSY else "Python, which begins operations too slowly"
        return f"{told}: low GPU and high CPU, so {which} limits it"
    return f"{told}: both are low, so it waits for {_awaited(now)}"


def _awaited(now: StepEvidence) -> str:
    waits = {
        CostKind.DATA: "data",
        CostKind.RANKS: "the other ranks or the network between them",
        CostKind.SAVING: "its saves",
        CostKind.SYNC: "results of the GPU that are asked for within the step",
        CostKind.PYTHON: "something in the loop's own code (network, disk, a sleep)",
    }
    return waits[max(waits, key=now.costs.share)]


def _against_data(now: StepEvidence) -> str:
    workers = integer(now.loader, "num_workers", low=0)
    if workers is None:
        return (
            "read ahead in other processes: a torchdata StatefulDataLoader with num_workers as "
            "the stream, or a map-style dataset"
        )
    most = max(1, now.answer.cores - 1)
    if workers == 0:
        return (
            f"num_workers={most} in run.loader: samples are read by the loop itself now, between "
            "its steps"
        )
    if workers < most:
        return f"num_workers={most} in run.loader, instead of {workers}: this rank has the cores"
    return (
        "make samples cheaper to read: decode, tokenise and resize beforehand; fewer, larger files "
        "on the node's own disk (`cache`)"
    )


def _against_saving(_: StepEvidence) -> str:
    return (
        'save less often (`save_every = "auto"` weighs it), or less: run.track(model=model, '
        'frozen="skip"), 8-bit moments'
    )


def _against_ranks(now: StepEvidence) -> str:
    size = integer(now.loader, "global_batch_size", low=1)
    grown = f"global_batch_size={2 * size}, instead of {size}" if size else "more accumulation"
    return (
        f"{grown}: gradients are added up once a step (no_sync between its micro-batches is done "
        "already), so larger steps do it less often; `speeds` in run.loader where ranks differ; "
        "nodes of one zone"
    )


def _against_optimizer(now: StepEvidence) -> str:
    for each in now.optimizers:
        name = text(each, "name") or ""
        if name in _FUSED and not each.get("fused"):
            return f"{name}(..., fused=True): one pass over all parameters instead of many"
        if each.get("foreach") is False:
            return f"{name}(..., foreach=True): one call for many tensors"
    return "larger global batches, so that it steps less often for as many samples; 8-bit moments"


def _against_attention(now: StepEvidence) -> str:
    spent = now.costs.spent[CostKind.ATTENTION]
    names = " ".join(spent.by_name)
    if "scaled_dot" not in names and "ScaledDot" not in names and "fl" not in names.lower():
        return (
            "torch.nn.functional.scaled_dot_product_attention instead of softmax(q @ k) @ v: it "
            "never holds the whole matrix"
        )
    if "attention_math" in names or (now.has_gpu and "flash" not in names.lower()):
        return (
            "bf16 or fp16, is_causal=True instead of a mask, on a CPU also dropout_p=0: then "
            "scaled_dot_product_attention takes its flash kernel"
        )
    return "shorter or packed sequences; a window instead of all of them (FlexAttention)"


def _against_products(now: StepEvidence) -> str:
    kinds = now.answer.facts.get("parameter_kinds")
    if now.has_gpu:
        full = kinds == ["float32"]
        tf32 = 'torch.set_float32_matmul_precision("high"), ' if full else ""
        return f"the work itself. {tf32}bf16 autocast; what is left is a matter of the model's size"
    threads = integer(now.answer.facts, "threads", low=1) or 1
    if threads < now.answer.cores and now.answer.world_size == 1:
        return f"the work itself. OMP_NUM_THREADS={now.answer.cores}, instead of {threads}; a GPU"
    return "the work itself. A smaller model, shorter sequences, or a GPU"


def _against_copies(now: StepEvidence) -> str:
    if now.costs.pageable or (now.has_gpu and not now.loader.get("pin_memory")):
        return (
            "pin_memory=True in run.loader and batch.to(run.device, non_blocking=True): copies "
            "then run beside the computation"
        )
    return (
        "make tensors where they are used, in the dtype and layout in which they are used; no "
        "`.cpu()` within the step"
    )


def _against_sync(_: StepEvidence) -> str:
    return (
        "no `.item()`, `print(loss)` or `if loss > x` in each step: run.log(loss=loss) takes the "
        "tensor itself and asks for its value later"
    )


def _against_small(now: StepEvidence) -> str:
    size = integer(now.loader, "micro_batch_size", low=1)
    step = integer(now.loader, "global_batch_size", low=1)
    larger = ""
    if size and step and size < step:
        larger = f'micro_batch_size larger than {size} in run.loader ("auto" finds the most)'
    if now.is_compiled:
        graphs = 'torch.compile(model, mode="reduce-overhead") begins a step as one graph'
        return "; ".join(filter(None, (larger, graphs))) if now.has_gpu or not larger else larger
    compiled = "run.track(model=torch.compile(model)) makes few operations of many"
    return "; ".join(filter(None, (larger, compiled)))


def _against_other(now: StepEvidence) -> str:
    if now.is_compiled:
        return "bf16 autocast halves what they read and write; activation checkpointing adds to it"
    return (
        "run.track(model=torch.compile(model)) makes one pass over memory of several operations; "
        "bf16 autocast halves what they read and write"
    )


def _against_python(now: StepEvidence) -> str:
    if now.waits:
        return (
            "look at what the loop's body asks of the network, the disk or a clock, and do that in "
            "the dataset, in a thread, or every hundredth step"
        )
    return (
        "move what the loop's body prepares into the dataset, where workers do it; log every "
        "tenth step; a larger micro_batch_size does more with each line of it"
    )


_TITLES: Final = {
    CostKind.DATA: "waiting for data",
    CostKind.SAVING: "saving",
    CostKind.RANKS: "adding up gradients over the ranks, and waiting for them",
    CostKind.OPTIMIZER: "the optimizer's step",
    CostKind.ATTENTION: "attention",
    CostKind.PRODUCTS: "matrix products and convolutions",
    CostKind.COPIES: "copies between devices, dtypes and layouts",
    CostKind.SYNC: "waiting for results of the GPU within the step",
    CostKind.SMALL: "many small operations, of which beginning them takes longest",
    CostKind.OTHER: "elementwise operations, norms and the like, which memory limits",
    CostKind.PYTHON: "Python between the operations",
}
_LEVERS: Final[dict[CostKind, Callable[[StepEvidence], str]]] = {
    CostKind.DATA: _against_data,
    CostKind.SAVING: _against_saving,
    CostKind.RANKS: _against_ranks,
    CostKind.OPTIMIZER: _against_optimizer,
    CostKind.ATTENTION: _against_attention,
    CostKind.PRODUCTS: _against_products,
    CostKind.COPIES: _against_copies,
    CostKind.SYNC: _against_sync,
    CostKind.SMALL: _against_small,
    CostKind.OTHER: _against_other,
    CostKind.PYTHON: _against_python,
}
