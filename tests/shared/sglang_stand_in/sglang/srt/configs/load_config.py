"""The configuration of a load, whose format may be a class."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class LoadFormat(str, enum.Enum):
    AUTO = "auto"


@dataclass
class LoadConfig:
    load_format: Any = LoadFormat.AUTO
    draft_model_idx: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.load_format, str):
            self.load_format = LoadFormat(self.load_format.lower())
