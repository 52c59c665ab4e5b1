"""SGLang's memory saver with this package, and with the C++ package that it replaces: times, bytes, weights and tokens.

It needs a GPU, this package and SGLang 0.5.17 or newer. Weights are random and no file is downloaded.

    pip install sglang==0.5.17
    pip install --no-deps --target /tmp/cpp torch_memory_saver==0.0.9.post1
    python benchmarks/sglang_sleep.py --backends none,torch_memory_saver,cpp --cpp /tmp/cpp --json result.json

Each backend has an engine in processes of its own, and the engines take turns (engine_turns.py). The backend "none" is an
engine without memory saver. "cpp" is the C++ package in the folder that `--cpp` names. A cycle of each case is:

    weights   release the weights, which have a backup in host memory, and resume them
    kv_cache  release the KV cache, which loses its contents, and resume it
    all       release everything with one call, and resume it with one call
    staged    release the cache and the weights, resume the weights, resume the cache: the order of a trainer
    rested    the same, with a second of rest before the first resume: the driver has cleared the released memory by then
    update    the same as "staged", with other weights loaded for one layer before the cache is resumed

The memory of the CUDA graphs is released too, with everything, unless SGLANG_MEMORY_SAVER_CUDA_GRAPH=0 is set.

Times are those of the engine's calls, in milliseconds. A digest covers the tokens that the engine generates, and SGLang's
checksum of all weights: the random weights are small, so not every wrong layer would change a token.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine_models import MODELS, add_model_arguments, write_model
from engine_turns import GIB, OURS, Cycle, add_arguments, compare, timed

_CASES = ("weights", "kv_cache", "all", "staged", "rested", "update")
_CPP = "cpp"
_REST_S = 1.0
_PROMPT_TOKENS = 20
_IDLE_ATTEMPTS = 1000
_FIRST_WEIGHTS = -1  # the seed of the layer that "update" changes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend (%(default)s)")
    parser.add_argument("--cpp", metavar="FOLDER", help='the C++ package for the backend "cpp"')
    add_arguments(parser, ("none", OURS), _CASES)
    return compare(SglangEngine, parser.parse_args())


class SglangEngine:
    """SGLang with random weights and one memory saver, or none."""

    def __init__(self, backend: str, parsed: argparse.Namespace) -> None:
        os.environ.update(_environment(backend, parsed))
        os.environ.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
        saver = _select(backend, parsed)
        self._backend = backend
        self._shape = MODELS[parsed.model]
        self._prompts = parsed.prompts
        self._sampling = {"temperature": 0.0, "max_new_tokens": parsed.tokens, "ignore_eos": True}
        sglang = importlib.import_module("sglang")
        self._torch = importlib.import_module("torch")
        self._requests = importlib.import_module("sglang.srt.managers.io_struct")
        self._engine = sglang.Engine(**_arguments(write_model(parsed.model), backend, parsed))
        self._load_layer(_FIRST_WEIGHTS)
        self.about = {
            "sglang": sglang.__version__,
            "torch": self._torch.__version__,
            "device": self._torch.cuda.get_device_name(),
            "memory saver": saver,
            "memory": self._engine.get_server_info()["internal_states"][0].get("memory_usage"),
        }

    def generate(self) -> str:
        """Return a digest of the weights, and of the tokens that follow fixed prompts."""
        prompts = [
            [(7 * row + column) % (self._shape.vocabulary - 5) + 5 for column in range(_PROMPT_TOKENS)]
            for row in range(self._prompts)
        ]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=self._sampling)
        tokens = [list(output["output_ids"]) for output in outputs]
        return hashlib.sha256(json.dumps([tokens, self._checksums()]).encode()).hexdigest()[:12]

    def supports(self, case: str) -> bool:
        """Return whether the engine has a memory saver: then it can do every case."""
        return self._backend != "none"

    def cycle(self, case: str, index: int) -> Cycle:
        """Perform one cycle of a case. Afterwards the weights are those of the start."""
        self._wait_until_idle()
        free = self._free_bytes()
        released = {"all": None, "weights": ["weights"], "kv_cache": ["kv_cache"]}.get(case, ["kv_cache", "weights"])
        figures = {"sleep": timed(lambda: self._engine.release_memory_occupation(tags=released))}
        figures["freed GiB"] = (self._free_bytes() - free) / GIB
        if case in ("weights", "kv_cache", "all"):
            figures["wake"] = timed(lambda: self._engine.resume_memory_occupation(tags=released))
            return Cycle(self.generate(), figures)
        if case == "rested":
            time.sleep(_REST_S)
        figures["wake weights"] = timed(lambda: self._engine.resume_memory_occupation(tags=["weights"]))
        if case == "update":
            figures["load"] = timed(lambda: self._load_layer(index))
        figures["wake cache"] = timed(lambda: self._engine.resume_memory_occupation(tags=["kv_cache"]))
        tokens = self.generate()
        if case == "update":
            self._load_layer(_FIRST_WEIGHTS)
        return Cycle(tokens, figures)

    def close(self) -> None:
        """End SGLang's processes."""
        self._engine.shutdown()

    def _free_bytes(self) -> int:
        """Return the free memory of the device. SGLang's calls wait until the device has finished its work."""
        return int(self._torch.cuda.mem_get_info()[0])

    def _wait_until_idle(self) -> None:
        """Wait until the scheduler has no request: it returns tokens before it has finished with them, and then a release
        would end it."""
        for _ in range(_IDLE_ATTEMPTS):
            if self._engine.flush_cache().success:
                return
        raise RuntimeError("the scheduler still has requests")

    def _checksums(self) -> list[str]:
        """Return SGLang's checksum of the weights of each rank."""
        request = self._requests.CheckWeightsReqInput(action="checksum")
        manager = self._engine.tokenizer_manager
        success, message, ranks, _ = self._engine.loop.run_until_complete(manager.check_weights(request))
        if not success:
            raise RuntimeError(f"SGLang computed no checksum: {message}")
        return [rank["per_gpu_checksum"] for rank in ranks]

    def _load_layer(self, seed: int) -> None:
        """Load weights for the attention of the first layer, as a trainer on the same GPU sends them.

        They are large, because the other random weights are so small that a layer has little effect.
        """
        torch, shape = self._torch, self._shape
        head = shape.hidden // shape.heads
        rows = {"q": shape.heads, "k": shape.key_value_heads, "v": shape.key_value_heads}
        generator = torch.Generator().manual_seed(seed + 1)
        tensors = [
            (
                f"model.layers.0.self_attn.{name}_proj.weight",
                (100 * torch.randn(count * head, shape.hidden, generator=generator)).to(torch.bfloat16).cuda(),
            )
            for name, count in rows.items()
        ]
        success, message = self._engine.update_weights_from_tensor(tensors)
        if not success:
            raise RuntimeError(f"SGLang did not load the weights: {message}")


def _environment(backend: str, parsed: argparse.Namespace) -> dict[str, str]:
    """Return the variables of an engine's processes."""
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if backend == _CPP:
        variables["PYTHONPATH"] = os.pathsep.join([parsed.cpp or "", os.environ.get("PYTHONPATH", "")])
        variables["LD_LIBRARY_PATH"] = os.pathsep.join([_runtime_folder(), os.environ.get("LD_LIBRARY_PATH", "")])
    return variables


def _runtime_folder() -> str:
    """Return the folder of PyTorch's CUDA runtime, which the preload library of the C++ package needs before PyTorch."""
    importlib.import_module("torch")
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return next((str(Path(line.split()[-1]).parent) for line in maps if "/libcudart.so" in line), "")


def _select(backend: str, parsed: argparse.Namespace) -> str:
    """Make Python find the package of a backend, and return its folder."""
    if backend == _CPP:
        sys.path.insert(0, parsed.cpp or "")  # processes of SGLang begin with this path
    elif backend != OURS:
        return ""
    folder = Path(str(importlib.import_module(OURS).__file__)).resolve().parent
    if (backend == _CPP) != (bool(parsed.cpp) and Path(parsed.cpp).resolve() in folder.parents):
        raise RuntimeError(f"the package of the backend {backend} is not the one in {folder}: --cpp is {parsed.cpp}")
    return str(folder)


def _arguments(model: str, backend: str, parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine``."""
    shape = MODELS[parsed.model]
    heads = max(1, shape.key_value_heads // parsed.gpus)
    bytes_per_token = 2 * 2 * shape.layers * heads * (shape.hidden // shape.heads)
    return {
        "model_path": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "context_length": 512,
        "random_seed": 1,
        "tp_size": parsed.gpus,
        "max_running_requests": parsed.prompts,
        "max_total_tokens": int(parsed.cache * GIB) // bytes_per_token,
        "mem_fraction_static": 0.85,  # of the memory that is free at the start
        "disable_radix_cache": True,  # every generation computes its prompts
        "disable_custom_all_reduce": True,  # so that NCCL's calls are in the graphs
        "attention_backend": parsed.attention,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,
        "disable_decode_cuda_graph": parsed.eager,
        "cuda_graph_bs_decode": sorted({1, parsed.prompts}),
        "skip_server_warmup": True,
        "log_level": "info",
        "enable_memory_saver": backend != "none",
        "enable_weights_cpu_backup": backend != "none",
    }


if __name__ == "__main__":
    sys.exit(main())
