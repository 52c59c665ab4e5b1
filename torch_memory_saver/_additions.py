"""The table of the functions that other folders add to the saver, by the event of the saver at which each is called.

The saver imports none of these folders. The table names each function as text, and the module of a function is
loaded when the event happens, so most processes never load it. A function whose folder is not installed is not added.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["ADDITIONS", "added"]

#: For each event, the functions by name, as "module:function" or "module:class".
ADDITIONS: dict[str, dict[str, str]] = {
    # A word of TMS_DEBUG, which is the name. The argument is the path of the word's folder.
    "recording": {
        "events": "torch_memory_saver.observe.events.from_environment:start_event_files",
        "snapshots": "torch_memory_saver.observe.memory.sampler:start_snapshots",
        "history": "torch_memory_saver.observe.memory.sampler:start_history",
        "oom": "torch_memory_saver.observe._out_of_memory.reporter:start_reports",
    },
    # A variable, which is the name. The argument is its text. Variables come after the recordings: a snapshot before a pause
    # shows what the release after it changes.
    "variable": {
        "TMS_METRICS_FILE": "torch_memory_saver.observe.events.from_environment:start_metrics",
        "TMS_RELEASE_CACHED": "torch_memory_saver.observe.memory.release:start_releases",
    },
    # The first use of the saver in a process, after the recordings and variables.
    "first use": {"requests": "torch_memory_saver.observe._processes.requests:start_serving"},
    # The first use of torch.cuda by the saver, and again in a forked child. The argument is the module torch.
    "first use of torch": {"observer": "torch_memory_saver.observe._out_of_memory.reporter:attach_observer"},
    # A resume fails with it, after the last attempt. The arguments are the error and the tags that the resume selects. The
    # function may add to the message, and must not raise.
    "out of memory": {"reports": "torch_memory_saver.observe._out_of_memory.reporter:explain"},
    # A read of a private attribute of the C++ package. The arguments are the engine and the name of the attribute.
    "private attribute": {"C++ package": "torch_memory_saver._compat.cpp_package:private_attribute_of"},
    # A command, which is the name; in the order of the help. The class is a Command of _cli/commands.py.
    "command": {
        "demo": "torch_memory_saver._cli.commands:Demo",
        "doctor": "torch_memory_saver.observe._doctor.command:Doctor",
        "run": "torch_memory_saver._cli.commands:Run",
        "top": "torch_memory_saver.observe._processes.commands:Top",
        "ask": "torch_memory_saver.observe._processes.commands:Ask",
        "store": "torch_memory_saver.observe._store.command:Store",
        "compare": "torch_memory_saver.observe.memory._command:Compare",
        "timeline": "torch_memory_saver.observe.events._command:Timeline",
        "simulate": "torch_memory_saver._cli.commands:Simulate",
    },
    # A call of patches(). The function returns rows of what can be replaced in other packages.
    "patches": {"vllm": "torch_memory_saver.vllm.patches:patches"},
    # A call of ledger(). The arguments are its own, checked.
    "ledger": {"ledger": "torch_memory_saver.observe._ledger.sources:take_ledger"},
}
_ROOT = os.path.dirname(os.path.abspath(__file__))


def added(event: str) -> dict[str, Callable[..., Any]]:
    """Return the functions that are added for an event, by name and in the order of the table. A module is loaded when its
    function is called."""
    return {name: partial(_call, place) for name, place in ADDITIONS[event].items() if _is_installed(place)}


def _is_installed(place: str) -> bool:
    """Return whether the folder of a function is there. A folder at which this process may not look counts as there: a
    process that gave up its rights has already loaded what it needs, and otherwise the import says what is denied."""
    try:
        os.stat(os.path.join(_ROOT, *place.split(".")[1:-1]))
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _call(place: str, *arguments: Any) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
