"""Guards the search for tensors and their names, with stand-ins for PyTorch's tensors and modules."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from torch_memory_saver._engine.tensors.lookup import extent_of, find_tensors


class Tensor:
    """One on a GPU: where it begins, its shape and strides, of 4 bytes each."""

    def __init__(self, address: int, *shape: int, stride: tuple[int, ...] | None = None, device: str = "cuda") -> None:
        self.address, self.shape, self.device = address, shape, device
        self.strides = stride if stride is not None else tuple(_product(shape[i + 1 :]) for i in range(len(shape)))
        self.dtype = "float32"

    def untyped_storage(self) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type=self.device))

    def numel(self) -> int:
        return _product(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return self.address


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


class Made(Tensor):
    """Made of other tensors, as DTensor is."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [f"part{number}" for number in range(len(self.parts))], None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("part"):
            return self.parts[int(name[4:])]
        raise AttributeError(name)


class Broken(Tensor):
    """Of a subclass that expects a state which it is not in."""

    def __init__(self) -> None:
        pass

    def __tensor_flatten__(self) -> Any:
        raise RuntimeError("not now")

    def untyped_storage(self) -> Any:
        raise RuntimeError("no storage")


class Module:
    def __init__(self, **members: Any) -> None:
        self._modules = {name: each for name, each in members.items() if isinstance(each, Module) or each is None}
        self._parameters = {name: each for name, each in members.items() if isinstance(each, Tensor) and name[0] == "w"}
        self._buffers = {name: each for name, each in members.items() if isinstance(each, Tensor) and name[0] != "w"}

    def modules(self) -> list[Module]:
        return [self, *(each for child in self._modules.values() if child for each in child.modules())]


class Engine(Module):
    pass


class Scripted(Module):
    """Keeps its members elsewhere."""

    def __init__(self) -> None:
        pass


torch = SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(Module=Module))
#: No real memory has such addresses.
FIRST = 1 << 60


def test_without_torch_there_is_none() -> None:
    found = find_tensors(None, ())
    assert found.inside(0, 1 << 63) == []
    assert found.hidden_objects == 0


def test_tensors_are_named_by_the_path_of_their_module() -> None:
    cos, weight, plain = Tensor(FIRST, 4, 2), Tensor(FIRST + 100, 3), Tensor(FIRST + 200, 1)
    engine = Engine(layer=Module(rope=Module(cos=cos), nothing=None), weight=weight)
    found = find_tensors(torch, ())
    (one,) = found.inside(FIRST, 1)
    assert one == (FIRST, 32, "float32", (4, 2), ("Engine.layer.rope.cos",), True)
    assert [tensor.names for tensor in found.inside(FIRST, 300)] == [("Engine.layer.rope.cos",), ("Engine.weight",), ()]
    assert found.inside(FIRST + 1, 99) == [], "those that begin there"
    del engine, plain


def test_a_tensor_of_several_modules_has_several_names() -> None:
    tied = Tensor(FIRST, 8)
    modules = [Engine(weight=tied, head=Module(weight=tied)), Scripted()]
    (one,) = find_tensors(torch, ()).inside(FIRST, 1)
    assert one.names == ("Engine.head.weight", "Engine.weight")
    del modules


def test_modules_that_hold_each_other_have_a_path() -> None:
    first, second = Engine(weight=Tensor(FIRST, 1)), Module(weight=Tensor(FIRST + 8, 1))
    first._modules["second"], second._modules["first"] = second, first
    names = [tensor.names for tensor in find_tensors(torch, ()).inside(FIRST, 16)]
    assert all(len(each) == 1 and each[0].endswith("weight") for each in names)
    first._modules.clear()


def test_the_tensors_that_another_is_made_of_have_its_name() -> None:
    made, broken = Made(Tensor(FIRST, 2), Made(Tensor(FIRST + 64, 2))), Broken()
    engine = Engine(weight=made, weird=broken)
    assert [tensor.names for tensor in find_tensors(torch, ()).inside(FIRST, 100)] == [("Engine.weight",)] * 2
    del engine


def test_what_has_no_memory_on_a_gpu_is_left_out() -> None:
    kept = [Tensor(FIRST, 2, device="cpu"), Tensor(FIRST, 0), Broken()]
    assert [extent_of(tensor) for tensor in kept] == [None] * 3
    assert find_tensors(torch, ()).inside(FIRST, 1) == []


def test_views_with_gaps_are_not_dense() -> None:
    assert extent_of(Tensor(FIRST, 3, 2, stride=(10, 1))) == (FIRST, 4 * 22)
    assert extent_of(Tensor(FIRST, 2, 3, stride=(1, 2))) == (FIRST, 4 * 6)
    kept = [Tensor(FIRST, 3, 2, stride=(10, 1)), Tensor(FIRST + 1000, 2, 3, stride=(1, 2))]
    assert [tensor.is_dense for tensor in find_tensors(torch, ()).inside(FIRST, 2000)] == [False, True]
    del kept


def test_what_is_frozen_is_not_listed_unless_it_is_passed() -> None:
    engine = Engine(child=Module(cos=Tensor(FIRST, 4)))
    gc.freeze()
    try:
        hidden = find_tensors(torch, ())
        assert hidden.inside(FIRST, 1) == []
        assert hidden.hidden_objects > 0
        (one,) = find_tensors(torch, (engine,)).inside(FIRST, 1)
        assert one.names == ("Engine.child.cos",)
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as conftest.py leaves it


def test_no_tensor_is_kept_alive() -> None:
    tensor = Tensor(FIRST, 4)
    before = len(gc.get_referrers(tensor))
    found = find_tensors(torch, ())
    assert found.inside(FIRST, 1)
    assert len(gc.get_referrers(tensor)) == before
