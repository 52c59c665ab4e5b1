"""Guards the description of a process group, with a stand-in for torch.distributed: tests/gpu has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.distributed.process_groups import group_of_ranks
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError


class ProcessGroup:
    group_name = "0"


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world of four ranks, in which this process is rank 2."""
    world = ProcessGroup()
    made = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        group=SimpleNamespace(WORLD=world),
        ProcessGroup=ProcessGroup,
        distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_map={world: ("gloo", "store")})),
        get_rank=lambda: 2,
        get_process_group_ranks=lambda group: list(range(4)) if group is world else [2, 3],
    )
    monkeypatch.setattr(layer, "imported", lambda: SimpleNamespace(distributed=made))
    return made


def test_the_default_group_and_others(distributed: Any) -> None:
    assert group_of_ranks("ranks.pause", None) == ("store", 2, (0, 1, 2, 3), "0")
    other = ProcessGroup()
    distributed.distributed_c10d._world.pg_map[other] = ("nccl", "other store")
    assert group_of_ranks("ranks.pause", other) == ("other store", 2, (2, 3), "0")


def test_a_group_without_a_store_is_refused(distributed: Any) -> None:
    distributed.distributed_c10d._world.pg_map[distributed.group.WORLD] = ("mpi", None)
    with pytest.raises(InvalidArgumentError, match="has no store: pass a group of the backend gloo or nccl"):
        group_of_ranks("ranks.pause", None)


@pytest.mark.parametrize("group", ["weights", -100, ProcessGroup()])
def test_what_is_no_group_of_this_process_is_refused(distributed: Any, group: object) -> None:
    with pytest.raises(InvalidArgumentError, match="group must be None or a process group that this process is a member of"):
        group_of_ranks("ranks.pause", group)


def test_torch_distributed_must_be_initialized(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "is_initialized"):
        with (
            monkeypatch.context() as patch,
            pytest.raises(InvalidStateError, match=r"ranks\.resume needs the process group"),
        ):
            patch.setattr(distributed, name, lambda: False)
            group_of_ranks("ranks.resume", None)
    assert group_of_ranks("ranks.resume", None).rank == 2
    monkeypatch.setattr(layer, "imported", lambda: None)
    with pytest.raises(InvalidStateError, match="init_process_group"):
        group_of_ranks("ranks.resume", None)
