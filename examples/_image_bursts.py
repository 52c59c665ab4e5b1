"""The images of memory_leak.py and fragmentation.py.

Each step's images are larger than those of the step before, and as many are on the device at once as a budget allows. So all
steps need about the same memory, and no block that PyTorch has cached is large enough for an image of the next step.
"""

from __future__ import annotations

from _check import MIB

CHANNELS, VALUE_BYTES = 3, 4
#: Pixels of an image's side in the first step, and how many more there are in each later one.
FIRST_SIDE, STRIDE = 1120, 112
#: PyTorch rounds a segment for one large tensor up to this.
_SEGMENT_UNIT = 2 * MIB


def side_of(step: int, first: int = FIRST_SIDE, stride: int = STRIDE) -> int:
    """Pixels of the sides of a step's images. Steps count from 0."""
    return first + step * stride


def image_bytes(side: int) -> int:
    """Of an image with 32 bits a channel."""
    return CHANNELS * side * side * VALUE_BYTES


def at_once(budget: int, side: int) -> int:
    """How many images are on the device at the same time."""
    return max(1, budget // image_bytes(side))


def segment_bytes(side: int) -> int:
    """What PyTorch reserves for one image, unless segments are expandable."""
    return -(-image_bytes(side) // _SEGMENT_UNIT) * _SEGMENT_UNIT
