"""Draws docs/images/runs.svg: the addresses of one tag, and the handles behind them, over two resumes.

    python docs/draw_runs.py

The core runs on the simulated GPU in a process of its own. The handles are the mappings that its driver names
(cuPointerGetAttribute), and the calls are those that it has counted. tests/docs/test_pictures.py fails where the picture is
not what is drawn.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch_memory_saver import _core, simulate

IMAGES = Path(__file__).resolve().parent / "images"

MIB = 1 << 20
TAG = "weights"
ALLOCATIONS, BYTES, SMALL = 32, 128 * MIB, 64 * MIB
#: Which allocations are freed: one that has a run of its own, and two inside runs.
FREED = (0, 10, 21)
#: The driver's calls that make and release memory. Each name is a key of Stage.calls.
CALLS = ("cuMemCreate", "cuMemRelease")
#: Attributes for cuPointerGetAttribute: where the reservation and the mapping of an address begin, and their sizes.
_RANGE_START, _RANGE_SIZE, _MAPPING_START, _MAPPING_SIZE = 11, 12, 19, 18

_WIDTH, _LEFT, _GAP = 960, 24, 7
_TOP, _STAGE, _STRIP = 108, 92, 34
_LABEL_WIDTH = 46
_TITLE = "The addresses of one tag, and the handles behind them"


class Colors(NamedTuple):
    """The colours. `run` is the outline of a handle, `wash` its inside, `paused` an allocation without memory."""

    ink: str
    quiet: str
    paper: str
    paused: str
    active: str
    run: str
    wash: str
    slack: str


COLORS = Colors("#1e293b", "#64748b", "#ffffff", "#e2e8f0", "#63a4d8", "#1d4ed8", "#eff6ff", "#c8874a")


class Span(NamedTuple):
    """Addresses: where they begin, from the begin of their range, and how many they are."""

    range: int
    begin: int
    bytes: int


class Stage(NamedTuple):
    """What is where at one moment, and what the driver was called for since the moment before."""

    title: str
    reserved: list[Span]
    handles: list[Span]
    segments: list[tuple[Span, str]]
    slack_bytes: int
    calls: dict[str, int]


class _Recorder:
    """Runs in the process that has the simulated GPU."""

    def __init__(self) -> None:
        self.driver: Any = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
        self.driver.tms_sim_calls.restype = ctypes.c_uint64
        self.ranges: list[tuple[int, int]] = []
        self.stages: list[Stage] = []

    def allocate(self, size: int) -> int:
        level = _core.region_enter(TAG, 0, True)
        try:
            address = _core.allocate(size)
        finally:
            _core.region_leave(level)
        found = (self._attribute(_RANGE_START, address), self._attribute(_RANGE_SIZE, address))
        if found not in self.ranges:
            self.ranges.append(found)
        return address

    def record(self, title: str) -> None:
        segments = _core.segments()
        handles = self._handles()
        slack = _core.counters()["slack_bytes"]
        held = sum(span.bytes for span in handles)
        resident = sum(segment.reserved_bytes for segment in segments if segment.state == _core.STATE_ACTIVE)
        assert held == resident + slack, (title, held, resident, slack)
        rows = sorted(
            (self._span(segment.address, segment.reserved_bytes), _core.STATE_NAMES[segment.state]) for segment in segments
        )
        used = {span.range for span, _ in rows}
        reserved = [Span(i, 0, size) for i, (_, size) in enumerate(self.ranges) if i in used]
        calls = {call: int(self.driver.tms_sim_calls(call.encode())) for call in CALLS}
        self.driver.tms_sim_clear_counts()
        self.stages.append(Stage(title, reserved, handles, rows, slack, calls))

    def _attribute(self, number: int, address: int) -> int:
        """0: nothing is mapped at the address."""
        value = ctypes.c_uint64()
        self.driver.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(address))
        return value.value

    def _handles(self) -> list[Span]:
        found = set()
        for begin, size in self.ranges:
            for address in range(begin, begin + size, SMALL):
                mapped = self._attribute(_MAPPING_SIZE, address)
                if mapped:
                    found.add(self._span(self._attribute(_MAPPING_START, address), mapped))
        return sorted(found)

    def _span(self, address: int, size: int) -> Span:
        for index, (begin, length) in enumerate(self.ranges):
            if begin <= address < begin + length:
                return Span(index, address - begin, size)
        raise AssertionError(f"0x{address:x} is in no range of the tag")


def record() -> list[Stage]:
    """Runs the core. In a process with the simulated GPU only."""
    recorder = _Recorder()
    addresses = [recorder.allocate(BYTES) for _ in range(ALLOCATIONS)]
    recorder.record("allocated")
    _core.pause((TAG,), None)
    recorder.record("paused")
    _core.resume((TAG,), None)
    recorder.record("resumed")
    for index in FREED:
        _core.free(addresses[index])
    recorder.record("freed")
    recorder.allocate(SMALL)
    recorder.record("reused")
    _core.pause((TAG,), None)
    _core.resume((TAG,), None)
    recorder.record("again")
    return recorder.stages


def stages() -> list[Stage]:
    """What :func:`record` returns in a process of its own."""
    settings = {"TMS_CUDA_DRIVER": str(simulate.simulator_path()), "TMS_SIMULATED_MEMORY": "8GiB"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_")} | settings
    command = [sys.executable, __file__, "--record"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [_read(row) for row in json.loads(done.stdout)]


def _read(row: list[Any]) -> Stage:
    title, reserved, handles, segments, slack, calls = row
    cells = [(Span(*span), state) for span, state in segments]
    return Stage(title, [Span(*span) for span in reserved], [Span(*span) for span in handles], cells, slack, calls)


# ---- the picture ----


def _size(size: int) -> str:
    return f"{size / (1024 * MIB):g} GiB" if size >= 1024 * MIB else f"{size // MIB} MiB"


def _held(stage: Stage) -> int:
    return sum(span.bytes for span in stage.handles)


def _caption(stage: Stage) -> str:
    made, released = (stage.calls[call] for call in CALLS)
    slack = len(_slack(stage))
    texts = {
        "allocated": f"{len(stage.segments)} allocations of {_size(BYTES)}: a handle each",
        "paused": f"Paused: only the addresses are left, in {len(stage.reserved)} ranges",
        "resumed": f"Resumed: {made} handles, each for neighbours of one range, up to 1 GiB",
        "freed": f"{len(FREED)} freed: {slack} leave slack; {released} was all of its run, which went back at once",
        "reused": f"{_size(SMALL)} allocated: from slack, {made or 'no'} handles made",
        "again": "Paused and resumed: laid out again, without slack",
    }
    return texts[stage.title]


def _numbers(stage: Stage) -> str:
    count = len(stage.handles)
    if count == 0:
        return "0 handles, 0 bytes held"
    slack = f", {_size(stage.slack_bytes)} of it slack" if stage.slack_bytes else ""
    return f"{count} handles, {_size(_held(stage))} held{slack}"


def _slack(stage: Stage) -> list[Span]:
    """The parts of handles in which no allocation is."""
    found = []
    for run in stage.handles:
        end = run.begin
        inside = [span for span, _ in stage.segments if span.range == run.range and span.begin >= run.begin]
        for span in [*inside, Span(run.range, run.begin + run.bytes, 0)]:
            begin = min(span.begin, run.begin + run.bytes)
            if begin > end:
                found.append(Span(run.range, end, begin - end))
            end = max(end, span.begin + span.bytes)
    assert sum(span.bytes for span in found) == stage.slack_bytes, (stage.title, found)
    return found


class _Scale:
    """Where addresses are drawn: the ranges one after the other, with gaps."""

    def __init__(self, ranges: list[Span]) -> None:
        total = sum(span.bytes for span in ranges)
        self.unit = (_WIDTH - 2 * _LEFT - _GAP * (len(ranges) - 1)) / total
        self.starts, x = [], float(_LEFT)
        for span in ranges:
            self.starts.append(x)
            x += span.bytes * self.unit + _GAP

    def place(self, span: Span) -> tuple[float, float]:
        return self.starts[span.range] + span.begin * self.unit, span.bytes * self.unit


def _box(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>'


def _styles(colors: Colors) -> dict[str, str]:
    return {
        "range": f'fill="none" stroke="{colors.quiet}" stroke-width="1" stroke-dasharray="3 3"',
        "run": f'rx="4" fill="{colors.wash}" stroke="{colors.run}" stroke-width="2"',
        "slack": 'rx="1.5" fill="url(#slack)"',
        "active": f'rx="1.5" fill="{colors.active}"',
        "paused": f'rx="1.5" fill="{colors.paused}"',
    }


def _strip(stage: Stage, scale: _Scale, y: float, colors: Colors) -> list[str]:
    parts, styles = [], _styles(colors)
    for span in stage.reserved:
        x, width = scale.place(span)
        parts.append(_box(x + 3, y, width - 6, _STRIP, styles["range"]))
    for span in stage.handles:
        x, width = scale.place(span)
        parts.append(_box(x + 1.5, y - 3, width - 3, _STRIP + 6, styles["run"]))
        if width >= _LABEL_WIDTH:
            middle = f'x="{x + width / 2:.1f}" y="{y + _STRIP + 16}" text-anchor="middle"'
            parts.append(f'<text {middle} font-size="11" fill="{colors.run}">{_size(span.bytes)}</text>')
    for span, style in [*stage.segments, *((span, "slack") for span in _slack(stage))]:
        x, width = scale.place(span)
        parts.append(_box(x + 3.5, y + 4, width - 7, _STRIP - 8, styles[style]))
    return parts


def _legend(colors: Colors) -> list[str]:
    entries = [
        ("active", "an allocation"),
        ("paused", "an allocation, paused"),
        ("slack", "slack"),
        ("run", "one handle: a run"),
        ("range", "a reserved address range"),
    ]
    parts, x, styles = [], _LEFT, _styles(colors)
    for style, text in entries:
        parts.append(_box(x + 1, 47, 22, 16, styles[style]))
        parts.append(f'<text x="{x + 31}" y="60">{text}</text>')
        x += 60 + 7 * len(text)
    return parts


def draw(rows: list[Stage], colors: Colors) -> str:
    """The picture as SVG."""
    height = _TOP + _STAGE * len(rows)
    scale = _Scale(rows[0].reserved)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{colors.ink}" role="img" '
        f'aria-label="{_TITLE}">',
        '<defs><pattern id="slack" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{colors.paper}"/><rect width="2.5" height="6" fill="{colors.slack}"/>'
        "</pattern></defs>",
        f'<rect width="{_WIDTH}" height="{height}" fill="{colors.paper}"/>',
        f'<text x="{_LEFT}" y="28" font-size="15" font-weight="600">{_TITLE}</text>',
        *_legend(colors),
    ]
    for index, stage in enumerate(rows):
        y = _TOP + _STAGE * index
        parts.append(f'<text x="{_LEFT}" y="{y - 12}">{index + 1}. {_caption(stage)}</text>')
        end = f'x="{_WIDTH - _LEFT}" y="{y - 12}" text-anchor="end"'
        parts.append(f'<text {end} fill="{colors.quiet}">{_numbers(stage)}</text>')
        parts += _strip(stage, scale, y, colors)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--record"]:
        print(json.dumps(record()))
    else:
        (IMAGES / "runs.svg").write_text(draw(stages(), COLORS), encoding="utf-8")


if __name__ == "__main__":
    main()
