"""The scheduler process of memory_leak.py: it runs the model on batches of images.

It has no leak: all memory of a batch is freed. PyTorch caches this memory, but images of later steps are too large for it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from _check import MIB
from _image_bursts import CHANNELS, at_once
from _leak_stage import Stage, serve

from torch_memory_saver import torch_memory_saver

#: The number of elements of the weights and of the KV cache.
WEIGHTS, SLOTS = 1 << 24, 1 << 22
#: Pixels of a side of the patches in which an image is read.
PATCH = 16


class Scheduler(Stage):
    role = "scheduler"

    def __init__(self, budget: int) -> None:
        self.budget = budget
        with torch_memory_saver.region(tag="weights", backup="host"):
            self.weights = torch.ones(WEIGHTS, dtype=torch.int32, device="cuda")
        with torch_memory_saver.region(tag="kv_cache"):
            self.kv_cache = torch.empty(SLOTS, dtype=torch.int64, device="cuda")

    def generate(self, message: dict[str, Any]) -> None:
        images = [(request, image) for request in message["requests"] for image in request["images"]]
        answers: dict[int, int] = defaultdict(int)
        count = at_once(self.budget, images[0][1]["side"])
        for first in range(0, len(images), count):
            batch = images[first : first + count]
            for (request, _), answer in zip(batch, self.run_batch([image for _, image in batch]), strict=True):
                answers[request["id"]] += answer
        for request in message["requests"]:
            request["answer"] = answers[request["id"]]

    def run_batch(self, images: list[dict[str, Any]]) -> list[int]:
        """Return a number for each image. The features of all images are on the device at once."""
        features = [self.upsample(image) for image in images]
        for slot, feature in enumerate(features):
            self.kv_cache[slot] = feature[:, ::PATCH, ::PATCH].sum() * self.weights[slot]
        return [int(answer) for answer in self.kv_cache[: len(features)].tolist()]

    def upsample(self, image: dict[str, Any]) -> torch.Tensor:
        side = image["side"]
        return torch.full((CHANNELS, side, side), image["token"], dtype=torch.int32, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-mib", type=int, required=True, help="memory for the images of a batch")
    serve(Scheduler(parser.parse_args().batch_mib * MIB))


if __name__ == "__main__":
    main()
