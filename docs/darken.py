"""Makes the dark version of each picture in docs/images: NAME.svg gives NAME-dark.svg, NAME.png gives NAME-dark.png.

    python docs/darken.py    # PNG files need Pillow

The lightness of every colour is inverted, its hue stays: white becomes the background of the site's dark scheme.
timeline-dark.png is no such picture: docs/draw_timeline.py photographs the page in its own dark scheme.
"""

from __future__ import annotations

import re
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
DRAWN_DARK = ("timeline.png",)

Color = tuple[int, ...]
#: The colours that white and black become.
PAPER, INK = (0x1E, 0x21, 0x29), (0xE6, 0xE9, 0xEE)
_COLOR = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b(?!\w)|(?<=[\":; ])(?:white|black)(?=[\";])")
_NAMED = {"white": "#ffffff", "black": "#000000"}


def dark(color: Color) -> Color:
    """Return a colour of the dark scheme. Parts are from 0 to 255."""
    lightness = (max(color) + min(color)) / 510
    grey = [ink + (paper - ink) * lightness for paper, ink in zip(PAPER, INK, strict=True)]
    # A colour keeps its share of the saturation that is possible at its lightness.
    room, dark_room = (1 - abs(2 * each - 1) for each in (lightness, (max(grey) + min(grey)) / 510))
    scale = dark_room / room if room else 0.0
    parts = [base + (part - lightness * 255) * scale for base, part in zip(grey, color, strict=True)]
    return tuple(min(255, max(0, round(part))) for part in parts)


def dark_color(text: str) -> str:
    """Return a colour of an SVG picture in the dark scheme."""
    digits = _NAMED.get(text, text).removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(digit * 2 for digit in digits)
    return "#" + "".join(f"{part:02x}" for part in dark(tuple(bytes.fromhex(digits))))


def dark_svg(picture: str) -> str:
    """Return a picture with dark colours. Shapes and texts without a colour of their own are black, so the root gets one."""
    changed = _COLOR.sub(lambda color: dark_color(color[0]), picture)
    root = re.search(r"<svg\b[^>]*>", changed)
    assert root is not None
    return changed if " fill=" in root[0] else changed.replace("<svg", f'<svg fill="{dark_color("black")}"', 1)


def darken_png(picture: Path, target: Path) -> None:
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    colors = {bytes(color): bytes(dark(color)) for _, color in image.getcolors(1 << 24)}
    pixels = image.tobytes()
    pixels = b"".join([colors[pixels[place : place + 3]] for place in range(0, len(pixels), 3)])
    Image.frombytes("RGB", image.size, pixels).save(target, optimize=True)


def main() -> None:
    for picture in sorted(IMAGES.iterdir()):
        target = picture.with_name(f"{picture.stem}-dark{picture.suffix}")
        if picture.stem.endswith("-dark") or picture.name in DRAWN_DARK:
            continue
        if picture.suffix == ".svg":
            target.write_text(dark_svg(picture.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            darken_png(picture, target)


if __name__ == "__main__":
    main()
