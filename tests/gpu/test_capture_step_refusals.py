"""Guards what captured steps refuse by name: what a graph cannot contain, and calls that do not fit what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_support import core, errors, saver, torch
from layer_runs import block
from step_runs import (
    ROWS,
    WIDTH,
    assert_like_eager,
    batch_of,
    capture_step,
    captured,
    distance,
    gradients_of,
    linear,
    model_of,
    module,
)


def assert_nothing_left() -> None:
    """No capture, and the next one works."""
    assert not torch.cuda.is_current_stream_capturing() and core.counters()["visible_captures"] == 0
    model = linear()
    assert_like_eager(captured(model), model)


def refused(message: str, model: Any, loss: Callable[..., Any] = distance, **keywords: Any) -> None:
    """Parameters, buffers and random numbers stay, and no gradient appears."""
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())], torch.cuda.get_rng_state()
    with pytest.raises(errors.InvalidArgumentError, match=message):
        captured(model, loss, **keywords)
    assert all(map(torch.equal, (*model.parameters(), *model.buffers()), before[0]))
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_nothing_left()


# ---- at the capture ----


@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_wait_for_the_gpu(where: str) -> None:
    waits = module(lambda self, x: self.a(x) * float(x.detach().sum().item()), a=linear())
    message = r"step \(\w+\) cannot be captured: CUDA error: operation not permitted when stream is capturing\. The model"
    if where == "model":
        refused(message, waits)
    else:
        refused(message, linear(), lambda model, x, target: distance(model, x, target) * x.sum().item())


def test_the_error_is_not_one_that_was_being_handled() -> None:
    try:
        raise ValueError("another error")
    except ValueError:
        refused("CUDA error: operation not permitted", linear(), lambda model, x, y: distance(model, x, y) * x.sum().item())


def test_errors_of_the_program_are_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        captured(linear(), lambda model, x, target: distance(model, x, target) / 0 if 1 / 0 else None)
    assert_nothing_left()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_lack_of_memory_is_named() -> None:
    """Not as a wait for the GPU."""
    huge = 1 << 50

    def loss(model: Any, x: Any, target: Any) -> Any:
        extra = torch.empty(huge, device="cuda").sum() if torch.cuda.is_current_stream_capturing() else 0.0
        return distance(model, x, target) + extra

    with pytest.raises(torch.OutOfMemoryError):
        captured(linear(), loss)
    assert_nothing_left()


@pytest.mark.parametrize(
    "hook",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_modules(hook: str) -> None:
    model = model_of()
    handle = getattr(model[1].up, hook)(lambda *arguments: None)
    refused(rf"module model\.1\.up has a hook \({hook}\)", model)
    handle.remove()
    step = captured(model)
    handle = getattr(model[1].up, hook)(lambda *arguments: None)
    with pytest.raises(errors.InvalidStateError, match=rf"model\.1\.up has a hook \({hook}\), and had none"):
        step(*batch_of(0))
    handle.remove()
    assert_like_eager(step, model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_and_several_microbatches(register: str) -> None:
    model = linear()
    handle = getattr(model.weight, register)(lambda tensor: None)
    refused(r"parameter model\.weight has a hook.*microbatches=1", model, microbatches=2)
    handle.remove()
    step = captured(model, microbatches=2)
    handle = getattr(model.weight, register)(lambda tensor: None)
    with pytest.raises(errors.InvalidArgumentError, match=r"parameter model\.weight has a hook"):
        step(*batch_of(0))


@pytest.mark.parametrize("where", ["tensor 1 of the sample", "the gradient of model.weight", "the loss"])
def test_tensors_that_are_made_of_other_tensors(where: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model, (x, target) = linear(), batch_of(0)
    loss = distance
    if where == "tensor 1 of the sample":
        target = TwoTensor(target, target.clone())
    elif where == "the loss":

        def loss(model: Any, x: Any, target: Any) -> Any:
            value = distance(model, x, target)
            return TwoTensor(value, value.clone())

    else:
        inner = model.weight.detach()
        model.weight = torch.nn.Parameter(TwoTensor(inner, inner.clone()))

        class SumOfFirst(torch.autograd.Function):  # type: ignore[name-defined, misc]
            @staticmethod
            def forward(context: Any, pair: Any) -> Any:
                return pair.a.sum()

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                ones = torch.ones_like(inner) * gradient
                return TwoTensor(ones, ones.clone())

        def loss(model: Any, x: Any, target: Any) -> Any:
            return SumOfFirst.apply(model.weight)

    with pytest.raises(errors.InvalidArgumentError, match=f"{where} is a TwoTensor, which is made of other tensors"):
        capture_step(model, loss, (x, target))
    assert_nothing_left()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_an_optimizer_inside(optimizer: str) -> None:
    model = linear()
    inside = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

    def loss(model: Any, x: Any, target: Any) -> Any:
        value = distance(model, x, target)
        inside.step()
        return value

    refused(rf"calls {optimizer}\.step\(\)", model, loss)
    distance(model, *batch_of(0)).backward()
    inside.step()  # is not refused elsewhere


def test_a_backward_inside() -> None:
    def loss(model: Any, x: Any, target: Any) -> Any:
        value = distance(model, x, target)
        value.backward()
        return value

    refused(r"called backward\(\)", linear(), loss)


def test_a_parameter_that_changes_inside() -> None:
    def loss(model: Any, x: Any, target: Any) -> Any:
        value = distance(model, x, target)
        with torch.no_grad():
            model.bias.clamp_(-100, 100)
        return value * 1.0

    refused(r"changes model\.bias in place", linear(), loss)


def test_a_model_or_loss_without_gradient() -> None:
    refused("has no parameter that requires a gradient", linear().requires_grad_(False))
    refused("the loss does not depend on any parameter", linear(), lambda model, x, y: distance(model, x, y).detach())


def test_what_is_no_loss() -> None:
    refused(
        r"returned a tensor of shape \[4, 16\]: it must return a tensor with one", linear(), lambda model, x, y: model(x)
    )
    refused("returned 'float'", linear(), lambda model, x, y: 1.0)


def test_parameters_from_elsewhere() -> None:
    model, other = linear(), linear()
    weight = model.weight
    refused(r"depends on a tensor of shape \[16, 16\] that is no", model, lambda m, x, y: distance(m, other(x), y))
    refused(
        r"depends on model\.weight, which was not read", model, lambda m, x, y: distance(m, x, y) + weight.square().sum()
    )


def test_sparse_gradients() -> None:
    made = module(lambda self, x: self.table((x > 0).long()).sum(1), table=torch.nn.Embedding(2, WIDTH, sparse=True))
    refused(r"gradient of model\.table\.weight is torch\.sparse_coo", made)


def test_buffers_that_are_replaced() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.count = self.count + 1
        return self.a(x)

    made = module(forward, a=linear())
    made.register_buffer("count", torch.zeros((), device="cuda"))
    refused(r"replaces its buffer model\.count", made)


def test_parameters_whose_gradient_comes_and_goes() -> None:
    choices = iter([True, False])
    made = module(lambda self, x: self.a(x) if next(choices) else self.b(x), a=linear(), b=linear())
    refused(r"model\.a\.bias, .* got a gradient in one run and none in another", made, warmup=2)


def test_distributed_data_parallel() -> None:
    """Its backward reduces gradients. The object has no process group: none is needed to refuse it."""
    parallel = torch.nn.parallel.DistributedDataParallel
    made = parallel.__new__(parallel)
    torch.nn.Module.__init__(made)
    made.module = linear()
    refused("is a DistributedDataParallel", made)


@pytest.mark.multigpu
def test_parameters_on_several_devices() -> None:
    refused("are on cuda:0, cuda:1: they must be on one GPU", torch.nn.Sequential(linear(), linear().to("cuda:1")))


def test_arguments_that_do_not_fit() -> None:
    model, (x, target) = linear(), batch_of(0)
    for arguments, message in (
        ((print, distance, (x, target)), "model is a builtin_function_or_method"),
        ((model, 3, (x, target)), "loss is a int"),
        ((model, distance, (x.cpu(), target)), "a graph reads dense tensors on a GPU"),
        ((model, distance, (x.requires_grad_(), target)), "tensor 0 of the batch requires a gradient"),
        ((torch.nn.Linear(2, 2), distance, batch_of(0)), "are on cpu, cuda:0: they must be on one GPU"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=message):
            capture_step(*arguments)
    refused("warmup is 0", model, warmup=0)
    refused("^capture_step: a tag must be a str, not int: 3", model, tag=3)
    refused("microbatches is 0", model, microbatches=0)
    refused(r"tensor 0 of the batch has the shape \[4, 16\], which cannot be cut into 3", model, microbatches=3)


# ---- at a call ----


def test_other_batches() -> None:
    model = linear()
    step = captured(model)
    x, target = batch_of(0)
    for batch, message in (
        ((x[:2], target[:2]), r"\[2, 16\] on cuda:0, and was torch.float32 \[4, 16\].* pad"),
        ((x, target.bfloat16()), r"tensor 1 is torch\.bfloat16"),
        ((x,), r"arguments are \(a tensor\), and were \(a tensor, a tensor\)"),
        ((x, 3), "3 was passed where a tensor was captured"),
        ((x.cpu(), target), r"on cpu, and was .* on cuda:0"),
        ((x.clone().requires_grad_(), target), "tensor 0 of the batch requires a gradient"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=message):
            step(*batch)
    assert model.weight.grad is None
    assert_like_eager(step, model)


def refused_call(step: Any, model: Any, message: str, error: str = "InvalidStateError") -> None:
    before = gradients_of(model)
    with pytest.raises(getattr(errors, error), match=message):
        step(*batch_of(0))
    assert all(a is b or torch.equal(a, b) for a, b in zip(gradients_of(model), before, strict=True))


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_without_gradients(how: str) -> None:
    model = linear()
    step = captured(model)
    with getattr(torch, how)():
        refused_call(step, model, "gradients are switched off")
        with pytest.raises(errors.InvalidStateError, match="gradients are switched off"):
            captured(model)
    assert_like_eager(step, model)


def test_paused_memory() -> None:
    model = linear()
    step = captured(model)
    saver.pause("step")
    refused_call(step, model, "the memory of its graph is paused: resume tag 'step' first")
    with pytest.raises(errors.InvalidStateError, match="is paused: resume tag 'step'"):
        captured(model)
    saver.resume("step")
    assert_like_eager(step, model)


def test_another_mode() -> None:
    model = model_of(block(WIDTH, dropout=0.5))
    step = captured(model)
    model[0].dropout.eval()
    refused_call(step, model, r"module model\.0\.dropout was switched between train\(\) and eval\(\)")
    model.train()
    assert_like_eager(step, model)


def test_replaced_parameters_buffers_and_modules() -> None:
    message = r"model\.0\.weight changed its address or requires_grad .*tensor\.copy_"
    model = model_of(linear(), torch.nn.BatchNorm1d(WIDTH, device="cuda"))
    step = captured(model)
    old = model[0].weight
    model[0].weight = torch.nn.Parameter(old.detach().clone())
    refused_call(step, model, message)
    model[0].weight = old.requires_grad_(False)
    refused_call(step, model, message)
    old.requires_grad_()
    data, old.data = old.data, old.data.clone()
    refused_call(step, model, message)
    old.data = data
    assert_like_eager(step, model)
    mean, model[1].running_mean = model[1].running_mean, model[1].running_mean.clone()
    refused_call(step, model, r"model\.1\.running_mean changed its address")
    model[1].running_mean = mean
    model[1] = linear()
    refused_call(step, model, r"model\.1 changed its address")


def test_a_gradient_of_another_type() -> None:
    model = linear()
    step = captured(model, microbatches=2)
    step(*batch_of(0))
    model.weight.grad = model.weight.grad.to_sparse()
    with pytest.raises(errors.InvalidStateError, match=r"\.grad of model\.weight is torch\.float32 and torch\.sparse_coo"):
        step(*batch_of(0))


def test_a_capture_under_way() -> None:
    model = linear()
    step = captured(model)
    graph = torch.cuda.CUDAGraph()
    x, batch = torch.zeros(ROWS, device="cuda"), batch_of(0)
    with saver.cuda_graph(graph, tag="other"):
        for call in (lambda: step(*batch), lambda: capture_step(model, distance, batch)):
            with pytest.raises(errors.CaptureInProgressError, match="the current stream is being captured"):
                call()
        x += 1
    graph.replay()
    assert x.tolist() == [1.0] * ROWS
    assert_like_eager(step, model)


def test_captures_of_layers_are_refused_inside_a_capture_too() -> None:
    from torch_memory_saver.layer_graphs import capture_layers

    made, sample = linear(), batch_of(0)[0]
    x = torch.zeros(1, device="cuda")
    with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="other"):
        with pytest.raises(errors.CaptureInProgressError, match="capture_layers: the current stream"):
            capture_layers([made], [sample])
        x += 1
    assert_nothing_left()
