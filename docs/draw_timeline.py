"""Draws docs/images/timeline.png and timeline-dark.png: an engine and a trainer that take turns on one simulated GPU.

    python docs/draw_timeline.py    # needs PyTorch's CUDA build and Chromium; no GPU

The processes write event files (TMS_DEBUG=events). Chromium photographs the page that shows them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_memory_saver import simulate
from torch_memory_saver.observe.events.timeline import read_logs, write_timeline

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1100, 1040
ROUNDS = 4
#: Kernels between a resume and the pause after it.
STEPS = 40
#: The tags of each role, with the MiB and the backup of each tag.
ROLES = {
    "engine": {"weights": (512, "host"), "kv_cache": (1280, None), "cuda_graph": (96, "host")},
    "trainer": {"params": (512, "host"), "optimizer": (640, "host"), "activations": (384, None)},
}

PROGRAM = """
import sys
import torch
from torch_memory_saver import torch_memory_saver as saver

sys.argv[0], tags = sys.argv[1], {tags}  # the name of the process in the picture
kept = []
for tag, (mebibytes, backup) in tags.items():
    with saver.region(tag=tag, backup=backup):
            kept.append(torch.ones(mebibytes << 18, device="cuda"))
unmanaged = torch.ones(64 << 18, device="cuda")
saver.pause()
print("ready", flush=True)
for line in sys.stdin:  # one turn
    for tag in tags:
        saver.resume(tag)
    for _ in range({work}):
        unmanaged.mul_(1.0001)
    torch.cuda.synchronize()
    for tag in reversed(tags):
        saver.pause(tag)
    print("done", flush=True)
"""


def main() -> None:
    """Runs both processes, and draws."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("draw_timeline: Chromium was not found: install it, or put it into PATH")
    with tempfile.TemporaryDirectory() as folder:
        run_processes(Path(folder))
        logs = [dataclasses.replace(log, host="node0") for log in read_logs([Path(folder) / "events"])]
        page = write_timeline(Path(folder) / "timeline.html", logs=logs)
        photograph(browser, page, IMAGES / "timeline.png", "light")
        photograph(browser, page, IMAGES / "timeline-dark.png", "dark")


def run_processes(folder: Path) -> None:
    """Run the engine and the trainer in turn."""
    variables = {**os.environ, **simulate.environment(devices=1, memory="3GiB", bandwidth="6GiB")}
    workers = []
    for role, tags in ROLES.items():  # one after the other: both together are more than the GPU has
        workers.append(start(role, tags, variables | {"TMS_DEBUG": "events", "TMS_DEBUG_DIR": str(folder)}))
        expect(workers[-1], "ready")
    for _ in range(ROUNDS):
        for worker in workers:
            assert worker.stdin is not None
            print("turn", file=worker.stdin, flush=True)
            expect(worker, "done")
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def start(role: str, tags: dict[str, tuple[int, bool]], variables: dict[str, str]) -> subprocess.Popen[str]:
    """One of the processes."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(tags=tags, work=STEPS), role],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def expect(worker: subprocess.Popen[str], word: str) -> None:
    """Waits for a line of the process."""
    assert worker.stdout is not None
    line = worker.stdout.readline().strip()
    if line != word:
        sys.exit(f"draw_timeline: a process said {line!r} in place of {word!r}")


def photograph(browser: str, page: Path, target: Path, scheme: str) -> None:
    """Photograph the upper part of the page as it looks in a light or dark colour scheme."""
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark]
    subprocess.run([*command, f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={target}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
