"""Guards that values of a wrong type are refused by name, and that what callers of the C++ package pass stays valid."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.options import PauseOptions, ResumeOptions
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


class NoTruth:
    """Like a tensor of several elements."""

    def __bool__(self) -> bool:
        raise RuntimeError("has no truth value")

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]


WRONG = ["no", "disk", "", b"", 2, -1, 1.0, [], (), {}, object(), len, NoTruth()]
#: Calls with a flag: of the C++ package, for which None is False as well, and of this one.
OLD_FLAGS = {
    "region(enable_cpu_backup)": lambda saver, graph, value: saver.region(enable_cpu_backup=value),
    "region(enable_disk_backup)": lambda saver, graph, value: saver.region(enable_disk_backup=value),
    "cuda_graph(enable_cpu_backup)": lambda saver, graph, value: saver.cuda_graph(graph, enable_cpu_backup=value),
    "retain_cpu_backup": lambda saver, graph, value: setattr(saver, "retain_cpu_backup", value),
}
NEW_FLAGS = {
    "pause(live_only)": lambda saver, graph, value: saver.pause(live_only=value),
    "resume(exclusive)": lambda saver, graph, value: saver.resume(exclusive=value),
    "resume(zero)": lambda saver, graph, value: saver.resume(zero=value),
    "resume(wait)": lambda saver, graph, value: saver.resume(wait=value),
    "ledger(measure_context)": lambda saver, graph, value: saver.ledger(measure_context=value),
}


@pytest.fixture(autouse=True)
def settings_are_restored() -> Any:
    retained = _core.get_retain_backup()
    yield
    _core.set_retain_backup(retained)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__ + str(value)[:5])
@pytest.mark.parametrize("call", (OLD_FLAGS | NEW_FLAGS).values(), ids=OLD_FLAGS | NEW_FLAGS)
def test_a_flag_of_another_type_is_refused(saver: TorchMemorySaver, fake_torch: FakeTorch, call: Any, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be True or False, not"):
        call(saver, fake_torch.torch.cuda.CUDAGraph(), value)


@pytest.mark.parametrize("call", NEW_FLAGS.values(), ids=NEW_FLAGS)
def test_a_new_flag_is_not_none(saver: TorchMemorySaver, fake_torch: FakeTorch, call: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be True or False, not None"):
        call(saver, None, None)


@pytest.mark.parametrize("value", [True, False, 0, 1, None])
@pytest.mark.parametrize("call", OLD_FLAGS.values(), ids=OLD_FLAGS)
def test_flags_as_callers_of_the_cpp_package_pass_them(
    saver: TorchMemorySaver, fake_torch: FakeTorch, call: Any, value: Any
) -> None:
    call(saver, fake_torch.torch.cuda.CUDAGraph(), value)


@pytest.mark.parametrize("value", [True, False, 0, 1])
@pytest.mark.parametrize("call", NEW_FLAGS.values(), ids=NEW_FLAGS)
def test_new_flags_are_bools_or_0_and_1(saver: TorchMemorySaver, fake_torch: FakeTorch, call: Any, value: Any) -> None:
    if call is NEW_FLAGS["ledger(measure_context)"] and value:
        pytest.skip("starts a process with a context")
    found = call(saver, None, value)
    if call is NEW_FLAGS["resume(wait)"] and not value:
        found.wait()


def test_what_a_flag_selects_is_in_force(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    for value, backup in ((1, _core.BACKUP_PINNED), (None, _core.BACKUP_NONE), (0, _core.BACKUP_NONE)):
        with saver.region("a", enable_cpu_backup=value):  # type: ignore[arg-type]
            assert _core.region_current().backup == backup


@pytest.mark.parametrize("name", ["backup", "if_shared", "timeout", "progress", "tag"])
def test_other_options_of_a_pause_name_the_value(saver: TorchMemorySaver, fake_torch: FakeTorch, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        saver.pause(**{name: NoTruth()})


class UnreadableTensor:
    """Stands for a paused tensor of PyTorch, whose contents must not be read."""

    __torch_function__ = None

    def __repr__(self) -> str:
        raise AssertionError("the contents are read")


@pytest.mark.parametrize("as_list", [False, True])
def test_a_tensor_in_place_of_a_tag_points_to_tag_of(saver: TorchMemorySaver, as_list: bool) -> None:
    tag: Any = [UnreadableTensor()] if as_list else UnreadableTensor()
    for call in (saver.pause, saver.resume, saver.stats):
        with pytest.raises(InvalidArgumentError, match=r"not UnreadableTensor.*torch_memory_saver\.tag_of\(tensor\)"):
            call(tag)


@pytest.mark.parametrize("options", [{"tag": 1}, {"tag": [1]}, {"backup": "hots"}, {"runs": "no"}])
def test_errors_of_a_region_begin_with_its_call(saver: TorchMemorySaver, options: dict[str, Any]) -> None:
    calls: dict[str, Any] = {"region": saver.region, "cuda_graph": lambda **given: saver.cuda_graph(None, **given)}
    for operation, call in calls.items():
        with pytest.raises(InvalidArgumentError, match=f"^{operation}: ") as raised:
            call(**options)
        assert raised.value.operation == operation
    with pytest.raises(InvalidArgumentError, match=r"^region: threads"):
        saver.region(threads=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^manage: a tag must be"):
        saver.manage([], tag=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "options", "operation"),
    [
        (PauseOptions.check, {"tag": 1}, "pause"),
        (PauseOptions.check, {"timeout": "soon"}, "pause"),
        (ResumeOptions.check, {"tag": 1}, "resume"),
        (ResumeOptions.check, {"progress": print, "wait": False}, "resume"),
    ],
)
def test_an_error_of_an_argument_names_its_operation(check: Any, options: dict[str, Any], operation: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        check(**options)
    assert raised.value.operation == operation
