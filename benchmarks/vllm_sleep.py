"""vLLM's sleep mode with this package's plug-in beside vLLM's own allocator: times, bytes and tokens.

It needs a GPU, this package installed (so that vLLM finds the plug-in) and vLLM 0.26.0 or newer. Weights are random and no
file is downloaded.

    pip install vllm==0.26.0
    python benchmarks/vllm_sleep.py --model 7B --json result.json
    python benchmarks/vllm_sleep.py --model 32B --gpus 2 --cycles 5

Each backend has an engine in a process of its own, and the engines take turns (engine_turns.py). The backend "none" is an
engine without sleep mode. A cycle of each case is:

    level1         sleep(1), wake the weights, wake the cache
    level1-rested  the same, with a second of rest while asleep: the driver has cleared the released memory by then
    level2         sleep(2), wake the weights, load them again, wake the cache
    cache-first    sleep(1), wake the cache, wake the weights
    cache-only     discard the cache, wake the cache; vLLM 0.26.0's own backend cannot do it
    update         sleep(1), wake the weights, load other weights for one layer, wake the cache; the next sleep copies them

Times are in milliseconds. `sleep`, `wake weights` and `wake cache` are the calls of the engine. `suspend` and `resume` are
the part inside the backend, in the process that has the GPU. `outside core` is the part of both that this package spends in
Python.
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

_CASES = ("level1", "level1-rested", "level2", "cache-first", "cache-only", "update")
_REST_S = 1.0
_PROMPT_TOKENS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--compile", action="store_true", help="vLLM's default compilation: the start takes longer")
    add_arguments(parser, ("none", OURS, "cumem"), _CASES)
    return compare(VllmEngine, parser.parse_args())


class VllmEngine:
    """vLLM with random weights and one backend of its sleep mode."""

    def __init__(self, backend: str, parsed: argparse.Namespace) -> None:
        os.environ.update(_environment(parsed))
        self._backend = backend
        self._prompts = parsed.prompts
        self._vocabulary = MODELS[parsed.model].vocabulary
        vllm = importlib.import_module("vllm")
        self._sampling = vllm.SamplingParams(temperature=0, max_tokens=parsed.tokens, detokenize=False, ignore_eos=True)
        self._llm = vllm.LLM(**_arguments(write_model(parsed.model), backend, parsed))
        if backend != "none":
            self._call("watch_backend")
        self.about = {
            "vllm": vllm.__version__,
            "torch": importlib.import_module("torch").__version__,
            **self._call("describe"),
        }

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return what the first worker returns. All workers are called."""
        return self._llm.collective_rpc(method, args=arguments)[0]

    def generate(self) -> str:
        """Return a digest of the tokens that follow fixed prompts."""
        prompts = [
            {"prompt_token_ids": [(7 * row + column) % (self._vocabulary - 5) + 5 for column in range(_PROMPT_TOKENS)]}
            for row in range(self._prompts)
        ]
        outputs = self._llm.generate(prompts, self._sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]

    def supports(self, case: str) -> bool:
        """Return whether the backend can do what the case does."""
        if case == "cache-only":
            return self._backend != "none" and bool(self._call("can_discard"))
        return self._backend != "none"

    def cycle(self, case: str, index: int) -> Cycle:
        """Perform one cycle of a case. Afterwards the weights are those of the start."""
        free = self._call("free_bytes")
        figures: dict[str, float] = {}
        if case == "cache-only":
            figures["sleep"] = timed(lambda: self._call("discard_cache"))
        else:
            level = 2 if case == "level2" else 1
            figures["sleep"] = timed(lambda: self._llm.sleep(level=level))
        figures["freed GiB"] = (self._call("free_bytes") - free) / GIB
        if case == "level1-rested":
            time.sleep(_REST_S)
        if case == "cache-only":
            figures["wake cache"] = timed(lambda: self._call("wake_up", ["kv_cache"]))
        elif case == "cache-first":
            figures["wake cache"] = timed(lambda: self._llm.wake_up(tags=["kv_cache"]))
            figures["wake weights"] = timed(lambda: self._llm.wake_up(tags=["weights"]))
        else:
            figures["wake weights"] = timed(lambda: self._llm.wake_up(tags=["weights"]))
            if case == "level2":
                figures["load"] = timed(lambda: self._call("load_first_weights"))
            if case == "update":
                figures["load"] = timed(lambda: self._call("load_other_weights", index))
            figures["wake cache"] = timed(lambda: self._llm.wake_up(tags=["kv_cache"]))
        figures["all calls"] = sum(figures.get(name, 0.0) for name in ("sleep", "wake weights", "wake cache"))
        spent, details = self._call("spent")
        figures.update(spent)
        tokens = self.generate()
        if case == "update":
            figures["sleep after update"] = timed(lambda: self._llm.sleep(level=1))
            self._llm.wake_up()
            self._call("spent")
            after = self.generate()
            if after != tokens:
                raise RuntimeError(f"the updated weights give tokens {tokens}, and {after} after a sleep")
            self._call("load_first_weights")
        return Cycle(tokens, figures, details)

    def close(self) -> None:
        """End vLLM's workers."""
        self._llm.llm_engine.engine_core.shutdown()


class WorkerExtension:
    """Methods that vLLM adds to its worker, which is in the process that has the GPU (``worker_extension_cls``)."""

    def describe(self: Any) -> dict[str, Any]:
        """Return what the JSON file says about the model and the device."""
        torch = importlib.import_module("torch")
        tensors = self.model_runner.model.parameters()
        return {
            "device": torch.cuda.get_device_name(),
            "weights_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "cache_bytes": sum(cache.numel() * cache.element_size() for cache in _tensors(self.model_runner.kv_caches)),
        }

    def free_bytes(self: Any) -> int:
        """Return the free memory of the device, after it has finished its work."""
        torch = importlib.import_module("torch")
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    def watch_backend(self: Any) -> None:
        """Start measuring the backend's own part of each sleep and wake-up."""
        self.measured = {"suspend": 0.0, "resume": 0.0}
        self.events_seen_ns = 0
        backend = _backend_of(self)
        for name in self.measured:
            setattr(backend, name, _measured(self.measured, name, getattr(backend, name)))
        self.spent()

    def spent(self: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return what the backend has spent since the last call: figures, and the phases of this package's calls."""
        figures = dict(self.measured)
        details: dict[str, Any] = {}
        if type(_backend_of(self)).__module__.split(".")[0] == OURS:
            native, copied, details = _own_calls(self.events_seen_ns)
            figures["outside core"] = figures["suspend"] + figures["resume"] - native
            figures["copied GiB"] = copied / GIB
        self.events_seen_ns = time.monotonic_ns()
        self.measured.update(suspend=0.0, resume=0.0)
        return figures, details

    def can_discard(self: Any) -> bool:
        """Return whether the backend can release the cache alone."""
        return hasattr(_backend_of(self), "discard")

    def discard_cache(self: Any) -> None:
        """Release the cache alone."""
        _backend_of(self).discard(("kv_cache",))

    def load_first_weights(self: Any) -> None:
        """Give all weights the random values that they had at the start."""
        utils = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
        utils.initialize_dummy_weights(self.model_runner.model, self.vllm_config.model_config)
        importlib.import_module("torch").cuda.synchronize()

    def load_other_weights(self: Any, seed: int) -> None:
        """Load other weights for the attention of the first layer, as a trainer would send them.

        They are large, because the other random weights are so small that a layer has little effect.
        """
        torch = importlib.import_module("torch")
        config = self.vllm_config.model_config.hf_config
        head = config.hidden_size // config.num_attention_heads
        dtype = self.vllm_config.model_config.dtype
        rows = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        generator = torch.Generator().manual_seed(seed)
        self.model_runner.model.load_weights(
            [
                (
                    f"model.layers.0.self_attn.{name}_proj.weight",
                    (100 * torch.randn(count * head, config.hidden_size, generator=generator)).to(dtype),
                )
                for name, count in rows.items()
            ]
        )
        torch.cuda.synchronize()


def _environment(parsed: argparse.Namespace) -> dict[str, str]:
    """Return the variables of an engine's process."""
    here = str(Path(__file__).resolve().parent)
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),  # workers import the extension
    }


def _arguments(model: str, backend: str, parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``."""
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": parsed.prompts,
        "seed": 1,
        "kv_cache_memory_bytes": int(parsed.cache * GIB),
        "gpu_memory_utilization": 0.3,  # only checked against the free memory
        "enable_prefix_caching": False,
        "tensor_parallel_size": parsed.gpus,
        "disable_custom_all_reduce": True,  # so that NCCL's calls are in the graphs
        "worker_extension_cls": "vllm_sleep.WorkerExtension",
        "enforce_eager": parsed.eager,
    }
    if not (parsed.eager or parsed.compile):
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if backend != "none":
        arguments["enable_sleep_mode"] = True
        _select(backend, arguments)
    return arguments


def _select(backend: str, arguments: dict[str, Any]) -> None:
    """Select the backend of the sleep mode. vLLM 0.26.0 has the setting in its configuration, but no argument for it."""
    engine_arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    if "sleep_mode_backend" in engine_arguments.__dataclass_fields__:
        arguments["sleep_mode_backend"] = backend
        return
    original = engine_arguments.create_model_config

    def create_model_config(self: Any, *given: Any, **named: Any) -> Any:
        config = original(self, *given, **named)
        config.sleep_mode_backend = backend
        return config

    engine_arguments.create_model_config = create_model_config


# ---- in the process that has the GPU -----------------------------------------------------------------------------------


def _backend_of(worker: Any) -> Any:
    """Return the backend of a worker. Releases of vLLM differ in its name."""
    find = getattr(worker, "_get_sleep_mode_backend", None)
    return find() if find else worker.sleep_mode_backend


def _measured(into: dict[str, float], name: str, call: Any) -> Any:
    def measured(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            into[name] += (time.perf_counter() - began) * 1e3

    return measured


def _own_calls(since_ns: int) -> tuple[float, int, dict[str, Any]]:
    """Return the milliseconds in the core of this package's pauses and resumes since then, the bytes that they copied, and
    the milliseconds of each of their phases."""
    events = importlib.import_module("torch_memory_saver.observe.events").events().events
    calls = [event for event in events if event.kind == "end" and event.began_ns >= since_ns]
    phases: dict[str, float] = {}
    for event in events:
        if event.kind == "phase" and event.began_ns >= since_ns:
            name = f"{event.operation} {event.phase}"
            phases[name] = phases.get(name, 0.0) + (event.ended_ns - event.began_ns) / 1e6
    native = sum(event.ended_ns - event.began_ns for event in calls) / 1e6
    details = {
        "phases": phases,
        "calls": [
            [event.operation, (event.ended_ns - event.began_ns) / 1e6, event.allocations, event.bytes, event.copied_bytes]
            for event in calls
        ],
    }
    return native, sum(event.copied_bytes for event in calls), details


def _tensors(caches: Any) -> list[Any]:
    return [each for cache in caches for each in (cache if isinstance(cache, (list, tuple)) else [cache])]


if __name__ == "__main__":
    sys.exit(main())
