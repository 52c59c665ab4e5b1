"""Guards that sharing managed tensors with other processes is refused with a remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
from gpu_support import MIB, STARTED_PRELOADED, Program, empty, errors, run_programs, saver, torch

REFUSED = r"tag 'weights'.*tensor\.cpu\(\).*disable\(\)"


def ways_to_share(tensor: torch.Tensor) -> list[Callable[[], object]]:
    from torch.multiprocessing.reductions import reduce_tensor

    return [
        lambda: ForkingPickler.dumps(tensor),
        lambda: ForkingPickler.dumps([{"key": (1, tensor[7:])}]),
        lambda: ForkingPickler.dumps(torch.nn.Parameter(tensor, requires_grad=False)),
        lambda: reduce_tensor(tensor),
        lambda: tensor.untyped_storage()._share_cuda_(),
        lambda: torch.multiprocessing.get_context("spawn").SimpleQueue().put(tensor),
    ]


def test_a_managed_tensor_is_refused_with_a_remedy() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(2 * MIB)
    for paused in (False, True):
        if paused:
            saver.pause("weights")
        for share in ways_to_share(tensor):
            with pytest.raises(errors.InvalidStateError, match=REFUSED) as caught:
                share()
            assert (caught.value.operation, caught.value.tag, caught.value.device) == ("share", "weights", 0)
    saver.resume("weights")
    assert pickle.loads(pickle.dumps(tensor.cpu())).numel() == 2 * MIB


def test_other_tensors_are_shared_as_before() -> None:
    with saver.region(tag="weights"):
        managed = empty(2 * MIB)
        with saver.disable():
            copy = managed.clone()
    handle = copy.untyped_storage()._share_cuda_()
    assert (handle[0], handle[2]) == (0, 2 * MIB)
    torch.UntypedStorage._release_ipc_counter(handle[4], handle[5], device=0)  # as the receiver does
    torch.cuda.ipc_collect()
    assert ForkingPickler.dumps(copy.cpu())
    assert ForkingPickler.dumps(torch.nn.Parameter(copy.cpu(), requires_grad=False))


def test_the_receiver_of_a_queue_gets_an_error() -> None:
    (done,) = run_programs([Program("share.py", preload=STARTED_PRELOADED)])
    done.check()
    assert done.output == "ready\n"
    assert done.error.count("cannot be sent, and its get() will raise: share: this tensor is in managed memory") == 2
