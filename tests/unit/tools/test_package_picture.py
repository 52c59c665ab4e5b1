"""Guards that the picture of the package's layers shows those that import-linter checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_picture_is_of_the_layers_that_are_checked(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, ROOT / "tools" / "package_picture.py", drawn], check=True)
    assert drawn.read_text() == (ROOT / "docs" / "images" / "package-layers.svg").read_text(), "run `make layers-picture`"
    assert drawn.read_text().count("<rect") > 20
