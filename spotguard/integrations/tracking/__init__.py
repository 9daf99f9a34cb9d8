"""One tracker run over all attempts: W&B, MLflow, TensorBoard, fed by `run.log`.

    from spotguard.integrations.tracking.wandb import WandbTracker
    run.report_to(WandbTracker(run, project="gpt"))

Each module needs the extra of its name. A tracker may fail, or be out of reach: the run goes on,
and the run store has all that was logged.
"""
