"""Guards that snapshots agree with PyTorch, name what allocated a leak, and can be taken in every state."""

from __future__ import annotations

import json
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, empty, errors, saver, torch

from torch_memory_saver._torch.binding.history import DEFAULT_MAX_ENTRIES
from torch_memory_saver.observe import memory

#: Bytes of each leaked block. PyTorch gives blocks of this size segments that they share.
LEAK = 3 * MIB


@pytest.fixture
def history() -> Iterator[memory.History]:
    """What is recorded: everything, from the begin of the test on."""
    yield memory.record_history(1000, clear_history=True)
    memory.stop_history()


def leak(blocks: list[Any], device: int = 0) -> None:
    """What the stacks of the leaked blocks must name."""
    blocks.append(empty(LEAK, device))


def own(snapshot: dict[str, Any]) -> Any:
    return snapshot["torch_memory_saver"]


def live_blocks(snapshot: dict[str, Any], device: int = 0) -> dict[int, dict[str, Any]]:
    """By address."""
    return {
        block["address"]: block
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def functions(block: dict[str, Any]) -> list[str]:
    """Of the stack of a block, innermost first."""
    return [frame["name"] for frame in block.get("frames", ())]


def opcodes(path: Path) -> set[str]:
    return {operation.name for operation, _, _ in pickletools.genops(path.read_bytes())}


def test_a_snapshot_is_torchs_with_the_managed_segments(history: memory.History) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = empty(5 * MIB)
    blocks: list[Any] = []
    leak(blocks)
    snapshot = memory.take_snapshot(tag="here", step=7, role="tester")
    reference = torch.cuda.memory._snapshot()
    assert snapshot["segments"] == reference["segments"]
    assert set(snapshot) == set(reference) | {"torch_memory_saver"}
    part = own(snapshot)
    assert (part["tag"], part["step"], part["role"]) == ("here", 7, "tester")
    assert part["history"] == {"enabled": True, "host": history.host, "max_entries": 1000, "stacks": "python"}
    segments = {segment["address"]: segment for segment in snapshot["segments"]}
    (managed,) = (row for row in part["segments"] if row["tag"] == "weights")
    assert managed["address"] <= weights.data_ptr() < managed["address"] + managed["bytes"]
    assert managed["address"] in segments, "the two parts are matched by address"
    assert segments[managed["address"]]["total_size"] == managed["bytes"]
    assert (managed["state"], managed["backup"], managed["device"]) == ("active", "host", 0)
    device = next(row for row in part["devices"] if row["device"] == 0)
    assert device["allocated"] == torch.cuda.memory_allocated(0)
    assert device["reserved"] == torch.cuda.memory_reserved(0)
    assert device["total"] == torch.cuda.mem_get_info(0)[1]
    assert functions(live_blocks(snapshot)[blocks[0].data_ptr()])[:2] == ["empty", "leak"]


def test_a_leak_shows_its_stack_in_every_later_snapshot(history: memory.History, tmp_path: Path) -> None:
    sampler = memory.MemorySnapshotSampler(tmp_path, role="engine", synchronize=True)
    blocks: list[Any] = []
    for step in range(1, 4):
        leak(blocks)
        path = sampler.sample(step)
        assert path is not None
        snapshot = pickle.loads(path.read_bytes())
        stacks = live_blocks(snapshot)
        leaked = {address for address, block in stacks.items() if "leak" in functions(block)}
        assert leaked == {block.data_ptr() for block in blocks}
        assert own(snapshot)["step"] == step
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"step-{step:06d}" for step in (1, 2, 3)]


@pytest.mark.multigpu
def test_every_device_is_recorded(history: memory.History) -> None:
    assert history.devices == tuple(range(torch.cuda.device_count()))
    blocks: list[Any] = []
    for device in (0, 1):
        leak(blocks, device)
    snapshot = memory.take_snapshot()
    for device in (0, 1):
        assert functions(live_blocks(snapshot, device)[blocks[device].data_ptr()])[:2] == ["empty", "leak"]
    assert [row["device"] for row in own(snapshot)["devices"]][:2] == [0, 1]


def test_blocks_from_before_the_recording_have_no_stack() -> None:
    before = empty(LEAK)
    memory.record_history(1000)
    try:
        block = live_blocks(memory.take_snapshot())[before.data_ptr()]
    finally:
        memory.stop_history()
    assert functions(block) == []
    assert own(memory.take_snapshot())["history"] == {"enabled": False, "host": False}


def test_the_history_is_bounded(history: memory.History) -> None:
    done = memory.record_history(10, clear_history=True)
    if "clear_history" in done.unsupported:
        pytest.skip(f"PyTorch {done.torch_version} does not say what becomes of earlier events")
    assert done.max_entries == 10
    for _ in range(50):
        empty(MIB)
    assert max(len(trace) for trace in memory.take_snapshot()["device_traces"]) == 10


def test_snapshots_inside_a_region_and_while_memory_is_paused(history: memory.History) -> None:
    with saver.region(tag="kv_cache"):
        cache = empty(4 * MIB)
        inside = memory.take_snapshot()
        assert functions(live_blocks(inside)[cache.data_ptr()])[0] == "empty"
    saver.pause("kv_cache")
    paused = memory.take_snapshot()
    assert {row["state"] for row in own(paused)["segments"] if row["tag"] == "kv_cache"} == {"paused"}
    assert cache.data_ptr() in live_blocks(paused), "PyTorch's counters do not fall at a pause"
    saver.resume("kv_cache")
    resumed = memory.take_snapshot()
    assert {row["state"] for row in own(resumed)["segments"] if row["tag"] == "kv_cache"} == {"active"}
    grown = own(resumed)["devices"][0]["free"] - own(paused)["devices"][0]["free"]
    assert grown <= -4 * MIB


def test_a_snapshot_leaves_a_capture_valid_and_a_synchronized_one_refuses(history: memory.History, tmp_path: Path) -> None:
    x = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        assert memory.MemorySnapshotSampler(tmp_path).sample() is not None
        with pytest.raises(errors.CaptureInProgressError, match="being captured"):
            memory.MemorySnapshotSampler(tmp_path, synchronize=True).sample()
        y += 1
    graph.replay()
    assert y.tolist() == [2.0] * 8
    del y
    graph.reset()


@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated")
def test_the_pickle_has_no_opcode_that_torchs_own_lack(history: memory.History, tmp_path: Path) -> None:
    with saver.region(tag="weights"):
        weights = empty(5 * MIB)
    ours = opcodes(memory.write_snapshot(tmp_path / "ours.pickle", step=70_000))
    theirs = set()
    # PyTorch's snapshots hold its settings, which are on in some programs and off in others.
    for name, setting in (("on", "True"), ("off", "False")):
        torch.cuda.memory._set_allocator_settings(f"release_lock_on_cudamalloc:{setting}")
        torch.cuda.memory._dump_snapshot(str(tmp_path / name))
        theirs |= opcodes(tmp_path / name)
    if "BINGET" in theirs:
        theirs.add("LONG_BINGET")  # the same with a larger number, in a snapshot of more than 256 objects, as most are
    assert sorted(ours - theirs) == [], sorted(theirs)
    assert {"PROTO", "FRAME", "MEMOIZE", "NEWTRUE", "NEWFALSE"} <= theirs
    assert weights.numel() == 5 * MIB


@pytest.mark.outer
def test_the_environment_alone_records_a_program_and_its_children(tmp_path: Path) -> None:
    """In hook mode preload without a child, which inherits its variables in the same way."""
    arguments: dict[str, tuple[str, ...]] = {"torch": ("child",), "preload": ()}
    programs = [
        Program(
            "leak.py",
            each,
            (("TMS_DEBUG", "history,snapshots"), ("TMS_DEBUG_DIR", str(tmp_path / mode)), ("RANK", "3")),
            preload=mode == "preload",
        )
        for mode, each in arguments.items()
    ]
    for mode, finished in zip(arguments, run_programs(programs), strict=True):
        finished.check()
        assert "Traceback" not in finished.error
        processes = [json.loads(line) for line in finished.output.splitlines()]
        seen = [check_files(tmp_path / mode, process) for process in processes]
        joined = [["3", "4", "5"]] if mode == "torch" else []
        assert seen == [["1", "2", "3"], *joined], "the child joins the moment under way"


def check_files(directory: Path, process: dict[str, Any]) -> list[str]:
    """Checks each snapshot of a process: what was leaked until then, with its stack, and memory that is not yet paused.
    Returns their moments."""
    paths = sorted(directory.glob(f"snapshots/step-*/rank3-pid{process['pid']}-leak.pickle"))
    devices = torch.cuda.device_count()
    for number, path in enumerate(paths, start=1):
        snapshot = pickle.loads(path.read_bytes())
        part = own(snapshot)
        assert (part["rank"], part["role"], part["step"]) == (3, "leak", int(path.parent.name[-6:]))
        assert (part["history"]["enabled"], part["history"]["max_entries"]) == (True, DEFAULT_MAX_ENTRIES)
        assert {(row["tag"], row["state"]) for row in part["segments"]} == {("kv_cache", "active")}
        for device in range(devices):
            blocks = live_blocks(snapshot, device)
            leaked = [address for address, block in blocks.items() if functions(block)[:1] == ["leaky_cache"]]
            assert sorted(leaked) == sorted(process["leaked"][device : number * devices : devices])
    return [path.parent.name.lstrip("step-0") for path in paths]
