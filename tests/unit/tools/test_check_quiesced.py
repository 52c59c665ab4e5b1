"""Guards tools/check_quiesced.py: it detects every path to a tms_quiesced_t that has not waited, and accepts the sources as
they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("check_quiesced", ROOT / "tools" / "check_quiesced.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_sources_are_in_order(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "tms_quiesced_t mine = {0};",
        "tms_quiesced_t mine = {.quiesced_devices = 3};",
        "unmap((tms_quiesced_t){0});",
        "unmap(*(tms_quiesced_t *)other);",
        "unmap(*(const tms_quiesced_t *)other);",
        "memset(&quiesced, 0, sizeof quiesced);",
        "quiesced->quiesced_devices |= 1;",
        "tms_segment_t other = {.quiesced = {0}};",
        "unmap(tms_quiesced_without_users());",
        "unmap(tms_quiesced_idle_or_lost(1));",
        "driver->cuMemUnmap(address, size);",
        "TMS_DRIVER_CALL(driver, context, error, cuMemUnmap, address, size);",
    ],
)
def test_code_that_has_not_waited_is_found(tool: ModuleType, line: str) -> None:
    source = f"static void other(int a) {{\n    {line}\n}}\n"
    (problem,) = {text.split(": ")[0] for text in tool.check("core/transition/pause.c", source)}
    assert problem == "csrc/core/transition/pause.c:2"


@pytest.mark.parametrize(
    "line",
    [
        "tms_quiesced_t quiesced;",
        "segment->quiesced = quiesced;",
        "tms_status_t status = tms_quiesce(wait, devices, mask, &quiesced, NULL, log, context, error);",
        "/* tms_quiesced_t mine = {0}; */",
        'log("cuMemUnmap(");',
    ],
)
def test_code_that_passes_a_value_on_is_accepted(tool: ModuleType, line: str) -> None:
    assert tool.check("core/transition/pause.c", f"static void other(int a) {{\n    {line}\n}}\n") == []


def test_a_named_function_may(tool: ModuleType) -> None:
    source = "static void undo_run(tms_transition_t *t) {\n    unmap(tms_quiesced_without_users());\n}\n"
    assert tool.check("core/transition/resume.c", source) == []
    assert len(tool.check("core/transition/resume.c", source.replace("undo_run", "redo_run"))) == 1


def test_two_functions_unmap(tool: ModuleType) -> None:
    source = "tms_status_t tms_run_depopulate(tms_run_t *run) {\n    driver->cuMemUnmap(run->begin, 1);\n}\n"
    assert tool.check("core/model/run.c", source) == []
    assert len(tool.check("core/model/run.c", source.replace("depopulate", "map"))) == 1
    assert len(tool.check("core/model/segment.c", source)) == 1


def test_a_named_function_must(tool: ModuleType) -> None:
    sources = {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in (ROOT / "csrc").rglob("*.c")}
    assert tool.stale(sources) == []
    sources["core/model/run.c"] = sources["core/model/run.c"].replace("tms_quiesced_without_users", "other")
    (problem,) = tool.stale(sources)
    assert problem.startswith("csrc/core/model/run.c: tms_run_map ")
