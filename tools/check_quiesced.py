"""Checks who makes a `tms_quiesced_t`, without which no memory is unmapped: `python tools/check_quiesced.py`.

core/model/quiesced.c makes such values in four functions (core/model/quiesced.h). Elsewhere in csrc a value is only
declared, passed and assigned as a whole. The check fails on every other way to make one: an initialiser, a compound
literal or a cast, a field, `memset` and the like. It fails on a call of `tms_quiesced_without_users`,
`tms_quiesced_by_program` or `tms_quiesced_idle_or_lost` from a function that is not listed here with its reason, and on a
listed function that makes none any more. It also fails on `cuMemUnmap` outside of the functions listed for it; the
interposers only pass on what the program itself unmaps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = {"core/model/quiesced.c", "core/model/quiesced.h"}

#: The callers that may state without waiting that memory is quiesced, as (file, function, maker), and the reason.
UNWAITED = {
    ("core/model/run.c", "tms_run_map", "tms_quiesced_without_users"): "it undoes its own mapping",
    ("core/model/guard.c", "tms_guard_map", "tms_quiesced_without_users"): "it undoes its own mapping",
    ("core/transition/guard_mode.c", "make_page", "tms_quiesced_without_users"): "making the page has failed",
    ("core/allocation/free.c", "tms_free_drop_guard", "tms_quiesced_without_users"): "the page itself is ours",
    ("core/allocation/allocation.c", "make_segment", "tms_quiesced_without_users"): "the allocation has failed",
    (
        "core/transition/resume.c",
        "undo_run",
        "tms_quiesced_without_users",
    ): "a failed resume, which has waited for its copies",
    ("core/allocation/free.c", "tms_free_await_users", "tms_quiesced_without_users"): "no device has access",
    ("core/allocation/free.c", "tms_free_await_users", "tms_quiesced_idle_or_lost"): "waiting has found them lost",
    ("core/allocation/free.c", "tms_free_retire", "tms_quiesced_by_program"): "the program has unmapped it",
    ("core/allocation/handles.c", "tms_handles_unmap", "tms_quiesced_by_program"): "the program unmaps it",
    ("core/allocation/handles.c", "make_segment", "tms_quiesced_without_users"): "the allocation has failed",
    ("core/allocation/handles.c", "map_own", "tms_quiesced_without_users"): "the map before has failed",
    ("core/allocation/handles.c", "tms_handles_map", "tms_quiesced_without_users"): "it was never mapped",
    ("core/allocation/handles.c", "tms_handles_release", "tms_quiesced_without_users"): "it was never mapped",
}

#: The functions that unmap, as (file, function): they refuse to without a value that covers every device with access.
UNMAPS = {("core/model/run.c", "tms_run_depopulate"), ("core/model/guard.c", "tms_guard_unmap")}

_TYPE = r"(?:struct\s+tms_quiesced|tms_quiesced_t)"
_FORBIDDEN = {
    "a cast, a compound literal or its size": re.compile(
        r"\(\s*(?:const\s+)?(?:struct\s+tms_quiesced|tms_quiesced_t)\s*\**\s*\)"
    ),
    "an initialiser": re.compile(r"(?:struct\s+tms_quiesced|tms_quiesced_t)\s+\w+\s*=\s*\{"),
    "a field": re.compile(r"\bquiesced_(?:devices|at)\b"),
    "the raw memory of one": re.compile(r"\bmem(?:set|cpy|move)\([^;]*\bquiesced\b"),
    "a designated initialiser": re.compile(r"\.quiesced\s*=\s*\{"),
}
_MAKER = re.compile(r"\b(tms_quiesced_(?:without_users|by_program|idle_or_lost))\(")
_FUNCTION = re.compile(r"^\w[^;{}()]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)


def without_comments(source: str) -> str:
    """The source with spaces in place of comments and strings. Positions and line numbers stay the same."""
    return re.sub(
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"',
        lambda found: re.sub(r"[^\n]", " ", found.group()),
        source,
        flags=re.DOTALL,
    )


def makers(name: str, code: str) -> list[tuple[int, tuple[str, str, str]]]:
    """Where a file states that memory is quiesced: positions, with the file, the function and the maker."""
    return [(found.start(), (name, function_at(code, found.start()), found.group(1))) for found in _MAKER.finditer(code)]


def function_at(code: str, position: int) -> str:
    """The function that begins last before a position; "" if there is none."""
    inside = [found.group(1) for found in _FUNCTION.finditer(code) if found.start() < position]
    return inside[-1] if inside else ""


def check(name: str, source: str) -> list[str]:
    """The problems in one file of csrc, one line each."""
    if name in HOME or name.startswith("simulator/"):
        return []
    code = without_comments(source)
    problems = []

    def problem(position: int, text: str) -> None:
        problems.append(f"csrc/{name}:{code.count(chr(10), 0, position) + 1}: {text}")

    for what, pattern in _FORBIDDEN.items():
        for found in pattern.finditer(code):
            problem(found.start(), f"{what}: only quiesced.c makes a tms_quiesced_t ({found.group().strip()})")
    for position, maker in makers(name, code):
        if maker not in UNWAITED:
            problem(position, f"{maker[2]}: its caller is not listed in UNWAITED (tools/check_quiesced.py)")
    for found in re.finditer(r"\bcuMemUnmap\s*[(,]", code):
        passes_on = name.startswith(("device/driver", "preload/"))
        if not passes_on and (name, function_at(code, found.start())) not in UNMAPS:
            problem(found.start(), "cuMemUnmap: its caller is not listed in UNMAPS (tools/check_quiesced.py)")
    return problems


def stale(sources: dict[str, str]) -> list[str]:
    """The rows of UNWAITED without such a call, one line each. `sources`: by their names in csrc."""
    found = {maker for name, source in sources.items() for _, maker in makers(name, without_comments(source))}
    return [
        f"csrc/{name}: {function} does not call {maker} any more"
        for name, function, maker in sorted(UNWAITED.keys() - found)
    ]


def main() -> int:
    paths = sorted((ROOT / "csrc").rglob("*.[ch]"))
    sources = {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in paths}
    problems = [line for name, source in sources.items() for line in check(name, source)] + stale(sources)
    print("\n".join(problems) or f"{len(sources)} files: every unmap has waited")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
