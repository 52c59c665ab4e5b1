"""Guards what counts as a change besides the bytes of tensors, when a model is described before and after its load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver.node_store import loading
from torch_memory_saver.node_store.tensors import Found, StorageShape, TensorShape


class Tensor:
    """A tensor, which may have attributes and hooks. Those of PyTorch are no entries of vars()."""

    _backward_hooks: Any = None
    _post_accumulate_grad_hooks: Any = None
    requires_grad = False


class Module:
    """A module with parameters, submodules and attributes."""

    def __init__(self, **parameters: Tensor) -> None:
        self._parameters: dict[str, Tensor] = parameters
        self._modules: dict[str, Module] = {}
        self._buffers: dict[str, Tensor] = {}
        self.training: bool | None = None

    def named_modules(self, prefix: str = "") -> list[tuple[str, Module]]:
        below = [each for name, module in self._modules.items() for each in module.named_modules(f"{prefix}{name}.")]
        return [(prefix.rstrip("."), self), *below]

    def named_parameters(self, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        return self._named("_parameters", remove_duplicate)

    def named_buffers(self, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        return self._named("_buffers", remove_duplicate)

    def _named(self, kind: str, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        assert not remove_duplicate
        return [
            (f"{path}.{name}".lstrip("."), tensor)
            for path, module in self.named_modules()
            for name, tensor in getattr(module, kind).items()
        ]


class OtherModule(Module):
    """What a module becomes."""


TORCH = SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(Module=Module))
SHAPE = TensorShape("torch.float32", (5,), (1,), 0, 0)


class Model(Module):
    """A model with one layer. `shape` is what find() says of its parameter, and `storages` where its other tensors lie."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["up"] = Module(weight=Tensor())
        self._buffers["scale"] = Tensor()
        self.number, self.name, self.call = 10**9, "".join(["na", "me"]), self.named_modules
        self.table, self.pair, self.kinds = {"a": 1}, (1, "x"), {"x"}
        self.shape, self.bytes = SHAPE, 20
        self.storages = {"scale": 1}

    def has(self, **facts: Any) -> None:
        self.shape = dataclasses.replace(SHAPE, **facts)

    @property
    def weight(self) -> Any:
        return self._modules["up"]._parameters["weight"]


@pytest.fixture(autouse=True)
def find(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are on no GPU."""

    def found(torch: Any, model: Model, operation: str) -> Found:
        others = {name: dataclasses.replace(SHAPE, storage=storage) for name, storage in model.storages.items()}
        shapes = [StorageShape(model.bytes, True, 0)] * 3
        return Found({**others, "up.weight": model.shape}, shapes, [None] * 3, [0])

    monkeypatch.setattr(loading, "find", found)


def change(load: Callable[[Any], Any]) -> str:
    model = Model()
    before = loading.describe(TORCH, model, "test")
    load(model)
    return loading.changed(before, loading.describe(TORCH, model, "test"))


def set_equal_values(model: Any) -> None:
    model.number, model.name, model.call = 10**9, "".join(["na", "me"]), model.named_modules
    model.table, model.pair, model.kinds, model.later = {"a": 1}, (1, "x"), {"x"}, {}
    model._buffers["scale"] = Tensor()


def test_equal_values_and_empty_containers_are_no_change() -> None:
    assert change(set_equal_values) == ""


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (lambda model: setattr(model, "number", 7), "changed 'number'"),
        (lambda model: setattr(model, "number", None), "changed 'number'"),
        (lambda model: delattr(model, "name"), "removed 'name'"),
        (lambda model: setattr(model, "later", Tensor()), "added 'later'"),
        (lambda model: setattr(model, "later", [0]), "added 'later.0'"),
        (lambda model: model.table.update(b=1), "added 'table.b'"),
        (lambda model: model.kinds.clear(), "removed 'kinds.x'"),
        (lambda model: model._modules.update(up=Module(weight=model.weight)), "replaced 'up'"),
        (lambda model: model._modules["up"]._parameters.update(weight=Tensor()), "replaced 'up.weight'"),
        (lambda model: setattr(model.weight, "quant_state", object()), "added 'up.weight.quant_state'"),
        (
            lambda model: model.has(dtype="torch.float16"),
            "changed the dtype of 'up.weight' from torch.float32 to torch.float16",
        ),
        (lambda model: model.has(shape=(4,)), "changed the shape of 'up.weight' from (5,) to (4,)"),
        (lambda model: model.has(strides=(2,)), "changed the strides of 'up.weight' from (1,) to (2,)"),
        (lambda model: setattr(model, "bytes", 40), "changed the storage of 'scale' from element 0, 20 bytes, device 0 to"),
        (lambda model: model.has(storage=1), "tied 'up.weight' to 'scale'"),
        (lambda model: model.storages.update(scale=0), "tied 'up.weight' to 'scale'"),
        (lambda model: model.storages.update(a=2), "added 'a'"),
        (lambda model: setattr(model.weight, "requires_grad", True), "changed 'up.weight.requires_grad'"),
        (lambda model: setattr(model._buffers["scale"], "requires_grad", True), "changed 'scale.requires_grad'"),
        (lambda model: setattr(model._buffers["scale"], "block", 128), "added 'scale.block'"),
        (lambda model: setattr(model.weight, "_backward_hooks", {5: print}), "added 'up.weight._backward_hooks.5'"),
        (
            lambda model: setattr(model.weight, "_post_accumulate_grad_hooks", {5: print}),
            "added 'up.weight._post_accumulate_grad_hooks.5'",
        ),
        (lambda model: setattr(model._modules["up"], "__class__", OtherModule), "changed 'up.__class__'"),
    ],
)
def test_everything_else_is_named(load: Callable[[Any], Any], text: str) -> None:
    found = change(load)
    assert found.startswith(text) and found.endswith(", which adopting would not: do that after adopt_or_load()")


def test_weights_that_loading_separates_are_named() -> None:
    model = Model()
    model.storages = {"scale": 0}
    before = loading.describe(TORCH, model, "test")
    model.storages = {"scale": 1}
    after = loading.describe(TORCH, model, "test")
    assert loading.changed(before, after).startswith("untied 'up.weight' from 'scale', which")


@pytest.mark.parametrize(("mode", "call"), [(False, "eval()"), (True, "train()")])
def test_the_mode_of_a_module_names_its_call(mode: bool, call: str) -> None:
    def load(model: Model) -> None:
        model._modules["up"].training = mode

    assert change(load) == f"changed 'up.training', which adopting would not: call {call} after adopt_or_load()"


def test_a_description_keeps_no_tensor() -> None:
    model = Model()
    before = loading.describe(TORCH, model, "test")
    model._modules["up"]._parameters["weight"] = Tensor()
    dead = [value for place, value in before.items() if place == ("up", "_parameters", "weight")]
    assert [reference() for reference in dead] == [None]
