"""Guards bind_region() with PyTorch: a thread pool's tensors are managed, paused and restored like the caller's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gpu_support import MIB, saver, torch


def load(number: int) -> Any:
    return torch.full((8 * MIB,), number, dtype=torch.uint8, device="cuda")


def release() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_shards_of_a_thread_pool_are_paused_and_restored() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True), ThreadPoolExecutor(4) as pool:
        shards = list(pool.map(saver.bind_region(load), range(8)))
        mine = load(8)
    assert {saver.tag_of(tensor) for tensor in (*shards, mine)} == {"weights"}
    assert saver.pause("weights").bytes >= 72 * MIB
    release()
    saver.resume("weights")
    assert all(bool((tensor == number).all()) for number, tensor in enumerate([*shards, mine]))


def test_ordinary_tensors_of_a_thread_pool() -> None:
    with saver.region(tag="weights"), saver.disable(), ThreadPoolExecutor(2) as pool:
        ordinary = list(pool.map(saver.bind_region(load), range(4)))
    assert {saver.tag_of(tensor) for tensor in ordinary} == {None}


def test_gradients_of_a_bound_function_are_managed() -> None:
    def train() -> Any:
        layer = torch.nn.Linear(64, 64, device="cuda")
        layer(torch.ones(4, 64, device="cuda")).sum().backward()
        return layer

    with saver.region(tag="train", enable_cpu_backup=True), ThreadPoolExecutor(1) as pool:
        layer = pool.submit(saver.bind_region(train)).result()
    assert {saver.tag_of(tensor) for tensor in (layer.weight, layer.weight.grad)} == {"train"}


@pytest.mark.multigpu
def test_a_thread_that_uses_another_device() -> None:
    def load_on(device: int) -> Any:
        with torch.cuda.device(device):
            return load(device)

    with saver.region(tag="weights", enable_cpu_backup=True), ThreadPoolExecutor(2) as pool:
        tensors = list(pool.map(saver.bind_region(load_on), range(2)))
    assert [saver.tag_of(tensor) for tensor in tensors] == ["weights"] * 2
    saver.pause("weights")
    release()
    saver.resume("weights")
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
