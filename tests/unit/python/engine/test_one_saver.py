"""Guards that a process has one saver: it can be copied and pickled, and the module has its settings."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import torch_memory_saver as module
from torch_memory_saver import errors
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.saver import TorchMemorySaver

SETTINGS = [name for name, value in vars(TorchMemorySaver).items() if isinstance(value, property)]


class Engine:
    """An object of a program that holds the saver and a method of it."""

    def __init__(self) -> None:
        self.saver = saver
        self.pause = saver.pause


# ---- copies ----


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_unpickling_gives_the_saver_of_the_process(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(saver, protocol)) is saver


def test_copies_are_the_object_itself() -> None:
    assert copy.copy(saver) is saver
    assert copy.deepcopy(saver) is saver
    assert copy.deepcopy({"nested": [saver]})["nested"][0] is saver


def test_objects_that_hold_the_saver_can_be_copied() -> None:
    for other in (pickle.loads(pickle.dumps(Engine())), copy.deepcopy(Engine()), copy.copy(Engine())):
        assert other.saver is saver
        assert other.pause == saver.pause


def test_a_second_object_does_not_survive_a_copy_as_a_third() -> None:
    second = module.TorchMemorySaver()
    assert copy.deepcopy(second) is second
    assert pickle.loads(pickle.dumps(second)) is saver


def test_another_process_has_its_own(tmp_path: Any) -> None:
    file = tmp_path / "saver.pickle"
    file.write_bytes(pickle.dumps(saver))
    program = (
        "import pickle, sys; found = pickle.load(open(sys.argv[1], 'rb')); "
        "import torch_memory_saver; assert found is torch_memory_saver.torch_memory_saver"
    )
    subprocess.run([sys.executable, "-c", program, str(file)], check=True)


# ---- settings of the module ----


@pytest.fixture
def restored() -> Iterator[None]:
    guard, host_memory, retain = saver.guard, saver.host_memory, saver.retain_cpu_backup
    margin, share_for = saver.memory_margin_bytes, saver.share_for
    yield
    saver.guard, saver.host_memory, saver.retain_cpu_backup = guard, host_memory, retain
    saver.memory_margin_bytes, saver.share_for = margin, share_for


def test_every_setting_is_an_attribute_of_the_module() -> None:
    assert set(SETTINGS) >= {"guard", "host_memory", "hook_mode", "memory_margin_bytes", "retain_cpu_backup", "share_for"}
    for name in SETTINGS:
        assert getattr(module, name) == getattr(saver, name)
        assert name in module.__annotations__, "declared for type checkers"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guard", True),
        ("host_memory", "pool"),
        ("retain_cpu_backup", True),
        ("memory_margin_bytes", 4096),
        ("share_for", "2.8"),
    ],
)
def test_a_setting_of_the_module_is_the_object_s(restored: None, name: str, value: Any) -> None:
    setattr(module, name, value)
    assert getattr(saver, name) == getattr(module, name) == value
    assert name not in vars(module)


def test_wrong_values_are_refused_as_on_the_object(restored: None) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="guard must be True or False"):
        module.guard = "on"  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        module.enabled = False


def test_other_names_behave_as_in_any_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "anything", 3, raising=False)
    assert vars(module)["anything"] == 3
    monkeypatch.undo()
    with pytest.raises(AttributeError, match="module 'torch_memory_saver' has no attribute 'anything'"):
        _ = module.anything
    monkeypatch.setattr(module, "pause", None)
    assert module.pause is None
    assert saver.pause is not None


def test_importing_the_module_and_setting_the_hook_mode_uses_nothing() -> None:
    program = (
        "import torch_memory_saver as m; m.hook_mode = 'torch'; assert m.torch_memory_saver.hook_mode == 'torch'; "
        "assert m.torch_memory_saver._impl is None; import inspect; assert inspect.ismodule(m)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
