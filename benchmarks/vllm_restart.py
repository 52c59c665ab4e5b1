"""How long an engine of vLLM takes from the start of its process to its first tokens: weights adopted, and read from files.

It needs a GPU, this package installed and vLLM 0.26.0 or newer. A Qwen2 model of random weights is written once, as a
checkpoint that any engine reads. The first engine with the load format `torch_memory_saver` loads and publishes it. Then new
processes take turns to adopt the weights and to read the files, which are in the page cache.

    python benchmarks/vllm_restart.py --model 7B

Times are in seconds, the median and the range:

    weights   the loader fills the parameters
    tokens    from the start of the process to the first tokens, imports and CUDA graphs included

An engine that gives other tokens than the first one makes the exit status 1. Times are never judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_models import add_model_arguments, write_model

OURS, FILES = "torch_memory_saver", "auto"

#: Writes the weights of the configuration in a folder, in files of at most 5 GB.
WRITE = """
import sys, torch, transformers
folder = sys.argv[1]
torch.manual_seed(1)
with torch.device("cuda"):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(folder, max_shard_size="5GB")
"""
#: The process of one engine: its arguments, the load format, the number of tokens, and the time at its start.
ENGINE = """
import json, sys, time
arguments, tokens, started = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import default_loader

    spent = []

    def timed(load):
        def timed_load(*given, **named):
            import torch
            began = time.time()
            result = load(*given, **named)
            torch.cuda.synchronize()
            spent.append(time.time() - began)
            return result
        return timed_load

    if arguments["load_format"] == "auto":
        kind = default_loader.DefaultModelLoader
    else:
        from torch_memory_saver.vllm.loader import PublishedLoader as kind
    kind.load_weights = timed(kind.load_weights)
    engine = LLM(**arguments)
    prompts = [{"prompt_token_ids": [7 * row + column + 5 for column in range(20)]} for row in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    engine.generate(prompts, sampling, use_tqdm=False)
    first = time.time() - started
    sampling.max_tokens = tokens
    found = [list(each.outputs[0].token_ids) for each in engine.generate(prompts, sampling, use_tqdm=False)]
    with open(sys.argv[4], "w") as file:
        json.dump({"weights": spent[0], "tokens": first, "generated": found}, file)
"""


def _run(arguments: dict[str, Any], tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        program, result = Path(folder, "engine.py"), Path(folder, "result.json")
        program.write_text(ENGINE, "utf-8")
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        command = [sys.executable, str(program), json.dumps(arguments), str(tokens), str(time.time()), str(result)]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        return dict(json.loads(result.read_text("utf-8")))


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (%(default)s)")
    parsed = parser.parse_args()
    if parsed.gpus != 1:
        parser.error("the weights of an engine on several GPUs are loaded in other processes, where nothing is measured")
    os.environ["TMS_SHARED_DIR"] = tempfile.mkdtemp(prefix="tms-bench-", dir="/dev/shm")
    folder = write_model(parsed.model)
    try:
        configuration = Path(folder, "config.json")
        written = configuration.read_text("utf-8")
        subprocess.run([sys.executable, "-c", WRITE, folder], stdout=sys.stderr, check=True)
        configuration.write_text(written, "utf-8")  # as older releases of transformers and vLLM read it
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        arguments = {
            "model": folder,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": parsed.prompts,
            "kv_cache_memory_bytes": int(parsed.cache * (1 << 30)),
            "enforce_eager": parsed.eager,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }
        one = {kind: {**arguments, "load_format": kind} for kind in (FILES, OURS)}
        published = _run(one[OURS], parsed.tokens)
        times: dict[str, list[dict[str, Any]]] = {FILES: [], OURS: []}
        for _ in range(parsed.rounds):
            for kind, found in times.items():
                found.append(_run(one[kind], parsed.tokens))
    finally:
        shutil.rmtree(os.environ["TMS_SHARED_DIR"])
        shutil.rmtree(folder)
    print(f"{size / 1e9:.1f} GB, loaded and published in {published['weights']:.2f} s\n")
    print("| load format | weights, s | tokens, s |\n| --- | --- | --- |")
    for kind, found in times.items():
        print(f"| {kind} | {_cell([each['weights'] for each in found])} | {_cell([each['tokens'] for each in found])} |")
    others = [kind for kind, found in times.items() for each in found if each["generated"] != published["generated"]]
    print(f"\n{len(others)} engines generated other tokens", flush=True)
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
