# /// script
# dependencies = ["torch>=2.6", "numpy", "scikit-learn"]
# ///
"""A small student learns what a large teacher says; the teacher is stored once.

python examples/recipes/distillation.py
spotguard up examples/recipes/distillation.py --yes
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

TEMPERATURE = 3.0


def main() -> None:
    run = spotguard.init(seed=4, save_every="100 steps")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    teacher = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    # A stand-in for a teacher that is downloaded. It is trained before the run begins.
    with run.warm_up():
        first = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
        for _ in range(60):
            F.cross_entropy(teacher(images[:1500]), labels[:1500]).backward()
            first.step()
            first.zero_grad()
    teacher.requires_grad_(False).eval()

    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    run.track(student=student, optimizer=optimizer)
    run.track(teacher=teacher, frozen="skip")  # so that a resume has this very teacher
    train = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    for step in run.steps(run.loader(train, global_batch_size=128), total=300):
        for x, y in step:
            told = F.softmax(teacher(x) / TEMPERATURE, dim=1)
            said = F.log_softmax(student(x) / TEMPERATURE, dim=1)
            soft = F.kl_div(said, told, reduction="batchmean") * TEMPERATURE**2
            step.backward(0.7 * soft + 0.3 * F.cross_entropy(student(x), y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        right = (student(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    sizes = [sum(p.numel() for p in m.parameters()) for m in (student, teacher)]
    print(f"accuracy {right:.3f} with {sizes[0]} parameters instead of {sizes[1]}")


if __name__ == "__main__":
    main()
