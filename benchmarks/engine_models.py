"""Configurations of Qwen2 models, for engines that give them random weights, and the arguments that choose one."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["MODELS", "Shape", "add_model_arguments", "write_model"]


class Shape(NamedTuple):
    """Sizes of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int


MODELS = {
    "tiny": Shape(128, 256, 2, 2, 2, 1024),
    "2GiB": Shape(2048, 8192, 16, 16, 4, 32000),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe an engine and what it generates."""
    parser.add_argument("--model", choices=MODELS, default="2GiB")
    parser.add_argument("--gpus", type=int, default=1, help="size of the tensor parallel group (%(default)s)")
    parser.add_argument(
        "--cache", type=float, default=30.0, metavar="GIB", help="size of the KV cache on each GPU (%(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts after each cycle (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="number of tokens to generate for each (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")


def write_model(name: str) -> str:
    """Write the configuration of a model to a new folder, and return the folder."""
    folder = tempfile.mkdtemp(prefix="engine_model_")
    shape = MODELS[name]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
    return folder
