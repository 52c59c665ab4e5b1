"""Shared by the programs that are one of two ranks, each on a device of its own.

``PROGRAM SCENARIOS RANK FILE``: both name the same scenarios, joined by commas, and the same new file. ``EAGER=1`` makes the
communicator with the group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

RANKS = 2

rank = int(sys.argv[2])
other = 1 - rank
device = torch.device("cuda", rank)


def main(*scenarios: Callable[[], None]) -> None:
    """Runs the scenarios that the command line names, and prints after each that it succeeded."""
    torch.cuda.set_device(device)
    eager = {"device_id": device} if os.environ.get("EAGER") == "1" else {}
    dist.init_process_group("nccl", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=RANKS, **eager)
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    for name in sys.argv[1].split(","):
        by_name[name]()
        print("ok:", name)
    dist.destroy_process_group()
    print("ok")
