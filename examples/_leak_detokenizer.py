"""The detokenizer process of memory_leak.py: it turns answers into text. Its memory does not grow."""

from __future__ import annotations

from typing import Any

import torch
from _leak_stage import Stage, serve
from _leak_tokenizer import VOCABULARY

from torch_memory_saver import torch_memory_saver


class Detokenizer(Stage):
    role = "detokenizer"

    def __init__(self) -> None:
        with torch_memory_saver.region(tag="vocabulary", backup="host"):
            self.words = torch.arange(VOCABULARY - 1, -1, -1, device="cuda")

    def generate(self, message: dict[str, Any]) -> None:
        answers = torch.tensor([request.pop("answer") for request in message["requests"]], device="cuda")
        for request, word in zip(message["requests"], self.words[answers % VOCABULARY].tolist(), strict=True):
            request["text"] = f"word {word}"


if __name__ == "__main__":
    serve(Detokenizer())
