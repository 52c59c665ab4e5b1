"""A training in plain PyTorch that sleeps between steps, and has the same losses as a training without sleep.

The parameters and the optimizer's state are kept in host memory while the training sleeps. The example runs on a GPU, or on
the simulated GPU, whose operators compute what the CPU computes.

    python -m torch_memory_saver simulate -- python examples/simulated_training.py
"""

import torch
from _common import MIB, check, free_bytes, options, show

from torch_memory_saver import torch_memory_saver

STEPS = 6


def train(sleeps: bool) -> tuple[list[float], int]:
    """Train. Returns the losses of all steps, and the fewest bytes that a sleep released."""
    torch.manual_seed(0)
    with torch_memory_saver.region(tag="training", backup="host"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 256).cuda()
    wanted = inputs.sum(dim=1, keepdim=True)
    losses, released = [], []
    for _ in range(STEPS):
        with torch_memory_saver.region(tag="training", backup="host"):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if sleeps:
            awake = free_bytes()
            show(f"step {len(losses)}, loss {losses[-1]:.3f}")
            torch_memory_saver.pause("training")
            show("asleep")
            released.append(free_bytes() - awake)
            torch_memory_saver.resume("training")
    return losses, min(released, default=0)


def main() -> None:
    options(__doc__, gib=0).parse_args()
    # On a real GPU, operators that add in arbitrary order would give different losses in each run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected, _ = train(sleeps=False)
    losses, released = train(sleeps=True)
    print(f"Each sleep released {released / MIB:.0f} MiB.")
    check(losses == expected, "the losses are those of a training that never slept")
    check(losses[-1] < losses[0], "it learns")
    check(released > 0, "its memory was free while it slept")


if __name__ == "__main__":
    main()
