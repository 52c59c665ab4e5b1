"""Guards check_fresh() with PyTorch: forgotten tensors by name and stack, and everything that is not one."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_support import MIB, assert_close_to, core, errors, free_bytes, hold_stream, saver, torch

from torch_memory_saver.observe import memory


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    saver.guard = True
    yield
    saver.guard = False


def in_region(values: torch.Tensor, tag: str = "w", **settings: Any) -> torch.Tensor:
    with saver.region(tag=tag, **settings):
        return values.cuda()


def cycle(tags: Any = None, **options: Any) -> None:
    saver.pause(tags)
    saver.resume(tags, **options)


def names(blocks: Any) -> list[tuple[str, ...]]:
    return [block.names for block in blocks]


def engine() -> Any:
    """A module with what engines forget, and weights."""

    class Rope(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.ones(1024, 64, device="cuda"))
            self.register_buffer("scale", torch.ones(1, device="cuda"), persistent=False)

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Rope(), Rope()])
            self.weight = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"), requires_grad=False)
            self.register_buffer("table", torch.full((4096,), -1, dtype=torch.int32, device="cuda"))

    with saver.region(tag="w"):
        return Engine()


def test_what_an_engine_forgot_is_named() -> None:
    model = engine()
    cycle()
    model.weight.fill_(2)
    model.layers[1].cos.fill_(1)
    report = saver.check_fresh("w")
    assert names(report.unwritten) == [("Engine.layers.0.cos",), ("Engine.layers.0.scale",), ("Engine.layers.1.scale",)]
    cos, scale, _ = report.unwritten
    assert (cos.address, cos.bytes, cos.dtype, cos.shape) == (
        model.layers[0].cos.data_ptr(),
        1024 * 64 * 4,
        "float32",
        (1024, 64),
    )
    assert (scale.bytes, scale.sampled_bytes) == (4, 4)
    assert names(report.integers) == [("Engine.table",)]
    assert report.checked_blocks == 6
    assert report.sampled_bytes < 4096
    assert "Engine.layers.0.cos" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["unwritten"][0]["names"] == ["Engine.layers.0.cos"]
    for layer in model.layers:
        layer.cos.fill_(1)
        layer.scale.fill_(1)
    model.table.fill_(0)
    assert saver.check_fresh("w").is_fresh
    assert saver.check_fresh("w").integers == ()


def test_preserved_and_backed_up_tensors_are_no_finding() -> None:
    model, kept = engine(), in_region(torch.ones(MIB), "kept", enable_cpu_backup=True)
    with saver.region(tag="kept", enable_cpu_backup=True):
        torch.empty(MIB, device="cuda")  # free blocks of it come back as the pattern
    handle = saver.preserve(model)
    cycle()
    report = saver.check_fresh()
    assert names(report.unwritten) == [("Engine.weight",)]
    assert names(report.integers) == [("Engine.table",)], "it was preserved, and holds -1"
    assert report.restored_bytes == kept.numel() * 4
    handle.remove()


def test_where_it_was_allocated_is_said() -> None:
    memory.record_history()
    try:
        model = engine()
        other = in_region(torch.ones(1024))
    finally:
        memory.stop_history()
    cycle()
    report = saver.check_fresh()
    stacks = {block.names: block.stack for block in report.unwritten}
    cos = stacks[("Engine.layers.0.cos",)]
    assert cos is not None
    assert [frame.name for frame in cos.frames[:2]] == ["__init__", "__init__"]
    assert cos.frames[0].filename == __file__
    assert stacks[("Engine.layers.0.cos",)] == stacks[("Engine.layers.1.cos",)]
    assert any(stack is not None and stack.frames[0].name == "in_region" for stack in stacks.values())
    (together,) = (blocks for stack, blocks in report.by_stack if stack == cos)
    assert len(together) == 2
    assert "test_check_fresh.py" in str(report)
    del model, other


#: Those whose 0xFF bytes no program writes, by their names in torch.
FINDINGS = [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "complex64",
    "bool",
]


@pytest.mark.parametrize("name", FINDINGS)
def test_types_without_minus_one_are_findings(name: str) -> None:
    kind = getattr(torch, name, None)
    if kind is None:
        pytest.skip(f"this release of torch has no {name}")
    with saver.region(tag="w"):
        tensor = torch.zeros(4096, dtype=torch.uint8, device="cuda").view(kind)
    cycle()
    (block,) = saver.check_fresh().unwritten
    assert block.dtype == name
    del tensor


@pytest.mark.parametrize("name", ["int64", "int32", "int16", "int8", "uint8"])
def test_integers_are_a_class(name: str) -> None:
    tensor = in_region(torch.zeros(4096, dtype=getattr(torch, name)))
    cycle()
    report = saver.check_fresh()
    assert report.is_fresh
    assert [block.dtype for block in report.integers] == [name]
    tensor.fill_(1)
    assert saver.check_fresh().integers == ()


def test_a_cache_is_ignored_by_tag_by_tensor_and_by_module() -> None:
    cache = in_region(torch.zeros(4 * MIB, dtype=torch.float16), "e/kv_cache")
    model = engine()
    cycle()
    assert saver.check_fresh("e/*").unwritten_bytes == 8 * MIB
    for ignore in ("*/kv_cache", [cache], (cache[100:200],), ["none", [cache]]):
        report = saver.check_fresh("e/*", ignore=ignore)
        assert report.is_fresh
        assert [block.bytes for block in report.ignored] == [8 * MIB]
    assert saver.check_fresh("w", ignore=model).is_fresh
    assert names(saver.check_fresh("w", ignore=model.layers).unwritten) == [("Engine.weight",)]
    cache[:MIB].fill_(1)  # a part
    assert saver.check_fresh("e/*", ignore=cache).ignored == ()
    report = saver.check_fresh("e/*")
    assert report.is_fresh
    assert [block.bytes for block in report.partly_written] == [8 * MIB]


def test_parameters_in_one_buffer_are_told_apart() -> None:
    flat = in_region(torch.ones(1 << 20))
    model = torch.nn.Module()
    for number, part in enumerate(flat.chunk(4)):
        setattr(model, f"weight{number}", torch.nn.Parameter(part.view(512, 512), requires_grad=False))
    cycle()
    (whole,) = saver.check_fresh().unwritten
    assert whole.bytes == 4 << 20
    assert whole.names == tuple(f"Module.weight{number}" for number in range(4))
    for number in (0, 1, 3):
        getattr(model, f"weight{number}").data.fill_(1)
    model.weight3.data[:256].fill_(float("nan")).view(torch.int32).fill_(-1)
    report = saver.check_fresh()
    assert names(report.unwritten) == [("Module.weight2",)]
    assert report.unwritten[0].shape == (512, 512)
    assert names(report.partly_written) == [("Module.weight3",)]


def test_blocks_that_are_younger_than_the_resume() -> None:
    old = in_region(torch.ones(64 * 1024))
    cycle()
    with saver.region(tag="w"):
        new = torch.empty(32 * 1024, device="cuda")  # in the same segment
    report = saver.check_fresh()
    assert core.find(new.data_ptr()) == core.find(old.data_ptr())
    assert [block.address for block in report.unwritten] == [old.data_ptr()]
    assert report.new_bytes == 128 * 1024


def test_blocks_freed_since_are_no_finding() -> None:
    first, second = in_region(torch.ones(64 * 1024)), in_region(torch.ones(64 * 1024))
    cycle()
    del first
    assert [block.address for block in saver.check_fresh().unwritten] == [second.data_ptr()]


def test_work_in_flight_is_waited_for() -> None:
    tensor = in_region(torch.ones(MIB))
    torch.cuda.synchronize()
    cycle()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        hold_stream()
        tensor.fill_(1)
    assert saver.check_fresh().is_fresh
    torch.cuda.synchronize()


def test_a_capture_is_refused_and_stays_valid() -> None:
    source, tensor = torch.ones(MIB, device="cuda"), in_region(torch.ones(MIB))
    cycle()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        result = source * 2
        with pytest.raises(errors.CaptureInProgressError):
            saver.check_fresh()
    graph.replay()
    assert bool((result == 2).all())
    assert saver.check_fresh("w").unwritten_bytes == 4 * MIB
    del graph, tensor


def test_pools_of_graphs_are_a_class() -> None:
    source = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        between = source * 2
        result = between + 1
        del between
    cycle("graph")
    report = saver.check_fresh("graph")
    assert report.is_fresh
    assert report.graph_bytes >= 8 * MIB
    assert report.graph_unwritten_bytes > 0
    graph.replay()
    assert bool((result == 3).all())
    report = saver.check_fresh("graph")
    assert report.is_fresh
    del graph


def test_all_of_it_on_request() -> None:
    tensor = in_region(torch.ones(32 * MIB, dtype=torch.uint8).view(torch.float32))
    cycle()
    tensor.fill_(1)
    hole = tensor[1 << 20 : (1 << 20) + (64 << 10)]
    hole.view(torch.int32).fill_(-1)
    assert saver.check_fresh().partly_written == ()
    (block,) = saver.check_fresh(whole=True).partly_written
    assert block.sampled_bytes == 32 * MIB
    assert block.unwritten_bytes == 256 << 10
    assert core.counters()["host_backup_bytes"] == 0


def test_frozen_modules_are_named_where_they_are_passed() -> None:
    model = engine()
    gc.collect()
    gc.freeze()
    try:
        cycle()
        hidden = saver.check_fresh()
        assert set(names(hidden.unwritten)) == {()}
        assert hidden.hidden_objects
        assert "gc.freeze()" in str(hidden)
        named = saver.check_fresh(modules=[model])
        assert ("Engine.weight",) in names(named.unwritten)
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as conftest.py leaves it


def test_memory_is_as_before() -> None:
    """Nothing is allocated on the device, nothing is kept on the host, and contents stay."""
    model = engine()
    cycle()
    model.weight.fill_(3)
    resident, allocated = core.counters()["resident_bytes"], torch.cuda.memory_allocated()
    before = free_bytes()
    saver.check_fresh(whole=True)
    assert (core.counters()["resident_bytes"], torch.cuda.memory_allocated()) == (resident, allocated)
    assert_close_to(free_bytes(), before, "free memory")
    assert bool((model.weight == 3).all())
    assert bool(model.layers[0].cos.isnan().all())


def test_expandable_segments_change_nothing() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        tensor, ordinary = in_region(torch.ones(MIB)), torch.ones(MIB, device="cuda")
        cycle()
        report = saver.check_fresh()
        assert [block.address for block in report.unwritten] == [tensor.data_ptr()]
        assert report.checked_bytes == 4 * MIB
        del ordinary
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
