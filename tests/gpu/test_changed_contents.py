"""Guards pauses that copy only changed contents, with PyTorch: the compiled kernel computes the function that the simulated
GPU has in C, and every byte comes back. core/transition/test_changed_chunks.c guards which chunks are copied."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_support import (
    MIB,
    SIMULATED,
    assert_same,
    core,
    driver,
    empty,
    fill_normal,
    fill_random,
    free_bytes,
    saver,
    torch,
)

from torch_memory_saver import simulate

CHUNK = 512 << 10
KEY_BYTES = (CHUNK // 16 + 3) * 16 + 4 * 9 * 8
#: Of a block of threads, and the number of chunks that it reads.
THREADS, GROUP = 256, 4
PTX = Path(__file__).resolve().parents[2] / "csrc" / "kernels" / "fingerprint.ptx"


def check(result: int, call: str) -> None:
    assert result == 0, f"{call} failed with {result}"


@pytest.fixture
def retained() -> Iterator[None]:
    saver.host_memory = "retain"
    yield
    saver.host_memory = "release"


# The kernel.


class Kernel:
    """The kernel in a module of its own, with a random key."""

    def __init__(self) -> None:
        if not PTX.is_file():
            pytest.skip("needs the sources: there is no csrc/")
        torch.cuda.synchronize()  # the device's context is current now
        module, address, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
        self.function = ctypes.c_void_p()
        self.key = random.Random(1).randbytes(KEY_BYTES)
        text = ctypes.c_char_p(PTX.read_bytes())
        check(driver().cuModuleLoadData(ctypes.byref(module), text), "cuModuleLoadData")
        found = driver().cuModuleGetFunction(ctypes.byref(self.function), module, ctypes.c_char_p(b"tms_fingerprint"))
        check(found, "cuModuleGetFunction")
        name = ctypes.c_char_p(b"tms_fingerprint_key")
        found = driver().cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, name)
        check(found, "cuModuleGetGlobal")
        assert size.value == KEY_BYTES
        check(driver().cuMemcpyHtoD_v2(address, self.key, ctypes.c_size_t(KEY_BYTES)), "cuMemcpyHtoD")

    def fingerprints(self, chunks: list[tuple[int, int]]) -> list[list[int]]:
        """Of (address, bytes), by way of pinned host memory."""
        rows = torch.tensor(chunks, dtype=torch.int64).pin_memory()
        results = torch.zeros(len(chunks), 4, dtype=torch.int32).pin_memory()
        arguments = (ctypes.c_uint64(rows.data_ptr()), ctypes.c_uint32(len(chunks)), ctypes.c_uint64(results.data_ptr()))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
        shape = map(ctypes.c_uint, (-(-len(chunks) // GROUP), 1, 1, THREADS, 1, 1, 0))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(driver().cuLaunchKernel(self.function, *shape, stream, pointers, None), "cuLaunchKernel")
        torch.cuda.synchronize()
        return [[word & 0xFFFFFFFF for word in row] for row in results.tolist()]

    def expected(self, contents: torch.Tensor) -> list[int]:
        words = (ctypes.c_uint32 * 4)()
        simulator = ctypes.CDLL(str(simulate.simulator_path()))
        simulator.tms_sim_fingerprint(
            self.key, ctypes.c_void_p(contents.data_ptr()), ctypes.c_uint64(contents.nbytes), words
        )
        return list(words)


def test_the_kernel_computes_what_the_function_in_c_does() -> None:
    kernel = Kernel()
    memory = empty(8 * MIB)
    fill_random(memory, 1)
    copy = memory.cpu()
    sizes = [CHUNK] * 4 + [CHUNK - 16, CHUNK, CHUNK - 4096, CHUNK - 4112]  # groups of which most is read without conditions
    sizes += [CHUNK, 16, CHUNK - 16, 4096, 0, 48, CHUNK, 512, CHUNK // 2, 12_352]  # the last group is not full
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    chunks = [(memory.data_ptr() + begin, size) for begin, size in zip(begins, sizes, strict=True)]
    found = kernel.fingerprints(chunks)
    for begin, size, words in zip(begins, sizes, found, strict=True):
        assert words == kernel.expected(copy[begin : begin + size]), f"{size} bytes at {begin}"


def test_weights_have_other_fingerprints_after_any_change() -> None:
    """A bit of one weight, a swap of two, and a shift by one."""
    kernel = Kernel()
    weights = torch.empty(CHUNK // 2, dtype=torch.bfloat16, device="cuda")
    fill_normal(weights, 1, 0.02)
    chunk = [(weights.data_ptr(), CHUNK)]
    (before,) = kernel.fingerprints(chunk)
    seen = {tuple(before)}
    words = weights.view(torch.int16)
    for bit in range(15):
        words[bit * 1000] ^= 1 << bit
        seen.add(tuple(kernel.fingerprints(chunk)[0]))
    words[7], words[70_001] = words[70_001].clone(), words[7].clone()
    seen.add(tuple(kernel.fingerprints(chunk)[0]))
    words.copy_(words.roll(1))
    seen.add(tuple(kernel.fingerprints(chunk)[0]))
    assert len(seen) == 18


# Pauses.


@pytest.mark.usefixtures("retained")
def test_only_what_has_changed_is_copied() -> None:
    with saver.region(tag="model", enable_cpu_backup=True):
        weights, adapter = empty(64 * MIB), empty(4 * MIB)
    fill_random(weights, 1)
    fill_random(adapter, 2)
    expected = weights.cpu(), adapter.cpu()
    first = saver.pause("model")
    assert (first.copied_bytes, first.unchanged_bytes) == (68 * MIB, 0)
    saver.resume("model")
    second = saver.pause("model")
    assert (second.copied_bytes, second.unchanged_bytes) == (0, 68 * MIB)
    saver.resume("model")
    adapter.add_(1)
    weights[10 * MIB] += 1
    expected = expected[0].clone(), expected[1] + 1
    expected[0][10 * MIB] += 1
    third = saver.pause("model")
    assert (third.copied_bytes, third.unchanged_bytes) == (4 * MIB + CHUNK, 64 * MIB - CHUNK)
    saver.resume("model")
    assert_same(weights.cpu(), expected[0])
    assert_same(adapter.cpu(), expected[1])


@pytest.mark.usefixtures("retained")
def test_a_freed_block_copies_its_segment_only() -> None:
    with saver.region(tag="model", enable_cpu_backup=True):
        blocks = [empty(12 * MIB) for _ in range(5)]
    for index, block in enumerate(blocks):
        fill_random(block, index)
    expected = [block.cpu() for block in blocks]
    with saver.region(tag="model", enable_cpu_backup=True):
        small = [empty(512 << 10) for _ in range(3)]  # of one segment
    for block in small:
        block.zero_()
    saver.pause("model")
    saver.resume("model")
    del small[1]
    report = saver.pause("model")
    assert (report.copied_bytes, report.unchanged_bytes) == (1 * MIB, 60 * MIB)
    saver.resume("model")
    for block, contents in zip(blocks, expected, strict=True):
        assert_same(block.cpu(), contents)


@pytest.mark.usefixtures("retained")
def test_a_write_to_a_view_of_the_backup_never_reaches_the_gpu() -> None:
    with saver.region(tag="model", enable_cpu_backup=True):
        weights = empty(8 * MIB)
    fill_random(weights, 1)
    expected = weights.cpu()
    saver.pause("model")
    saver.resume("model")
    view = saver.get_cpu_backup(weights, zero_copy=True)
    assert view is not None
    for value in range(3):
        view.fill_(value)
        assert saver.pause("model").unchanged_bytes == 0
        saver.resume("model")
        assert_same(weights.cpu(), expected)
    view.fill_(7)
    del view
    assert saver.pause("model").unchanged_bytes == 0
    saver.resume("model")
    assert saver.pause("model").unchanged_bytes == 8 * MIB
    saver.resume("model")
    assert_same(weights.cpu(), expected)


@pytest.mark.usefixtures("retained")
def test_random_writes_come_back_bit_for_bit() -> None:
    choose = random.Random(1)
    with saver.region(tag="model", enable_cpu_backup=True):
        tensors = [empty(size) for size in (3 * MIB, 700_000, 21 * MIB, 512)]
    expected = []
    for index, tensor in enumerate(tensors):
        fill_random(tensor, index)
        expected.append(tensor.clone())  # in ordinary memory of the GPU, where comparing is fast
    copied = unchanged = 0
    for cycle in range(30 if SIMULATED else 1000):
        for _ in range(choose.randrange(4)):
            index = choose.randrange(len(tensors))
            begin = choose.randrange(tensors[index].numel())
            size = choose.randint(1, min(1 << choose.randrange(24), tensors[index].numel() - begin))
            tensors[index][begin : begin + size] = cycle % 251
            expected[index][begin : begin + size] = cycle % 251
        report = saver.pause("model")
        copied, unchanged = copied + report.copied_bytes, unchanged + report.unchanged_bytes
        saver.resume("model")
        for tensor, contents in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, contents)
    assert copied > 0
    assert unchanged > 0


@pytest.mark.usefixtures("retained")
def test_the_kernel_takes_at_most_two_mib_of_the_device() -> None:
    with saver.region(tag="model", enable_cpu_backup=True):
        weights = empty(2 * MIB)
    fill_random(weights, 1)
    with saver.region(tag="other"):
        other = empty(2 * MIB)
    saver.pause("other")
    saver.resume("other")
    before = free_bytes()
    saver.pause("model")
    saver.resume("model")
    assert before - free_bytes() <= 2 * MIB
    assert core.counters()["quarantined_host"] == 0
    del other
