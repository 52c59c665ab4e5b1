"""Makes a Python for libraries that are built with a sanitizer, as `make sanitize-python` needs it.

    make_python.py FOLDER RUNTIME COMPILER...

FOLDER becomes a virtual environment with the packages of the Python that runs this. Its ``bin/python`` (launcher.c) loads
RUNTIME, the sanitizer's runtime library, before everything else, and so do the Pythons that this one starts. Python itself
is not instrumented. Programs that are no Python are started without the runtime: LD_PRELOAD reads as if it were not there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

LAUNCHER = Path(__file__).with_name("launcher.c")

#: A module that is imported when Python starts.
HIDE_RUNTIME = """
import os

others = os.environ["LD_PRELOAD"].partition(":")[2]
if others:
    os.environ["LD_PRELOAD"] = others
else:
    del os.environ["LD_PRELOAD"]
"""


def main() -> None:
    folder, runtime, compiler = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).resolve(), sys.argv[3:]
    if not runtime.is_file() or runtime.read_bytes()[:4] != b"\x7fELF":
        raise SystemExit(f"error: {runtime} is not a shared library: the compiler has no runtime for this sanitizer")
    major, minor = sys.version_info[:2]
    packages = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    for directory in (folder / "bin", packages):
        directory.mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\ninclude-system-site-packages = false\n")
    (packages / "hide_runtime.py").write_text(HIDE_RUNTIME)
    lines = ["import hide_runtime", f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"]
    (packages / "launcher.pth").write_text("".join(f"{line}\n" for line in lines))
    real = Path(sys.base_prefix, "bin", f"python{major}.{minor}")
    command = [*compiler, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-static"]
    command += [f'-DREAL_PYTHON="{real}"', f'-DRUNTIME="{runtime}"', str(LAUNCHER), "-o", str(folder / "bin" / "python")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
