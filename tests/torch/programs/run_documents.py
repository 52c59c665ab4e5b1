"""Runs programs of the documentation, each in a process of its own, and imports PyTorch once for all of them.

Arguments: files, each a Python program. For each, one line on stdout: its exit status and its path. What a program prints
goes to the path with .log behind it. A child is forked before anything uses the GPU, so that it may use it.

With TMS_DISABLE memory is never managed, so an assertion about it cannot hold. An assertion that fails is then written to
the path with .failed behind it, and the program goes on.
"""

import ast
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch  # imported for the children

import torch_memory_saver  # noqa: F401


class _Noted(ast.NodeTransformer):
    """Replaces assertions by notes of those that do not hold."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        call = ast.parse(f"_note(lambda: 0, {ast.unparse(node.test)!r})").body[0]
        assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
        assert isinstance(call.value.args[0], ast.Lambda)
        call.value.args[0].body = node.test
        return ast.copy_location(call, node)


def run_file(path: str) -> None:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__file__ = path
    if os.environ.get("TMS_DISABLE"):
        tree = ast.fix_missing_locations(_Noted().visit(tree))
        failed = Path(path + ".failed")
        failed.touch()

        def note(holds: Callable[[], object], text: str) -> None:
            try:
                if holds():
                    return
            except (AttributeError, KeyError) as error:  # of None, or of a tag without memory
                text = f"{text} ({error!r})"
            with failed.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

        vars(main)["_note"] = note
    exec(compile(tree, path, "exec"), vars(main))


def run(path: str) -> int:
    """In the child: the program as the main module. Returns its exit status."""
    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run_file(path)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    assert not torch.cuda.is_initialized()
    for path in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = run(path)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), path, flush=True)


if __name__ == "__main__":
    main()
