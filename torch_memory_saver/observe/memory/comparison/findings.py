"""The findings that the text and the page of a comparison show: the attributes of :class:`Comparison` that they read."""

from __future__ import annotations

from typing import Protocol

from .drift import Drift
from .fragmentation import DeviceUsage, Fragmentation
from .growth import StackGrowth

__all__ = ["Findings"]


class Findings(Protocol):
    """The results of a comparison."""

    @property
    def moments(self) -> tuple[str, ...]: ...

    @property
    def processes(self) -> tuple[DeviceUsage, ...]: ...

    @property
    def growths(self) -> tuple[StackGrowth, ...]: ...

    @property
    def leaks(self) -> tuple[StackGrowth, ...]: ...

    @property
    def warm_ups(self) -> tuple[StackGrowth, ...]: ...

    @property
    def grown(self) -> tuple[StackGrowth, ...]: ...

    @property
    def varying(self) -> tuple[StackGrowth, ...]: ...

    @property
    def drifts(self) -> tuple[Drift, ...]: ...

    @property
    def fragmentation(self) -> tuple[Fragmentation, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...
