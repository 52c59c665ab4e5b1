"""Guards preserve(): the blocks that survive a pause of memory without a backup, and only they."""

from __future__ import annotations

import gc
import logging
from array import array
from typing import Any

import pytest
from gpu_support import MIB, core, errors, saver, segment_of, torch

from torch_memory_saver import _core
from torch_memory_saver._engine import engine
from torch_memory_saver._engine.tensors import preserved

#: Bytes that neither a fill pattern nor zeroed memory has.
VALUE = 3


@pytest.fixture(autouse=True)
def nothing_preserved() -> Any:
    yield
    gc.collect()
    assert saver.preserved() == (), "a test has left something preserved"


def filled(size: int, tag: str = "a", **settings: Any) -> torch.Tensor:
    with saver.region(tag=tag, **settings):
        return torch.full((size,), VALUE, dtype=torch.uint8, device="cuda")


def intact(tensor: torch.Tensor) -> bool:
    return bool((tensor == VALUE).all())


def cycle(tag: str | None = None, **options: Any) -> int:
    """Pauses and resumes, while other memory uses what was released. Returns the bytes that were copied to the host."""
    report = saver.pause(tag, **options)
    other = torch.full((report.bytes,), 0xEE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del other
    torch.cuda.empty_cache()
    assert saver.resume(tag).copied_bytes == report.copied_bytes
    return report.copied_bytes


def rope() -> Any:
    """What engines have in memory without a backup: a table, a scale, and weights."""
    module = torch.nn.Module()
    module.register_buffer("table", torch.full((4096,), VALUE, dtype=torch.uint8, device="cuda"))
    module.register_buffer("scale", torch.full((512,), VALUE, dtype=torch.uint8, device="cuda"), persistent=False)
    module.register_buffer("host", torch.ones(4))
    weight = torch.full((MIB,), VALUE, dtype=torch.uint8, device="cuda")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def test_a_preserved_tensor_survives_and_the_rest_does_not() -> None:
    kept, lost = filled(4096), filled(8 * MIB)
    address = kept.data_ptr()
    (block,) = saver.preserve(kept).blocks
    assert (block.address, block.bytes, block.device, block.tag) == (address, 4096, 0, "a")
    for _ in range(3):
        assert cycle() == 4096
        assert intact(kept)
        assert kept.data_ptr() == address
        assert not intact(lost)
        lost.fill_(VALUE)


def test_the_rest_is_zeroed_on_request() -> None:
    kept, lost = filled(4096), filled(8 * MIB)
    saver.preserve(kept)
    saver.pause()
    saver.resume(zero=True)
    assert intact(kept)
    assert not lost.any()


def test_a_view_keeps_its_whole_storage() -> None:
    whole = filled(4 * MIB)
    view = whole[100:200]
    assert [block.bytes for block in saver.preserve(view).blocks] == [4 * MIB]
    assert cycle() == 4 * MIB
    assert intact(whole)


#: Tensor objects that die at once, while their storage lives on.
TEMPORARIES = {
    "view": lambda tensor: tensor[8:16],
    "data": lambda tensor: tensor.data,
    "detach": lambda tensor: tensor.detach(),
    "reshape": lambda tensor: tensor.view(2, -1).T,
    "dtype": lambda tensor: tensor.view(torch.float32),
    "chunks": lambda tensor: tensor.chunk(4)[2:],
    "generator": lambda tensor: (part for part in tensor.split(1024)),
    "set": lambda tensor: torch.empty(0, dtype=torch.uint8, device="cuda").set_(tensor),
}


@pytest.mark.parametrize("temporary", TEMPORARIES.values(), ids=TEMPORARIES)
def test_a_temporary_tensor_preserves_its_storage(temporary: Any) -> None:
    kept, lost = filled(4096), filled(8 * MIB)
    handle = saver.preserve(temporary(kept))
    gc.collect()
    assert saver.preserved() == handle.blocks
    assert len(handle.blocks) == 1
    for _ in range(2):
        assert cycle() == 4096
        assert intact(kept)
    assert not intact(lost)
    handle.remove()
    assert saver.preserved() == ()
    assert cycle() == 0
    assert not intact(kept)


def test_the_values_of_a_state_dict_preserve_parameters_and_buffers() -> None:
    with saver.region(tag="a"):
        model = torch.nn.BatchNorm1d(64).cuda()
        model.running_var.fill_(VALUE)
    handle = saver.preserve(model.state_dict().values())
    assert len(handle.blocks) == 5
    assert cycle() > 0
    assert intact(model.running_var)
    assert bool((model.weight == 1).all())
    handle.remove()
    assert saver.preserved() == ()


def test_a_later_registration_replaces_the_earlier_one() -> None:
    """So a removed handle, even one that is removed again, ends nothing that a later call has registered."""
    kept = filled(4096)
    with saver.region(tag="a"):
        model = rope()
    first = saver.preserve(kept, model, parameters=True)
    second = saver.preserve(kept[:10].detach(), model)
    assert cycle() == 4096 + 4096 + 512, "the parameters are not kept any more"
    first.remove()
    assert cycle() == 4096 + 4096 + 512
    second.remove()
    assert saver.preserved() == ()
    third = saver.preserve(kept)
    first.remove()
    second.remove()
    assert saver.preserved() == third.blocks


def test_a_handle_ends_the_registration_of_its_own_tag() -> None:
    kept = filled(4096)
    handle = saver.preserve(kept, tag="a")
    saver.preserve(kept)
    handle.remove()
    assert cycle() == 4096
    assert intact(kept)


def test_a_handle_keeps_no_memory_and_ends_nothing_of_new_objects() -> None:
    kept = filled(4 * MIB)
    allocated = torch.cuda.memory_allocated()
    handle = saver.preserve(kept)
    address = kept.data_ptr()
    del kept
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated - 4 * MIB
    again = filled(4 * MIB)
    assert again.data_ptr() == address
    later = saver.preserve(again)
    handle.remove()
    assert saver.preserved() == later.blocks


def test_a_registration_ends_with_its_storage() -> None:
    kept = filled(4 * MIB)
    allocated = torch.cuda.memory_allocated()
    saver.preserve(kept.detach(), kept[1:], kept)
    address = kept.data_ptr()
    del kept
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated - 4 * MIB, "a registration keeps no memory alive"
    again = filled(4 * MIB)
    assert again.data_ptr() == address
    assert saver.preserved() == (), "new memory at the same address is not preserved"
    assert cycle() == 0


def test_new_storages_take_over_no_registration() -> None:
    """Their records and their Python objects may get the addresses of dead ones."""
    others = [filled(4096) for _ in range(100)]
    for tensor in others:
        saver.preserve(tensor[:1])
    del others[:], tensor
    gc.collect()
    new = [filled(4096) for _ in range(300)]
    assert len(new) == 300
    assert saver.preserved() == ()


def test_a_storage_that_grows_is_kept_with_its_new_size() -> None:
    with saver.region(tag="a"):
        kept = torch.full((4096,), VALUE, dtype=torch.uint8, device="cuda")
        saver.preserve(kept.data)
        kept.untyped_storage().resize_(0)
        assert saver.preserved() == ()
        kept.untyped_storage().resize_(8192)
    kept.fill_(VALUE)
    assert cycle() == 8192
    assert intact(kept)


def test_of_a_module_the_buffers_of_the_pause_are_kept() -> None:
    with saver.region(tag="a"):
        model = torch.nn.ModuleList([rope(), rope()])
    assert len(saver.preserve(model).blocks) == 4
    assert cycle() == 2 * (4096 + 512)
    assert all(intact(buffer) for buffer in model.buffers() if buffer.is_cuda)
    assert not any(intact(layer.weight) for layer in model)
    with saver.region(tag="a"):
        model[0].table = torch.full((8192,), VALUE, dtype=torch.uint8, device="cuda")
    assert cycle() == 8192 + 512 + 4096 + 512
    assert intact(model[0].table)
    del model[1]
    assert cycle() == 8192 + 512


def test_the_parameters_of_a_module_on_request() -> None:
    with saver.region(tag="a"):
        model = rope()
    saver.preserve(model, parameters=True)
    assert cycle() == 4096 + 512 + MIB
    assert intact(model.weight)


def test_what_dies_is_forgotten() -> None:
    first, second = filled(4096), filled(4096)
    with saver.region(tag="a"):
        model = rope()
    saver.preserve([first, second], model)
    assert len(saver.preserved("a")) == 4
    del first, model
    gc.collect()
    assert [block.address for block in saver.preserved()] == [second.data_ptr()]
    assert cycle() == 4096


def test_contents_are_lost_after_remove() -> None:
    first, second = filled(4096), filled(4096)
    handle = saver.preserve(first)
    saver.preserve(second)
    handle.remove()
    assert cycle() == 4096
    assert intact(second)
    assert not intact(first)


def test_a_tag_limits_what_is_kept() -> None:
    first, second = filled(4096, "a"), filled(4096, "b")
    (block,) = saver.preserve(first, second, tag="b").blocks
    assert (block.address, block.tag) == (second.data_ptr(), "b")
    assert saver.preserved("a") == ()
    assert cycle() == 4096
    assert intact(second)
    assert not intact(first)


def test_only_paused_tags_are_looked_at() -> None:
    first, second = filled(4096, "a"), filled(4096, "b")
    saver.preserve(first, second)
    assert cycle("a") == 4096
    assert intact(first)
    assert intact(second)


def test_the_choice_of_a_pause_goes_first() -> None:
    kept, lost = filled(4096), filled(4 * MIB)
    saver.preserve(kept)
    assert cycle(backup="discard") == 0
    assert not intact(kept)
    kept.fill_(VALUE)
    lost.fill_(VALUE)
    assert cycle(backup="host") == 4096 + 4 * MIB
    assert intact(kept)
    assert intact(lost)


@pytest.mark.parametrize("settings", [{"enable_cpu_backup": True}, {"enable_disk_backup": True}])
def test_memory_with_a_backup_keeps_what_it_kept(settings: dict[str, Any]) -> None:
    kept, other = filled(4 * MIB, "a", **settings), filled(4 * MIB, "a", **settings)
    bare = filled(4096, "a")
    expected = cycle()
    assert saver.preserve(kept).blocks == ()
    assert cycle() == expected
    saver.preserve(bare)
    assert cycle() == expected + 4096
    assert intact(kept)
    assert intact(other)


def test_free_blocks_are_not_kept_with_live_ones() -> None:
    """The two lists, of live bytes and of preserved blocks, are one for the core."""
    with saver.region(tag="a", enable_cpu_backup=True):
        backed = [torch.full((64 << 10,), VALUE, dtype=torch.uint8, device="cuda") for _ in range(16)]
    bare = [filled(4096) for _ in range(8)]
    del backed[::2]
    saver.preserve(bare[1], bare[5])
    assert cycle() == 8 * (64 << 10) + 2 * 4096
    assert all(intact(tensor) for tensor in backed)
    assert [intact(tensor) for tensor in bare] == [number in (1, 5) for number in range(8)]


def test_unmanaged_memory_is_said_to_need_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ordinary, managed = torch.full((4096,), VALUE, dtype=torch.uint8, device="cuda"), filled(4096)
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        assert len(saver.preserve(ordinary, managed, torch.ones(3)).blocks) == 1
    assert "1 of 2 tensors are not in managed memory" in caplog.text
    assert cycle() == 4096
    assert intact(ordinary)


def test_a_module_without_buffers_on_a_gpu_is_said_to_preserve_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with saver.region(tag="a"):
        module = torch.nn.Linear(4, 4, device="cuda")
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        assert len(saver.preserve(module, parameters=True).blocks) == 2
        assert not caplog.records
        assert saver.preserve(module).blocks == ()
    assert caplog.text.count("nothing to preserve. A module") == 1 and "with parameters=True also for" in caplog.text
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        saver.preserve()
    assert "preserve: nothing was passed, so there is nothing to preserve. " in caplog.text


@pytest.mark.parametrize("wrong", [3, "weights", {"a": 1}, [None]])
def test_something_else_is_refused_and_nothing_registered(wrong: Any) -> None:
    tensor = filled(4096)
    with pytest.raises(errors.InvalidArgumentError, match="tensors, modules or iterables"):
        saver.preserve(tensor, wrong)
    assert saver.preserved() == ()


def test_sparse_tensors_keep_their_parts() -> None:
    with saver.region(tag="a"):
        sparse = torch.sparse_coo_tensor(
            torch.zeros(1, 8, dtype=torch.long, device="cuda"), torch.full((8,), 3.0, device="cuda"), (4,)
        )
    assert len(saver.preserve(sparse).blocks) == 2
    assert cycle() == 8 * 8 + 8 * 4
    assert bool((sparse._values() == 3).all())
    assert not sparse._indices().any()


def test_a_graph_s_static_tensors() -> None:
    """Graphs' pools have no backup by default. What a replay reads, and no replay writes, has to be preserved."""
    source = torch.ones(4096, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.region(tag="graph"):
        table = torch.arange(4096, dtype=torch.float32, device="cuda")
    with saver.cuda_graph(graph, tag="graph"):
        result = source + table
    saver.preserve(table, result)
    graph.replay()
    expected = result.clone()
    assert cycle("graph") == 2 * 4096 * 4
    assert torch.equal(result, expected)
    result.zero_()
    graph.replay()
    assert torch.equal(result, expected)
    del graph


def test_ten_thousand_buffers() -> None:
    with saver.region(tag="a"):
        buffers = [torch.full((4096,), VALUE, dtype=torch.uint8, device="cuda") for _ in range(10_000)]
    assert len(saver.preserve(buffers).blocks) == 10_000
    del buffers[::3]
    assert cycle() == len(buffers) * 4096
    assert intact(torch.stack(buffers))


def test_retained_host_memory_is_used_again() -> None:
    kept = filled(4 * MIB, host_memory="retain")
    saver.preserve(kept)
    for _ in range(2):
        assert cycle() == 4 * MIB
    host = saver.get_cpu_backup(kept)
    assert host is not None
    assert bool((host == VALUE).all())


def test_where_nothing_is_preserved_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def pause(*arguments: Any, **named: Any) -> Any:
        calls.append((named["find_live"] is not None, named["preserves"]))
        return original(*arguments, **named)

    original = _core.pause
    monkeypatch.setattr(_core, "pause", pause)
    tensor = filled(4096)
    cycle()
    handle = saver.preserve(tensor)
    cycle()
    handle.remove()
    cycle()
    assert [preserves for _, preserves in calls] == [False, True, False]
    snapshots = []
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *_: snapshots.append(1))
    cycle()
    assert snapshots == [], "without a backup torch's blocks are not looked at"


@pytest.mark.multigpu
def test_several_devices() -> None:
    tensors = []
    for device in range(2):
        with torch.cuda.device(device):
            tensors += [filled(4096), filled(MIB)]
    saver.preserve(tensors[0], tensors[2])
    assert {block.device for block in saver.preserved()} == {0, 1}
    assert cycle() == 2 * 4096
    assert [intact(tensor) for tensor in tensors] == [True, False, True, False]


def test_backup_bytes_are_seen_while_paused() -> None:
    kept = filled(4096)
    saver.preserve(kept)
    assert segment_of(kept).backup_bytes == 0
    saver.pause()
    assert segment_of(kept).backup_bytes >= 4096
    assert core.counters()["host_resident_bytes"] >= 4096
    saver.resume()
    assert segment_of(kept).backup_bytes == 0


class Part:
    """A range of another tensor's memory, which torch.as_tensor() takes for memory of its own."""

    def __init__(self, whole: torch.Tensor, begin: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (whole.data_ptr() + begin, False),
            "version": 2,
        }


def test_storages_that_overlap_or_touch_are_one_range() -> None:
    whole = filled(64 << 10)
    ranges = [(0, 4096), (0, 100), (4096, 512), (4100, 8), (8192, 4096), (10_000, 4096)]
    parts = [torch.as_tensor(Part(whole, begin, size), device="cuda") for begin, size in ranges]
    base = whole.data_ptr()
    assert [part.data_ptr() - base for part in parts] == [begin for begin, _ in ranges]
    saver.preserve(parts)
    _, kept = engine.preserved.live(None)
    ends = array("Q", kept)
    assert [end - base for end in ends] == [0, 4096 + 512, 8192, 10_000 + 4096]
    assert cycle() == 4096 + 512 + 10_000 + 4096 - 8192
    assert all(intact(part) for part in parts)
    assert not intact(whole)


def test_a_registration_with_a_tag_does_not_shrink_a_larger_one_without() -> None:
    whole = filled(64 << 10)
    part = torch.as_tensor(Part(whole, 0, 512), device="cuda")
    saver.preserve(whole)
    saver.preserve(part, tag="a")
    assert [(block.address, block.bytes) for block in saver.preserved()] == [(whole.data_ptr(), 64 << 10)]
    assert cycle() == 64 << 10
    assert intact(whole)


def test_a_new_module_with_the_id_of_a_dead_one_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at what is registered finds the dead module. Before it ends, the new one is registered."""

    class Observed(torch.nn.Module):
        """A module that calls a function once when its members are listed next."""

        listed: Any = None

        def modules(self) -> Any:
            listed, self.listed = self.listed, None
            if listed is not None:
                listed()
            return super().modules()

    number = 1
    monkeypatch.setattr(preserved, "id", lambda what: number if type(what) is torch.nn.Module else id(what), raising=False)
    made: list[Any] = []
    first, observed = torch.nn.Module(), Observed()
    saver.preserve(first, observed)

    def register_another() -> None:
        module = torch.nn.Module()
        module.register_buffer("table", filled(4096))
        saver.preserve(module)
        made.append(module)

    observed.listed = register_another
    del first
    saver.preserved()
    (module,) = made
    assert [block.address for block in saver.preserved()] == [module.table.data_ptr()]
    assert cycle() == 4096
    assert intact(module.table)


def test_a_pause_starts_no_garbage_collection() -> None:
    """One costs as much as all copies of thousands of buffers, in a process with PyTorch's objects."""
    with saver.region(tag="a"):
        buffers = [torch.full((512,), VALUE, dtype=torch.uint8, device="cuda") for _ in range(5000)]
    modules = [torch.nn.Module() for _ in buffers[::10]]
    for index, buffer in enumerate(buffers):
        modules[index // 10].register_buffer(f"buffer{index}", buffer)
    saver.preserve(buffers[::2], modules)
    saver.pause()
    saver.resume()
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        saver.pause()
    finally:
        gc.callbacks.remove(note)
    saver.resume()
    assert len(begun) <= 1
    assert all(intact(buffer) for buffer in buffers)


def test_buffers_of_a_scripted_module() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((512,), 3.0, device="cuda"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with saver.region(tag="a"):
        scripted = torch.jit.script(Scaled())
    assert len(saver.preserve(scripted).blocks) == 1
    assert cycle() == 512 * 4
    assert bool((scripted.scale == 3).all())
