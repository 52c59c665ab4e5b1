"""A process that loads models with examples/sglang_published_loader.py and SGLang's stand-in. Executes the commands on its
standard input, one a line, and answers each with `ok` and JSON.

start FOLDER       the checkpoint; the first command
load RANK          a new model on a rank: how often files were loaded, the warnings, and digests of the model
update             loads the checkpoint into the newest model, as SGLang's update from disk does
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared" / "sglang_stand_in"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from gpu_support import torch

loaders: Any = import_module("sglang.srt.model_loader.loader")
config = SimpleNamespace(
    model_path="",
    revision=None,
    dtype=torch.float32,
    quantization=None,
    hf_config=SimpleNamespace(architectures=["Model"]),
)
warnings: list[str] = []


class Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


class State:
    model: Any = None
    loader: Any = None


def start(checkpoint: str) -> None:
    State.loader = import_module("sglang_published_loader").PublishedLoader
    config.model_path = checkpoint


def new_loader() -> Any:
    return loaders.get_model_loader(import_module("sglang.srt.configs.load_config").LoadConfig(State.loader))


def described() -> list[Any]:
    weight = State.model.weight.detach().cpu().contiguous().view(torch.uint8)
    return [hashlib.sha256(weight.numpy().tobytes()).hexdigest(), State.model.scale_value]


def load(rank: str) -> list[Any]:
    State.model = None
    gc.collect()
    warnings.clear()
    import_module("sglang.srt.runtime_context").get_parallel().tp_rank = int(rank)
    before = loaders.DefaultModelLoader.loads
    State.model = new_loader().load_model(model_config=config, device_config=SimpleNamespace(device="cuda"))
    return [loaders.DefaultModelLoader.loads - before, warnings, described()]


def update() -> list[Any]:
    before = loaders.DefaultModelLoader.loads
    loader = new_loader()
    loader.load_weights_and_postprocess(State.model, loader._get_all_weights(config, State.model), torch.device("cuda"))
    return [loaders.DefaultModelLoader.loads - before, warnings, described()]


COMMANDS: dict[str, Any] = {each.__name__: each for each in (start, load, update)}

logging.getLogger("torch_memory_saver").addHandler(Warnings(logging.WARNING))
for line in sys.stdin:
    name, *words = line.split()
    try:
        answer = "ok" + json.dumps(COMMANDS[name](*words))
    except Exception as error:
        answer = f"{type(error).__name__}: {' '.join(str(error).split())}"
    print(answer, flush=True)
