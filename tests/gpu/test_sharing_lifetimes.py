"""Guards how long what was sent to other processes lives: blocks that importers read are not used again, memory outlives its
sender, and descriptors do not leak."""

from __future__ import annotations

import os
import zlib

import pytest
from gpu_programs import Program
from gpu_support import GRANULARITY, MIB, STARTED_PRELOADED, core, empty, open_files, saver, segment_of, torch
from importers import Importer, contents, message
from sent_tensors import SIZE, drop_counter, share, shared_descriptors, weights


def test_a_block_is_not_used_again_while_an_importer_reads_it(importer: Importer) -> None:
    with saver.region(tag="block"):
        tensor, neighbour = empty(MIB), empty(MIB)  # which keeps the allocation
    tensor.fill_(5)
    torch.cuda.synchronize()
    before, address = contents(tensor), tensor.data_ptr()
    importer.take("block", message(tensor))
    del tensor
    with saver.region(tag="block"):
        others = [empty(MIB).fill_(6) for _ in range(4)]
    torch.cuda.synchronize()
    assert address not in {other.data_ptr() for other in others}
    assert importer.read("block") == before
    importer.drop("block")
    torch.cuda.ipc_collect()
    with saver.region(tag="block"):
        again = [empty(MIB) for _ in range(4)]
    assert address in {other.data_ptr() for other in again}
    del neighbour


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_an_importer_outlives_its_sender(importer: Importer, end: str) -> None:
    sender = Program("exporter.py", ("11",), preload=STARTED_PRELOADED).start(pipes=True)
    assert sender.stdin is not None and sender.stdout is not None
    importer.take("orphan", sender.stdout.readline().strip())
    if end == "kill":
        sender.kill()
    else:
        sender.stdin.close()
    sender.wait(timeout=60)
    data = bytes([11]) * (4 * MIB)
    assert importer.read("orphan") == f"{len(data)} {zlib.crc32(data)}"
    importer.drop("orphan")


def test_ten_thousand_shares_leave_no_descriptor() -> None:
    tensors = [weights(SIZE // 4, seed=seed) for seed in range(4)]
    assert len({segment_of(tensor).address for tensor in tensors}) == 4
    drop_counter(share(tensors[0]))  # with the test of the format, the event and the first file of counters
    assert len(shared_descriptors()) == 1
    files = open_files()
    for round in range(10_000):
        drop_counter(share(tensors[round % 4]))
    assert len(shared_descriptors()) == 4, "one for each piece of memory"
    torch.cuda.ipc_collect()
    of_three_pieces = 2 * 3  # ours, and on the simulated GPU one of its driver
    assert open_files() <= files + of_three_pieces
    for _ in range(3):
        saver.pause("weights")
        assert shared_descriptors() == set()
        saver.resume("weights")
        for tensor in tensors:
            drop_counter(share(tensor))
        pieces = {core.export_memory(tensor.data_ptr()).generation for tensor in tensors}
        assert len(shared_descriptors()) == len(pieces)


def test_neighbours_in_one_piece_of_memory_are_shared_one_by_one(importer: Importer) -> None:
    """After a resume one physical handle may hold several allocations: each is described by its place in it. Once memory of
    the tag was sent, each has a handle of its own."""
    tag = "neighbours"  # of which nothing was shared yet
    tensors = [weights(SIZE // 4, tag, seed) for seed in range(8)]
    for was_sent in (False, True):
        saver.pause(tag)
        saver.resume(tag)
        exported = [core.export_memory(tensor.data_ptr()) for tensor in tensors]
        assert (len({each.generation for each in exported}) == len(tensors)) == was_sent
        for index, tensor in enumerate(tensors):
            assert exported[index].address <= tensor.data_ptr() < exported[index].address + exported[index].bytes
            importer.take(str(index), message(tensor))
        for index, tensor in enumerate(tensors):
            assert importer.read(str(index)) == contents(tensor)
        tensors[3].fill_(7)
        torch.cuda.synchronize()
        assert [importer.read(str(index)) for index in range(8)] == [contents(tensor) for tensor in tensors]
        for index in range(8):
            importer.drop(str(index))


def test_a_freed_neighbour_does_not_end_what_was_sent(importer: Importer) -> None:
    tag = "freed neighbour"
    tensors = [weights(SIZE // 4, tag, seed) for seed in range(8)]
    saver.pause(tag)
    saver.resume(tag)
    exported = core.export_memory(tensors[-1].data_ptr())
    first = next(tensor for tensor in tensors if tensor.data_ptr() >= exported.address)
    assert first is not tensors[-1]
    importer.take("last", message(tensors[-1]))
    tensors = [tensor for tensor in tensors if tensor is not first]
    del first
    torch.cuda.empty_cache()
    assert saver.pause(tag).possibly_shared_bytes >= exported.bytes
    saver.resume(tag)
    importer.drop("last")


def test_a_forked_child_has_no_descriptor() -> None:
    tensor = weights(GRANULARITY)
    drop_counter(share(tensor))
    descriptor = core.export_memory(tensor.data_ptr()).descriptor
    assert os.readlink(f"/proc/self/fd/{descriptor}")
    child = os.fork()
    if child == 0:
        os._exit(1 if os.path.lexists(f"/proc/self/fd/{descriptor}") else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.path.lexists(f"/proc/self/fd/{descriptor}")
