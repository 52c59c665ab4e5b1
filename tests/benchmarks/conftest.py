"""The modules of benchmarks/ import each other by name, as Python does where run.py is started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks"), str(Path(__file__).resolve().parent)]
