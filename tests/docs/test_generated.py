"""Guards that the pages match the code: their generated parts are up to date, docs/generated.py finds everything that the
code has, and names on the pages exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from document_blocks import REPOSITORY, pages

import torch_memory_saver
from torch_memory_saver import _core, layer_graphs
from torch_memory_saver._engine.variables import BUILD_VARIABLES, PYTHON_VARIABLES
from torch_memory_saver.observe import events, memory

if not (REPOSITORY / "docs").is_dir():
    pytest.skip("needs the sources: there is no docs/", allow_module_level=True)


def _load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


_load("docstrings")  # which the next one imports
generated = _load("generated")
hooks = _load("hooks")
REFERENCE = REPOSITORY / "docs" / "reference"


@pytest.mark.parametrize(
    "page", [path for path in pages() if "<!-- generated: " in path.read_text(encoding="utf-8")], ids=str
)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    own_form = sys.version_info >= (3, 13)  # argparse prints options in another form
    text = page.read_text(encoding="utf-8")
    assert generated.refreshed(text, lambda name: not (own_form and name == "command-line")) == text, "run: make pages"


def test_every_variable_has_a_row_and_an_explanation() -> None:
    rows = generated.variables()
    assert {row.name for row in rows} == set(_core.SETTINGS) | {row.name for row in PYTHON_VARIABLES}
    assert [tuple(row) for row in rows[-len(PYTHON_VARIABLES) :]] == [tuple(row) for row in PYTHON_VARIABLES]
    assert [row.name for row in rows if len(row.meaning) < 10 or not row.allowed or not row.default] == []


def test_every_variable_that_the_code_names_has_a_row_and_there_are_few() -> None:
    sources = (REPOSITORY / "torch_memory_saver").rglob("*.py")
    named = {
        name for path in sources for name in re.findall(r'(?<!b)"(TMS_[A-Z_]*[A-Z])\b', path.read_text(encoding="utf-8"))
    }
    of_others = ("TMS_SIMULATED", "TMS_GPU", "TMS_DEMO", *BUILD_VARIABLES)
    known = {row.name for row in generated.variables()}
    assert {name for name in named if not name.startswith(of_others)} <= known
    assert len(known) <= 23


def test_every_variable_of_the_simulated_gpu_has_a_row() -> None:
    sources = (REPOSITORY / "csrc" / "simulator").rglob("*.c")
    read = {name for path in sources for name in re.findall(r'"(TMS_SIMULATED_\w+)"', path.read_text(encoding="utf-8"))}
    assert {name for name, _ in generated.simulated_variables()} == read


def test_variables_that_the_pages_mention_exist() -> None:
    known = {row.name for row in generated.variables()} | {name for name, _ in generated.simulated_variables()}
    known.update(BUILD_VARIABLES)
    for page in pages():
        mentioned = set(re.findall(r"\bTMS_[A-Z_]+[A-Z]\b(?!\*)", page.read_text(encoding="utf-8")))
        assert mentioned <= known, page


def test_every_command_and_option_is_shown() -> None:
    page = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    names = {"", "demo", "doctor", "run", "top", "ask", "store", "compare", "timeline", "simulate"}
    assert set(dict(generated.commands())) == names
    assert "--bandwidth SIZE" in page


def _reference() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(REFERENCE.rglob("*.md")))


def test_every_public_name_is_in_the_reference() -> None:
    page = _reference()
    names = set(torch_memory_saver.__all__) - {"__version__", "errors", "memory_saver", "reports", "torch_memory_saver"}
    names |= set(events.__all__)
    assert [name for name in sorted(names) if not re.search(rf"^### `{name}`$", page, re.MULTILINE)] == ["TorchMemorySaver"]
    assert not re.search(r"^#+ `_", page, re.MULTILINE)


def test_every_method_and_setting_is_in_the_reference() -> None:
    found = re.findall(r"^torch_memory_saver\.TorchMemorySaver\.(\w+)$", _reference(), re.MULTILINE)
    names = {name for name in dir(torch_memory_saver.TorchMemorySaver) if not name.startswith("_")}
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize("package", [layer_graphs, layer_graphs.plan, memory])
def test_every_name_of_a_package_is_in_the_reference(package: ModuleType) -> None:
    name = re.escape(package.__name__)
    found = re.findall(rf"^{name}\.(\w+)$", _reference(), re.MULTILINE)
    assert sorted(found) == sorted(set(package.__all__) - {"plan"})


def test_each_list_of_objects_has_its_description() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- reference\n") == text.count("<!-- generated: api -->"), page


def test_a_description_has_signature_arguments_and_errors() -> None:
    page = (REFERENCE / "api" / "regions.md").read_text(encoding="utf-8")
    pause = page.partition("### `pause`")[2].partition("### `resume`")[0]
    assert "    timeout: float | None = 10.0,\n" in pause
    assert '    backup: Literal["host", "mmap", "disk", "shared"] | None | Literal["discard"] = None,\n' in pause
    assert re.search(r"\*\*Arguments\*\*\n\n- `tag`: ", pause) and "- `progress`: " in pause
    assert re.search(r"\*\*Raises\*\*\n\n- `InvalidArgumentError`: ", pause)
    assert ":meth:" not in page and "``" not in page.replace("```", "")


def test_files_that_pages_stand_for_are_included() -> None:
    page = (REPOSITORY / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert "## Unreleased" in hooks.expand(page, lambda target: None)


def test_alerts_become_admonitions() -> None:
    page = "Text.\n\n> [!WARNING]\n> One line,\n> and another.\n>\n> - a list\n\nMore.\n"
    assert hooks.admonitions(page) == "Text.\n\n!!! warning\n\n    One line,\n    and another.\n\n    - a list\n\nMore.\n"


def test_every_alert_of_the_pages_becomes_an_admonition() -> None:
    for page in pages():
        assert not re.search(r"^> *\[!", hooks.admonitions(page.read_text(encoding="utf-8")), re.MULTILINE), page


def _words(page: Path) -> int:
    """Comments for the search are not shown."""
    return len(re.sub(r"<!-- search: .* -->", "", generated.written(page.read_text(encoding="utf-8"))).split())


def test_pages_are_short() -> None:
    """README is an overview, and few people read more than a few pages. The API's words come from docstrings."""
    assert _words(REPOSITORY / "README.md") <= 1100
    assert _words(REPOSITORY / "docs" / "performance.md") <= 2000
    api = (REFERENCE / "errors.md", *REFERENCE.glob("api*"), *REFERENCE.glob("api/*"))
    others = [page for page in (REPOSITORY / "docs").rglob("*.md") if page not in api]
    assert sum(_words(page) for page in others) <= 39_000


#: Code that changes a process for more than the package itself.
_EFFECTS = (
    r"os\.register_at_fork|atexit\.register|gc\.set_threshold|gc\.collect|gc\.freeze|sys\.meta_path|sys\.path\b|os\.environ\["
    r"|_cuda_attach_out_of_memory_observer|set_multithreading_enabled"
)


def test_the_page_of_changes_names_the_effects_that_the_code_has() -> None:
    package = REPOSITORY / "torch_memory_saver"
    sources = [path for path in package.rglob("*.py") if "_simulate" not in path.parts]
    found = {name for path in sources for name in re.findall(_EFFECTS, path.read_text(encoding="utf-8"))}
    page = (REFERENCE / "patches.md").read_text(encoding="utf-8")
    assert len(found) > 8
    assert [name for name in sorted(found) if name.rstrip("[") not in page] == []


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("sleep", "guides/engines.md"),
        ("wake up", "guides/engines.md"),
        ("staged", "guides/training-and-rollout.md"),
        ("OOM", "guides/out-of-memory.md"),
        ("LoRA", "guides/engines.md"),
        ("verl", "guides/engines.md"),
    ],
)
def test_a_search_finds_words_that_users_know_from_engines(word: str, page: str) -> None:
    assert word in (REPOSITORY / "docs" / page).read_text(encoding="utf-8")


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
