"""Checks that end the program, for examples that need no PyTorch themselves."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def check(holds: bool, what: str) -> None:
    """End the program with status 1 unless `what` holds."""
    if not holds:
        raise SystemExit(f"FAILED: {what}")
    print(f"  ok: {what}", flush=True)
