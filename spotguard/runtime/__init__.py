"""Import this in a training script: `import spotguard.runtime as spotguard`.

    run = spotguard.init()
    loader = run.loader(dataset, global_batch_size=512, micro_batch_size=8)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(loader, total=20_000):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        optimizer.step(); scheduler.step(); optimizer.zero_grad(set_to_none=True)

The same script runs under plain `python`, under `torchrun` and under `spotguard up`.
"""

from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.loop.epochs import Epoch
from spotguard.runtime.run import Run
from spotguard.runtime.starting import init, reset
from spotguard.runtime.state.tracked import Box
from spotguard.runtime.step import Step

__all__ = ["Box", "ElasticLoader", "Epoch", "init", "reset", "Run", "Step"]
