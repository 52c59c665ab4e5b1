"""The images of memory_leak.py and fragmentation.py.

Each step's images are larger than those of the step before, and as many are on the device at once as a budget allows. So all
steps need about the same memory, and no block that PyTorch has cached is large enough for an image of the next step.
"""

from __future__ import annotations

from _check import MIB

CHANNELS, VALUE_BYTES = 3, 4
#: Pixels of an image's side in the first step, and the pixels added in each later step.
FIRST_SIDE, STRIDE = 1120, 112
#: PyTorch rounds a segment for one large tensor up to a multiple of this size.
_SEGMENT_UNIT = 2 * MIB


def side_of(step: int, first: int = FIRST_SIDE, stride: int = STRIDE) -> int:
    """Return the pixels of a side of a step's images. Steps count from 0."""
    return first + step * stride


def image_bytes(side: int) -> int:
    """Return the bytes of an image with 32 bits for each channel."""
    return CHANNELS * side * side * VALUE_BYTES


def at_once(budget: int, side: int) -> int:
    """Return how many images are on the device at the same time."""
    return max(1, budget // image_bytes(side))


def segment_bytes(side: int) -> int:
    """Return the bytes that PyTorch reserves for one image, unless segments are expandable."""
    return -(-image_bytes(side) // _SEGMENT_UNIT) * _SEGMENT_UNIT
