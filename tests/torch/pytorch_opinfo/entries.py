"""The list of checks for the entries of PyTorch's databases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.opinfo import core

DTYPES = (torch.float32, torch.bfloat16)
OPERATOR_CHECKS = ("forward", "backward", "inplace", "out", "noncontiguous", "errors")
MODULE_CHECKS = ("forward", "backward", "noncontiguous", "errors")
OPTIMIZER_CHECKS = ("forward", "errors")
CHECKS = {
    "operator": OPERATOR_CHECKS,
    "foreach": OPERATOR_CHECKS,
    "module": MODULE_CHECKS,
    "optimizer": OPTIMIZER_CHECKS,
}


def choose_seeds() -> None:
    """Makes the operators use the seed of a run. Some entries set a fixed seed at each call, which hides the randomness."""
    for module in (invocations, core):
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = lambda operator, *arguments, **keywords: operator(*arguments, **keywords)


class Unit(NamedTuple):
    """One check of one entry with one type."""

    kind: str
    name: str
    info: Any
    dtype: torch.dtype
    check: str


def _named() -> Iterator[tuple[str, str, Any]]:
    for info in invocations.op_db:
        yield "operator", info.name + (f".{info.variant_test_name}" if info.variant_test_name else ""), info
    for kind in ("unary", "binary", "pointwise", "reduce", "other"):
        for info in getattr(invocations, f"foreach_{kind}_op_db"):
            yield "foreach", info.name, info
    for info in optim_db:
        yield "optimizer", info.name, info
    for info in module_db:
        yield "module", info.name, info


def _dtypes(kind: str, info: Any) -> tuple[torch.dtype, ...]:
    if kind == "optimizer":
        return DTYPES
    return tuple(each for each in DTYPES if each in info.supported_dtypes("cpu"))


def in_share(name: str, share: int, of: int) -> bool:
    """Whether an entry is in share number `share` of `of`, counted from 1. It depends only on the entry's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % of == share - 1


def units(share: int, of: int, only: str = "", also: tuple[str, ...] = ()) -> list[Unit]:
    """The units of a share, in the same order in every process.

    Args:
        only: If not empty, selects only the entry with this name.
        also: Names of entries to include although they are in another share.
    """
    return [
        Unit(kind, name, info, dtype, check)
        for kind, name, info in _named()
        if (in_share(name, share, of) and only in ("", name)) or name in also
        for dtype in _dtypes(kind, info)
        for check in CHECKS[kind]
    ]
