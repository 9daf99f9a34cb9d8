"""Lightning's Trainer as safe as our own loop, by one line.

    from spotguard.integrations.lightning import SpotguardCallback

    trainer = Trainer(max_epochs=10, callbacks=[SpotguardCallback()])

A batch of the Trainer is then one optimizer step's global batch: what counts batches, such as
`val_check_interval`, counts optimizer steps.
"""

from spotguard.integrations.installed import check_installed

check_installed("lightning", lightning="2.5")

from spotguard.integrations.lightning.callback import SpotguardCallback  # noqa: E402

__all__ = ["SpotguardCallback"]
