"""Guards the case of an importer that may not have the sender's file descriptors: PyTorch's own error there, and a sender
that goes on as if the message had never been received."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from gpu_support import SIMULATED, assert_close_to, fill_random, free_bytes, open_files, saver, torch
from importers import Importer, contents
from sent_tensors import SIZE, drop_counter, share, shared_descriptors, weights

REFUSED = "pidfd_getfd: Operation not permitted"
#: CUDA lets no other user have the event that comes with a tensor, which PyTorch opens first.
REFUSED_TO_ANOTHER_USER = REFUSED if SIMULATED else "CUDA error: mapping of buffer object failed"
PR_SET_DUMPABLE, PR_SET_PTRACER = 4, 0x59616D61
CAP_SYS_PTRACE = 19
ANY_PROCESS = ctypes.c_ulong(-1)

libc = ctypes.CDLL(None, use_errno=True)


def has_the_capability() -> bool:
    words = Path("/proc/self/status").read_text().split("CapPrm:")[1].split()
    return bool(int(words[0], 16) >> CAP_SYS_PTRACE & 1)


def ptrace_scope() -> int:
    """Yama's setting; 0 where the kernel has no Yama."""
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(path.read_text()) if path.exists() else 0


def set_for_this_process(option: int, value: int | ctypes.c_ulong) -> None:
    assert libc.prctl(option, value, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())


@pytest.fixture(scope="module")
def other() -> Iterator[Importer]:
    """An importer with all rights."""
    with Importer() as process:
        yield process


def reduced(tensor: torch.Tensor) -> tuple[object, tuple[object, ...]]:
    """What reduce_tensor returns. The simulated GPU opens events through /proc, which may be refused too. The tensor is
    ready, so there the importer does not wait for its event."""
    rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
    return rebuild, (*arguments[:-1], False) if SIMULATED else arguments


def assert_refused(
    refused: Importer, then: Importer, permit: Callable[[], None] = lambda: None, refusal: str = REFUSED
) -> None:
    """Sends to an importer that is refused, and checks the sender. Afterwards `permit` is called, and `then` receives."""
    tensor = weights()
    drop_counter(share(tensor))  # with the test of the format
    sent = bytes(ForkingPickler.dumps(reduced(tensor))).hex()
    assert refusal in refused.try_to("call", "it", sent)  # its CUDA context takes device memory
    files, free = open_files(), free_bytes()
    assert len(shared_descriptors()) == 1
    for _ in range(2):
        assert refusal in refused.try_to("call", "it", sent)
    assert (len(shared_descriptors()), open_files(), free_bytes()) == (1, files, free)

    fill_random(tensor, 2)
    torch.cuda.synchronize()
    kept = contents(tensor)
    report = saver.pause("weights")
    assert (report.bytes, report.possibly_shared_bytes) == (SIZE, SIZE), "it is counted as if it had received the tensor"
    assert shared_descriptors() == set() and open_files() < files
    assert_close_to(free_bytes() - free, SIZE, "freed", slack=SIZE // 8)
    saver.resume("weights")
    assert contents(tensor) == kept

    permit()
    then.call("it", reduced(tensor))
    assert then.read("it") == contents(tensor)
    then.fill("it", 3)
    assert int(tensor.min()) == int(tensor.max()) == 3
    then.drop("it")
    assert saver.pause("weights", if_shared="wait", timeout=60).possibly_shared_bytes == 0
    assert shared_descriptors() == set()
    saver.resume("weights")


def test_a_system_call_that_is_filtered(other: Importer) -> None:
    """As by the profile of a container."""
    with Importer() as importer:
        importer.restrict("system-call")
        assert_refused(importer, other)


@pytest.mark.skipif(not has_the_capability(), reason="a process without CAP_SYS_PTRACE has fewer capabilities than none")
def test_an_importer_with_fewer_capabilities_than_the_sender(other: Importer) -> None:
    with Importer() as importer:
        importer.restrict("permitted")
        assert_refused(importer, other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_an_importer_of_another_user(other: Importer) -> None:
    with Importer() as importer:
        importer.restrict("user")
        assert_refused(importer, other, refusal=REFUSED_TO_ANOTHER_USER)


@pytest.mark.skipif(ptrace_scope() > 1, reason="Yama allows no process without the capability")
def test_a_sender_that_is_not_dumpable() -> None:
    """The importer has the sender's user and capabilities."""
    with Importer() as importer:
        importer.restrict("effective")
        set_for_this_process(PR_SET_DUMPABLE, 0)
        if ptrace_scope():
            set_for_this_process(PR_SET_PTRACER, ANY_PROCESS)
        try:
            assert_refused(importer, importer, permit=lambda: set_for_this_process(PR_SET_DUMPABLE, 1))
        finally:
            set_for_this_process(PR_SET_DUMPABLE, 1)


@pytest.mark.skipif(ptrace_scope() != 1, reason="kernel.yama.ptrace_scope is not 1")
def test_a_sender_permits_any_process_where_yama_restricts() -> None:
    """The importer is the sender's child, and Yama permits parents only."""
    set_for_this_process(PR_SET_PTRACER, 0)
    with Importer() as importer:
        importer.restrict("effective")
        assert_refused(importer, importer, permit=lambda: set_for_this_process(PR_SET_PTRACER, ANY_PROCESS))
