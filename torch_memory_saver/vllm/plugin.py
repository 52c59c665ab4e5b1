"""The entry point that vLLM calls in each of its processes, and the changes that it makes in vLLM.

vLLM's registry of backends covers suspend and resume only. vLLM looks a backend up when an engine sleeps for the first time,
long after it has allocated the engine's memory. No call of vLLM says before that which backend an engine selects. So one
function of vLLM is wrapped in every process that may have a worker: the initialiser of workers. The wrapper reads which
backend and which load format the worker selects. A worker is constructed in the process that allocates its memory, before
its first allocation.

Our load format is registered when a worker selects it, because that imports vLLM's model loaders, which only processes with
a worker have imported by then. With ``TMS_DISABLE`` nothing is wrapped, so the format is registered at once: an engine that
selects it runs, with vLLM's own loader.

Everything else is replaced when the first worker of the process selects our backend:

- ``get_mem_allocator_instance`` of ``vllm.device_allocator``, which finds the allocator. The new one returns our allocator
  if the newest worker that can sleep selects our backend. In every other case it calls vLLM's own function.
- The property of the configuration that says whether sleeping releases the memory of CUDA graphs, because vLLM decides that
  by the name of its own backend. So ``sleep_mode_offload_cudagraph`` works with our backend as well. vLLM has read the
  property when it kept NCCL from registering graphs, so the worker does that. The property stays as it is if
  vLLM's own allocator has methods for pools of graphs that ours lacks. They are compared when the backend is selected,
  because the module of that allocator loads a library.

A failure to find something in vLLM is logged and never raised: it would end engines that use another backend.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from importlib import import_module
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import replace

from .allocator import allocator

__all__ = ["BACKEND", "register"]

logger = logging.getLogger("torch_memory_saver")

#: Name that selects the backend and the loader, as in ``--sleep-mode-backend torch_memory_saver``.
BACKEND = "torch_memory_saver"
_VLLMS_OWN = "cumem"
_GRAPH_POOL = "use_cumem_cudagraph_pool"
#: NCCL's variable. The memory of graphs that NCCL has registered stays on the GPU when it is released, and collectives in
#: these graphs use it after a resume.
_NCCL_REGISTERS = "NCCL_GRAPH_REGISTER"


class _State:
    """The state of the plug-in in this process.

    Attributes:
        was_called: Whether :func:`register` was called.
        was_selected: Whether a worker has selected our backend.
        is_selected: Whether the newest worker that can sleep selects our backend.
    """

    def __init__(self) -> None:
        self.was_called = False
        self.was_selected = False
        self.is_selected = False


_state = _State()


def register() -> None:
    """Register the backend with vLLM, and have vLLM use our allocator where the backend is selected.

    The load format ``torch_memory_saver`` is registered where a worker selects it. vLLM calls this function. Further calls
    do nothing. If ``TMS_DISABLE`` is set, only the load format is registered, which then loads as vLLM's own. A release of
    vLLM that lacks a part of the interface is named in the log, and stays unchanged.
    """
    if _state.was_called:
        return
    _state.was_called = True
    if _core.get_disabled():
        _register_loader()
        return
    try:
        backends = import_module("vllm.device_allocator.sleep_mode_backend")
        find_allocator = import_module("vllm.device_allocator").get_mem_allocator_instance
        worker_class = import_module("vllm.v1.worker.worker_base").WorkerBase
        config_class = import_module("vllm.config").VllmConfig
        is_cuda = import_module("vllm.platforms").current_platform.is_cuda()
        backends.SleepModeBackendFactory.register_backend(BACKEND, f"{__package__}.backend", "SleepBackend")
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the name is taken
        _log_lack(error)
        return
    if is_cuda:
        _watch_workers(worker_class, find_allocator, config_class)


def _log_lack(error: Exception) -> None:
    """Log why the backend does not exist. Releases of vLLM without any backends are no reason for a warning."""
    is_old = isinstance(error, ModuleNotFoundError) and str(error.name).startswith("vllm.device_allocator")
    logger.log(
        logging.INFO if is_old else logging.WARNING,
        "vLLM %s does not get the sleep mode backend %r, which was written for vLLM 0.33.0: %s. Its own backends work as "
        "before.",
        getattr(sys.modules.get("vllm"), "__version__", "(unknown release)"),
        BACKEND,
        error,
    )


def _backend_of(vllm_config: Any) -> str | None:
    """Return the backend that a configuration selects, or None without sleep mode."""
    model = getattr(vllm_config, "model_config", None)
    return getattr(model, "sleep_mode_backend", None) if getattr(model, "enable_sleep_mode", False) else None


def _selects_loader(vllm_config: Any) -> bool:
    """Return whether a configuration selects our load format, for its model or for its draft model."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_load_config", None)
    return any(getattr(each, "load_format", None) == BACKEND for each in (getattr(vllm_config, "load_config", None), draft))


def _register_loader() -> None:
    """Register our load format, which vLLM offers from then on."""
    try:
        import_module(f"{__package__}.loader")
    except (ImportError, AttributeError) as error:
        logger.warning(
            "vLLM %s does not get the load format %r, which was run with vLLM 0.26.0: %s",
            getattr(sys.modules.get("vllm"), "__version__", "(unknown release)"),
            BACKEND,
            error,
        )


def _watch_workers(worker_class: Any, find_allocator: Any, config_class: Any) -> None:
    """Note what each new worker selects, and replace or register the rest when the first one selects ours.

    For the backend, workers without sleep mode do not count.
    """
    construct = worker_class.__init__

    @functools.wraps(construct)
    def __init__(self: Any, vllm_config: Any, *arguments: Any, **keywords: Any) -> None:
        if _selects_loader(vllm_config):
            _register_loader()
        backend = _backend_of(vllm_config)
        if backend is not None:
            _state.is_selected = backend == BACKEND
            if _state.is_selected and not _state.was_selected:
                _state.was_selected = True
                _replace_allocator(find_allocator)
                _release_graphs(config_class)
            if _state.is_selected and getattr(vllm_config, _GRAPH_POOL, False):
                _leave_graphs_unregistered()
        construct(self, vllm_config, *arguments, **keywords)

    replace("vllm.v1.worker.worker_base.WorkerBase.__init__", worker_class, "__init__", __init__)


def _leave_graphs_unregistered() -> None:
    """Keep NCCL, which this process initialises later, from registering the memory of graphs."""
    setting = os.environ.setdefault(_NCCL_REGISTERS, "0")
    if setting != "0":
        logger.warning(
            "%s=%s: NCCL registers the memory of CUDA graphs, which a sleep cannot release then. Set it to 0.",
            _NCCL_REGISTERS,
            setting,
        )


def _replace_allocator(original: Any) -> None:
    """Replace vLLM's function in its module, and in the modules that have imported it by name."""

    @functools.wraps(original)
    def get_mem_allocator_instance() -> Any:
        return allocator if _state.is_selected else original()

    name = original.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            replace(f"vllm.device_allocator.{name}", module, name, get_mem_allocator_instance)


def _release_graphs(config_class: Any) -> None:
    """Have vLLM capture CUDA graphs into our pool where it would capture them into its own. Older releases have no pool."""
    original = getattr(config_class, _GRAPH_POOL, None)
    if not isinstance(original, property):
        return
    lack = _lack_of_graph_pool()
    if lack:
        logger.warning(
            "vLLM %s captures CUDA graphs through an interface that the sleep mode backend %r does not have: %s. A sleep "
            "does not release the memory of CUDA graphs; the rest of the sleep mode works.",
            getattr(sys.modules.get("vllm"), "__version__", "(unknown release)"),
            BACKEND,
            lack,
        )
        return

    def use_pool(vllm_config: Any) -> Any:
        if _backend_of(vllm_config) == BACKEND:
            vllm_config = _View(vllm_config, model_config=_View(vllm_config.model_config, sleep_mode_backend=_VLLMS_OWN))
        return original.__get__(vllm_config)

    pool = property(use_pool, doc=original.__doc__)
    replace(f"vllm.config.VllmConfig.{_GRAPH_POOL}", config_class, _GRAPH_POOL, pool)


def _lack_of_graph_pool() -> str:
    """Return what our allocator lacks of the methods by which vLLM's own allocator provides pools for CUDA graphs, or ""."""
    try:
        own = import_module("vllm.device_allocator.cumem").CuMemAllocator
    except (ImportError, AttributeError) as error:
        return str(error)
    names = [name for name in dir(own) if "cudagraph_pool" in name and not name.startswith("_")]
    return ", ".join(name for name in names if not hasattr(allocator, name))


class _View:
    """A configuration in which some values are replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
