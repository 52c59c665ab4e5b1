"""Guards the record of what the package replaces in other packages: which rows are in force, and what is put back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import torch_memory_saver
from torch_memory_saver import _patches
from torch_memory_saver._patches import PATCHES, is_replaced, note_operator, patches_in_force, replace, restore
from torch_memory_saver.reports import Patch

EMPTY, COLLECT = "torch.cuda.empty_cache", "torch.cuda.ipc_collect"


@pytest.fixture(autouse=True)
def nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_patches, "_places", {})
    monkeypatch.setattr(_patches, "_operators", {})
    yield


def names() -> list[str]:
    return [patch.name for patch in patches_in_force()]


def test_each_row_is_complete_and_has_a_name_of_its_own() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    assert all(patch.when and patch.reason and isinstance(patch, Patch) for patch in PATCHES)


def test_the_module_and_the_saver_have_the_list() -> None:
    module = SimpleNamespace(empty_cache=len)
    replace(EMPTY, module, "empty_cache", max)
    (patch,) = torch_memory_saver.patches()
    assert patch is next(row for row in PATCHES if row.name == EMPTY)
    assert torch_memory_saver.torch_memory_saver.patches() == (patch,)


def test_a_replacement_is_in_force_until_the_original_is_back() -> None:
    module = SimpleNamespace(empty_cache=len)
    assert not is_replaced(module, "empty_cache")
    replace(EMPTY, module, "empty_cache", max)
    assert module.empty_cache is max
    assert is_replaced(module, "empty_cache")
    assert names() == [EMPTY]
    restore(module, "empty_cache")
    assert module.empty_cache is len
    assert not is_replaced(module, "empty_cache")
    assert names() == []


def test_a_wrapper_of_the_program_stays_and_the_row_as_well() -> None:
    module = SimpleNamespace(empty_cache=len)
    replace(EMPTY, module, "empty_cache", max)
    module.empty_cache = min  # the program's, around ours
    restore(module, "empty_cache")
    assert module.empty_cache is min
    assert names() == [EMPTY]


def test_a_second_replacement_remembers_the_first_original() -> None:
    module = SimpleNamespace(empty_cache=len)
    replace(EMPTY, module, "empty_cache", max)
    replace(EMPTY, module, "empty_cache", min)
    restore(module, "empty_cache")
    assert module.empty_cache is len


def test_rows_come_in_the_order_of_the_table_once_each() -> None:
    order = [patch.name for patch in PATCHES if patch.name in (EMPTY, COLLECT)]
    for name in reversed(order):
        replace(name, SimpleNamespace(a=len), "a", max)
        replace(name, SimpleNamespace(a=len), "a", max)
    assert names() == order


def test_entries_of_a_dict() -> None:
    table: dict[type, Any] = {int: len}
    replace(COLLECT, table, int, max)
    assert table == {int: max}
    restore(table, int)
    assert table == {int: len}


def test_an_attribute_that_a_class_only_inherits_is_deleted_again() -> None:
    class Base:
        def close(self) -> str:
            return "base"

    class Pool(Base):
        pass

    replace(COLLECT, Pool, "close", lambda self: "ours")
    assert Pool().close() == "ours"
    restore(Pool, "close")
    assert "close" not in vars(Pool)
    assert Pool().close() == "base"


def test_an_operator_is_in_force_for_good() -> None:
    note_operator("aten::_cudnn_init_dropout_state", object())
    assert names() == ["aten::_cudnn_init_dropout_state"]


def test_what_has_no_row_is_refused() -> None:
    module = SimpleNamespace(a=len)
    with pytest.raises(KeyError):
        replace("torch.cuda.nothing", module, "a", max)
    assert module.a is len
