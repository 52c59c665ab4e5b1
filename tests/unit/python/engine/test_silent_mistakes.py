"""Guards the warnings about calls that do nothing, or less than expected, without an error: each is logged once."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core, _text
from torch_memory_saver._engine import engine
from torch_memory_saver._text import warn_once
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="torch_memory_saver")

    def messages() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return messages


def managed(saver: TorchMemorySaver, fake_torch: FakeTorch, tag: str) -> int:
    with saver.region(tag):
        return fake_torch.allocate(2 * MIB)


# ---- once for each cause ----


def test_a_cause_is_logged_once(warnings: Callable[[], list[str]]) -> None:
    for number in range(3):
        warn_once("cause", "number %d", number)
    warn_once("other cause", "number %d", 3)
    assert warnings() == ["number 0 (Logged once.)", "number 3 (Logged once.)"]


def test_threads_log_a_cause_once(warnings: Callable[[], list[str]]) -> None:
    barrier = threading.Barrier(8)

    def warn() -> None:
        barrier.wait(60)
        warn_once("cause", "text")

    threads = [threading.Thread(target=warn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(warnings()) == 1


def test_the_number_of_causes_is_bounded(monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(_text, "_MAX_CAUSES", 3)
    for number in range(5):
        warn_once(f"cause {number}", "text")
    assert len(warnings()) == 3


# ---- a pause where nothing is managed ----


def test_a_pause_where_nothing_is_managed(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    fake_torch.allocate(6 * MIB)
    for _ in range(2):
        assert saver.pause().allocations == 0
    (message,) = warnings()
    assert "no GPU memory of this process is managed" in message
    assert "PyTorch holds 6 MiB outside regions" in message


def test_a_pause_before_anything_is_allocated_does_not_hide_a_later_one(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    saver.pause()
    assert warnings() == []
    fake_torch.allocate(2 * MIB)
    saver.pause()
    assert "PyTorch holds 2 MiB" in warnings()[0]


def test_pauses_of_managed_memory_and_repeated_ones_are_silent(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    managed(saver, fake_torch, "a")
    for _ in range(2):
        saver.pause()
        saver.pause("a")
        saver.resume()
        saver.resume("a")
    assert warnings() == []


# ---- unknown tags ----


def test_an_unknown_tag_is_logged_once_with_what_was_meant(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    for tag in ("weights", "kv_cache"):
        managed(saver, fake_torch, tag)
    for _ in range(2):
        assert saver.pause("wieghts").unknown_tags == 1
        assert saver.resume("wieghts").unknown_tags == 1
    (message,) = warnings()
    assert message.startswith("pause: no allocation ever had the tag 'wieghts'")
    assert "'weights', 'kv_cache'; did you mean weights?" in message
    saver.pause(["weights", "9 of 10"])
    (message,) = warnings()
    assert "'9 of 10'" in message
    assert "did you mean" not in message


def test_a_misspelled_tag_of_a_hook_is_logged_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    """One that resembles a known tag: the memory of another one may come later."""
    tags = ("weights", "kv_cache", "weigths", "optimizer")
    handles = [saver.on_pause(tag, "before", lambda call: None) for tag in tags]
    for tag in ("weights", "kv_cache"):
        managed(saver, fake_torch, tag)
    for _ in range(2):
        saver.pause("kv_cache")
        saver.resume()
    for handle in handles:
        handle.remove()
    (message,) = warnings()
    assert message.startswith("on_pause: no allocation ever had the tag 'weigths'") and "did you mean weights?" in message


def test_a_call_before_the_first_allocation_does_not_use_the_warning_up(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    with saver.region("entered"):
        saver.pause("kv_cahce")
    assert warnings() == []
    managed(saver, fake_torch, "kv_cache")
    assert saver.stats("kv_cahce").allocations == ()
    (message,) = warnings()
    assert message.startswith("stats: ") and "did you mean kv_cache?" in message


def test_each_report_prints_its_unknown_tags(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    managed(saver, fake_torch, "kv_cache")
    unknown = "no memory has tag 'kv_cahce'; tags are: 'kv_cache'; did you mean kv_cache?"
    for _ in range(2):
        assert str(saver.pause("kv_cahce")) == f"paused nothing; {unknown}"
        assert str(saver.resume("kv_cahce")) == f"resumed nothing; {unknown}"
        assert str(saver.resume("kv_cahce", wait=False).wait()) == f"resumed nothing; {unknown}"
    report = saver.pause(["kv_cahce", "kv_cache", "kv_cahce*"])
    assert str(report).endswith("; no memory has tag 'kv_cahce', 'kv_cahce*'; tags are: 'kv_cache'; did you mean kv_cache?")
    saver.resume()
    assert "kv_cahce" not in repr(saver.pause("kv_cahce"))


def call_resume_in_the_background(saver: TorchMemorySaver) -> None:
    saver.resume("unknown", wait=False).wait()


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("pause", lambda saver: saver.pause("unknown")),
        ("resume", lambda saver: saver.resume(["unknown"])),
        ("resume", call_resume_in_the_background),
        ("stats", lambda saver: saver.stats("unknown")),
        ("preserved", lambda saver: saver.preserved("unknown")),
    ],
)
def test_every_selection_of_an_unknown_tag_is_explained(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]], operation: str, call: Any
) -> None:
    managed(saver, fake_torch, "known")
    call(saver)
    (message,) = warnings()
    assert message.startswith(f"{operation}: no allocation ever had the tag 'unknown'")
    told = "nothing of it is listed" if operation in ("stats", "preserved") else "there is nothing to do for it"
    assert f"'unknown', so {told}. Tags of allocations now: 'known'" in message


def test_a_tag_of_a_region_without_allocations(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    managed(saver, fake_torch, "a")
    with saver.region("empty"):
        pass
    saver.pause("empty")
    (message,) = warnings()
    assert "a region of it was entered, but nothing was allocated there" in message


def test_many_tags_are_not_all_listed(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    for number in range(12):
        managed(saver, fake_torch, f"tag {number}")
    saver.stats("unknown")
    assert "'tag 9' and 2 more" in warnings()[0]


def test_known_tags_are_not_listed_for_a_call_that_finds_its_memory(
    monkeypatch: pytest.MonkeyPatch, saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    managed(saver, fake_torch, "a")

    def list_tags() -> Any:
        raise AssertionError("a plain cycle looks nothing up")

    monkeypatch.setattr(_core, "tags", list_tags)
    saver.pause("a")
    saver.resume("a")


# ---- the empty string ----


def test_an_empty_tag_selects_everything_and_says_so(
    saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    managed(saver, fake_torch, "a")
    managed(saver, fake_torch, "b")
    for _ in range(2):
        assert saver.pause("").allocations == 2
        assert saver.resume("").allocations == 2
    (message,) = warnings()
    assert 'tag is "", which selects every tag' in message


# ---- memory that receivers hold ----


def test_memory_that_receivers_hold_is_named(
    monkeypatch: pytest.MonkeyPatch, saver: TorchMemorySaver, fake_torch: FakeTorch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(engine.shared_memory, "possibly_shared_bytes", lambda tags: 3 * MIB)
    managed(saver, fake_torch, "a")
    for _ in range(2):
        assert saver.pause().possibly_shared_bytes == 3 * MIB
        saver.resume()
    (message,) = warnings()
    assert message.startswith("pause: up to 3 MiB stay on the GPU")
    assert 'if_shared="wait"' in message


def test_warnings_are_no_exceptions_where_warnings_are_errors() -> None:
    program = "from torch_memory_saver import torch_memory_saver as s; s.pause(''); s.stats('x'); print('done')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
