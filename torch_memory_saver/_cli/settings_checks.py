"""Checks of the TMS_* variables: their names, their values, and the folders that they name. They need no GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch_memory_saver._cli.check import Check, Finding, fail, ok, skip, warn
from torch_memory_saver._cli.facts import run_child
from torch_memory_saver._cli.host_checks import why_not_writable
from torch_memory_saver._engine.background import debug_folder, requested_recordings
from torch_memory_saver._engine.variables import PYTHON_VARIABLES, known_variables, unknown_variables
from torch_memory_saver._text import suggestion
from torch_memory_saver.memory.release import read_seconds

__all__ = ["CHECKS"]

_PREFIX = "TMS_"
_LEVEL = "TMS_LOG_LEVEL"
#: Has the core read its variables, which it logs about, and make the first call that a malformed limit is an error of.
_READ_SETTINGS = """
from torch_memory_saver import _core
from torch_memory_saver.errors import TorchMemorySaverError
_core.counters()
try:
    _core.pause((), None)
except TorchMemorySaverError as error:
    import sys
    print(error, file=sys.stderr)
"""
#: What the core writes about a variable: the sentence begins with its name.
_COMPLAINT = re.compile(r"\b(TMS_\w+(?:='| and TMS_).*?)\.?$", re.MULTILINE)
#: Of the variables that Python reads: whether a value has the right form.
_FORMS: Mapping[str, Callable[[str], bool]] = {
    "TMS_DEBUG": lambda text: not requested_recordings(text)[1],
    "TMS_RELEASE_CACHED": lambda text: text.lower() == "pause" or read_seconds(text) is not None,
}
_DEBUG, _DEBUG_FOLDER = "TMS_DEBUG", "TMS_DEBUG_DIR"
_METRICS, _PAGES = "TMS_METRICS_FILE", "TMS_SHARED_PAGE"


def _given() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)}


def _complaints_of_core() -> list[str]:
    """What the core says about the values that it reads."""
    folder = str(Path(os.path.abspath(__file__)).parents[2])
    quiet = os.environ.get(_LEVEL, "").lower() in ("silent", "error")
    variables = {_LEVEL: "warning"} if quiet else {}
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    _, errors, problem = run_child("-c", _READ_SETTINGS, PYTHONPATH=path, **variables)
    return [*_COMPLAINT.findall(errors), *([f"the core could not be asked: {problem}"] if problem else [])]


def settings() -> Finding:
    given = _given()
    lines = [f"{name}={value}" for name, value in given.items()]
    wrong = [f"{name} is unknown{suggestion(name, known_variables())}" for name in unknown_variables(given)]
    allowed = {variable.name: variable.allowed for variable in PYTHON_VARIABLES}
    for name, is_right in _FORMS.items():
        value = given.get(name, "").strip()
        if value and not is_right(value):
            wrong.append(f"{name}='{value}' is ignored: it may be {allowed[name]}")
    wrong += _complaints_of_core() if given else []
    if len(wrong) == 1:
        return warn(wrong[0], "correct or unset it", lines)
    if wrong:
        return warn(f"{len(wrong)} mistakes", "correct or unset these variables", [*wrong, *lines])
    return ok(f"{len(given)} set" if given else "none set", lines)


def _nearest(folder: Path) -> Path:
    """The folder, or the one that exists above it, in which it would be made."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _why_not_for_pages(folder: Path) -> str | None:
    """The same for the folder of shared pages, which the core makes, but not those above it."""
    return why_not_writable(folder if folder.exists() else folder.parent)


def output_folders() -> Finding:
    given = _given()
    folders = {}
    if requested_recordings(given.get(_DEBUG, ""))[0]:
        folders[_DEBUG_FOLDER] = Path(debug_folder())
    if given.get(_METRICS):
        folders[_METRICS] = Path(given[_METRICS]).absolute().parent
    if given.get(_PAGES, "").startswith("/"):
        folders[_PAGES] = Path(given[_PAGES])
    if not folders:
        return skip("no variable names a folder to write to", "set TMS_DEBUG=events to have events written")
    lines = [f"{name}: {folder}" for name, folder in folders.items()]
    for name, folder in folders.items():
        problem = _why_not_for_pages(folder) if name == _PAGES else why_not_writable(_nearest(folder))
        if problem is not None:
            return fail(f"{name}: {folder} cannot be written to: {problem}", "choose another folder", lines)
    return ok("can be written to", lines)


CHECKS = (Check("settings", settings), Check("output folders", output_folders))
