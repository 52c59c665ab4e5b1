"""Guards manage(): tensors and modules move into managed memory, and stay the same objects with the same contents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_programs import subprocess_run
from gpu_support import MIB, core, empty, errors, free_bytes, hold_stream, saver, segment_of, take_all_but, tms, torch

from torch_memory_saver._torch.binding import captures, layer

TAG = "managed"
#: Bytes by which the device may exceed the largest storage during a move.
SLACK = 64 * MIB


@pytest.fixture
def lows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Free bytes of device 0 after each storage was moved: the least since the one before."""
    seen: list[int] = []
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_and_look(storage: Any, size: int) -> Any:
        __tracebackhide__ = True  # PyTorch shows a storage with all its bytes
        result = resize(storage, size)
        seen.append(int(torch.cuda.mem_get_info(0)[0]))
        return result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_and_look, raising=False)
    yield seen


def tied_model() -> Any:
    """A language model in small: tied embeddings, a buffer that is a view, and a tensor that stays on the CPU."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(512, 256, device="cuda")
            self.hidden = torch.nn.Linear(256, 256, device="cuda")
            self.out = torch.nn.Linear(256, 512, bias=False, device="cuda")
            self.out.weight = self.words.weight
            self.register_buffer("table", torch.arange(4096, dtype=torch.float32, device="cuda")[1024:2048])
            self.register_buffer("host", torch.ones(4))

        def forward(self, words: Any) -> Any:
            return self.out(torch.relu(self.hidden(self.words(words)))) + self.table[:512]

    return Tied()


def storages_of(module: Any) -> dict[int, int]:
    """The storages of a module on the device, by the address of their record, with their bytes."""
    members = [*module.parameters(), *module.buffers()]
    storages = [member.untyped_storage() for member in members if member.is_cuda]
    return {storage._cdata: storage.nbytes() for storage in storages}


def cycle(tag: str = TAG) -> int:
    """Pauses and resumes a tag, while other memory uses what was released. Returns the bytes of device memory."""
    released = saver.pause(tag).bytes
    other = torch.full((max(released, 1),), 0xEE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del other
    torch.cuda.empty_cache()
    saver.resume(tag)
    return int(released)


def filled(size: int, value: int) -> Any:
    return torch.full((size,), value, dtype=torch.uint8, device="cuda")


def test_a_module_moves_and_stays_the_same() -> None:
    model = tied_model()
    words = torch.arange(8, device="cuda")
    expected = model(words).detach().clone()
    identities, storages = [id(each) for each in model.parameters()], storages_of(model)
    view = model.hidden.weight.data[3:5]

    handle = saver.manage(model, tag=TAG, backup="host")

    assert handle.moved_bytes == sum(storages.values())
    assert [id(each) for each in model.parameters()] == identities
    assert storages_of(model) == storages
    assert model.out.weight is model.words.weight
    assert view.data_ptr() == model.hidden.weight[3:5].data_ptr()
    assert model.host.device.type == "cpu"
    for tensor in (model.words.weight, model.hidden.weight, model.hidden.bias, model.table, view):
        assert saver.tag_of(tensor) == TAG
        assert segment_of(tensor).backup == core.BACKUP_PINNED
    assert torch.equal(model(words), expected)
    assert cycle() >= handle.moved_bytes
    assert torch.equal(model(words), expected)
    handle.remove()


def test_tensors_move_with_their_whole_storage_once() -> None:
    whole = filled(4 * MIB, 3)
    halves = whole.split(2 * MIB)
    assert tms.manage([halves[1], (part for part in whole.chunk(4))], tag=TAG).moved_bytes == 4 * MIB
    assert saver.tag_of(whole) == TAG
    assert [half.data_ptr() - whole.data_ptr() for half in halves] == [0, 2 * MIB]
    assert bool((whole == 3).all())


def test_the_default_tag_and_backup_are_those_of_a_region() -> None:
    tensor = filled(MIB, 1)
    assert saver.manage(tensor).moved_bytes == MIB
    assert (segment_of(tensor).tag, segment_of(tensor).backup) == ("default", core.BACKUP_NONE)


def test_what_is_in_place_is_not_moved() -> None:
    with saver.region(tag=TAG, backup="host"):
        inside = filled(MIB, 1)
    outside = filled(2 * MIB, 2)
    address = inside.data_ptr()
    assert saver.manage([inside, outside], tag=TAG, backup="host").moved_bytes == 2 * MIB
    assert inside.data_ptr() == address
    assert saver.manage([inside, outside], tag=TAG, backup="host").moved_bytes == 0
    saver.pause(TAG)
    assert saver.manage([inside, outside], tag=TAG, backup="host").moved_bytes == 0
    saver.resume(TAG)
    assert bool((inside == 1).all()) and bool((outside == 2).all())


def test_another_tag_or_backup_moves_managed_memory() -> None:
    with saver.region(tag="before"):
        tensor = filled(32 * MIB, 5)
    assert saver.manage(tensor, tag=TAG).moved_bytes == 32 * MIB
    assert saver.stats("before").total.resident_bytes == 0
    assert saver.manage(tensor, tag=TAG, backup="host").moved_bytes == 32 * MIB
    assert saver.stats(TAG).total.resident_bytes == 32 * MIB
    cycle()
    assert bool((tensor == 5).all())


def test_storages_without_memory_and_modules_without_tensors_are_skipped() -> None:
    nothing = empty(0)
    freed = empty(MIB)
    freed.untyped_storage().resize_(0)
    assert saver.manage([nothing, freed, [], torch.nn.ReLU()], tag=TAG).moved_bytes == 0


def test_sparse_tensors_move_with_their_parts() -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]], device="cuda")
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, 5.0], device="cuda"), (2, 3), check_invariants=True)
    assert saver.manage(tensor, tag=TAG).moved_bytes == 6 * 8 + 3 * 4
    assert saver.tag_of(tensor._values()) == TAG
    assert tensor._values().tolist() == [3.0, 4.0, 5.0]


def test_nested_tensors_move_and_their_parts_on_the_cpu_stay() -> None:
    rows = [torch.full((length,), float(length), device="cuda") for length in (2, 3)]
    tensor = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert saver.manage(tensor, tag=TAG).moved_bytes >= 5 * 4
    assert saver.tag_of(tensor.values()) == TAG
    assert tensor.values().tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_strided_nested_tensors_move_and_are_named() -> None:
    rows = [torch.full((length,), float(length), device="cuda") for length in (2, 3)]
    tensor = torch.nested.nested_tensor(rows, layout=torch.strided)
    assert saver.manage(tensor, tag=TAG, backup="host").moved_bytes == 5 * 4
    assert saver.tag_of(tensor) == TAG
    cycle()
    assert [part.tolist() for part in tensor.unbind()] == [[2.0, 2.0], [3.0, 3.0, 3.0]]
    with pytest.raises(errors.InvalidArgumentError, match="a nested tensor of 2 parts is on device cpu"):
        saver.manage(torch.nested.nested_tensor([row.cpu() for row in rows]), tag=TAG)


def test_inside_a_region_of_another_tag() -> None:
    tensor = filled(MIB, 1)
    with saver.region(tag="other"):
        saver.manage(tensor, tag=TAG)
        beside = empty(MIB)
    assert (saver.tag_of(tensor), saver.tag_of(beside)) == (TAG, "other")


@pytest.mark.multigpu
def test_a_module_on_two_devices() -> None:
    with torch.cuda.device(1):
        parts = [torch.full((MIB,), device, dtype=torch.uint8, device=f"cuda:{device}") for device in (1, 0)]
        assert saver.manage(parts, tag=TAG, backup="host").moved_bytes == 2 * MIB
    assert [segment_of(part).device for part in parts] == [1, 0]
    cycle()
    assert [int(part.min()) for part in parts] == [1, 0]


# -- memory ------------------------------------------------------------------------------------------------------------


def many(sizes: list[int]) -> list[Any]:
    return [filled(size, number % 251) for number, size in enumerate(sizes)]


#: Sizes of storages, in MiB: large ones, those of PyTorch's segments of 20 MiB, and all together.
SIZES = {
    "large": [24, 90, 24, 24, 90, 24, 24, 24, 11, 11, 11],
    "medium": [3] * 60 + [7] * 20,
    "mixed": [1, 40, 5, 1, 24, 6, 12] * 6,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_peak_is_the_largest_storage(sizes: list[int], lows: list[int]) -> None:
    tensors = many([size * MIB for size in sizes])
    torch.cuda.empty_cache()
    start = free_bytes()

    handle = saver.manage([tensors[start::7] for start in range(7)], tag=TAG)  # not in the order of their addresses

    assert handle.moved_bytes == sum(sizes) * MIB
    assert len(lows) == len(sizes)
    assert start - min(lows) <= max(sizes) * MIB + SLACK
    assert start - free_bytes() <= 24 * MIB, "the old memory is with the driver"
    assert all(bool((tensor == number % 251).all()) for number, tensor in enumerate(tensors))


def test_a_device_that_is_almost_full_suffices() -> None:
    tensors = many([90 * MIB, 24 * MIB] * 4)
    torch.cuda.empty_cache()
    filler = take_all_but(90 * MIB + SLACK)
    assert saver.manage(tensors, tag=TAG).moved_bytes == 4 * 114 * MIB
    assert all(bool((tensor == number % 251).all()) for number, tensor in enumerate(tensors))
    del filler


def test_small_tensors_empty_the_cache_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = many([4096] * 500)
    calls = core.counters()["frees_total"]
    saver.manage(tensors, tag="before")
    releases: list[None] = []
    empty_cache = torch._C._cuda_emptyCache
    monkeypatch.setattr(layer.require(), "empty_cache", lambda: releases.append(None) or empty_cache())
    saver.manage(tensors, tag=TAG)
    assert 1 <= len(releases) <= 4, "before and after, and once more each where a pool is retired"
    assert core.counters()["frees_total"] > calls


def test_memory_that_runs_out_half_way_leaves_everything_whole() -> None:
    tensors = sorted(many([24 * MIB] * 4 + [300 * MIB]), key=lambda tensor: tensor.data_ptr())
    values = [int(tensor[0]) for tensor in tensors]
    torch.cuda.empty_cache()
    filler = take_all_but(150 * MIB)
    addresses = [tensor.data_ptr() for tensor in tensors]
    large = next(number for number, tensor in enumerate(tensors) if tensor.numel() == 300 * MIB)

    with pytest.raises(errors.OutOfMemoryError, match=r"\(300 MiB\), which stays where it was: \d") as caught:
        saver.manage(tensors, tag=TAG, backup="host")

    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert (caught.value.operation, caught.value.tag, caught.value.bytes) == ("manage", TAG, 300 * MIB)
    assert f"{large} of 5 storages ({large * 24 or 0}" in str(caught.value)
    assert "The largest holder of device 0 is PyTorch in this process, outside of regions" in str(caught.value)
    assert [saver.tag_of(tensor) for tensor in tensors] == [TAG] * large + [None] * (5 - large)
    assert [tensor.data_ptr() for tensor in tensors[large:]] == addresses[large:]
    assert [int(tensor.min()) for tensor in tensors] == [int(tensor.max()) for tensor in tensors] == values

    del filler
    torch.cuda.empty_cache()
    assert saver.manage(tensors, tag=TAG, backup="host").moved_bytes == 300 * MIB + (4 - large) * 24 * MIB
    cycle()
    assert [int(tensor.min()) for tensor in tensors] == values


def test_a_failure_of_the_copy_is_passed_on_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted([filled(MIB, 1), filled(MIB, 2)], key=lambda tensor: tensor.data_ptr())
    resize = torch.UntypedStorage.resize_
    calls: list[int] = []

    def fail_second(storage: Any, size: int) -> Any:
        __tracebackhide__ = True  # PyTorch shows a storage with all its bytes
        calls.append(size)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", fail_second, raising=False)
    with pytest.raises(KeyboardInterrupt):
        saver.manage([first, second], tag=TAG)
    monkeypatch.undo()
    assert (saver.tag_of(first), saver.tag_of(second)) == (TAG, None)
    assert core.region_current().depth == 0
    assert {int(first.min()), int(second.min())} == {1, 2}
    assert saver.manage([first, second], tag=TAG).moved_bytes == MIB


def test_cached_memory_is_released_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not empty its cache for an allocation in a region."""
    tensor = filled(64 * MIB, 7)
    torch.cuda.empty_cache()
    filler = take_all_but(96 * MIB)
    resize = torch.UntypedStorage.resize_
    cached: list[Any] = [None]

    def cache_before(storage: Any, size: int) -> Any:
        __tracebackhide__ = True  # PyTorch shows a storage with all its bytes
        if cached:  # inside the region, where no other part of the package makes room
            cached.clear()
            with saver.disable():
                keep = filled(64 * MIB, 0)
                segment = keep.data_ptr()
            del keep
            assert segment
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", cache_before, raising=False)
    assert saver.manage(tensor, tag=TAG).moved_bytes == 64 * MIB
    assert bool((tensor == 7).all())
    del filler


def test_work_of_other_streams_is_waited_for_before_the_copy() -> None:
    """The copy runs on the current stream, which does not wait for the one that writes to the tensor."""
    tensor = filled(MIB, 1)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        beside = empty(512)  # so that no memory of this stream is released, which would wait for the device
        hold_stream()
        tensor.fill_(9)
    assert saver.manage(tensor, tag=TAG).moved_bytes == MIB
    assert bool((tensor == 9).all())
    del beside


def test_another_thread_does_not_get_memory_that_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy runs on the current stream, and the old memory belongs to another one."""
    tensor = filled(24 * MIB, 9)
    address = tensor.data_ptr()
    resize = torch.UntypedStorage.resize_
    others: list[int] = []

    def allocate() -> None:
        others.append(filled(24 * MIB, 1).data_ptr())

    def resize_behind_work(storage: Any, size: int) -> Any:
        __tracebackhide__ = True  # PyTorch shows a storage with all its bytes
        hold_stream()
        result = resize(storage, size)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        return result

    with torch.cuda.stream(torch.cuda.Stream()):
        monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_behind_work, raising=False)
        saver.manage(tensor, tag=TAG)
    assert others != [address]
    assert bool((tensor == 9).all())


def test_no_capture_begins_during_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled(MIB, 1)
    resize = torch.UntypedStorage.resize_
    opened: list[bool] = []

    def try_gate() -> None:
        opened.append(captures.capture_gate.held().acquire(blocking=False))  # type: ignore[attr-defined]

    def resize_while_another_thread_tries(storage: Any, size: int) -> Any:
        __tracebackhide__ = True  # PyTorch shows a storage with all its bytes
        thread = threading.Thread(target=try_gate)
        thread.start()
        thread.join()
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_while_another_thread_tries, raising=False)
    saver.manage(tensor, tag=TAG)
    assert opened == [False]


_UNCACHED = """
import torch
from torch_memory_saver import errors, torch_memory_saver as saver

tensor = torch.full((1 << 20,), 3, dtype=torch.uint8, device="cuda")
try:
    print(saver.manage(tensor, tag="managed").moved_bytes, saver.tag_of(tensor))
except errors.InvalidStateError as error:
    print(error)
assert bool((tensor == 3).all())
"""


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_where_pytorch_does_not_cache(preload: bool) -> None:
    done = subprocess_run(["-c", _UNCACHED], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, preload=preload).check()
    if preload:
        assert done.output == f"{MIB} managed\n"
    else:
        assert "PyTorch's caching may be off" in done.output
