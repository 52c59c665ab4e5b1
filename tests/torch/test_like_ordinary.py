"""Guards that memory in regions goes as far as ordinary memory: random programs, see programs/like_ordinary.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "like_ordinary.py"
#: Before regions gave idle memory back, programs 4 and 7 ran out of memory.
FIRST, PROGRAMS = 4, 4


def test_a_device_that_suffices_without_regions_suffices_with_them() -> None:
    command = [sys.executable, str(PROGRAM), "--seed", str(FIRST), "--programs", str(PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(rf"{PROGRAMS} programs from seed {FIRST}: 0 failed \[\]; \d{{3,}} steps", done.stdout), done.stdout
