"""Runs a program of the documentation whose assertions may fail: python note_assertions.py PATH.

With TMS_DISABLE memory is never managed, so an assertion about it cannot hold. One that fails is written to the path
with .failed behind it, and the program goes on.
"""

import ast
import sys
from collections.abc import Callable
from pathlib import Path


class _Noted(ast.NodeTransformer):
    """Replaces assertions by notes of those that do not hold."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        call = ast.parse(f"_note(lambda: 0, {ast.unparse(node.test)!r})").body[0]
        assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
        assert isinstance(call.value.args[0], ast.Lambda)
        call.value.args[0].body = node.test
        return ast.copy_location(call, node)


def run_file(path: str) -> None:
    tree = ast.fix_missing_locations(_Noted().visit(ast.parse(Path(path).read_text(encoding="utf-8"), path)))
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

    main = sys.modules["__main__"] = type(sys)("__main__")
    vars(main).update(__file__=path, _note=note)
    exec(compile(tree, path, "exec"), vars(main))


if __name__ == "__main__":
    run_file(sys.argv[1])
