"""Models, losses and eager steps to compare captured steps with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_support import core, torch
from layer_runs import block

ROWS = 4
WIDTH = 16


def linear() -> Any:
    return torch.nn.Linear(WIDTH, WIDTH, device="cuda")


def model_of(*modules: Any) -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(*(modules or (block(WIDTH), block(WIDTH))))


def module(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module with these parts, and this forward, which gets the module first."""

    class Made(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, *arguments: Any) -> Any:
            return forward(self, *arguments)

    made = Made()
    for name, part in parts.items():
        setattr(made, name, part)
    return made.cuda()


def batch_of(seed: int, rows: int = ROWS) -> tuple[Any, Any]:
    """Inputs and targets that depend on the seed only."""
    x, target = (
        torch.arange(start, start + rows * WIDTH, device="cuda", dtype=torch.float32).reshape(rows, WIDTH).sin()
        for start in (seed, seed + 1000)
    )
    return x, target


def distance(model: Any, x: Any, target: Any) -> Any:
    """A loss whose gradient is dense: see test_layer_graphs_calls.py."""
    return (model(x) - target).square().sum()


def capture_step(*arguments: Any, **keywords: Any) -> Any:
    from torch_memory_saver.layer_graphs import capture_step

    return capture_step(*arguments, **({"tag": "step"} | keywords))


def captured(model: Any, loss: Any = distance, rows: int = ROWS, **keywords: Any) -> Any:
    return capture_step(model, loss, batch_of(0, rows), **keywords)


def eager_step(model: Any, *batch: Any, loss: Any = distance, microbatches: int = 1) -> Any:
    """What a captured step stands for."""
    pieces = zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True)
    losses = []
    for piece in pieces:
        value = loss(model, *piece)
        value.backward()
        losses.append(value.detach())
    return losses[0] if microbatches == 1 else torch.stack(losses)


def gradients_of(model: Any) -> list[Any]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compares bit for bit."""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine is None) == (theirs is None), f"item {number}"
        assert mine is None or (mine.stride() == theirs.stride() and torch.equal(mine, theirs)), f"item {number}"


def run(step: Callable[..., Any], model: Any, seeds: Sequence[int], rows: int = ROWS) -> list[Any]:
    """The losses of these batches one after the other, and then the accumulated gradients and the buffers. Begins with
    parameters without gradients."""
    model.zero_grad()
    losses = [step(*batch_of(seed, rows)) for seed in seeds]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [*losses, *gradients_of(model), *buffers]


def assert_like_eager(step: Any, model: Any, loss: Any = distance, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Compares with eager steps that begin with the same random numbers and buffers, and accumulate over several batches."""
    before = torch.cuda.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    rows = ROWS * step.microbatches
    expected = run(lambda *batch: eager_step(model, *batch, loss=loss, microbatches=step.microbatches), model, seeds, rows)
    torch.cuda.set_rng_state(before[0])
    for buffer, value in zip(model.buffers(), before[1], strict=True):
        buffer.copy_(value)
    assert_same(run(step, model, seeds, rows), expected)


def resident_bytes(tag: str = "step") -> int:
    return sum(row.reserved_bytes for row in core.segments() if row.tag == tag and row.state == core.STATE_ACTIVE)
