"""vLLM's stand-in (vllm_stand_in), with the plug-in as in a process that has just been started."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import torch_memory_saver

_FOLDER = Path(__file__).resolve().parent / "vllm_stand_in"
_PLUGIN = "torch_memory_saver.vllm"
#: The variable that a configuration sets.
_NCCL = "NCCL_GRAPH_REGISTER"
#: As pyproject.toml declares it.
ENTRY_POINT = EntryPoint("torch_memory_saver", "torch_memory_saver.vllm:register", "vllm.general_plugins")


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or f"{name}.".startswith(f"{_PLUGIN}.")]:
        del sys.modules[name]
    vars(torch_memory_saver).pop("vllm", None)


@contextmanager
def stand_in() -> Iterator[None]:
    """Inside, ``vllm`` is the stand-in, and neither it nor the plug-in has been imported."""
    _forget()
    sys.path.insert(0, str(_FOLDER))
    before = os.environ.pop(_NCCL, None)
    try:
        yield
    finally:
        os.environ.pop(_NCCL, None)
        if before is not None:
            os.environ[_NCCL] = before
        sys.path.remove(str(_FOLDER))
        _forget()


def load_plugin() -> Any:
    """Load the plug-in as vLLM does, and return its module."""
    ENTRY_POINT.load()()
    return import_module(_PLUGIN)


def make_worker(
    backend: str = "torch_memory_saver",
    *,
    load: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
    rank: int = 0,
    **settings: Any,
) -> Any:
    """Return a worker of an engine in sleep mode, or with other settings of the model, of its load and of the ranks."""
    config = import_module("vllm.config")
    settings = {"enable_sleep_mode": True, "sleep_mode_backend": backend, **settings}
    made = config.VllmConfig(
        config.ModelConfig(**settings),
        load_config=config.LoadConfig(**(load or {})),
        parallel_config=config.ParallelConfig(**(parallel or {})),
    )
    # A worker gets its configuration from the process that has made and checked it.
    return import_module("vllm.v1.worker.gpu_worker").Worker(pickle.loads(pickle.dumps(made)), rank=rank)
