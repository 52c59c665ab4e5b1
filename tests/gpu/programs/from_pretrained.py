"""Loads a model of transformers inside a region. Prints the model's bytes, how many of them are managed, and the most memory
that PyTorch had reserved, in MiB.

Usage: from_pretrained.py ORDINARY WAY. ORDINARY 1: in no region. WAY: device_map, device (torch.device("cuda") around the
call) or accelerate (load_checkpoint_and_dispatch).
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20

ordinary, way = sys.argv[1:]
config = LlamaConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=48000,
)


def load(folder: str) -> torch.nn.Module:
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


with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.cuda.init()
    with contextlib.nullcontext() if ordinary == "1" else saver.region(tag="weights", backup="host"):
        model = load(folder)
tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in model.parameters()}.values()
sizes = {tensor: tensor.numel() * tensor.element_size() for tensor in tensors}
sums = [float(tensor.double().sum()) for tensor in tensors]
managed = sum(size for tensor, size in sizes.items() if saver.tag_of(tensor) == "weights")
print(sum(sizes.values()) / MIB, managed / MIB, torch.cuda.max_memory_reserved() / MIB)
if ordinary == "0":
    saver.pause("weights")
    saver.resume("weights")
    assert [float(tensor.double().sum()) for tensor in tensors] == sums
