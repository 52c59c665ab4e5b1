"""Guards tools/core_stub.py: _core.pyi is what csrc/include gives, and its checksum differs if the C interface does."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("tms_core_stub", ROOT / "tools" / "core_stub.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_stub_is_up_to_date(tool: ModuleType) -> None:
    assert tool.STUB.read_text(encoding="utf-8") == tool.stub(), "run 'make stub'"


def test_comments_do_not_change_the_interface(tool: ModuleType, tmp_path: Path) -> None:
    include = tmp_path / "include"
    shutil.copytree(tool.INCLUDE, include)
    before = tool.interface_text(include)
    header = include / "tms.h"
    text = header.read_text(encoding="utf-8")
    header.write_text(
        "/* A comment\n * of two lines. */\n" + text.replace("    double seconds;\n", "    double  seconds;\n\n")
    )
    assert tool.interface_text(include) == before
    header.write_text(text.replace("    double seconds;\n", "    float seconds;\n"))
    assert tool.interface_text(include) != before


def test_a_row_is_a_function_as_ruff_formats_it(tool: ModuleType) -> None:
    types = ", ".join(f"argument_{number}: dict[str, int] = {number}" for number in range(4))
    rows = f"""/* A comment with TMS_FUNCTION(x). */
TMS_FUNCTION(tms_status_t, first, (int (*callback)(void *), tms_error_t *error), TAKES, "(size: int) -> int",
             "Return the size "
             "in bytes.\\n\\n"
             "It is positive.")
TMS_C_FUNCTION(void, second, (void))
TMS_PYTHON_FUNCTION(third, TAKES, "({types}) -> None", "Do it.")
"""
    first, third = tool.functions(rows)
    assert first == 'def first(size: int) -> int:\n    """Return the size in bytes.\n\n    It is positive."""\n'
    parameters = types.replace(", argument", ",\n    argument")
    assert third == f'def third(\n    {parameters},\n) -> None:\n    """Do it."""\n'
