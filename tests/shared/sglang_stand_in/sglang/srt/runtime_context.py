"""The ranks of the process, which a test may change."""

from __future__ import annotations

from types import SimpleNamespace

_GROUPS = ("tp", "pp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp", "dcp", "attn_dp")
_PARALLEL = SimpleNamespace(**{f"{group}_rank": 0 for group in _GROUPS}, **{f"{group}_size": 1 for group in _GROUPS})


def get_parallel() -> SimpleNamespace:
    return _PARALLEL
