"""Guards calls of captured layers: what modules may do and return, and mistakes that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_support import core, errors, torch
from layer_runs import block, chunks_of_blocks, numbers, sample_of


def capture_layers(*arguments: Any, **keywords: Any) -> Any:
    from torch_memory_saver.layer_graphs import capture_layers

    return capture_layers(*arguments, **({"tag": "graphs"} | keywords))


def module(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module with these parts, and this forward, which gets the module first."""

    class Made(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return forward(self, *arguments, **keywords)

    made = Made()
    for name, part in parts.items():
        setattr(made, name, part)
    return made.cuda()


def linear(width: int = 16) -> Any:
    return torch.nn.Linear(width, width, device="cuda")


def captured(made: Any, sample: Any = None, **keywords: Any) -> Any:
    [[layer]] = capture_layers([made], [sample_of() if sample is None else sample], **keywords).layers
    return layer


def gradients(layer: Any, made: Any, loss: Callable[[Any], Any], x: Any, *arguments: Any, **keywords: Any) -> list[Any]:
    """The loss, and the gradients of the input and of all parameters."""
    made.zero_grad()
    x = x.detach().clone().requires_grad_()
    value = loss(layer(x, *arguments, **keywords))
    value.backward()
    found = [value.detach(), x.grad, *(parameter.grad for parameter in made.parameters())]
    return [None if each is None else each.clone() for each in found]


def squares(y: Any) -> Any:
    """A loss whose gradient is dense. The gradient of sum() is one number with stride 0: eager layers get it as it is, and
    captured layers as a dense copy, for which cuBLAS may choose another kernel."""
    return y.square().sum()


def assert_like_eager(made: Any, layer: Any, loss: Callable[[Any], Any], *arguments: Any, **keywords: Any) -> None:
    for seed in range(3):
        state = torch.cuda.get_rng_state()
        expected = gradients(made, made, loss, numbers(seed), *arguments, **keywords)
        torch.cuda.set_rng_state(state)
        found = gradients(layer, made, loss, numbers(seed), *arguments, **keywords)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))


# ---- what layers do ----


def test_dropout_has_the_random_numbers_of_eager_layers() -> None:
    made = block(16, dropout=0.5)
    sample, before = sample_of(), torch.cuda.get_rng_state()
    layer = captured(made, sample)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert_like_eager(made, layer, squares)
    assert not torch.equal(layer(numbers(0)), made(numbers(0)))
    layer._progress.restart()


def test_buffers_count_calls_and_not_captures() -> None:
    made = torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(16, device="cuda"))
    layer = captured(made)
    assert int(made[1].num_batches_tracked) == 0 and not made[1].running_mean.any()
    layer(numbers(1)).sum().backward()
    mean = made[1].running_mean.clone()
    assert int(made[1].num_batches_tracked) == 1
    made[1].reset_running_stats()
    made(numbers(1))
    assert torch.equal(made[1].running_mean, mean)


def test_keywords_nested_tensors_and_constants() -> None:
    made = module(
        lambda self, x, *, mask, scale: {"y": self.a(x) * mask[0] * scale, "n": scale, "seen": (mask[0] > 0)}, a=linear()
    )
    keywords = {"mask": [numbers(5)], "scale": 3}
    layer = captured(made, sample_keywords=[keywords])
    assert_like_eager(made, layer, lambda result: squares(result["y"]) * result["n"], **keywords)
    result = layer(numbers(0), mask=[numbers(1)], scale=3)
    assert result["n"] == 3 and result["seen"].dtype == torch.bool and not result["seen"].requires_grad
    with pytest.raises(errors.InvalidArgumentError, match="4 was passed where 3 was captured"):
        layer(numbers(0), mask=[numbers(1)], scale=4)
    with pytest.raises(errors.InvalidArgumentError, match="5 was passed where a tensor was captured"):
        layer(numbers(0), mask=[5], scale=3)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"arguments are \(a tensor, mask=\[a tensor\]\), and were .*scale=3\)"
    ):
        layer(numbers(0), mask=[numbers(1)])


def test_an_output_that_no_loss_uses_has_the_gradient_zero() -> None:
    made = module(lambda self, x: (self.a(x), self.b(x)), a=linear(), b=linear())
    layer = captured(made)
    gradients(layer, made, lambda outputs: squares(outputs[0] * outputs[1]), numbers(4))
    layer_only_first = gradients(layer, made, lambda outputs: squares(outputs[0]), numbers(0))
    eager = gradients(made, made, lambda outputs: squares(outputs[0]), numbers(0))
    assert all(map(torch.equal, layer_only_first[:4], eager[:4]))
    assert not layer_only_first[4].any(), "the gradient of b; eager has None"


def test_a_gradient_that_a_layer_passes_on_is_not_the_static_one() -> None:
    """x + bias: the input's gradient is the output's."""
    made = module(lambda self, x: x + self.a.bias, a=linear())
    made.a.weight.requires_grad_(False)
    layers = capture_layers([made, linear()], [sample_of(), sample_of()])
    [[first, _]] = layers.layers
    assert {
        each.data_ptr() for run in first.passes.values() for each in run._input_gradients if each is not None
    }.isdisjoint(each.data_ptr() for run in first.passes.values() for each in run.output_gradients)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast(dtype: str) -> None:
    made = block(16)
    with torch.autocast("cuda", dtype=getattr(torch, dtype)):
        layer = captured(made)
        assert torch.is_autocast_cache_enabled()
        assert_like_eager(made, layer, squares)


def test_a_tensor_that_several_layers_read_gets_the_sum_of_their_gradients() -> None:
    """Autograd keeps the gradient of the last layer while the others run."""
    [modules] = chunks_of_blocks(1, 4)
    [layers] = capture_layers(modules, [sample_of() for _ in modules]).layers

    def run(layers: Any) -> list[Any]:
        x = numbers(3).requires_grad_()
        base = x * 2.0
        hidden = base
        for layer in layers:
            hidden = layer(hidden + base)
        result = hidden.detach().clone()
        squares(hidden).backward()
        found = [result, x.grad.clone()] + [each.grad.clone() for m in modules for each in m.parameters()]
        for m in modules:
            m.zero_grad()
        return found

    expected = run(modules)
    assert all(map(torch.equal, run(layers), expected))


def test_frozen_layers_have_no_backward() -> None:
    modules = [linear().requires_grad_(False), linear()]
    layers = capture_layers(modules, [sample_of().detach(), sample_of().detach()])
    assert layers.memory_report().graphs == 3
    for seed in range(2):
        modules[1].zero_grad()
        hidden = layers.layers[0][1](layers.layers[0][0](numbers(seed)))
        squares(hidden).backward()
        found = modules[1].weight.grad.clone()
        modules[1].zero_grad()
        squares(modules[1](modules[0](numbers(seed)))).backward()
        assert torch.equal(found, modules[1].weight.grad)


def test_evaluation_runs_the_module() -> None:
    made = block(16, dropout=0.5)
    layer = captured(made)
    x = numbers(0)
    with torch.no_grad():
        assert layer(x).shape == x.shape
        assert layer(x[:2]).shape == x[:2].shape, "other shapes, too"
    made.eval()
    assert torch.equal(layer(x), made(x))
    made.train()
    layer(x).sum().backward()


def test_hooks_of_parameters_run_at_each_replay() -> None:
    made = linear()
    seen: list[float] = []
    made.weight.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    layer = captured(made)
    assert not seen
    layer(numbers(0)).sum().backward()
    layer(numbers(1)).sum().backward()
    assert len(seen) == 2 and seen[0] != seen[1]


@pytest.mark.multigpu
def test_layers_of_another_device() -> None:
    with torch.cuda.device(1):
        made = block(16)
        sample = sample_of()
    assert torch.cuda.current_device() == 0
    layer = captured(made, sample)
    assert torch.cuda.current_device() == 0
    assert {row.device for row in core.segments() if row.tag == "graphs"} == {1}
    x = numbers(2).to("cuda:1")
    assert torch.equal(layer(x), made(x))


def test_every_public_name_is_explained() -> None:
    from torch_memory_saver import layer_graphs

    assert all(getattr(layer_graphs, name).__doc__ for name in layer_graphs.__all__)


# ---- mistakes ----


def test_a_run_out_of_turn_is_refused() -> None:
    [modules] = chunks_of_blocks(1, 2)
    graphs = capture_layers(modules, [sample_of(), sample_of()], (1, 1, -1, -1))
    first, second = graphs.layers[0]
    hidden = first(numbers(0))
    message = (
        r"the forward of chunk 0, layer 0 was called, but the forward of chunk 0, layer 1, for micro-batch 0 comes next in "
        r"the captured order \(run 1 of 8\)"
    )
    with pytest.raises(errors.InvalidStateError, match=message):
        first(numbers(1))
    y = second(hidden)
    with (
        torch.autograd.set_multithreading_enabled(False),
        pytest.raises(errors.InvalidStateError, match=r"the backward of chunk 0, layer 1 was called, .* micro-batch 1"),
    ):
        y.sum().backward()
    graphs.restart()
    outputs = [second(first(numbers(seed))) for seed in range(2)]
    for output in outputs:
        output.sum().backward()


@pytest.mark.parametrize(
    "hook",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_modules_are_refused(hook: str) -> None:
    made = block(16)
    getattr(made.up, hook)(lambda *arguments: None)
    with pytest.raises(errors.InvalidArgumentError, match=rf"module up has a hook \({hook}\)"):
        captured(made)


def test_tensors_that_are_made_of_other_tensors_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def pair(x: Any) -> Any:
        return TwoTensor(x, x.clone())

    with pytest.raises(errors.InvalidArgumentError, match="tensor 0 of the sample is a TwoTensor, which is made of other"):
        captured(linear(), pair(numbers(0)))
    with pytest.raises(errors.InvalidArgumentError, match="tensor 0 is a TwoTensor, which is made of other"):
        captured(linear())(pair(numbers(0)))
    with pytest.raises(errors.InvalidArgumentError, match="tensor 0 of the result is a TwoTensor, which is made of other"):
        captured(module(lambda self, x: pair(self.a(x)), a=linear()))
    made = module(lambda self, x: self.a(x) + self.b(x).a, a=linear(), b=linear())
    made.b.requires_grad_(False).weight = torch.nn.Parameter(pair(made.b.weight.detach()), requires_grad=False)
    assert_like_eager(made, captured(made), squares)


def test_other_shapes_types_and_gradients_are_refused() -> None:
    layer = captured(linear(), sample_of().detach())
    with pytest.raises(errors.InvalidArgumentError, match=r"\[2, 16\] on cuda:0, and was torch.float32 \[4, 16\]"):
        layer(numbers(0)[:2])
    with pytest.raises(errors.InvalidArgumentError, match=r"tensor 0 is torch\.bfloat16"):
        layer(numbers(0).bfloat16())
    with pytest.raises(errors.InvalidArgumentError, match="requires a gradient, and its sample did not"):
        layer(numbers(0).requires_grad_())
    layer(numbers(0)).sum().backward()


def test_a_replaced_parameter_is_refused() -> None:
    made = [linear(), linear()]
    [[first, second]] = capture_layers(made, [sample_of(), sample_of()]).layers
    second(first(numbers(0))).sum().backward()
    made[1].weight = torch.nn.Parameter(made[1].weight.detach().clone())
    hidden = first(numbers(0))
    with pytest.raises(errors.InvalidStateError, match=r"layer 1 .* weight changed its address .*tensor.copy_"):
        second(hidden)


def test_an_output_that_the_backward_reads_must_not_change() -> None:
    layer = captured(module(lambda self, x: torch.tanh(self.a(x)), a=linear()))
    y = layer(numbers(0))
    y.add_(1)
    # On this thread: autograd's own would keep the graph for a moment longer.
    with (
        torch.autograd.set_multithreading_enabled(False),
        pytest.raises(errors.InvalidStateError, match="output 0 was changed in place"),
    ):
        y.sum().backward()


def test_an_output_that_the_backward_does_not_read_may_change() -> None:
    made = linear()
    assert_like_eager(made, captured(made), lambda y: squares(y.mul_(2)))


def test_layers_and_samples_must_fit() -> None:
    on_host = torch.nn.Linear(16, 16)
    for layers, samples, message in (
        ([linear()], [sample_of(), sample_of()], "sample_inputs is for"),
        ([], [], "nothing to capture"),
        ([on_host], [sample_of()], "they must be on one GPU"),
        ([linear()], [sample_of().cpu()], "a graph reads dense tensors on a GPU"),
        ([[linear()], linear()], [[sample_of()], sample_of()], "it must be a sequence"),
        ([[linear], [linear()]], [[sample_of()], [sample_of()]], "must be a torch.nn.Module"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=message):
            capture_layers(layers, samples)
    with pytest.raises(errors.InvalidArgumentError, match="warmup is 0"):
        captured(linear(), warmup=0)
    with pytest.raises(errors.InvalidArgumentError, match="leave pool=None"):
        captured(linear(), graphs="shared", pool=torch.cuda.graph_pool_handle())


def test_a_failing_layer_leaves_no_capture_open() -> None:
    made = module(lambda self, x: x * self.a(x).sum().item(), a=linear())
    refusal = (
        r"layer 0 \(Made\) cannot be captured: CUDA error: operation not permitted when stream is capturing. Captured code"
    )
    with pytest.raises(errors.InvalidArgumentError, match=refusal):
        captured(made)
    assert not torch.cuda.is_current_stream_capturing() and core.counters()["visible_captures"] == 0
    other = block(16)
    assert_like_eager(other, captured(other), squares)
