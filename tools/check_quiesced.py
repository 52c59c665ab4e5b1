"""Checks who makes a `tms_quiesced_t`, without which no memory is unmapped: `python tools/check_quiesced.py`.

core/quiesced.c makes such values in three functions (core/quiesced.h). Elsewhere in csrc a value is only declared, passed
and assigned as a whole. The check fails on every other way to make one: an initialiser, a compound literal or a cast, a
field, `memset` and the like. It fails on a call of `tms_quiesced_never_handed_out` or `tms_quiesced_devices_lost` from a
function that is not listed here with its reason. It also fails on `cuMemUnmap` outside core/segment.c; the interposers
only pass on what the program itself unmaps.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = {"core/quiesced.c", "core/quiesced.h"}

#: The callers that may state without waiting that memory is quiesced, as (file, function, maker), and the reason.
UNWAITED = {
    ("core/segment.c", "tms_segment_map", "tms_quiesced_never_handed_out"): "it undoes its own mapping",
    ("core/segment.c", "tms_segment_guard", "tms_quiesced_never_handed_out"): "it undoes its own mapping",
    ("core/transition/guarding.c", "make_page", "tms_quiesced_never_handed_out"): "making the page has failed",
    ("core/allocation/retire.c", "tms_saver_drop_guard", "tms_quiesced_never_handed_out"): "the page itself is ours",
    ("core/allocation/allocation.c", "make_segment", "tms_quiesced_never_handed_out"): "the allocation has failed",
    (
        "core/transition/resume.c",
        "undo",
        "tms_quiesced_never_handed_out",
    ): "a failed resume, which has waited for its copies",
    ("core/allocation/retire.c", "tms_saver_await_users", "tms_quiesced_never_handed_out"): "the segment is not mapped",
    ("core/allocation/retire.c", "tms_saver_await_users", "tms_quiesced_devices_lost"): "waiting has found them lost",
}

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
_MAKER = re.compile(r"\b(tms_quiesced_(?:never_handed_out|devices_lost))\(")
_FUNCTION = re.compile(r"^\w[^;{}()]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)


def without_comments(source: str) -> str:
    """The source with spaces in place of comments and strings. Positions and line numbers stay the same."""
    return re.sub(
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"',
        lambda found: re.sub(r"[^\n]", " ", found.group()),
        source,
        flags=re.DOTALL,
    )


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
    functions = [(found.start(), found.group(1)) for found in _FUNCTION.finditer(code)]
    for found in _MAKER.finditer(code):
        inside = [function for start, function in functions if start < found.start()]
        if (name, inside[-1] if inside else "", found.group(1)) not in UNWAITED:
            problem(found.start(), f"{found.group(1)}: its caller is not listed in UNWAITED (tools/check_quiesced.py)")
    if name != "core/segment.c":
        for found in re.finditer(r"\bcuMemUnmap\s*[(,]", code):
            if not name.startswith(("device/driver", "preload/")):
                problem(found.start(), "only tms_segment_depopulate unmaps")
    return problems


def main() -> int:
    sources = sorted((ROOT / "csrc").rglob("*.[ch]"))
    problems = [line for path in sources for line in check(str(path.relative_to(ROOT / "csrc")), path.read_text())]
    print("\n".join(problems) or f"{len(sources)} files: every unmap has waited")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
