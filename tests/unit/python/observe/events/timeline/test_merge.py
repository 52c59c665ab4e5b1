"""Guards which logs are drawn together: by boot id and UUID; and what is "other" on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from recorded_logs import GIB, MIB, Process

from torch_memory_saver.observe.events.timeline.merge import OTHER, Gpu, hosts_of, same_process


def levels_over_time(gpu: Gpu) -> Iterator[tuple[int, dict[tuple[int, str, str], int]]]:
    """After each moment of rows: what each band holds, by process, kind and tag."""
    levels: dict[tuple[int, str, str], int] = {}
    for number, (time_ns, band, size) in enumerate(gpu.rows):
        one = gpu.bands[band]
        levels[one.process, one.kind, one.tag] = size
        if number + 1 == len(gpu.rows) or gpu.rows[number + 1][0] != time_ns:
            yield time_ns, {key: value for key, value in levels.items() if value}


def engine_and_trainer() -> tuple[Process, Process]:
    engine, trainer = Process(1, rank=0, ordinal=0), Process(2, rank=1, ordinal=3, role="trainer")
    engine.allocate(10, "kv", 4 * GIB)
    trainer.allocate(20, "params", GIB)
    engine.pause(30, "kv", 4 * GIB)
    trainer.allocate(200, "grads", 2 * GIB)
    return engine, trainer


def test_processes_on_one_gpu_are_one_gpu() -> None:
    engine, trainer = engine_and_trainer()
    (host,) = hosts_of([trainer.log(300), engine.log(250)])
    assert [log.pid for log in host.logs] == [1, 2], "by rank"
    (gpu,) = host.gpus
    assert (gpu.uuid, gpu.total_bytes, gpu.ordinals) == ("GPU-a", 8 * GIB, {0: 0, 1: 3})
    assert (host.begin_ns, host.end_ns) == (10, 300)
    assert dict(levels_over_time(gpu)) == {
        10: {(0, "resident", "kv"): 4 * GIB},
        20: {(0, "resident", "kv"): 4 * GIB, (1, "resident", "params"): GIB},
        130: {(0, "paused", "kv"): 4 * GIB, (1, "resident", "params"): GIB},
        200: {(0, "paused", "kv"): 4 * GIB, (1, "resident", "params"): GIB, (1, "resident", "grads"): 2 * GIB},
    }


def test_other_is_what_is_used_less_what_the_processes_hold() -> None:
    engine, trainer = engine_and_trainer()
    trainer.sample(25, 8 * GIB - (4 + 1) * GIB - 300 * MIB)  # kv and params are resident
    engine.sample(140, 8 * GIB - GIB - 500 * MIB)  # params is
    (host,) = hosts_of([engine.log(250), trainer.log(300)])
    seen = dict(levels_over_time(host.gpus[0]))
    other = (OTHER, "other", "")
    assert {at: levels.get(other) for at, levels in seen.items()} == {
        10: None,
        20: None,
        25: 300 * MIB,
        130: 300 * MIB,
        140: 500 * MIB,
        200: 500 * MIB,
    }
    assert host.gpus[0].bands[-1].kind == "other"


def test_other_never_needs_more_than_the_device_has() -> None:
    """What others freed since the last sample is not drawn on top of memory that a process has got meanwhile."""
    engine = Process(1)
    engine.allocate(10, "kv", GIB)
    engine.sample(20, 0)
    engine.allocate(30, "weights", 5 * GIB)
    (host,) = hosts_of([engine.log(40)])
    assert [levels.get((OTHER, "other", "")) for _, levels in levels_over_time(host.gpus[0])] == [None, 7 * GIB, 2 * GIB]


def test_machines_are_apart() -> None:
    logs = []
    for boot, host in (("one", "a"), ("two", "b"), ("one", "a"), ("", "c"), ("", "c")):
        process = Process(len(logs), boot_id=boot, host=host)
        process.allocate(10 + len(logs), "kv", GIB)
        logs.append(process.log(50))
    hosts = hosts_of(logs)
    assert [(host.names, [log.pid for log in host.logs]) for host in hosts] == [
        (("a",), [0, 2]),
        (("b",), [1]),
        (("c",), [3]),
        (("c",), [4]),
    ]
    assert [len(host.gpus) for host in hosts] == [1, 1, 1, 1], "the same UUID, but another machine"
    assert [sum(size for _, _, size in host.gpus[0].rows) for host in hosts] == [2 * GIB, GIB, GIB, GIB]


def test_containers_of_one_machine_are_together() -> None:
    logs = []
    for host in ("pod-b", "pod-a"):
        process = Process(7, host=host)
        process.allocate(10, "kv", GIB)
        logs.append(process.log(50))
    (host,) = hosts_of(logs)
    assert (host.names, len(host.gpus), len(host.logs)) == (("pod-a", "pod-b"), 1, 2)


def test_a_device_without_a_uuid_is_shared_with_nobody() -> None:
    logs = []
    for pid in (1, 2):
        process = Process(pid, uuid="")
        process.allocate(pid, "kv", pid * GIB)
        logs.append(process.log(50))
    (host,) = hosts_of(logs)
    assert [(gpu.uuid, gpu.ordinals, gpu.total_bytes) for gpu in host.gpus] == [("", {0: 0}, 0), ("", {1: 0}, 0)]


def test_many_tags_share_a_band() -> None:
    process = Process(1)
    for number in range(30):
        process.allocate(number, f"tag {number:02}", (number + 1) * MIB)
    process.free(100, "tag 00", MIB)
    (host,) = hosts_of([process.log(200)])
    (gpu,) = host.gpus
    assert [(band.tag, band.folded) for band in gpu.bands[:2]] == [("tag 29", 0), ("tag 28", 0)]
    assert [(band.tag, band.folded) for band in gpu.bands if band.folded] == [("", 18)]
    *_, (_, last) = levels_over_time(gpu)
    assert sum(last.values()) == (sum(range(1, 31)) - 1) * MIB
    assert last[0, "resident", ""] == sum(range(2, 19)) * MIB


def test_files_of_one_process() -> None:
    process = Process(1)
    for at in range(1, 8):
        process.allocate(at, "kv", MIB)
    early, late = process.log(9), None
    process.allocate(20, "kv", MIB)
    late = process.log(30, capacity=3)
    assert late.dropped == 5
    assert same_process(early, late) and same_process(late, early) and same_process(late, late)
    other = Process(1)
    for at in range(101, 109):
        other.allocate(at, "kv", MIB)
    assert not same_process(late, other.log(200)), "the number was used again"
    assert not same_process(early, process.log(30, capacity=1)), "they share no event"
    unknown = Process(1, boot_id="")
    assert not same_process(unknown.log(1), unknown.log(1))
