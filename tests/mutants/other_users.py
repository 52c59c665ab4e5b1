"""Bugs that let another user of the machine run code in a process, or stop it."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_STARTUP = "torch_memory_saver/_startup.py"
_INTERPRETER = "tests/unit/preload/test_interpreter.py::test_no_code_of_another_folder_runs"
_CHILDREN = "tests/unit/python/cli/test_child_python.py::"
_BUDGET = "csrc/simulator/devices/budget.c"

MUTANTS = (
    Mutant(
        "a-relative-name-of-a-library-is-believed",
        "csrc/base/library_path.c",
        "return length > 0 && length < PATH_MAX && path[0] == '/';",
        "return length > 0 && length < PATH_MAX;",
        ("tests/unit/base/test_library_path.c", _INTERPRETER),
    ),
    Mutant(
        "a-removed-library-is-found",
        "csrc/base/library_path.c",
        "strcmp(line + length - strlen(removed), removed) == 0",
        "false",
        ("tests/unit/base/test_library_path.c",),
    ),
    Mutant(
        "a-set-user-id-program-follows-its-caller",
        "csrc/base/config.c",
        "secure_getenv(name)",
        "getenv(name)",
        ("tests/unit/base/test_config.c",),
    ),
    Mutant(
        "a-relative-folder-of-backups-is-used",
        "csrc/base/config.c",
        "if (value && *value != '/' && variable->kind != KIND_TEXT) {",
        "if (value && *value != '/' && variable->kind == KIND_PAGE) {",
        ("tests/unit/base/test_config.c",),
    ),
    Mutant(
        "a-driver-is-loaded-by-a-relative-path",
        "csrc/device/driver.c",
        "    if (*path != '/') return \"is not an absolute path\";\n",
        "",
        ("tests/unit/device/test_driver.c",),
    ),
    Mutant(
        "added-code-imports-from-the-working-directory",
        _STARTUP,
        "path = entries if finder is importlib.machinery.PathFinder else None",
        "path = None",
        (_INTERPRETER,),
    ),
    Mutant(
        "commands-start-python-in-the-working-directory",
        "torch_memory_saver/_cli/child_python.py",
        '    return ["-c", _FIRST + text]',
        '    return ["-c", text]',
        (f"{_CHILDREN}test_the_demo_runs_in_a_folder_of_another_user",),
    ),
    Mutant(
        "a-relative-folder-of-recordings-moves-with-the-program",
        "torch_memory_saver/_engine/variables.py",
        "    return os.path.normpath(os.path.join(_DIRECTORY, path))",
        "    return os.path.abspath(path)",
        ("tests/unit/python/engine/test_recordings.py::test_nothing_is_recorded_in_another_working_directory",),
    ),
    Mutant(
        "a-shared-file-of-another-size-is-mapped",
        _BUDGET,
        "    if (!empty && status.st_size != sizeof(sim_shared_t)) return NULL;\n",
        "",
        ("tests/unit/simulator/test_process.c",),
    ),
    Mutant(
        "a-shared-file-that-others-can-write-is-used",
        _BUDGET,
        '    if (status->st_mode & OTHERS) return "other users can use it";\n',
        "",
        ("tests/unit/simulator/test_process.c",),
    ),
)
