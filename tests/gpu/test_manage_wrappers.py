"""Guards manage() of optimizers that wrap others: those with the state are followed, unknown wrappers are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import errors, saver, torch

pytest.importorskip("torch", reason="PyTorch is not installed")

TAG = "optimizer"
WIDTH = 64
#: The bytes of AdamW's state of one layer that lie on the device.
STATE = 2 * WIDTH * WIDTH * 4


def layers(number: int) -> list[Any]:
    return [torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(number)]


def adam(layer: Any) -> Any:
    layer.weight.grad = torch.ones_like(layer.weight)
    return torch.optim.AdamW(layer.parameters(), lr=0.1)


def tags(optimizers: list[Any]) -> list[str | None]:
    """The tags of all state of optimizers on the device."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [saver.tag_of(tensor) for state in states for tensor in state.values() if tensor.is_cuda]


def hooks_of(optimizer: Any) -> int:
    return sum(
        len(getattr(optimizer, f"_optimizer_{name}_hooks")) for name in ("step_pre", "step_post", "load_state_dict_post")
    )


class Silent(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
    """An optimizer that never calls its base's __init__, as accelerate's does."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @property
    def state(self) -> Any:
        return next(iter(vars(self).values())).state

    @property
    def param_groups(self) -> Any:
        return next(iter(vars(self).values())).param_groups

    def step(self, closure: Any = None) -> None:
        for each in vars(self).values():
            each.step(closure)


class Plain:
    """An object that is no optimizer of PyTorch, as those of DeepSpeed and Megatron-LM."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> None:
        for each in vars(self).values():
            for inner in each if isinstance(each, (list, tuple)) else [each]:
                inner.step()


class Sharing(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
    """An optimizer with hooks and state of its own, as PyTorch's ZeroRedundancyOptimizer."""

    def __init__(self, **attributes: Any) -> None:
        (first,) = attributes.values()
        super().__init__(first.param_groups, {})
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> None:
        for each in list(vars(self).values()):
            if isinstance(each, torch.optim.Optimizer):
                each.step(closure)


def pairs(first: Any, second: Any) -> Any:
    return Plain(by_name=[("a", first), ("b", second)], step=lambda: [each.step() for each in (first, second)])


WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda first, second: Silent(optimizer=first, optim=second),
    "nested": lambda first, second: [Silent(optim=Silent(optimizer=first)), Silent(optimizer=Plain(optimizer=second))],
    "chained": lambda first, second: Plain(chained_optimizers=[Plain(optimizer=first), Plain(optimizer=second)]),
    "pairs": pairs,
    "hooks": lambda first, second: [Sharing(optim=first), Sharing(optimizer=second)],
    "tuple": lambda first, second: Plain(parts=(first, second)),
}


def step(wrapper: Any) -> None:
    for each in wrapper if isinstance(wrapper, list) else [wrapper]:
        each.step()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_optimizers_inside_are_followed(wrap: Callable[[Any, Any], Any]) -> None:
    inner = [adam(layer) for layer in layers(2)]
    wrapper = wrap(*inner)
    handle = saver.manage(wrapper, tag=TAG, backup="host")
    assert handle.moved_bytes == 0
    step(wrapper)
    assert handle.moved_bytes == 2 * STATE
    assert tags(inner) == [TAG] * 4
    assert saver.manage([wrapper, inner], tag=TAG, backup="host").moved_bytes == 0
    handle.remove()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_state_that_exists_moves_at_once(wrap: Callable[[Any, Any], Any]) -> None:
    inner = [adam(layer) for layer in layers(2)]
    wrapper = wrap(*inner)
    step(wrapper)
    handle = saver.manage(wrapper, tag=TAG)
    assert handle.moved_bytes == 2 * STATE
    handle.remove()
    assert [hooks_of(each) for each in inner] == [0, 0]


def test_wrappers_that_refer_to_each_other_end() -> None:
    first, second = (adam(layer) for layer in layers(2))
    outer = Plain(optimizer=first, chained=[second])
    first.optimizer, second.owner = outer, [outer]
    outer.itself = [outer]
    handles = [saver.manage(each, tag=TAG) for each in (outer, first, second)]
    first.step()
    second.step()
    assert tags([first, second]) == [TAG] * 4
    assert [hooks_of(each) for each in (first, second)] == [3, 3]
    for handle in handles:
        handle.remove()


def test_state_that_a_wrapper_loads_into_the_inner_one_moves_at_once() -> None:
    class Loading(Sharing):
        def load_state_dict(self, state: Any) -> None:
            for parameter in self.optim.param_groups[0]["params"]:
                self.optim.state[parameter] = {"loaded": torch.ones_like(parameter)}
            super().load_state_dict(state)

    (layer,) = layers(1)
    wrapper = Loading(optim=adam(layer))
    handle = saver.manage(wrapper, tag=TAG)
    wrapper.load_state_dict(wrapper.state_dict())
    assert tags([wrapper.optim]) == [TAG]
    other = saver.manage(wrapper.optim, tag="other")
    wrapper.load_state_dict(wrapper.state_dict())
    assert tags([wrapper.optim]) == ["other"], "a later call for the inner optimizer replaces the earlier one"
    handle.remove()
    other.remove()


# -- refusals ----------------------------------------------------------------------------------------------------------


def opaque(inner: Any) -> Any:
    """An optimizer whose inner one only a function knows."""

    class Opaque(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            pass

        def step(self, closure: Any = None) -> None:
            inner.step(closure)

    return Opaque()


UNKNOWN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another attribute": (lambda inner: Silent(hidden=inner), "Silent keeps an optimizer in its attribute 'hidden'"),
    "with hooks": (lambda inner: Sharing(base=inner), "Sharing keeps an optimizer in its attribute 'base'"),
    "a function": (opaque, r"Opaque has not called Optimizer.__init__\(\) and holds no optimizer"),
    "deeper": (lambda inner: Plain(optimizers=[inner, opaque(inner)]), "Opaque has not called"),
    "no optimizer": (lambda inner: Plain(step_size=inner.param_groups), "needs tensors, modules, optimizers"),
}


@pytest.mark.parametrize(("wrap", "match"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_wrapper_is_refused_before_anything_moves(wrap: Callable[[Any], Any], match: str) -> None:
    (layer,) = layers(1)
    inner = adam(layer)
    for _ in range(2):
        with pytest.raises(errors.InvalidArgumentError, match=match):
            saver.manage([layer, inner, wrap(inner)], tag=TAG)
    assert saver.tag_of(layer.weight) is None
    assert hooks_of(inner) == 0


def test_a_wrapper_with_the_state_of_the_one_that_it_hides_is_followed_itself() -> None:
    class Delegating(torch.optim.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def step(self, closure: Any = None) -> None:
            self._inner.step(closure)

    (layer,) = layers(1)
    wrapper = Delegating(adam(layer))
    handle = saver.manage(wrapper, tag=TAG)
    wrapper.step()
    assert tags([wrapper._inner]) == [TAG] * 2
    handle.remove()


def test_a_failed_call_removes_its_followers_and_keeps_the_earlier_ones() -> None:
    first, second = (adam(layer) for layer in layers(2))
    earlier = saver.manage(first, tag="earlier")
    register = second.register_load_state_dict_post_hook

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    second.register_load_state_dict_post_hook = fail
    with pytest.raises(KeyboardInterrupt):
        saver.manage([first, second], tag=TAG)
    second.register_load_state_dict_post_hook = register
    assert (hooks_of(first), hooks_of(second)) == (3, 0)
    first.step()
    second.step()
    assert (tags([first]), tags([second])) == (["earlier"] * 2, [None] * 2)
    earlier.remove()


def test_a_call_that_fails_during_the_move_removes_its_followers() -> None:
    (layer,) = layers(1)
    optimizer = adam(layer)
    saver.memory_margin_bytes = torch.cuda.mem_get_info()[1]
    with pytest.raises(errors.OutOfMemoryError):
        saver.manage([layer, optimizer], tag=TAG)
    saver.memory_margin_bytes = 0
    assert hooks_of(optimizer) == 0


# -- a step without state ----------------------------------------------------------------------------------------------


def test_one_warning_after_a_first_step_that_made_no_state(caplog: pytest.LogCaptureFixture) -> None:
    class Stateless(torch.optim.SGD):  # type: ignore[misc, name-defined, unused-ignore]
        pass

    (layer,) = layers(1)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = Stateless(layer.parameters(), lr=0.1)
    handle = saver.manage(optimizer, tag=TAG)
    for _ in range(3):
        optimizer.step()
    assert [record.message.count("step() of Stateless has made no state") for record in caplog.records] == [1]
    handle.remove()


def test_no_warning_of_a_wrapper_whose_state_is_inside(caplog: pytest.LogCaptureFixture) -> None:
    (layer,) = layers(1)
    wrapper = Sharing(optim=adam(layer))
    handle = saver.manage(wrapper, tag=TAG)
    wrapper.step()
    assert not [record for record in caplog.records if "no state" in record.message]
    handle.remove()


def test_wrapped_optimizers_are_not_kept_alive() -> None:
    (layer,) = layers(1)
    wrapper = Sharing(optim=adam(layer))
    handle = saver.manage(wrapper, tag=TAG)
    wrapper.step()
    references = [weakref.ref(wrapper), weakref.ref(wrapper.optim)]
    del wrapper
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    handle.remove()


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_the_wrappers_of_pytorch(preload: bool) -> None:
    for done in run_programs([Program("managed_training.py", ("zero,local_sgd",), preload=preload)]):
        done.check()
        assert done.output.splitlines() == ["ok: zero", "ok: local_sgd"]
