"""Guards that the table of options (csrc/include/tms_selection.h) says what the public signatures and the core say."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import pytest

from torch_memory_saver import _core, options
from torch_memory_saver.saver import TorchMemorySaver

#: The type of a public option, by its kind.
TYPES = {
    "BACKUP": Literal["host", "mmap", "disk", "shared", "discard"] | None,
    "HOST_MEMORY": Literal["release", "pool", "retain"] | None,
    "IF_SHARED": Literal["allow", "wait", "refuse"],
    "FLAG": bool,
    "PROGRESS": Callable[[int, int], Any] | None,
    "SECONDS": float | None,
}
TABLES = {
    "pause": (_core.PAUSE_OPTIONS, options.PAUSE_TABLE),
    "resume": (_core.RESUME_OPTIONS, options.RESUME_TABLE),
}
PUBLIC = {name: getattr(TorchMemorySaver, name) for name in TABLES}


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the parameters by keyword only, in order."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def members(kind: Any) -> frozenset[Any]:
    """The types of a union, and the values of its literals."""
    if typing.get_origin(kind) is Literal:
        return frozenset(typing.get_args(kind))
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return frozenset().union(*map(members, typing.get_args(kind))) if is_union else frozenset({kind})


def core_defaults(name: str) -> dict[str, Any]:
    """The defaults of the arguments of a native function, from its signature."""
    signature = str(getattr(_core, name).__doc__).partition("\n")[0]
    function = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return dict(
        zip([each.arg for each in function.args.args[2:]], map(ast.literal_eval, function.args.defaults), strict=True)
    )


@pytest.mark.parametrize("name", TABLES)
def test_the_public_signature_has_the_options_of_the_table_in_order(name: str) -> None:
    rows, _ = TABLES[name]
    table = [(option, ast.literal_eval(default)) for option, _, default, _ in rows]
    signature = list(keywords(PUBLIC[name]).items())
    assert signature == table
    assert [type(default) for _, default in signature] == [type(default) for _, default in table]


@pytest.mark.parametrize("name", TABLES)
def test_the_public_types_are_those_of_the_kinds(name: str) -> None:
    rows, _ = TABLES[name]
    hints = typing.get_type_hints(PUBLIC[name])
    for option, kind, *_ in rows:
        assert members(hints[option]) == members(TYPES[kind]), option


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is newer")
def test_the_overloads_leave_out_only_what_they_refuse() -> None:
    expected = keywords(TorchMemorySaver.resume)
    found = [keywords(each) for each in typing.get_overloads(TorchMemorySaver.resume)]  # type: ignore[attr-defined,unused-ignore]
    assert len(found) == 3
    for overload in found:
        wait = overload.pop("wait")
        assert wait in (True, inspect.Parameter.empty)
        assert list(overload) in (list(expected)[:-1], [each for each in list(expected)[:-1] if each != "progress"])
        assert all(overload[each] == expected[each] for each in overload)


@pytest.mark.parametrize(("name", "native"), [("pause", "check_pause"), ("resume", "resume_begin")])
def test_the_core_has_the_shared_options_with_the_same_defaults(name: str, native: str) -> None:
    rows, table = TABLES[name]
    arguments = core_defaults(name)
    shared = [option for option, _, _, is_shared in rows if is_shared]
    assert [each for each in arguments if each in shared] == shared
    for option in shared:
        row = table.options[option]
        assert row.for_core
        assert row.check(row.default) == arguments[option], option
    assert core_defaults(native) == arguments
    own = {"pause": ["interruptible", "find_live", "preserves"], "resume": ["interruptible"]}[name]
    assert [each for each in arguments if each not in shared] == own


@pytest.mark.parametrize("method", ["region", "cuda_graph", "manage", "pause", "resume"])
def test_every_argument_reaches_the_engine(method: str) -> None:
    """Each argument is written twice in saver.py, also in methods whose options are in no table."""
    received: dict[str, Any] = {}

    class Theirs:
        def __getattr__(self, name: str) -> Callable[..., None]:
            assert name == method
            return lambda *what, **keywords: received.update(zip(["what"], what, strict=False), **keywords)

    saver = TorchMemorySaver()
    saver._impl = Theirs()
    given = {name: object() for name in inspect.signature(getattr(TorchMemorySaver, method)).parameters if name != "self"}
    getattr(saver, method)(**given)
    assert received == given
