"""The sizes of fragmentation.py."""

from __future__ import annotations

from _check import MIB

#: Pixels of the sides of images. One of the first step leaves room for a prefix in its segment.
FIRST_SIDE, STRIDE = 2016, 336
#: The prefix that is kept of an image, and how many of them there is room for.
PREFIX_BYTES, PREFIXES = 5 * MIB // 4, 4
