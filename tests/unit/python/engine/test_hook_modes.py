"""Guards hook modes that programs register: the implementation they make, and refused names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import torch_memory_saver as module
from torch_memory_saver import errors
from torch_memory_saver._engine import hook_modes, preload
from torch_memory_saver.saver import TorchMemorySaver


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The registered hook modes; those that the test adds are removed after it."""
    registered: dict[str, Any] = {}
    monkeypatch.setattr(hook_modes, "_registered", registered)
    yield registered


class TheirSaver:
    """An implementation that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def pause(self, **keywords: Any) -> str:
        self.calls.append(("pause", keywords))
        return "paused"

    def resume(self, **keywords: Any) -> None:
        self.calls.append(("resume", keywords))

    def region(self, **keywords: Any) -> None:
        self.calls.append(("region", keywords))

    def cuda_graph(self, **keywords: Any) -> None:
        self.calls.append(("cuda_graph", keywords))


def test_a_registered_hook_mode_makes_the_implementation(saver: TorchMemorySaver, registry: dict[str, Any]) -> None:
    made: list[TheirSaver] = []

    def factory() -> TheirSaver:
        made.append(TheirSaver())
        return made[-1]

    with pytest.raises(errors.InvalidArgumentError, match="register_hook_mode"):
        saver.hook_mode = "theirs"
    module.register_hook_mode("theirs", factory)
    saver.hook_mode = "theirs"
    assert saver.hook_mode == "theirs"
    assert made == []
    assert saver.pause("a") == "paused"  # type: ignore[comparison-overlap]
    saver.resume()
    assert saver._impl is made[0]
    assert made[0].calls == [("pause", {"tag": "a"}), ("resume", {"tag": None})]
    made[0].calls.clear()
    saver.region("a", runs=False)
    saver.region("a", runs=True)
    saver.cuda_graph(None, runs=False)  # type: ignore[arg-type]
    assert [keywords.get("runs") for _, keywords in made[0].calls] == [False, None, False]
    assert saver.hook_mode == "theirs"
    saver.hook_mode = "theirs"
    saver.hook_mode = "torch"
    with pytest.raises(errors.InvalidStateError, match='"theirs" is in force'):
        saver.hook_mode = "preload"


def test_a_hook_mode_that_this_process_has_not_registered(saver: TorchMemorySaver, registry: dict[str, Any]) -> None:
    module.register_hook_mode("theirs", TheirSaver)
    saver.hook_mode = "theirs"
    registry.clear()
    with pytest.raises(errors.InvalidArgumentError, match=r"register_hook_mode\(\) in this process, not 'theirs'"):
        saver.pause()


def test_a_factory_that_makes_nothing(saver: TorchMemorySaver, registry: dict[str, Any]) -> None:
    module.register_hook_mode("nothing", lambda: None)
    saver.hook_mode = "nothing"
    with pytest.raises(errors.InvalidStateError, match="'nothing' returned None"):
        saver.pause()
    assert saver._impl is None


@pytest.mark.parametrize("name", ["auto", "preload", "torch", "theirs", "", 3])
def test_names_of_hook_modes_that_are_refused(registry: dict[str, Any], name: Any) -> None:
    module.register_hook_mode("theirs", TheirSaver)
    with pytest.raises(errors.InvalidArgumentError):
        module.register_hook_mode(name, TheirSaver)
    assert list(registry) == ["theirs"]


def test_a_factory_has_to_be_callable(registry: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="cannot be called"):
        module.register_hook_mode("theirs", "TheirSaver")  # type: ignore[arg-type]


@pytest.mark.parametrize(("uses_preload", "inside"), [(True, str(preload.library_path())), (False, None)])
def test_a_registered_hook_mode_decides_whether_children_are_preloaded(
    saver: TorchMemorySaver,
    registry: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    uses_preload: bool,
    inside: str | None,
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    module.register_hook_mode("theirs", TheirSaver, uses_preload=uses_preload)
    saver.hook_mode = "theirs"
    with saver.configure_subprocess():
        assert os.environ.get("LD_PRELOAD") == inside
