"""Loads a model of transformers without a region, and in each way inside a region. Prints a line for each: the bytes of the
model, how many of them are managed, and the most memory that PyTorch had reserved, in MiB.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
#: `device` has torch.device("cuda") around the call, and `accelerate` calls load_checkpoint_and_dispatch().
WAYS = ("device_map", "device", "accelerate")

config = LlamaConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=48000,
)


def load(folder: str, way: str) -> torch.nn.Module:
    if way == "device_map":
        return LlamaForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.float32)
    if way == "device":
        with torch.device("cuda"):
            return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = LlamaForCausalLM(config)
    file = str(Path(folder) / "model.safetensors")
    return load_checkpoint_and_dispatch(model, file, device_map={"": 0})  # type: ignore[no-any-return]


def report(folder: str, way: str, is_managed: bool) -> None:
    torch.cuda.reset_peak_memory_stats()
    with saver.region(tag="weights", backup="host") if is_managed else contextlib.nullcontext():
        model = load(folder, way)
    tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in model.parameters()}.values()
    sizes = {tensor: tensor.numel() * tensor.element_size() for tensor in tensors}
    managed = sum(size for tensor, size in sizes.items() if saver.tag_of(tensor) == "weights")
    print(sum(sizes.values()) / MIB, managed / MIB, torch.cuda.max_memory_reserved() / MIB)
    if is_managed:
        sums = [float(tensor.double().sum()) for tensor in tensors]
        saver.pause("weights")
        saver.resume("weights")
        assert [float(tensor.double().sum()) for tensor in tensors] == sums


with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.cuda.init()
    for way, is_managed in [("device_map", False), *((way, True) for way in WAYS)]:
        report(folder, way, is_managed)
        gc.collect()
        saver.empty_cache()
        assert torch.cuda.memory_reserved() == 0
