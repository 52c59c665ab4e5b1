"""Guards manage() of optimizers: their state moves after the step that has made it, and training gives the same numbers."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, empty, errors, free_bytes, saver, torch

from torch_memory_saver._engine.tensors import managed_tensors
from torch_memory_saver._torch.binding import layer

TAG = "optimizer"
WIDTH = 64


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The size of each storage that was moved, and the free bytes of the device after it."""
    seen: list[tuple[int, int]] = []
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_and_count(storage: Any, size: int) -> Any:
        __tracebackhide__ = True  # PyTorch shows a storage with all its bytes
        result = resize(storage, size)
        seen.append((size, int(torch.cuda.mem_get_info(0)[0])))
        return result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_and_count, raising=False)
    yield seen


def new_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).cuda()


def give_gradients(model: Any, step: int) -> None:
    """Gradients that depend on the weights, without products of matrices: the same with every optimizer."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        with torch.no_grad():
            torch.mul(parameter, 0.5 + number + step, out=parameter.grad)


def state_of(optimizer: Any) -> list[Any]:
    return [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]


def tags(optimizer: Any) -> set[str | None]:
    return {saver.tag_of(tensor) for tensor in state_of(optimizer) if tensor.is_cuda}


def expected_after(steps: int, make: Callable[[Any], Any]) -> list[Any]:
    """The weights after training without the package's help."""
    model = new_model()
    optimizer = make(model)
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_weights(model: Any, expected: list[Any]) -> None:
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))


ADAM = {
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
def test_adams_state_moves_after_the_first_step(options: dict[str, bool], moves: list[tuple[int, int]]) -> None:
    def make(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    expected = expected_after(4, make)
    model = new_model()
    optimizer = make(model)
    handle = saver.manage(optimizer, tag=TAG, backup="host")
    assert handle.moved_bytes == 0
    for step in range(4):
        give_gradients(model, step)
        optimizer.step()
        assert tags(optimizer) == {TAG}
        if step == 0:
            size = sum(tensor.untyped_storage().nbytes() for tensor in state_of(optimizer) if tensor.is_cuda)
            assert handle.moved_bytes == sum(moved for moved, _ in moves) == size
            moves.clear()
        assert saver.pause(TAG).bytes >= handle.moved_bytes
        saver.resume(TAG)
    assert moves == [], "later steps move nothing"
    assert [saver.tag_of(parameter) for parameter in model.parameters()] == [None] * 3
    assert_weights(model, expected)


def test_a_step_that_adds_nothing_costs_no_look_at_pytorchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    optimizer.step()
    calls: list[str] = []
    monkeypatch.setattr(managed_tensors, "find_movable", lambda *_: calls.append("find"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("synchronize"))
    monkeypatch.setattr(layer.require(), "empty_cache", lambda: calls.append("empty"))
    for step in range(1, 3):
        give_gradients(model, step)
        optimizer.step()
    monkeypatch.undo()
    assert calls == []


def test_a_step_of_an_optimizer_without_state_empties_the_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    emptied: list[int] = []
    empty_cache = layer.require().empty_cache
    monkeypatch.setattr(layer.require(), "empty_cache", lambda: emptied.append(1) or empty_cache())
    optimizer.step()
    first = len(emptied)
    optimizer.step()
    assert first >= 1
    assert len(emptied) == first


def test_temporaries_of_a_step_stay_outside() -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    inside: list[str | None] = []

    def look(*_: Any) -> None:
        inside.append(saver.tag_of(empty(MIB)))

    optimizer.register_step_pre_hook(look)
    saver.manage(optimizer, tag=TAG)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    assert inside == [None, None]
    size = sum(tensor.untyped_storage().nbytes() for tensor in state_of(optimizer) if tensor.is_cuda)
    assert saver.stats(TAG).total.resident_bytes <= size + 2 * MIB


def test_the_state_does_not_lie_in_segments_of_activations(moves: list[tuple[int, int]]) -> None:
    """They would stay on the device until all of the state in them has moved."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12))).cuda()
    size = 2048 * 2048 * 4
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    after: list[int] = []
    optimizer.register_step_post_hook(lambda *_: after.append(free_bytes()))
    saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    del [empty(24 * size)][0]
    assert torch.cuda.memory_reserved() >= 24 * size
    optimizer.step()
    assert len(moves) == 12 * 3
    assert after[0] - min(free for _, free in moves) <= size + 64 * MIB


def test_state_that_exists_moves_at_once() -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    give_gradients(model, 0)
    optimizer.step()
    assert tags(optimizer) == {None}
    assert saver.manage([model, optimizer], tag=TAG).moved_bytes == 3 * 3 * WIDTH * WIDTH * 4
    assert tags(optimizer) == {TAG}
    assert {saver.tag_of(parameter) for parameter in model.parameters()} == {TAG}


def test_the_state_of_a_new_group_moves(moves: list[tuple[int, int]]) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model[0].parameters())
    saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    optimizer.step()
    assert len(moves) == 2
    optimizer.add_param_group({"params": [model[1].weight], "lr": 0.1})
    optimizer.step()
    assert len(moves) == 4
    assert len(state_of(optimizer)) == 6
    assert tags(optimizer) == {TAG}


def test_state_that_is_loaded_moves_at_once() -> None:
    def make(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    expected = expected_after(4, make)
    model = new_model()
    first, second = make(model), make(model)
    handle = saver.manage(second, tag=TAG, backup="host")
    for step in range(2):
        give_gradients(model, step)
        first.step()
    second.load_state_dict(first.state_dict())
    assert handle.moved_bytes == 2 * 3 * WIDTH * WIDTH * 4
    assert tags(second) == {TAG}
    saver.pause(TAG)
    saver.resume(TAG)
    for step in range(2, 4):
        give_gradients(model, step)
        second.step()
    assert tags(second) == {TAG}
    assert_weights(model, expected)


def test_state_that_a_step_replaces_moves_again() -> None:
    """An optimizer that does not work in place, and keeps tensors in lists."""

    class Averages(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["history"] = [parameter.detach() * 2, {"nested": (parameter.detach() + 1,)}]

    model = new_model()
    optimizer = Averages(model.parameters())
    handle = saver.manage(optimizer, tag=TAG)
    for step in range(1, 4):
        optimizer.step()
        assert handle.moved_bytes == step * 3 * 2 * WIDTH * WIDTH * 4
        for parameter in model.parameters():
            doubled, nested = optimizer.state[parameter]["history"]
            assert saver.tag_of(doubled) == saver.tag_of(nested["nested"][0]) == TAG
            assert torch.equal(doubled, parameter * 2)


def test_remove_ends_the_registration(moves: list[tuple[int, int]]) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = saver.manage(optimizer, tag=TAG)
    handle.remove()
    handle.remove()
    give_gradients(model, 0)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (moves, handle.moved_bytes, tags(optimizer)) == ([], 0, {None})


def test_a_later_call_replaces_the_earlier_one(moves: list[tuple[int, int]]) -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    first = saver.manage(optimizer, tag="first")
    second = saver.manage(optimizer, tag="second")
    give_gradients(model, 0)
    optimizer.step()
    assert tags(optimizer) == {"second"}
    assert (first.moved_bytes, len(moves)) == (0, 6)
    first.remove()  # which leaves the second one alone
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (tags(optimizer), len(moves)) == ({"second"}, 12)
    second.remove()


def test_an_optimizer_is_not_kept_alive() -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    handle.remove()


def test_a_lack_of_memory_leaves_the_state_and_the_next_step_moves_it() -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    saver.memory_margin_bytes = torch.cuda.mem_get_info()[1]
    with pytest.raises(errors.OutOfMemoryError, match=r"AdamW.state\[0\]\['exp_avg"):
        optimizer.step()
    assert (handle.moved_bytes, tags(optimizer)) == (0, {None})
    saver.memory_margin_bytes = 0
    give_gradients(model, 1)
    optimizer.step()
    assert tags(optimizer) == {TAG}
    assert_weights(model, expected_after(2, lambda model: torch.optim.AdamW(model.parameters())))


def test_a_capture_that_begins_during_the_look_at_the_state_delays_the_move(
    moves: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the optimizer comes before the wait for captures, and another thread may begin one in between."""
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters())
    saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    answers = [False, False, True]  # before the step that makes the state, before the move, and at the move
    with monkeypatch.context() as patched:
        patched.setattr(managed_tensors, "_is_capturing", lambda torch: answers.pop(0))
        optimizer.step()
    assert (answers, moves) == ([], [])
    give_gradients(model, 1)
    optimizer.step()
    assert tags(optimizer) == {TAG}


# -- captured steps ----------------------------------------------------------------------------------------------------


def on_a_side_stream(work: Callable[[], Any]) -> None:
    """As PyTorch's documentation warms up for a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True, "capturable": True}], ids=["foreach", "fused"])
def test_a_captured_step_uses_the_moved_state(options: dict[str, bool], moves: list[tuple[int, int]]) -> None:
    def make(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    expected = expected_after(4, make)
    model = new_model()
    optimizer = make(model)
    saver.manage(optimizer, tag=TAG, backup="host")
    give_gradients(model, 0)
    on_a_side_stream(optimizer.step)
    assert tags(optimizer) == {TAG}
    moves.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert moves == []
    for step in range(1, 4):
        give_gradients(model, step)
        saver.pause(TAG)
        saver.resume(TAG)
        graph.replay()
    assert_weights(model, expected)
    del graph


def test_state_that_a_capture_has_made_is_refused_by_name() -> None:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    handle = saver.manage(optimizer, tag=TAG)
    give_gradients(model, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert handle.moved_bytes == 0
    graph.replay()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(errors.InvalidArgumentError, match=r"AdamW.state\[0\].* has memory of pool .* captured graphs"):
        optimizer.step()
    assert not torch.equal(before[0], model[0].weight), "the step itself has run"
    with pytest.raises(errors.InvalidArgumentError, match="captured graphs"):
        saver.manage(optimizer, tag=TAG)
    handle.remove()
    optimizer.step()
    assert tags(optimizer) == {None}
    del graph


# -- several processes' training ---------------------------------------------------------------------------------------


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_distributed_training(preload: bool) -> None:
    """DDP with its buckets, and FSDP2, each in a group of one."""
    for done in run_programs([Program("managed_training.py", ("ddp,fsdp",), preload=preload)]):
        done.check()
        assert done.output.splitlines() == ["ok: ddp", "ok: fsdp"]
