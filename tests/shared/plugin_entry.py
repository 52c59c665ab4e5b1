"""The entry point of the pytest plugin, for tests of a package whose libraries were built in the source tree."""

from __future__ import annotations

import re
from pathlib import Path

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def add_plugin_entry(site: Path) -> None:
    """Makes `site`, a folder of packages, declare the entry point that pyproject.toml declares."""
    folder = site / "plugin-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    declared = re.search(r"^\[project.entry-points.pytest11\]\n(.*)$", _PYPROJECT.read_text(), re.MULTILINE)
    assert declared is not None
    (folder / "entry_points.txt").write_text("[pytest11]\n" + declared[1].replace('"', "") + "\n")
