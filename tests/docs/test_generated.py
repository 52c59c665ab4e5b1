"""Guards that the reference pages match the code: docs/hooks.py finds everything that the code has, and names on the pages
exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from document_blocks import REPOSITORY, pages

import torch_memory_saver
from torch_memory_saver import _core, layer_graphs, memory
from torch_memory_saver._engine.variables import PYTHON_VARIABLES

if not (REPOSITORY / "docs").is_dir():
    pytest.skip("needs the sources: there is no docs/", allow_module_level=True)


def _load_hooks() -> ModuleType:
    specification = importlib.util.spec_from_file_location("documentation_hooks", REPOSITORY / "docs" / "hooks.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


hooks = _load_hooks()


def _expanded(page: Path) -> str:
    return str(hooks.expand(page.read_text(encoding="utf-8"), lambda target: None))


def test_every_variable_has_a_row_and_an_explanation() -> None:
    rows = hooks.variables()
    assert {row.name for row in rows} == set(_core.SETTINGS) | {row.name for row in PYTHON_VARIABLES}
    assert [tuple(row) for row in rows[-len(PYTHON_VARIABLES) :]] == [tuple(row) for row in PYTHON_VARIABLES]
    assert [row.name for row in rows if len(row.meaning) < 10 or not row.allowed or not row.default] == []


def test_every_variable_that_the_code_names_has_a_row_and_there_are_few() -> None:
    sources = (REPOSITORY / "torch_memory_saver").rglob("*.py")
    named = {
        name for path in sources for name in re.findall(r'(?<!b)"(TMS_[A-Z_]*[A-Z])\b', path.read_text(encoding="utf-8"))
    }
    of_others = ("TMS_SIMULATED", "TMS_GPU", "TMS_DEMO", "TMS_WERROR")
    known = {row.name for row in hooks.variables()}
    assert {name for name in named if not name.startswith(of_others)} <= known
    assert len(known) <= 22


def test_every_variable_of_the_simulated_gpu_has_a_row() -> None:
    sources = (REPOSITORY / "csrc" / "simulator").rglob("*.c")
    read = {name for path in sources for name in re.findall(r'"(TMS_SIMULATED_\w+)"', path.read_text(encoding="utf-8"))}
    assert {name for name, _ in hooks.simulated_variables()} == read


def test_variables_that_the_pages_mention_exist() -> None:
    known = {row.name for row in hooks.variables()} | {name for name, _ in hooks.simulated_variables()}
    for page in pages():
        mentioned = set(re.findall(r"\bTMS_[A-Z_]+[A-Z]\b(?!\*)", page.read_text(encoding="utf-8")))
        assert mentioned <= known, page


def test_every_command_and_option_is_shown() -> None:
    page = _expanded(REPOSITORY / "docs" / "reference" / "command-line.md")
    commands = dict(hooks.commands())
    assert set(commands) == {"", "demo", "doctor", "run", "top", "ask", "compare", "timeline", "simulate"}
    for name, text in commands.items():
        assert text.rstrip() in page, name
    assert "--bandwidth SIZE" in page


def test_every_public_name_is_in_the_reference() -> None:
    page = (REPOSITORY / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    page += (REPOSITORY / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    bound = {name for name in torch_memory_saver.__all__ if hasattr(torch_memory_saver.TorchMemorySaver, name)}
    names = set(torch_memory_saver.__all__) - bound - {"__version__", "memory_saver", "torch_memory_saver"}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", page)] == []


@pytest.mark.parametrize("package", [layer_graphs, layer_graphs.plan, memory])
def test_every_name_of_a_package_is_in_the_reference(package: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    name = re.escape(package.__name__)
    assert sorted(re.findall(rf"^::: {name}\.(\w+)$", page, re.MULTILINE)) == sorted(set(package.__all__) - {"plan"})


def test_requests_of_the_pages_are_answered() -> None:
    for page in pages():
        assert not re.search(r"<!-- (generated|include):", _expanded(page)), page


def test_functions_that_the_pages_name_are_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "csrc").rglob("*.[ch]"))
    for page in (REPOSITORY / "docs").rglob("*.md"):
        for name in set(re.findall(r"\btms_[a-z_]+[a-z]\b", page.read_text(encoding="utf-8"))):
            assert re.search(rf"\b{name}\b", code), f"{page}: {name}"


def test_files_that_the_pages_name_are_there() -> None:
    for page in pages():
        names = re.findall(
            r"`((?:csrc|tests|examples|tools|benchmarks|torch_memory_saver)/[\w./-]*)`", page.read_text("utf-8")
        )
        missing = [name for name in names if not (REPOSITORY / name).exists() and not name.endswith(".so")]
        assert missing == [], page
