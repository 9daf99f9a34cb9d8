"""Hugging Face's `Trainer` and its subclasses survive by one line.

    from spotguard.integrations.transformers import SpotguardCallback

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[SpotguardCallback()])
    trainer.train()

Or, for a trainer that is made elsewhere, `attach(trainer)` before `trainer.train()`. The global
batch, the order of samples and the steps then no longer depend on the number of ranks; the run
saves in its store, leaves when it is told to, and goes on by itself in the next attempt.
"""

from spotguard.integrations.installed import check_installed

# From 5.3 on the Trainer's loop consists of the parts that `surviving_trainer` stands between.
check_installed("transformers", transformers="5.3", accelerate="1.1")

from spotguard.integrations.transformers.callback import SpotguardCallback, attach  # noqa: E402

__all__ = ["attach", "SpotguardCallback"]
