# /// script
# dependencies = ["torch>=2.6", "numpy"]
# [tool.spotguard]
# nodes = "1:2"
# save_every = "5s"
# ///
"""Train a small GPT on real text: the source of Python's own standard library.

python examples/train_gpt.py                            # one process
torchrun --nproc-per-node 2 examples/train_gpt.py       # two
spotguard up examples/train_gpt.py --nodes 2 --yes      # two nodes that may vanish
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard


class Text(torch.utils.data.Dataset):
    """Windows of `length` + 1 bytes."""

    def __init__(self, length: int, files: int = 40) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = sorted(library.glob("*.py"))[:files]
        data = b"\n".join(path.read_bytes() for path in sources)
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.bytes[index * self.length :][: self.length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        split = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # tied: stored once in a checkpoint

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x_BT.shape[1], device=x_BT.device)
        return self.head(self.norm(self.blocks(self.token(x_BT) + self.place(places))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bitwise", action="store_true", help="the same bits on 1 node and on 7")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="more seconds per micro-batch, to interrupt"
    )
    options = parser.parse_args()

    run = spotguard.init(seed=1, exact="bitwise" if options.bitwise else None)
    torch.manual_seed(1)
    model = GPT(options.width, options.layers, options.length, options.dropout).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)

    def warm_cosine(step: int) -> float:
        return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / options.steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_cosine)
    loader = run.loader(
        Text(options.length), global_batch_size=48, micro_batch_size=8, num_workers=options.workers
    )
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in run.steps(loader, total=options.steps):
        for x_BT, y_BT in step:
            logits = model(x_BT.to(run.device))
            step.backward(F.cross_entropy(logits.flatten(0, 1), y_BT.to(run.device).flatten()))
            time.sleep(options.pause)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
