"""Test files that are skipped without being imported, because what they need is missing."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest


class NotImported(pytest.Module):
    """A test file that is skipped as a whole."""

    reason: str

    @classmethod
    def made(cls, path: Path, parent: pytest.Collector, reason: str) -> NotImported:
        module: NotImported = cls.from_parent(parent, path=path)
        module.reason = reason
        return module

    def collect(self) -> NoReturn:
        pytest.skip(self.reason, allow_module_level=True)
