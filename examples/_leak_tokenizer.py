"""The tokenizer process of memory_leak.py: it turns the images of requests into tokens. A trainer lives in the same process.

It has a leak: it keeps the pixels of an image until its request is answered, but does not remove them afterwards.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _image_bursts import CHANNELS
from _leak_stage import Stage, serve
from _leak_trainer import Trainer

#: Pixels of a side of the images that the vision model takes.
SIDE = 224
#: Bytes of the pixels of one image: 588 KiB.
PIXEL_BYTES = CHANNELS * SIDE * SIDE * 4
#: Tokens are numbers below this one.
VOCABULARY = 1 << 16


class Tokenizer(Stage):
    role = "tokenizer"

    def __init__(self, trainer: Trainer, drop_answered: bool) -> None:
        self.trainer = trainer
        self.drop_answered = drop_answered
        self.pixels: dict[int, torch.Tensor] = {}

    def generate(self, message: dict[str, Any]) -> None:
        for request in message["requests"]:
            for image in request["images"]:
                image["token"] = self.tokenize(image)

    def tokenize(self, image: dict[str, Any]) -> int:
        pixels = self.preprocess(image)
        self.pixels[image["id"]] = pixels
        return int(pixels.sum(dtype=torch.float64)) % VOCABULARY

    def preprocess(self, image: dict[str, Any]) -> torch.Tensor:
        """Convert an image, which a request brings as bytes, to the size and type of the vision model."""
        side = image["side"]
        decoded = torch.full((CHANNELS, side, side), image["id"] % 256, dtype=torch.uint8).cuda()
        stride = side // SIDE
        return decoded[:, ::stride, ::stride][:, :SIDE, :SIDE].float()

    def sleep(self, message: dict[str, Any]) -> None:
        if self.drop_answered:
            self.pixels.clear()

    def train(self, message: dict[str, Any]) -> None:
        self.trainer.step()
        self.report(message)

    def wake(self, message: dict[str, Any]) -> None:
        """Do nothing: the trainer resumes its memory when it trains."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer-mib", type=int, required=True)
    parser.add_argument("--drop-answered", action="store_true", help="the fix of the leak")
    options = parser.parse_args()
    serve(Tokenizer(Trainer(options.optimizer_mib), options.drop_answered))


if __name__ == "__main__":
    main()
