"""Draws the graph that check_layers.py reads: as input for graphviz, or as SVG with the standard library alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# (user, used), two folders of csrc by their paths: how many pairs of modules use each other.
Counts = dict[tuple[str, str], int]
Rows = Sequence[Sequence[str]]

# The contents of each layer in one line.
CONTENTS = {
    "include": "tms.h, the public C ABI: used by all",
    "base": "status, log, settings, registry, quarantine",
    "device": "driver, devices, waiting, captures, copier",
    "backup": "what is kept and where: host memory, files",
    "core": "segments, regions, pause, resume, pending",
    "abi": "the one state, the function table",
    "preload": "interposers",
    "python": "the extension module",
}
COLOURS = {
    "base": "#64748b",
    "device": "#0f766e",
    "backup": "#b45309",
    "core": "#1d4ed8",
    "abi": "#7e22ce",
    "preload": "#be123c",
    "python": "#15803d",
}
CAPTION = "An arrow points from a layer to one that it uses. Its number counts the pairs of files."
INK, QUIET, PAPER = "#1e293b", "#64748b", "#ffffff"


def dot(counts: Counts) -> str:
    """The graph of the folders, with the number of pairs of modules at each arrow, for `dot -Tsvg`."""
    lines = ["digraph layers {", "  rankdir=TB;", '  node [shape=box, fontname="sans-serif"];']
    lines += [f'  "{user}" -> "{used}" [label={count}];' for (user, used), count in sorted(counts.items())]
    return "\n".join([*lines, "}"]) + "\n"


@dataclass
class Box:
    name: str
    left: float
    top: float
    width: float
    height: float = 56
    # For each side: how many arrows end there, and how many of these ends are placed.
    ends: dict[str, int] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def middle(self) -> float:
        return self.left + self.width / 2

    def edge(self, side: str) -> float:
        return self.left if side == "left" else self.left + self.width

    def next_end(self, side: str) -> float:
        """The y coordinate at which the side's next arrow begins or ends, from the top down."""
        self.placed[side] = self.placed.get(side, 0) + 1
        return self.top + self.height * self.placed[side] / (self.ends[side] + 1)


# Lengths in the drawing, in pixels.
STACK_WIDTH, GAP, LANE, MARGIN, SIMULATOR_WIDTH = 380, 34, 26, 24, 200


def svg(counts: Counts, layers: Rows, shared: str, simulator: str, simulator_order: Rows) -> str:
    """The layers from the highest to the lowest, and beside them the simulator with its folders. An arrow points from a
    layer to each lower one that it uses, with the number of pairs of modules."""
    uses = _by_layer(counts)
    rows = [*reversed(layers)]
    rank = {layer: index for index, row in enumerate(rows) for layer in row}
    sides = {pair: _side(pair, rows) for pair in uses if set(pair) <= rank.keys() and rank[pair[1]] - rank[pair[0]] > 1}
    lanes = {side: sum(other == side for other in sides.values()) for side in ("left", "right")}
    left = MARGIN + LANE * (lanes["left"] + 1)
    boxes = _stack(rows, left)
    bottom = max(box.bottom for box in boxes.values()) + GAP
    right = left + STACK_WIDTH + LANE * (lanes["right"] + 1) + MARGIN
    width, height = right + SIMULATOR_WIDTH + MARGIN, bottom + 44 + 22 + MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="The layers of csrc">',
        f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
    ]
    drawn += [draw_box(box, COLOURS.get(box.name, INK), CONTENTS.get(box.name, "")) for box in boxes.values()]
    drawn.append(draw_box(Box(shared, left, bottom, right - left + SIMULATOR_WIDTH, 44), INK, CONTENTS[shared]))
    for (user, used), count in sorted(uses.items()):
        if user in rank and used in rank and rank[used] == rank[user] + 1:
            drawn.append(_straight(boxes[user], boxes[used], count))
    lowest = boxes[rows[-1][0]]
    to_shared = sum(count for (user, used), count in uses.items() if used == shared and user != simulator)
    drawn.append(_arrow([(lowest.middle, lowest.bottom), (lowest.middle, bottom)], QUIET, to_shared))
    drawn += _lanes(sides, uses, boxes, rank)
    drawn += _simulator(simulator, simulator_order, Box(simulator, right, MARGIN, SIMULATOR_WIDTH, bottom - GAP - MARGIN))
    beside = uses.get((simulator, shared), 0)
    if beside:
        middle = right + SIMULATOR_WIDTH / 2
        drawn.append(_arrow([(middle, bottom - GAP), (middle, bottom)], QUIET, beside))
    drawn.append(text((left + right + SIMULATOR_WIDTH) / 2, bottom + 44 + 26, CAPTION, QUIET, size=12))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _by_layer(counts: Counts) -> Counts:
    uses: Counts = {}
    for (user, used), count in counts.items():
        pair = (user.split("/")[0], used.split("/")[0])
        if pair[0] != pair[1]:
            uses[pair] = uses.get(pair, 0) + count
    return uses


def _side(pair: tuple[str, str], rows: Rows) -> str:
    """The side of the stack for an arrow that skips a layer: the side of its user, if a row has two layers."""
    row = next(row for row in rows if pair[0] in row)
    return "right" if row.index(pair[0]) > 0 else "left"


def _stack(rows: Rows, left: float) -> dict[str, Box]:
    boxes = {}
    top: float = MARGIN
    for row in rows:
        each = (STACK_WIDTH - GAP * (len(row) - 1)) / len(row)
        for index, layer in enumerate(row):
            boxes[layer] = Box(layer, left + index * (each + GAP), top, each)
        top += boxes[row[0]].height + GAP
    return boxes


def _lanes(sides: dict[tuple[str, str], str], uses: Counts, boxes: dict[str, Box], rank: dict[str, int]) -> list[str]:
    """The arrows that skip a layer. Each leaves a box at its side, goes down a lane of its own and enters another box."""
    drawn = []
    for side in ("left", "right"):
        pairs = [pair for pair, own in sides.items() if own == side]
        # The shortest arrow takes the innermost lane, so that arrows cross only where they must.
        pairs.sort(key=lambda pair: (rank[pair[1]] - rank[pair[0]], rank[pair[0]]))
        for name in [end for pair in pairs for end in pair]:
            boxes[name].ends[side] = boxes[name].ends.get(side, 0) + 1
        # At a box, from the top down: the incoming arrows and then the outgoing ones, the longest first.
        ends: dict[tuple[tuple[str, str], int], float] = {}
        for which in (1, 0):
            for pair in reversed(pairs):
                ends[pair, which] = boxes[pair[which]].next_end(side)
        for lane, pair in enumerate(pairs, start=1):
            user, used = boxes[pair[0]], boxes[pair[1]]
            edge = min(user.edge(side), used.edge(side)) if side == "left" else max(user.edge(side), used.edge(side))
            at = edge + (-LANE if side == "left" else LANE) * lane
            path = [
                (user.edge(side), ends[pair, 0]),
                (at, ends[pair, 0]),
                (at, ends[pair, 1]),
                (used.edge(side), ends[pair, 1]),
            ]
            drawn.append(_arrow(path, COLOURS.get(pair[0], INK), uses[pair]))
    return drawn


def _simulator(name: str, order: Rows, box: Box) -> list[str]:
    drawn = [
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}" rx="8" fill="none" '
        f'stroke="{QUIET}" stroke-dasharray="5 4"/>',
        text(box.middle, box.top + 22, name, INK, bold=True),
        text(box.middle, box.top + 40, "shares only include/", QUIET),
    ]
    rows = [row for row in reversed(order) if list(row) != ["."]]
    room = (box.height - 56 - 12) / max(len(rows), 1)
    for index, row in enumerate(rows):
        each = (box.width - 24 - 8 * (len(row) - 1)) / len(row)
        for place, folder in enumerate(row):
            inner = Box(folder, box.left + 12 + place * (each + 8), box.top + 56 + index * room, each, min(room - 10, 40))
            drawn.append(draw_box(inner, QUIET, ""))
    return drawn


def text(x: float, y: float, words: str, colour: str, *, bold: bool = False, size: int = 13) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="{colour}" font-size="{size}"{weight}>{escape(words)}</text>'
    )


def draw_box(box: Box, colour: str, words: str) -> str:
    frame = (
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}" rx="6" fill="{colour}" '
        f'fill-opacity="0.08" stroke="{colour}" stroke-width="1.5"/>'
    )
    middle = box.top + box.height / 2
    if not words:
        return frame + text(box.middle, middle + 5, box.name, INK)
    return (
        frame + text(box.middle, middle - 4, box.name, INK, bold=True) + text(box.middle, middle + 14, words, QUIET, size=12)
    )


def _straight(user: Box, used: Box, count: int) -> str:
    """An arrow between neighbours: straight down, at the middle of the narrower box."""
    x = user.middle if user.width <= used.width else used.middle
    return _arrow([(x, user.bottom), (x, used.top)], COLOURS.get(user.name, INK), count)


def _arrow(path: list[tuple[float, float]], colour: str, count: int) -> str:
    """A line through points, with an arrowhead at its end and a number at its longest vertical part."""
    (x_before, y_before), (x, y) = path[-2:]
    if x == x_before:
        head = f"{x:g},{y:g} {x - 4:g},{y - 8:g} {x + 4:g},{y - 8:g}"
    else:
        back = 8 if x_before > x else -8
        head = f"{x:g},{y:g} {x + back:g},{y - 4:g} {x + back:g},{y + 4:g}"
    points = " ".join(f"{px:g},{py:g}" for px, py in path)
    if len(path) == 2:
        number = text(x + 14, (y_before + y) / 2 + 4, str(count), colour, size=11)
    else:
        at, middle = path[1][0], (path[1][1] + path[2][1]) / 2
        number = f'<rect x="{at - 10:g}" y="{middle - 8:g}" width="20" height="16" fill="{PAPER}"/>'
        number += text(at, middle + 4, str(count), colour, size=11)
    line = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2" stroke-linejoin="round"/>'
    return f'{line}<polygon points="{head}" fill="{colour}"/>{number}'
