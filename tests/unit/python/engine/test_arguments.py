"""Guards the checks of arguments: accepted and refused values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deferred import DEFERRED
from hypothesis import given
from hypothesis import strategies as st
from recorded_hooks import Recorder

from torch_memory_saver import _core, errors, options


@pytest.mark.parametrize("tag", ["", None, 3, b"weights", ["a"], "a\0b", "\ud800"])
def test_bad_tags_are_refused(tag: object) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        options.check_tag(tag)


def test_a_decorator_without_parentheses_is_named() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"Write a decorator with parentheses: @region\(\)"):
        options.check_tag(test_bad_tags_are_refused)


@given(st.text(min_size=1).filter(lambda text: "\0" not in text and text.isprintable()))
def test_any_other_text_is_a_tag(tag: str) -> None:
    assert options.check_tag(tag) == tag


def test_tags_select() -> None:
    assert options.check_tags(None) is None
    assert options.check_tags("") is None
    assert options.check_tags("a") == ("a",)
    assert options.check_tags(["b", "a", "b"]) == ("b", "a")
    assert options.check_tags(tag for tag in "ab") == ("a", "b")
    assert options.check_tags(()) == ()


@pytest.mark.parametrize("tags", [3, b"a", bytearray(b"a"), ["a", ""], [""], [None], object()])
def test_bad_selections_are_refused(tags: object) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        options.check_tags(tags)


def test_pause_backup_choices() -> None:
    assert options.choose_pause_backup(None) is None
    for choose in (options.choose_backup, options.choose_pause_backup):
        with pytest.raises(errors.InvalidArgumentError, match=r"""not 'cpu'; did you mean "host"\?$"""):
            choose("cpu")
    assert options.choose_pause_backup("host") == _core.BACKUP_PINNED
    assert options.choose_pause_backup("mmap") == _core.BACKUP_MMAP
    assert options.choose_pause_backup("disk") == _core.BACKUP_DISK
    assert options.choose_pause_backup("shared") == _core.BACKUP_SHARED
    assert options.choose_pause_backup("discard") == _core.BACKUP_NONE


@pytest.mark.parametrize("backup", ["", "Host", "pinned", 0, False, ["host"]])
def test_unknown_pause_backups_are_refused(backup: object) -> None:
    with pytest.raises(errors.InvalidArgumentError, match='"host", "mmap", "disk", "shared" or "discard"'):
        options.choose_pause_backup(backup)


def test_an_error_of_an_argument_names_its_operation_once() -> None:
    for check, operation in ((options.PauseOptions.check, "pause"), (options.ResumeOptions.check, "resume")):
        with pytest.raises(errors.InvalidArgumentError, match=f"^{operation}: tag must be") as raised:
            check(3)
        assert raised.value.operation == operation


def test_host_policies() -> None:
    assert options.choose_host_policy(None) == _core.HOST_DEFAULT
    assert options.choose_host_policy("release") == _core.HOST_RELEASE
    assert options.choose_host_policy("pool") == _core.HOST_POOL
    assert options.choose_host_policy("retain") == _core.HOST_RETAIN


@pytest.mark.parametrize("policy", ["", "keep", "Pool", 1, True, ("pool",)])
def test_unknown_host_policies_are_refused(policy: object) -> None:
    with pytest.raises(errors.InvalidArgumentError, match='"release", "pool" or "retain"'):
        options.choose_host_policy(policy)


@pytest.mark.parametrize("function", DEFERRED)
def test_a_progress_whose_body_never_runs_is_refused(function: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="progress must be an ordinary function, not a"):
        options.check_progress(function)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("function", DEFERRED)
def test_a_progress_whose_result_shows_that_no_body_ran_ends_the_call(hooks: Recorder, function: Any) -> None:
    hooks.allocate("a")
    with pytest.raises(errors.InvalidArgumentError, match=r"progress has returned a .+, whose body has not run"):
        hooks.saver.pause(backup="host", progress=lambda done, total: function(done, total))


def test_progress_is_called_with_both_numbers() -> None:
    reported: list[tuple[int, int]] = []
    progress = options.check_progress(lambda *numbers: reported.append(numbers))
    assert progress is not None
    progress(1, 2)
    assert reported == [(1, 2)]
    assert options.check_progress(None) is None
    with pytest.raises(errors.InvalidArgumentError, match="progress must be None or a callable"):
        options.check_progress(True)


def test_devices() -> None:
    assert options.check_device(None) == -1
    assert options.check_device(3) == 3
    assert options.check_device(SimpleNamespace(type="cuda", index=1)) == 1
    assert options.check_device(SimpleNamespace(type="cuda", index=None)) == -1


@pytest.mark.parametrize("device", [-1, 1 << 31, 1.0, True, "cuda:0", SimpleNamespace(type="cpu", index=0)])
def test_bad_devices_are_refused(device: object) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="device must"):
        options.check_device(device)


def test_a_device_by_its_name_names_what_is_accepted() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"such as torch.device\('cuda:0'\), not 'cuda:0'"):
        options.check_device("cuda:0")


def test_backup_choices() -> None:
    assert options.backup_of_aliases(False, False, None) is None
    assert options.backup_of_aliases(True, False, None) == "host"
    assert options.backup_of_aliases(True, False, "pinned") == "host"
    assert options.backup_of_aliases(True, False, "mmap") == "mmap"
    assert options.backup_of_aliases(False, True, None) == "disk"


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ((True, True, None), "exclude"),
        ((False, False, "pinned"), "enable_cpu_backup"),
        ((False, True, "mmap"), "enable_cpu_backup"),
        ((True, False, "tape"), "pinned"),
        ((True, False, 3), "pinned"),
        (("disk", False, None), 'second argument .* pass the backup by name, as backup="disk"'),
        (("kv", False, None), "second argument .* not 'kv': a region has one tag"),
    ],
)
def test_bad_backup_choices_are_refused(choice: tuple[Any, ...], words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        options.backup_of_aliases(*choice)


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.5, "3", True, None, Path()])
def test_bad_byte_counts_are_refused(value: object) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="margin"):
        options.check_bytes("margin", value)


def test_byte_counts() -> None:
    assert options.check_bytes("margin", 0) == 0
    assert options.check_bytes("margin", (1 << 63) - 1) == (1 << 63) - 1
