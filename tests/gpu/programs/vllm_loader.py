"""A process with engines of vLLM's stand-in, one after the other. Executes the commands on its standard input, one a line,
and answers each with `ok`, followed by what was asked for, or with the error, on a line.

engine [JSON]      starts an engine. JSON: arguments of vllm_engine.make_worker, without spaces. Answers JSON: how often
                   files were loaded, the warnings, and digests of the tensors and of what processing sets
sleep, wake        of the newest engine; sleep answers the bytes copied
reload             loads the weights of the newest engine again, as vLLM does, and into the existing model. Answers the loads
names              answers: the published names
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))

from command_loop import serve
from gpu_support import saver, torch
from vllm_engine import load_plugin, make_worker, stand_in

from torch_memory_saver import node_store

warnings: list[str] = []


class Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


class State:
    worker: Any = None
    model: Any = None


def loads() -> int:
    return int(import_module("vllm.model_executor.model_loader.default_loader").DefaultModelLoader.loads)


def engine(text: str = "{}") -> str:
    State.worker = State.model = None
    gc.collect()  # parameters have their layers
    warnings.clear()
    settings = json.loads(text)
    settings["dtype"] = getattr(torch, settings.get("dtype", "bfloat16"))
    before = loads()
    State.worker = make_worker(**{"load": {"load_format": "torch_memory_saver"}, **settings})
    State.model = State.worker.load_checkpoint()
    return " " + json.dumps([loads() - before, warnings, contents()])


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def contents() -> str:
    """The digests of all tensors, and what processing has set in Python."""
    model = State.model
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: module.scale_value for name, module in model.named_modules() if hasattr(module, "scale_value")}
    attribute = getattr(model.up, "w_kc", None)
    rows = {name: (str(tensor.dtype), digest(tensor)) for name, tensor in sorted(named.items())}
    return json.dumps([rows, values, None if attribute is None else digest(attribute)])


def sleep() -> str:
    before = saver.stats().pauses.copied_bytes
    State.worker.sleep()
    return f" {saver.stats().pauses.copied_bytes - before}"


def wake() -> str:
    State.worker.wake_up()
    return " " + json.dumps(contents())


def reload() -> str:
    """vLLM asks a new loader for the weights, or has it load into the model that exists."""
    config = State.worker.vllm_config
    before = loads()
    loader = import_module("vllm.model_executor.model_loader").get_model_loader(config.load_config)
    assert hasattr(loader, "get_all_weights")
    State.model.load_weights(loader.get_all_weights(config.model_config, State.model))
    loader.load_weights(State.model, config.model_config)
    return f" {loads() - before}"


def names() -> str:
    return " " + json.dumps(node_store.names())


logging.getLogger("torch_memory_saver").addHandler(Warnings(logging.WARNING))
with stand_in():
    load_plugin()
    serve((engine, sleep, wake, reload, names))
