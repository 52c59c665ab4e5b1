"""The loop of a program that a test drives line by line: it reads commands from stdin and prints one answer for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable


def serve(functions: Iterable[Callable[..., object]]) -> None:
    """Call the function that the first word of each line names, with the other words.

    The answer is "ok" and what the function returns, or the type and the text of its exception.
    """
    commands = {function.__name__: function for function in functions}
    for line in sys.stdin:
        name, *words = line.split()
        try:
            answer = f"ok{commands[name](*words)}"
        except Exception as error:
            answer = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(answer, flush=True)
