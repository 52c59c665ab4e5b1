"""Guards tools/check_layers.py: it detects every forbidden use between csrc's files, and accepts valid ones."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shutil.which("gcc") or shutil.which("cc")


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    load("layers_picture")
    return load("check_layers")


def write(folder: Path, files: dict[str, str]) -> Path:
    """Sources with these texts in `folder`/csrc. A name alone stands for an include."""
    for name, text in files.items():
        path = folder / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(f'#include "{line}"\n' if line.endswith((".h", ".def")) else f"{line}\n" for line in text.split("\n"))
        )
    return folder / "csrc"


IN_ORDER = {
    "include/tms.h": "include/tms_api.def",
    "include/tms_api.def": "",
    "base/log.h": "include/tms.h",
    "base/log.c": "base/log.h",
    "device/driver.h": "base/log.h",
    "core/model/saver.c": "device/driver.h",
    "preload/hooks.c": "core/model/saver.h",
    "core/model/saver.h": "include/tms.h",
    "python/module.c": "#include <Python.h>\nmodule.h",
    "python/module.h": "base/log.h",
    "simulator/memory/map.c": "include/tms.h",
}


def problems(tool: ModuleType, csrc: Path, objects: Path | None = None) -> list[str]:
    found: list[str] = tool.check(tool.read(csrc, objects or csrc / "none"))
    return found


def compile_all(folder: Path) -> Path:
    for source in sorted((folder / "csrc").rglob("*.c")):
        built = folder / "build" / source.relative_to(folder).with_suffix(".o")
        built.parent.mkdir(parents=True, exist_ok=True)
        assert COMPILER is not None
        subprocess.run([COMPILER, "-c", f"-I{folder / 'csrc'}", str(source), "-o", str(built)], check=True)
    return folder / "build"


needs_compiler = pytest.mark.skipif(COMPILER is None or shutil.which("nm") is None, reason="needs a C compiler and nm")


@pytest.mark.slow  # `make lint` does the same
@needs_compiler
def test_this_repository(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 0, capsys.readouterr().err


def test_valid_sources_pass(tool: ModuleType, tmp_path: Path) -> None:
    assert problems(tool, write(tmp_path, IN_ORDER)) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("device/capture.h", "core/model/region.h", ["device uses core", "device/capture.h", "core/model/region.h"]),
        ("include/extra.h", "base/log.h", ["include uses base", "include/extra.h", "base/log.h"]),
        ("python/glue.c", "preload/hooks.h", ["python uses preload", "python/glue.c", "preload/hooks.h"]),
        ("simulator/memory/budget.c", "base/log.h", ["simulator uses base", "simulator/memory/budget.c"]),
        ("abi/state.c", "simulator/control.h", ["abi uses simulator", "abi/state.c", "simulator/control.h"]),
        ("base/text.c", "#include <Python.h>", ["base/text.c includes Python.h"]),
        ("base/text.c", "base/nothing.h", ["base/text.c", '"base/nothing.h", which is not in csrc']),
        ("more/text.c", "", ["more/text is in no layer"]),
    ],
)
def test_an_include_against_the_order(tool: ModuleType, tmp_path: Path, file: str, text: str, words: list[str]) -> None:
    others = {"core/model/region.h": "", "preload/hooks.h": "", "simulator/control.h": ""}
    (problem,) = problems(tool, write(tmp_path, {**IN_ORDER, **others, file: text}))
    for word in words:
        assert word in problem


def test_an_include_is_looked_for_beside_its_file_first(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(tmp_path, {"python/errors.h": "", "python/errors.c": "errors.h", "base/config.c": "  # include <errno.h>"})
    assert problems(tool, csrc) == []


def test_a_circle_of_files(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(
        tmp_path,
        {
            "core/model/a.h": "core/model/b.h",
            "core/model/b.h": "",
            "core/model/b.c": "core/model/c.h",
            "core/model/c.h": "core/model/a.h",
        },
    )
    (problem,) = problems(tool, csrc)
    assert problem.startswith("a circle of core/model/a, core/model/b, core/model/c:")
    assert 'core/model/b.c has #include "core/model/c.h"' in problem


BACKUP = {
    "backup/content.h": "",
    "backup/backup.h": "backup/content.h",
    "backup/host/types.h": "",
    "backup/host/store.h": "backup/host/types.h",
    "backup/host/operations.h": "backup/backup.h",
    "backup/disk/disk.h": "",
    "backup/disk/disk.c": "backup/disk/disk.h\nbackup/host/store.h",
    "backup/disk/operations.h": "backup/backup.h",
    "backup/stores.h": "backup/host/operations.h\nbackup/disk/operations.h",
}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("backup/host/pool.c", "backup/disk/disk.h", ["host uses disk", "backup/host/pool.c", "backup/disk/disk.h"]),
        ("backup/host/pool.c", "backup/stores.h", ["host uses stores", "backup/host/pool.c"]),
        ("backup/disk/copy.c", "backup/stores.h", ["disk uses stores", "backup/disk/copy.c"]),
        ("backup/content.c", "backup/host/store.h", ["content uses host", "backup/content.c"]),
        (
            "backup/disk/copy.c",
            "backup/host/types.h",
            ["disk may include of host only", "backup/host/store:", "backup/disk/copy.c"],
        ),
        (
            "backup/stores.c",
            "backup/host/store.h",
            ["stores may include of host only backup/host/operations:", "backup/stores.c"],
        ),
        ("backup/stores.c", "disk/disk.h", ["stores may include of disk only backup/disk/operations:", "backup/stores.c"]),
        ("backup/tape/tape.c", "", ["backup/tape/tape is in no part of backup"]),
    ],
)
def test_the_order_of_the_parts_of_backup(tool: ModuleType, tmp_path: Path, file: str, text: str, words: list[str]) -> None:
    csrc = write(tmp_path, BACKUP)
    assert problems(tool, csrc) == []
    (problem,) = problems(tool, write(tmp_path, {file: text}))
    for word in words:
        assert word in problem


@needs_compiler
@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("core/model/run.c", "core/allocation/free.h", ["model uses allocation", "core/model/run.c"]),
        ("core/allocation/new.c", "core/transition/pause.h", ["allocation uses transition", "core/allocation/new.c"]),
        ("core/extra.c", "", ["core/extra is in no part of core"]),
    ],
)
def test_the_order_of_the_parts_of_core(tool: ModuleType, tmp_path: Path, file: str, text: str, words: list[str]) -> None:
    parts = {
        "core/model/saver.h": "",
        "core/allocation/free.h": "core/model/saver.h",
        "core/transition/pause.h": "core/allocation/free.h\ncore/model/saver.h",
    }
    assert problems(tool, write(tmp_path, parts)) == []
    (problem,) = problems(tool, write(tmp_path, {**parts, file: text}))
    for word in words:
        assert word in problem


def test_a_symbol_against_the_order_of_the_parts_of_backup(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(
        tmp_path,
        {
            "backup/host/pool.c": "int tms_disk(void);\nint tms_pool(void) { return tms_disk(); }",
            "backup/disk/disk.c": "int tms_room(void);\nint tms_disk(void) { return tms_room(); }",
            "backup/host/room.c": "int tms_room(void) { return 1; }",
        },
    )
    (problem,) = problems(tool, csrc, compile_all(tmp_path))
    assert "host uses disk" in problem and "backup/host/pool.c uses tms_disk of backup/disk/disk.c" in problem


@needs_compiler
def test_a_symbol_against_the_order(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(
        tmp_path,
        {
            "base/log.c": "int tms_deep(void);\nint tms_log(void) { return tms_deep(); }",
            "core/model/deep.c": "int tms_deep(void) { return 1; }",
            "abi/api.c": "int tms_deep(void);\nint tms_api(void) { return tms_deep(); }",
        },
    )
    (problem,) = problems(tool, csrc, compile_all(tmp_path))
    assert "base uses core" in problem and "base/log.c uses tms_deep of core/model/deep.c" in problem


@needs_compiler
def test_a_circle_by_symbols_and_includes(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(
        tmp_path,
        {
            "core/model/a.h": "int tms_a(void);",
            "core/model/a.c": "int tms_b(void);\nint tms_a(void) { return tms_b(); }",
            "core/model/b.c": "core/model/a.h\nint tms_b(void) { return 0; }",
        },
    )
    (problem,) = problems(tool, csrc, compile_all(tmp_path))
    assert (
        "core/model/a.c uses tms_b of core/model/b.c" in problem
        and 'core/model/b.c has #include "core/model/a.h"' in problem
    )


@needs_compiler
def test_a_name_that_two_libraries_define_means_the_user_s_own(tool: ModuleType, tmp_path: Path) -> None:
    both = "int cudaMalloc(void) { return 0; }"
    user = "int cudaMalloc(void);\nint %s(void) { return cudaMalloc(); }"
    csrc = write(
        tmp_path,
        {
            "preload/hooks.c": both,
            "preload/resolve.c": user % "tms_resolve",
            "simulator/runtime.c": both,
            "simulator/graph.c": user % "sim_graph",
        },
    )
    assert problems(tool, csrc, compile_all(tmp_path)) == []


@needs_compiler
def test_stale_objects_are_ignored(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(
        tmp_path,
        {
            "base/a.c": "int tms_b(void);\nint tms_a(void) { return tms_b(); }",
            "core/model/b.c": "int tms_b(void) { return 0; }",
        },
    )
    objects = compile_all(tmp_path)
    assert len(problems(tool, csrc, objects)) == 1
    (csrc / "core/model/b.c").rename(csrc / "base/b.c")
    assert problems(tool, csrc, objects) == []
    assert tool.main(["--csrc", str(csrc), "--objects", str(objects)]) == 0
    assert tool.main(["--csrc", str(csrc), "--objects", str(objects), "--need-objects"]) == 1


SIMULATOR = {
    "simulator/memory/map.h": "",
    "simulator/memory/map.c": "simulator/memory/map.h",
    "simulator/streams/queue.c": "simulator/memory/map.h",
    "simulator/streams/queue.h": "",
}


def test_a_circle_of_the_simulator_s_folders(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "SIMULATOR_ORDER", ())
    csrc = write(tmp_path, SIMULATOR)
    assert problems(tool, csrc) == []
    write(tmp_path, {"simulator/memory/copy.c": "simulator/streams/queue.h"})
    (problem,) = problems(tool, csrc)
    assert problem.startswith("a circle of the simulator's folders memory, streams:")
    assert "simulator/memory/copy.c" in problem and "simulator/streams/queue.c" in problem


def test_a_circle_of_files_in_a_folder_of_the_simulator(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(tmp_path, SIMULATOR)
    write(tmp_path, {"simulator/memory/export.h": "", "simulator/memory/export.c": "simulator/memory/map.h"})
    assert problems(tool, csrc) == []
    write(tmp_path, {"simulator/memory/map.c": "simulator/memory/map.h\nsimulator/memory/export.h"})
    (problem,) = problems(tool, csrc)
    assert problem.startswith("a circle of simulator/memory/export, simulator/memory/map:")
    assert 'simulator/memory/map.c has #include "simulator/memory/export.h"' in problem


@needs_compiler
def test_a_declaration_does_not_hide_a_circle_in_a_folder_of_the_simulator(tool: ModuleType, tmp_path: Path) -> None:
    csrc = write(
        tmp_path,
        {
            "simulator/control/life.h": "int sim_life(void);",
            "simulator/control/life.c": "int sim_entry(void);\nint sim_life(void) { return sim_entry(); }",
            "simulator/control/entry.c": "simulator/control/life.h\nint sim_entry(void) { return 0; }",
        },
    )
    (problem,) = problems(tool, csrc, compile_all(tmp_path))
    assert problem.startswith("a circle of simulator/control/entry, simulator/control/life:")
    assert "simulator/control/life.c uses sim_entry of simulator/control/entry.c" in problem


def test_the_order_of_the_simulator_s_folders(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csrc = write(tmp_path, SIMULATOR)
    monkeypatch.setattr(tool, "SIMULATOR_ORDER", (("memory",), ("streams",)))
    assert problems(tool, csrc) == []
    monkeypatch.setattr(tool, "SIMULATOR_ORDER", (("streams",), ("memory",)))
    (problem,) = problems(tool, csrc)
    assert "streams uses memory" in problem and "simulator/streams/queue.c" in problem
    monkeypatch.setattr(tool, "SIMULATOR_ORDER", (("memory",),))
    assert problems(tool, csrc) == ["simulator/streams is not in SIMULATOR_ORDER"]


def test_pictures(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csrc = write(tmp_path, IN_ORDER)
    picture = tmp_path / "layers.svg"
    assert tool.main(["--csrc", str(csrc), "--dot", "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert '"core/model" -> "device" [label=1];' in printed
    assert printed.startswith("digraph") and printed.endswith("}\n")
    words = {element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("}text")}
    assert {"base", "device", "backup", "core", "abi", "preload", "python", "include", "simulator"} <= words


def test_the_printed_report(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csrc = write(tmp_path, IN_ORDER)
    assert tool.main(["--csrc", str(csrc), "--objects", str(tmp_path)]) == 0
    assert "every use follows the order" in capsys.readouterr().out
    write(tmp_path, {"base/log.c": "core/model/saver.h"})
    assert tool.main(["--csrc", str(csrc), "--objects", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "problems: 1" in printed.out and 'base/log.c has #include "core/model/saver.h"' in printed.err


def test_pre_commit_has_the_versions_of_the_extra_dev() -> None:
    pins = dict(re.findall(r'"([\w-]+)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    hooks = re.findall(r'"([\w-]+)==([\d.]+)"', (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name for name, _ in hooks} == {"ruff", "clang-format"}
    assert all(pins[name] == version for name, version in hooks)


def test_files_have_at_most_600_lines() -> None:
    folders = ("benchmarks", "csrc", "docs", "examples", "tests", "tools", "torch_memory_saver")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    code = [path for path in files if path.suffix in (".c", ".cpp", ".cu", ".def", ".h", ".js", ".py", ".pyi")]
    longer = {str(path.relative_to(ROOT)) for path in code if path.read_bytes().count(b"\n") > 600}
    assert longer == {"torch_memory_saver/saver.py"}, "it has every public method with its documentation, in one class"
