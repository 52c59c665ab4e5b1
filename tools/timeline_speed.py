"""Measures how long the page of a timeline takes to open in headless Chromium.

    python tools/timeline_speed.py [--events 100000] [--processes 2] [--times 5]

Makes logs of processes that allocate, free, pause and resume at random, and prints how long the page takes to make, its
size, how long after the navigation its script has drawn everything (performance.now() at its end), and how long Chromium
takes from its start to a photograph of the page, and to one of an empty page.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "python" / "support")]

from recorded_logs import GIB, MIB, Process  # type: ignore[import-not-found]  # noqa: E402

from torch_memory_saver.observe.events import EventLog, write_timeline  # noqa: E402

TAGS = [f"tag {number}" for number in range(10)]
WINDOW = "--window-size=1280,1200"


def log(count: int, number: int) -> EventLog:
    """A log of about so many events."""
    chance, process, now = random.Random(number), Process(number + 1, total=80 * GIB, role="worker", rank=number), 0
    live: dict[str, list[int]] = {tag: [] for tag in TAGS}
    while len(process.events) < count:
        now += chance.randrange(1, 2_000_000)
        tag = chance.choice(TAGS)
        what = chance.random()
        if what < 0.45 and sum(map(sum, live.values())) < 30 * GIB:
            live[tag].append(chance.randrange(1, 64) * 2 * MIB)
            process.allocate(now, tag, live[tag][-1])
        elif what < 0.9 and live[tag]:
            process.free(now, tag, live[tag].pop())
        elif live[tag]:
            size = sum(live[tag])
            process.sample(now, 30 * GIB)
            process.pause(now + 10, tag, size, size, ns=500_000)
            process.resume(now + 1_000_000, tag, size, size, ns=500_000)
            now += 1_600_000
    result: EventLog = process.log(now + 1)
    return result


def seconds(command: list[str]) -> tuple[float, str]:
    """How long a command takes, and its output."""
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description="how long a timeline takes to open")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("timeline_speed: Chromium was not found: install it, or put it into PATH")
    with tempfile.TemporaryDirectory() as folder:
        page, empty, photograph = (Path(folder) / name for name in ("page.html", "empty.html", "page.png"))
        logs = [log(options.events // options.processes, number) for number in range(options.processes)]
        began = time.perf_counter()
        write_timeline(page, logs=logs)
        made = time.perf_counter() - began
        empty.write_text("<!DOCTYPE html><title>empty</title>")
        start = [browser, "--headless", "--no-sandbox", "--disable-gpu", WINDOW]
        opened, whole, nothing = [], [], []
        for _ in range(options.times):
            _, text = seconds([*start, "--dump-dom", page.as_uri()])
            opened += [int(number) for number in re.findall(r'data-opened-ms="(\d+)"', text)]
            whole.append(seconds([*start, f"--screenshot={photograph}", page.as_uri()])[0])
            nothing.append(seconds([*start, f"--screenshot={photograph}", empty.as_uri()])[0])
        print(f"{sum(len(one.events) for one in logs)} events of {len(logs)} processes")
        print(f"made in {made:.2f} s, {page.stat().st_size / 1e6:.1f} MB")
        print(f"drawn {statistics.median(opened)} ms after the navigation, at most {max(opened)} ms")
        print(f"Chromium from its start to a photograph: {statistics.median(whole):.2f} s, at most {max(whole):.2f} s")
        print(f"of an empty page: {statistics.median(nothing):.2f} s, at most {max(nothing):.2f} s")


if __name__ == "__main__":
    main()
