"""States of random numbers that PyTorch keeps on a device, which must not lie in the memory of a tag.

- The seed and the offset of a device's generator, for captured graphs. PyTorch allocates them when a capture begins and no
  graph of the generator exists, and writes to them before each replay of any graph.
- cuDNN's state for the dropout of recurrent networks. PyTorch allocates it at the first use of a device, and again after
  the generator was seeded, and uses it for every network.

Inside a region, or where ``TMS_INIT_ENABLE`` manages everything, they would be paused with a tag, and other graphs and
networks would access paused memory. So both are allocated in ordinary memory (ordinary_pool.py). Elsewhere nothing is done.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.eager import eager
from torch_memory_saver._torch.layer import TorchCuda, in_use
from torch_memory_saver._torch.ordinary_pool import OrdinaryPools
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["RandomStates"]

logger = logging.getLogger("torch_memory_saver")

#: PyTorch's operator that allocates cuDNN's state, and the dispatch key under which it selects the device.
_OPERATOR, _KEY = "_cudnn_init_dropout_state", "BackendSelect"


class RandomStates:
    """The two states in this process. Any thread may call."""

    def __init__(self, pools: OrdinaryPools) -> None:
        self._pools = pools
        self._library: Any = None  # owns the replaced operator

    def capture_begins(self, device: int) -> object:
        """Allocate the state of the device's generator for a capture that is about to begin. It stays as long as the
        returned object or a graph lives."""
        torch = in_use()
        if torch is None or not _core.region_current().managed:
            return None
        try:
            with self._pools.routed(torch, device):
                graph = torch.torch.cuda.CUDAGraph()
                graph.register_generator_state(torch.torch.cuda.default_generators[device])
            return graph
        except (AttributeError, TorchMemorySaverError, RuntimeError) as error:
            logger.debug("the state of the random generator for graphs may lie in managed memory: %s", error)
            return None

    def begin(self, torch: Any) -> None:
        """Replace the operator that allocates cuDNN's state, once. To be called with the module torch."""
        if self._library is not None or not hasattr(torch.ops.aten, _OPERATOR):
            return
        allocate = getattr(torch.ops.aten, _OPERATOR).default
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

        def allocate_state(*arguments: Any, **keywords: Any) -> Any:
            found = in_use()
            if found is None or not _core.region_current().managed:
                return allocate.redispatch(keys, *arguments, **keywords)
            with self._pools.routed(found, _device_of(found, keywords.get("device"))):
                return allocate.redispatch(keys, *arguments, **keywords)

        try:
            self._library = _replace(torch, eager(allocate_state))
        except (AttributeError, RuntimeError) as error:
            logger.debug("cuDNN's state for dropout may lie in managed memory: %s", error)


def _device_of(torch: TorchCuda, device: Any) -> int:
    index: int | None = getattr(device, "index", None)
    return torch.current_device() if index is None else index


def _replace(torch: Any, function: Callable[..., Any]) -> Any:
    library = torch.library.Library("aten", "IMPL")
    # Releases of PyTorch without this argument allow the override by default.
    allowed = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of a replaced operator
        library.impl(_OPERATOR, function, _KEY, **allowed)
    return library
