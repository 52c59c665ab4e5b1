"""The sizes of fragmentation.py."""

from __future__ import annotations

from _check import MIB

#: Pixels of an image's side: of the first step, and added in each step. The first images leave room for a prefix.
FIRST_SIDE, STRIDE = 2016, 336
#: The size of the prefix that is kept of an image, and the number of prefixes that are kept.
PREFIX_BYTES, PREFIXES = 5 * MIB // 4, 4
