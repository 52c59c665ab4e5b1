"""Guards captured steps: they compute what eager steps do, before and after a pause; gradients and losses do not lie in
memory that a replay or a pause changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gpu_support import core, release_everything, saver, torch
from layer_runs import block
from step_runs import (
    ROWS,
    WIDTH,
    assert_like_eager,
    assert_same,
    batch_of,
    capture_step,
    captured,
    distance,
    eager_step,
    gradients_of,
    linear,
    model_of,
    module,
    resident_bytes,
    run,
)

MICROBATCHES = (1, 3)


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_steps_compute_what_eager_steps_do(microbatches: int) -> None:
    """Also gradients that are accumulated over several calls."""
    model = model_of()
    step = captured(model, rows=ROWS * microbatches, microbatches=microbatches)
    assert step.memory_report().graphs == step.memory_report().pools == 1
    for _ in range(2):
        assert_like_eager(step, model)
        assert saver.pause("step").bytes > 0 and resident_bytes() == 0
        saver.resume("step")


def test_the_report_has_no_line_of_negligible_results() -> None:
    report = dataclasses.replace(captured(model_of()).memory_report(), pool_bytes=2 << 20)
    assert "fragmentation" not in str(dataclasses.replace(report, result_bytes=4))
    assert "part without results (fragmentation)       50.0%" in str(dataclasses.replace(report, result_bytes=1 << 20))


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_training_is_the_same_with_the_step_paused_for_the_optimizer(microbatches: int) -> None:
    model = model_of()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    rows = ROWS * microbatches

    def train(step: Any, pauses: bool) -> list[Any]:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for seed in range(6):
            losses.append(step(*batch_of(seed, rows)))
            if seed % 2:  # each update has the gradients of two batches
                if pauses:
                    saver.pause("step")
                optimizer.step()
                optimizer.zero_grad(set_to_none=seed == 1)
                if pauses:
                    saver.resume("step")
        return losses + [parameter.detach().clone() for parameter in model.parameters()]

    expected = train(lambda *batch: eager_step(model, *batch, microbatches=microbatches), pauses=False)
    step = captured(model, rows=rows, microbatches=microbatches)
    assert_same(train(step, pauses=True), expected)
    assert not torch.equal(expected[-1], start[-1])


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_gradients_and_losses_do_not_lie_in_the_graphs_memory(microbatches: int) -> None:
    model = model_of()
    rows = ROWS * microbatches
    step = captured(model, rows=rows, microbatches=microbatches)
    kept = [step(*batch_of(0, rows)), *(parameter.grad for parameter in model.parameters())]
    before = [each.clone() for each in kept]
    assert all(core.find(each.data_ptr()) is None for each in kept)
    for parameter in model.parameters():
        parameter.grad = None
    step(*batch_of(1, rows))
    assert_same(kept, before)
    assert not torch.equal(next(model.parameters()).grad, before[1])
    saver.pause("step")
    assert_same(kept, before)


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_gradients_that_the_program_replaced(microbatches: int) -> None:
    model = model_of()
    rows = ROWS * microbatches
    step = captured(model, rows=rows, microbatches=microbatches)

    def accumulate(step: Any) -> list[Any]:
        model.zero_grad()
        step(*batch_of(0, rows))
        mine = [parameter.grad.flip(0).contiguous() for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), mine, strict=True):
            parameter.grad = gradient
        step(*batch_of(1, rows))
        assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), mine, strict=True))
        return mine

    expected = accumulate(lambda *batch: eager_step(model, *batch, microbatches=microbatches))
    assert_same(accumulate(step), expected)


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_sums_of_gradients_keep_the_sign_of_zero(microbatches: int) -> None:
    """-0.0 + 0.0 is 0.0, so a sum must not begin with 0.0."""
    made = module(lambda self, x: self.scale * x, scale=torch.nn.Parameter(torch.ones(1, WIDTH)))
    x = torch.full((microbatches, WIDTH), -0.0, device="cuda")
    step = capture_step(made, lambda model, x: model(x).sum(), (x,), microbatches=microbatches)
    step(x)
    assert torch.signbit(made.scale.grad).all() and not made.scale.grad.any()


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_dropout_has_the_random_numbers_of_eager_steps(microbatches: int) -> None:
    model = model_of(block(WIDTH, dropout=0.5), block(WIDTH, dropout=0.5))
    before = torch.cuda.get_rng_state()
    step = captured(model, rows=ROWS * microbatches, microbatches=microbatches)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert_like_eager(step, model)
    batch = batch_of(0, ROWS * microbatches)
    assert not torch.equal(step(*batch), step(*batch)), "each replay has fresh numbers"


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_buffers_count_calls_and_not_captures(microbatches: int) -> None:
    model = model_of(linear(), torch.nn.BatchNorm1d(WIDTH, device="cuda"))
    step = captured(model, rows=ROWS * microbatches, microbatches=microbatches)
    assert int(model[1].num_batches_tracked) == 0 and not model[1].running_mean.any()
    assert_like_eager(step, model)
    assert int(model[1].num_batches_tracked) == 3 * microbatches


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_frozen_unused_and_tied_parameters(microbatches: int) -> None:
    made = module(lambda self, x: self.b(self.frozen(self.a(x))), a=linear(), b=linear(), frozen=linear(), unused=linear())
    made.frozen.requires_grad_(False)
    made.b.weight = made.a.weight
    step = captured(made, rows=ROWS * microbatches, microbatches=microbatches)
    assert_like_eager(step, made)
    assert made.frozen.weight.grad is None and made.unused.weight.grad is None


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast(dtype: str, microbatches: int) -> None:
    model = model_of()
    with torch.autocast("cuda", dtype=getattr(torch, dtype)):
        step = captured(model, rows=ROWS * microbatches, microbatches=microbatches)
        assert torch.is_autocast_cache_enabled()
        assert_like_eager(step, model)


def test_a_batch_may_have_structure_and_constants() -> None:
    made = linear()

    def loss(model: Any, batch: dict[str, Any], scale: float) -> Any:
        return ((model(batch["x"][0]) - batch["y"]) * scale).square().sum()

    def batch(seed: int) -> dict[str, Any]:
        x, y = batch_of(seed)
        return {"x": [x], "y": y}

    step = capture_step(made, loss, (batch(0), 2.0))
    for seed in range(2):
        made.zero_grad()
        eager_loss = loss(made, batch(seed), 2.0)
        eager_loss.backward()
        expected = [eager_loss.detach(), *gradients_of(made)]
        made.zero_grad()
        assert_same([step(batch(seed), 2.0), *gradients_of(made)], expected)


def test_a_single_value_is_a_sample() -> None:
    made = linear()
    step = capture_step(made, lambda model, x: model(x).square().sum(), batch_of(0)[0])
    assert torch.equal(step(batch_of(1)[0]), made(batch_of(1)[0]).square().sum())


def test_a_loss_that_is_a_module_may_have_parameters() -> None:
    loss = module(lambda self, model, x, target: (model(x) * self.weight - target).square().sum(), weight=linear().weight)
    model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    loss.weight = torch.nn.Parameter(torch.ones(WIDTH, device="cuda"))
    step = capture_step(model, loss, batch_of(0))
    eager_step(model, *batch_of(1), loss=loss)
    expected = [*gradients_of(model), *gradients_of(loss)]
    model.zero_grad()
    loss.zero_grad()
    step(*batch_of(1))
    assert_same([*gradients_of(model), *gradients_of(loss)], expected)


def test_hooks_of_parameters_run_at_each_call() -> None:
    """And keep what they get."""
    made = linear()
    seen: list[Any] = []
    accumulated: list[Any] = []
    made.weight.register_hook(seen.append)
    made.weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))
    step = captured(made)
    assert not seen and not accumulated
    step(*batch_of(0))
    first = seen[0].clone()
    step(*batch_of(1))
    assert len(seen) == len(accumulated) == 2
    assert torch.equal(seen[0], first) and not torch.equal(seen[1], first)
    assert torch.equal(accumulated[1], made.weight.grad)


def test_a_gradient_that_is_not_as_its_parameter() -> None:
    """Transposed and expanded gradients become what eager backwards make of them."""
    made = module(
        lambda self, x: x @ self.weight.t() + self.bias,
        weight=torch.nn.Parameter(torch.randn(2 * WIDTH, WIDTH)),
        bias=torch.nn.Parameter(torch.zeros(2 * WIDTH)),
    )
    x = batch_of(0)[0]

    def loss(model: Any, x: Any) -> Any:
        return model(x).square().sum() + model.bias.sum()

    step = capture_step(made, loss, x)
    loss(made, x).backward()
    expected = gradients_of(made)
    made.zero_grad()
    step(x)
    assert_same(gradients_of(made), expected)


# ---- memory ----


def test_a_pause_gives_everything_back() -> None:
    model = model_of()
    step = captured(model)
    held = resident_bytes()
    assert held > 0
    assert saver.pause("step").bytes == held
    assert resident_bytes() == 0
    saver.resume("step")
    assert resident_bytes() == held
    report = step.memory_report()
    assert report.static_inputs == 1 and report.static_input_bytes == 2 * ROWS * WIDTH * 4
    assert 0 < report.result_bytes <= report.pool_bytes < held
    del step, model
    release_everything()
    assert not [row for row in core.segments() if row.tag == "step"]


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_steps_of_several_sizes_share_a_pool(microbatches: int) -> None:
    """They take what the largest one takes, and run in any order."""
    model = model_of(torch.nn.Linear(WIDTH, 1024, device="cuda"), block(1024), torch.nn.Linear(1024, WIDTH, device="cuda"))
    pool = torch.cuda.graph_pool_handle()
    sizes = [4 * microbatches, 256 * microbatches, 64 * microbatches]
    steps = {rows: captured(model, rows=rows, microbatches=microbatches, pool=pool) for rows in sizes}
    alone = captured(model, rows=max(sizes), microbatches=microbatches).memory_report()
    assert steps[sizes[-1]].memory_report().pool_bytes == alone.pool_bytes
    for rows in sizes * 2:
        expected = run(lambda *batch: eager_step(model, *batch, microbatches=microbatches), model, (1, 2), rows)
        assert_same(run(steps[rows], model, (1, 2), rows), expected)


@pytest.mark.multigpu
def test_a_step_of_another_device() -> None:
    with torch.cuda.device(1):
        model = model_of()
        step = captured(model)
        batch = batch_of(1)
    assert torch.cuda.current_device() == 0
    assert {row.device for row in core.segments() if row.tag == "step"} == {1}
    assert torch.equal(step(*batch), distance(model, *batch))
