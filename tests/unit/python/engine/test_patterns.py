"""Guards the patterns of tags: what they stand for, that an existing name wins, and that names cost nothing more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from core_regions import core_region
from fake_torch import FakeTorch
from threads import InsideRegion

from torch_memory_saver import _core, options
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import PauseOptions, ResumeOptions, select_tags
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
#: A tag never goes away, so each test has names of its own.
numbers = itertools.count()


@pytest.fixture
def space() -> str:
    return f"space{next(numbers)}"


@pytest.fixture
def allocate(simulator: Any) -> Iterator[Any]:
    """Allocates with each tag."""
    addresses = []

    def make(*tags: str) -> list[int]:
        for tag in tags:
            with core_region(tag, _core.BACKUP_NONE, True):
                addresses.append(_core.allocate(2 * MIB, 0))
        return addresses[-len(tags) :]

    yield make
    for address in addresses:
        _core.free(address)


def enter(tag: str) -> None:
    """A region without an allocation."""
    _core.region_leave(_core.region_enter(tag, _core.BACKUP_NONE, True))


def test_a_pattern_stands_for_the_tags_that_match(allocate: Any, space: str) -> None:
    names = [f"{space}/{name}" for name in ("weights", "kv_cache", "Weights", "layer.1/scale")]
    allocate(*names)
    assert select_tags(f"{space}/*") == tuple(names), "in the order of their first use; * stands for / as well"
    assert select_tags(f"{space}/w*") == (names[0],), "upper and lower case differ"
    assert select_tags(f"{space}/[wW]eights") == (names[0], names[2])
    assert select_tags(f"{space}/[!wW]*") == (names[1], names[3])
    assert select_tags(f"{space}/kv?cache") == (names[1],)
    assert select_tags(f"{space}/layer?1*") == (names[3],)
    assert select_tags(f"{space}/weights*") == (names[0],)
    assert select_tags(f"{space}/eights") == (f"{space}/eights",)


def test_several_overlap_and_each_tag_is_there_once(allocate: Any, space: str) -> None:
    first, second, third = (f"{space}{letter}" for letter in "abc")
    allocate(first, second, third)
    assert select_tags([f"{space}[bc]", first, f"{space}*", second]) == (second, third, first)
    assert select_tags((first, first)) == (first,)


@pytest.mark.parametrize("literal", ["a*", "a?", "[ab]", "*", "a[", "ax[b]*"])
def test_an_existing_tag_of_that_name_wins(allocate: Any, space: str, literal: str) -> None:
    other = f"{space}ab"
    allocate(other)
    name = space + literal
    before = select_tags(name)
    enter(name)
    assert select_tags(name) == (name,), "a region has it"
    allocate(name)
    assert select_tags(name) == (name,)
    assert before == ((other,) if literal in ("a*", "a?", "*") else (name,))
    assert select_tags(f"{space}*") == ((name,) if literal == "*" else (other, name))


def test_a_bracket_names_a_wildcard_itself(allocate: Any, space: str) -> None:
    allocate(f"{space}a*", f"{space}ab", f"{space}a[b")
    assert select_tags(f"{space}a[*]") == (f"{space}a*",)
    assert select_tags(f"{space}a[[]*") == (f"{space}a[b",)


def test_a_pattern_that_matches_nothing_is_an_unknown_tag(
    allocate: Any, space: str, saver: TorchMemorySaver, fake_torch: FakeTorch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    allocate(f"{space}/a")
    enter(f"{space}/entered only")
    pattern = f"{space}/[e-z]*"
    assert select_tags(pattern) == (pattern,), "no allocation ever had a tag that matches"
    report = saver.pause([pattern, f"{space}/?"])
    assert (report.allocations, report.unknown_tags) == (1, 1)
    assert f"no allocation ever had a tag that matches the pattern '{pattern}'" in caplog.text + capfd.readouterr().err
    assert saver.resume(f"{space}*").allocations == 1


def test_names_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> Any:
        raise AssertionError("tags were listed")

    monkeypatch.setattr(options._core, "tags", look)
    assert select_tags(None) is None
    assert select_tags("") is None
    assert select_tags("weights") == ("weights",)
    assert select_tags(iter(["kv/cache", "a.b", "a\\b", "a]"])) == ("kv/cache", "a.b", "a\\b", "a]")
    assert PauseOptions.check(["a", "b"]).tags == ("a", "b")
    with pytest.raises(AssertionError, match="listed"):
        ResumeOptions.check("a*")


@pytest.mark.parametrize("wrong", [3, b"a*", ["a*", 3], ["a*", ""], "a*\0"])
def test_what_is_no_selection_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        select_tags(wrong)


def test_a_tag_stays_known_after_its_memory_is_gone(simulator: Any, space: str) -> None:
    with core_region(f"{space}*", _core.BACKUP_NONE, True):
        address = _core.allocate(2 * MIB, 0)
    _core.free(address)
    assert select_tags(f"{space}*") == (f"{space}*",)
    assert _core.tags()[f"{space}*"] is True


def test_pause_and_resume(allocate: Any, space: str, saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    tags = [f"{space}/actor/weights", f"{space}/actor/kv", f"{space}/ref/weights"]
    addresses = allocate(*tags)

    def paused() -> list[bool]:
        return [_core.find(address).state == _core.STATE_PAUSED for address in addresses]

    assert saver.pause(f"{space}/actor/*").allocations == 2
    assert paused() == [True, True, False]
    assert saver.pause([f"{space}/*/weights"]).allocations == 1
    assert paused() == [True, True, True]
    assert saver.resume([f"{space}/ref*", f"{space}/actor/kv"]).allocations == 2
    assert paused() == [True, False, False]
    assert saver.resume(f"{space}/*", wait=False).wait().allocations == 1
    assert paused() == [False, False, False]


def test_a_region_of_a_tag_that_matches_is_in_the_way_as_by_name(
    allocate: Any, space: str, saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    """A thread inside it would allocate paused memory. One that has allocated nothing yet is not selected."""
    allocate(f"{space}/a")
    with InsideRegion(saver, f"{space}/b", fake_torch):
        with pytest.raises(InvalidStateError, match=f"{space}/b"):
            saver.pause(f"{space}/*", timeout=0)
        assert saver.pause(f"{space}/[a]").allocations == 1
    assert saver.resume(f"{space}/*").allocations == 1


def test_a_tag_that_appears_later_is_not_selected(
    allocate: Any, space: str, saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate(f"{space}/a")
    listed = _core.tags

    def list_and_allocate() -> dict[str, bool]:
        known = listed()
        allocate(f"{space}/late")
        return known

    monkeypatch.setattr(_core, "tags", list_and_allocate)
    assert saver.pause(f"{space}/*").allocations == 1
    monkeypatch.setattr(_core, "tags", listed)
    assert saver.pause(f"{space}/*").allocations == 1
    assert saver.resume(f"{space}/*").allocations == 2


def test_the_driver_is_called_as_for_names(allocate: Any, simulator: Any, space: str, saver: TorchMemorySaver) -> None:
    tags = [f"{space}/a", f"{space}/b"]
    allocate(*tags)

    def calls(selection: Any) -> list[str]:
        simulator.start_trace()
        saver.pause(selection)
        saver.resume(selection)
        return list(simulator.trace())

    by_names = calls(tags)
    assert by_names
    assert calls(f"{space}/*") == by_names
