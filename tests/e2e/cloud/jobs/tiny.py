"""A job of a few kilobytes, which also writes down what its node hears of its cloud."""

import argparse
import http.client
import json
import os
import time
from urllib.parse import urlsplit

import torch
from torch import nn

import spotguard.runtime as spotguard
from spotguard.launch.metadata import detect
from spotguard.runtime.preemption.notices import notice_source
from spotguard.storage import PrefixedStore, open_store


def heard() -> dict[str, str]:
    """Ask the node's metadata service once, as the watcher does all the time."""
    setting = os.environ.get("SPOTGUARD_METADATA", "none")
    name, _, endpoint = setting.partition("=")
    address = urlsplit(endpoint).netloc
    source = notice_source(setting)
    try:
        notice = source.check() if source else None
    except (OSError, http.client.HTTPException, ValueError) as problem:
        answer = f"{type(problem).__name__}: {problem}"
    else:
        answer = "no notice" if notice is None else f"notice: {notice.action}"
    return {
        "told": name,
        "answer": answer,
        "detected": detect(address) if address else detect(),
    }


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a step takes")
    options = parser.parse_args()

    run = spotguard.init(seed=3)
    if os.environ.get("RANK", "0") == "0" and "SPOTGUARD_RUN_ID" in os.environ:
        store = PrefixedStore(
            open_store(os.environ["SPOTGUARD_STORE"]), os.environ["SPOTGUARD_RUN_ID"]
        )
        store.put("heard.json", json.dumps(heard()).encode())
    torch.manual_seed(3)
    x = torch.randn(512, 8)  # 16 steps an epoch
    y = torch.sin(x).sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        torch.utils.data.TensorDataset(x, y), global_batch_size=32, micro_batch_size=8
    )
    for step in run.steps(loader, epochs=options.epochs):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
