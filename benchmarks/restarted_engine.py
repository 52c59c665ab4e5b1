"""How long a process takes from its start to its weights on the GPU: adopted from the shared store, and read from a file.

One process publishes the weights and writes them to a file with safetensors. Then new processes take turns to adopt them and
to read the file, which is in the page cache. Prints a table in Markdown:

    python benchmarks/restarted_engine.py --gib 16
    python benchmarks/restarted_engine.py --gib 1,16 --model
    python -m torch_memory_saver simulate --memory 2GiB -- python benchmarks/restarted_engine.py --gib 0.02 --model

    weights   from the call of adopt() or load_file() on; with `--model` from the construction of the model on
    whole     from the start of the process to the weights on the GPU, imports and CUDA's context included
    token     `--model` only: from the start of the process to the first token

Without `--model` the weights are tensors of the sizes of a large model. With it they are those of a model of transformers
like Qwen2, in bfloat16, with random weights: one process constructs it without initialisation and adopts it, and the other
calls from_pretrained(). All must find the same token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared_backups import folder

NAME = "benchmark"
MIB = 1 << 20
#: Sizes of the model, without its layers: (least bytes, hidden, intermediate, heads, heads of keys and values).
SHAPES = ((4 << 30, 4096, 16384, 32, 8), (512 << 20, 1024, 4096, 16, 4), (0, 256, 1024, 4, 2))
VOCABULARY = 4096
PROMPT = tuple(range(1, 33))


class Tensors:
    """The weights of a large model as plain tensors."""

    def __init__(self, file: str, total: int) -> None:
        self.file = os.path.join(file, "weights.safetensors")
        sizes = [size * MIB for size in (128, 64, 64, 256, 256)]
        self.scale = max(1, sum(sizes) // total)
        self.sizes = [size for _ in range(max(1, total // sum(sizes))) for size in sizes]

    def _empty(self) -> dict[str, Any]:
        import torch

        return {
            f"layers.{index}": torch.empty(size // self.scale // 8, dtype=torch.int64, device="cuda")
            for index, size in enumerate(self.sizes)
        }

    def make(self) -> Any:
        import torch

        made = self._empty()
        for index, tensor in enumerate(made.values()):
            tensor.random_(generator=torch.Generator(device="cuda").manual_seed(index))
        return made

    def save(self, weights: Any) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.cpu() for name, tensor in weights.items()}, self.file)

    def prepare(self) -> Any:
        """Weights that can be adopted."""
        return self._empty()

    def load(self) -> Any:
        from safetensors.torch import load_file

        return load_file(self.file, device="cuda")

    def answer(self, weights: Any) -> int:
        return int(weights["layers.1"].sum())


class Model:
    """A model of transformers."""

    def __init__(self, file: str, total: int) -> None:
        from transformers import Qwen2Config

        _, hidden, intermediate, heads, pairs = next(shape for shape in SHAPES if total >= shape[0])
        keys = hidden // heads * pairs
        layer = 2 * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * intermediate)
        self.file = file
        self.config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=pairs,
            num_hidden_layers=max(1, (total - 4 * hidden * VOCABULARY) // layer),
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )

    def _construct(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)

    def make(self) -> Any:
        import torch

        torch.manual_seed(1)
        return self._construct()

    def save(self, weights: Any) -> None:
        weights.save_pretrained(self.file)

    def prepare(self) -> Any:
        try:
            from transformers.initialization import no_init_weights
        except ImportError:  # transformers 4
            from transformers.modeling_utils import no_init_weights

        with no_init_weights():
            return self._construct()

    def load(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.file, dtype=torch.bfloat16, device_map="cuda")

    def answer(self, weights: Any) -> int:
        import torch

        with torch.inference_mode():
            return int(weights(torch.tensor([PROMPT], device="cuda")).logits[0, -1].argmax())


def work(what: str, is_model: bool, file: str, total: int, started: float) -> Iterator[float]:
    """Run the part of one process. Yield the seconds of `weights`, `whole` and `token`, and the answer."""
    import torch

    from torch_memory_saver import node_store

    weights_of = Model(file, total) if is_model else Tensors(file, total)
    weights = weights_of.prepare() if what == "adopt" and not is_model else None
    if what == "publish":
        weights = weights_of.make()
    torch.cuda.synchronize()
    began = time.time()
    if what == "publish":
        node_store.publish(NAME, weights, identity=NAME)
    elif what == "adopt":
        weights = weights_of.prepare() if weights is None else weights
        adopted = node_store.adopt(NAME, weights, identity=NAME)
        assert adopted, adopted.reason
    else:
        weights = weights_of.load()
    torch.cuda.synchronize()
    yield time.time() - began
    yield time.time() - started
    answer = weights_of.answer(weights)
    yield time.time() - started
    yield answer
    if what == "publish":
        weights_of.save(weights)


def _run(what: str, is_model: bool, file: str, total: int) -> list[float]:
    arguments = [what, str(int(is_model)), file, str(total), str(time.time())]
    done = subprocess.run([sys.executable, __file__, "--process", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


def _measure(is_model: bool, total: int, rounds: int, parent: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="tms-bench-", dir=parent) as file:
        published, *_, answer = _run("publish", is_model, file, total)
        size = sum(path.stat().st_size for path in Path(file).iterdir())
        _run("load", is_model, file, total)  # fills the page cache
        times: dict[str, list[list[float]]] = {"load": [], "adopt": []}
        for _ in range(rounds):
            for what, found in times.items():
                found.append(_run(what, is_model, file, total))
                assert found[-1][3] == answer, f"{what}: other weights"
    print(f"{size / 1e9:.1f} GB, published in {published:.2f} s\n")
    print("| from | weights, s | GB/s | whole, s | token, s |\n| --- | --- | --- | --- | --- |")
    for what, found in times.items():
        weights, whole, token = ([each[part] for each in found] for part in range(3))
        speed = size / 1e9 / statistics.median(weights)
        print(f"| {what} | {_cell(weights)} | {speed:.1f} | {_cell(whole)} | {_cell(token) if is_model else ''} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", default="16", help="sizes of the weights (%(default)s)")
    parser.add_argument("--model", action="store_true", help="a model of transformers, and its first token")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (%(default)s)")
    parser.add_argument("--folder", help="where the file is written; default: TMPDIR")
    parser.add_argument("--huge", action="store_true", help="mount the store's folder with huge pages, as root")
    parser.add_argument("--process", nargs=5, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.process:
        what, is_model, file, total, started = parsed.process
        for number in work(what, is_model == "1", file, int(total), float(started)):
            print(number, flush=True)
        return
    for gib in map(float, parsed.gib.split(",")):
        with folder(parsed.huge):  # a new one for each size, which is empty
            _measure(parsed.model, int(gib * (1 << 30)), parsed.rounds, parsed.folder)


if __name__ == "__main__":
    main()
