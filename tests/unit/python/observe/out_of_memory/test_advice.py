"""Guards the paragraph of an out-of-memory report: it says what failed, who holds most, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_pages import make_page, make_row

from torch_memory_saver.observe._out_of_memory import account as account_module
from torch_memory_saver.observe._out_of_memory.account import Account, summarize
from torch_memory_saver.observe._out_of_memory.failure import PYTORCH, THIS_PACKAGE, Failure
from torch_memory_saver.observe._processes.shared_pages import Pages
from torch_memory_saver.reports.ledger import DeviceLedger, Ledger, LedgerLine, LedgerPart

GIB = 1 << 30
TOTAL = 80 * GIB
#: Linux gives no process a larger number than 2^22.
NO_PROCESS = (1 << 22) + 1
MANAGED = LedgerLine(
    "managed",
    "managed, resident",
    50 * GIB,
    parts=(
        LedgerPart("weights", 10 * GIB),
        LedgerPart("kv", 30 * GIB),
        LedgerPart("graph", 6 * GIB),
        LedgerPart("x", 4 * GIB),
    ),
)
IN_USE = LedgerLine("torch", "PyTorch", 50 * GIB, parts=(LedgerPart("in use", 40 * GIB), LedgerPart("cached", 10 * GIB)))
CACHED = LedgerLine("torch", "PyTorch", 50 * GIB, parts=(LedgerPart("in use", 10 * GIB), LedgerPart("cached", 40 * GIB)))
OTHERS = LedgerLine(
    "processes",
    "other processes",
    50 * GIB,
    parts=(LedgerPart(f"pid {NO_PROCESS}", 50 * GIB), LedgerPart(f"pid {NO_PROCESS + 1}", None)),
)


def account(*lines: LedgerLine, used: int = 70 * GIB) -> Account:
    return Account(0, Ledger((DeviceLedger(0, TOTAL, used, lines),), (), 1, 0.0))


def resume(needed: int = 20 * GIB, tags: tuple[str, ...] | None = ("weights",)) -> Failure:
    return Failure(THIS_PACKAGE, "resume", 0, GIB, needed, tags)


def allocation(requested: int = 20 * GIB, tags: tuple[str, ...] = (), allowed: int = TOTAL) -> Failure:
    return Failure(PYTORCH, "allocate", 0, requested, requested, tags, allowed_bytes=allowed)


def test_a_resume_while_other_processes_hold_most() -> None:
    assert summarize(resume(), account(OTHERS)) == (
        "A resume of tag 'weights' needs 20 GiB of device 0, of which 10 GiB of 80 GiB are free. The largest holder "
        "of device 0 is other processes: 50 GiB of 80 GiB (pid 4194305: 50 GiB). Have them pause or end, or give "
        "them another device. Or let the resume wait for them: resume(timeout=seconds)."
    )


def test_a_process_of_this_machine_is_named() -> None:
    with open("/proc/self/comm", encoding="utf-8") as file:
        name = file.read().strip()
    part = LedgerPart(f"pid {os.getpid()}", GIB)
    text = account(LedgerLine("processes", "other processes", GIB, parts=(part,))).sentence
    assert text.endswith(f"(pid {os.getpid()}, {name}: 1 GiB).")


def test_the_resident_tags_of_another_process_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on the device that ran out, by the shared page of the process."""
    page = make_page(
        NO_PROCESS,
        make_row("weights", 1, resident_bytes=GIB),
        make_row("kv", 1, resident_bytes=2 * GIB),
        make_row("paused", 1, paused_bytes=GIB),
        make_row("of another device", 0, resident_bytes=GIB),
        uuids=("GPU-1", "GPU-0"),
    )
    foreign = make_page(NO_PROCESS, make_row("of another process", 1, resident_bytes=GIB), uuids=("", "GPU-0"), foreign=True)
    monkeypatch.setattr(account_module, "read_pages", lambda: Pages((page, foreign), {}))
    monkeypatch.setattr(account_module._core, "device_info", lambda _device: SimpleNamespace(uuid="GPU-0"))
    assert f"(pid {NO_PROCESS}, with tags 'kv', 'weights': 50 GiB)." in account(OTHERS).sentence


def test_the_name_of_another_program_cannot_command_a_terminal() -> None:
    """The sentence is in messages and in the log."""
    rename = "import sys; open('/proc/self/comm', 'wb').write(b'a\\x1b[31m\\nb'); print('', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        part = LedgerPart(f"pid {process.pid}", GIB)
        text = account(LedgerLine("processes", "other processes", GIB, parts=(part,))).sentence
    assert f"(pid {process.pid}, a?[31m?b: 1 GiB)" in text


def test_an_allocation_while_other_processes_hold_most() -> None:
    text = summarize(allocation(tags=("kv",)), account(OTHERS))
    assert text.startswith("PyTorch requested 20 GiB of device 0 in a region with tag 'kv', of which 10 GiB of 80 GiB")
    assert text.endswith("Have them pause or end, or give them another device."), "an allocation does not wait"


@pytest.mark.parametrize(
    ("tags", "example"),
    [
        (("weights",), ', such as pause("kv"),'),
        (("kv",), ', such as pause("weights"),'),
        (("weights", "kv", "graph", "x"), ","),
    ],
)
def test_managed_memory_holds_most(tags: tuple[str, ...], example: str) -> None:
    text = summarize(resume(tags=tags), account(MANAGED))
    assert "(tag 'kv': 30 GiB, tag 'weights': 10 GiB, tag 'graph': 6 GiB, ...)" in text
    assert text.endswith(f"Pause what is not needed now{example} or make it smaller.")


def test_a_resume_of_all_tags_has_nothing_to_pause() -> None:
    text = summarize(resume(tags=None), account(MANAGED))
    assert text.endswith('Resume only the tags that are needed now, such as resume("weights"), or make them smaller.')


def test_an_allocation_outside_of_regions_may_pause_any_tag() -> None:
    assert 'such as pause("kv")' in summarize(allocation(), account(MANAGED))


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (IN_USE, "Delete tensors that are not needed, or allocate them in a region, so that they can be paused."),
        (CACHED, "expandable_segments:True avoids those."),
        (LedgerLine("library", "libnccl.so.2", 50 * GIB), "where PyTorch and NCCL can."),
        (LedgerLine("context", "context", 50 * GIB), "let fewer processes use this one."),
        (LedgerLine("unattributed", "not attributed", 50 * GIB), "processes in other containers count here."),
    ],
)
def test_each_holder_has_its_advice(line: LedgerLine, advice: str) -> None:
    assert summarize(resume(), account(LedgerLine("context", "context", GIB), line)).endswith(advice)


SLACK = LedgerLine("slack", "managed, slack", 8 * GIB, parts=(LedgerPart("kv", 3 * GIB), LedgerPart("weights", 5 * GIB)))
RETURN_SLACK = (
    "8 GiB of device 0 are slack: memory of freed allocations that stays with its tag (tag 'weights': 5 GiB, tag 'kv': "
    '3 GiB). pause(tag, backup="host") and resume(tag) return it and keep the contents. Tags with region(runs=False), and '
    "processes with TMS_RUNS=0, have none."
)


def test_slack_is_named_beside_the_largest_holder() -> None:
    assert account(OTHERS, SLACK).slack_sentence == RETURN_SLACK
    text = summarize(resume(), account(OTHERS, SLACK))
    assert text.index("The largest holder of device 0 is other processes") < text.index(RETURN_SLACK)
    assert text.index(RETURN_SLACK) < text.index("Have them pause or end")
    assert "slack" not in summarize(resume(), account(OTHERS)) + account(OTHERS).slack_sentence


def test_slack_is_the_largest_holder() -> None:
    text = summarize(allocation(), account(SLACK))
    assert "The largest holder of device 0 is slack of this process: 8 GiB of 80 GiB (tag 'weights': 5 GiB, " in text
    assert text.endswith(RETURN_SLACK)


def test_a_device_that_is_too_small() -> None:
    text = summarize(allocation(90 * GIB), account(OTHERS))
    assert "more than the whole memory of the device" in text and "Have them pause" not in text


def test_a_limit_of_pytorchs_own() -> None:
    text = summarize(allocation(GIB, allowed=8 * GIB), account(IN_USE))
    assert "limited to 8 GiB by torch.cuda.set_per_process_memory_fraction()" in text
    assert "free now" not in text


def test_paused_memory_counts_against_a_limit_of_pytorchs_own() -> None:
    assert "paused memory counts against that limit" in summarize(allocation(GIB, allowed=8 * GIB), account(IN_USE))


def test_paused_memory_is_named_beside_pytorchs_own_error_only() -> None:
    paused = replace(account(OTHERS), paused_sentence="PyTorch counts paused memory.")
    assert "are free. PyTorch counts paused memory. The largest holder" in summarize(allocation(), paused)
    assert "PyTorch counts" not in summarize(resume(), paused)


def test_a_margin_that_forbids_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_memory_saver._core.get_memory_margin", lambda: 6 * GIB)
    margin = "memory_margin_bytes keeps 6 GiB of each device free"
    text = summarize(allocation(5 * GIB, tags=("a",)), account(IN_USE))
    assert margin in text
    assert "free now" not in text
    assert margin not in summarize(allocation(3 * GIB, tags=("a",)), account(IN_USE)), "it fits beside the margin"
    assert margin not in summarize(allocation(5 * GIB), account(IN_USE)), "outside of regions there is no margin"
    assert margin not in summarize(resume(5 * GIB), account(IN_USE)), "nor in a resume"


def test_memory_that_is_free_again() -> None:
    assert "That much is free now" in summarize(resume(5 * GIB), account(OTHERS))
    assert "That much is free now" not in summarize(resume(), account(OTHERS))


def test_several_tags_and_all_tags() -> None:
    assert summarize(resume(tags=("a", "b")), account(OTHERS)).startswith("A resume of tags 'a', 'b' needs")
    assert summarize(resume(tags=None), account(OTHERS)).startswith("A resume of all tags needs")


def test_without_a_device_or_a_ledger() -> None:
    failure = Failure(THIS_PACKAGE, "resume", None, GIB, GIB, None)
    assert summarize(failure, Account(None, None, "the failure names no device")) == (
        "A resume of all tags needs 1 GiB of a device. Who holds it is not known: the failure names no device."
    )


def test_a_device_without_any_holder() -> None:
    empty = account(LedgerLine("unattributed", "not attributed", 0), used=0)
    assert empty.sentence == ""
    assert summarize(resume(), empty).startswith("A resume of tag 'weights' needs 20 GiB of device 0")
