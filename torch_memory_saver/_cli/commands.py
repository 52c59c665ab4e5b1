"""The commands: their names, options and what each calls.

A command's module is imported where the command runs, because this module is imported for every command.
"""

from __future__ import annotations

import abc
import argparse
import math
import shutil
from pathlib import Path

from torch_memory_saver import simulate
from torch_memory_saver._cli import output
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["COMMANDS", "Command"]

_SHORTEST_INTERVAL_S, _DEFAULT_INTERVAL_S = 0.1, 2.0
_DEFAULT_ROWS = 10
_FEWEST_MOMENTS = 3
_DEFAULT_PAGE = "timeline.html"


class Command(abc.ABC):
    """One command. `name` is what the user types. `help` describes the command in one line."""

    name = ""
    help = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""
        return

    @abc.abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit status."""


class _Demo(Command):
    """Shows one step of reinforcement learning, and checks it."""

    name = "demo"
    help = "show a whole cycle of pause and resume, on the GPU or on the simulated GPU"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--device",
            choices=["auto", "gpu", "simulated"],
            default="auto",
            help="where to run: the GPU through PyTorch, the simulated GPU, or (auto) the GPU if there is one",
        )
        parser.add_argument("--ascii", action="store_true", help="draw without Unicode characters")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli.demo import run_demo

        return run_demo(arguments.device, ascii_only=arguments.ascii)


class _Doctor(Command):
    """Checks the machine."""

    name = "doctor"
    help = "check the installation, the GPUs and the machine, and say what to change"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
        parser.add_argument(
            "--ledger",
            action="store_true",
            help="show also who holds the memory of each GPU; with --json an object of `checks`, `ledger` and `failures`",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli.doctor import run_doctor

        return run_doctor(as_json=arguments.json, with_ledger=arguments.ledger, debug=arguments.debug)


class _Run(Command):
    """Runs a program that need not import this package, or prints the environment that it would get."""

    name = "run"
    help = "run a program that need not import torch_memory_saver, preloaded or recorded: run [options] -- command ..."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [options] -- command ..."
        parser.add_argument("--preload", action="store_true", help='preload the hook library (hook mode "preload")')
        parser.add_argument(
            "--manage",
            action="store_true",
            help="manage every allocation, also of a program that never imports torch_memory_saver; implies --preload",
        )
        parser.add_argument(
            "--record",
            type=_recordings,
            default=(),
            metavar="WHAT",
            help="record events, snapshots, history or oom, separated by commas, of each process (TMS_DEBUG)",
        )
        parser.add_argument(
            "--directory",
            metavar="DIR",
            help="where to record it (TMS_DEBUG_DIR; default: torch_memory_saver_debug in this folder)",
        )
        parser.add_argument(
            "--print-env",
            nargs="?",
            choices=("shell", "json", "torchrun"),
            const="shell",
            metavar="FORMAT",
            help="run nothing, and print the environment that the program would get: as shell (export lines, the default), "
            "json (Ray's runtime_env) or torchrun (what to write before torchrun)",
        )
        parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli import child_environment

        command = _program_of(arguments, self.name)
        if arguments.print_env is not None:
            if command:
                raise InvalidArgumentError("--print-env runs nothing: leave the command out", operation="run")
            child_environment.print_environment(arguments)
            return 0
        if not command:
            raise InvalidArgumentError("there is no command to run: use run [options] -- command ...", operation="run")
        return child_environment.run_program(command, arguments)


class _Top(Command):
    """Shows the GPUs and their processes, again and again."""

    name = "top"
    help = (
        "show the memory of each GPU by process, and managed memory by tag: resident, paused, backed up (needs no PyTorch)"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from torch_memory_saver._diagnostics.processes.table import ORDERS

        orders = list(ORDERS)
        parser.add_argument("--once", action="store_true", help="print once and end")
        parser.add_argument("--json", action="store_true", help="print one JSON object per line, with sizes in bytes")
        parser.add_argument(
            "--interval",
            type=_interval,
            default=_DEFAULT_INTERVAL_S,
            metavar="SECONDS",
            help=f"seconds between refreshes (default {_DEFAULT_INTERVAL_S:g})",
        )
        parser.add_argument(
            "--sort", choices=orders, default=orders[0], help=f"order of the processes (default {orders[0]})"
        )
        parser.add_argument(
            "--filter", default="", metavar="TEXT", help="only processes whose number, name or a tag contains this"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli.top import run_top

        return run_top(arguments)


class _Ask(Command):
    """Asks another process for a file, which it writes at its next pause or resume."""

    name = "ask"
    help = "ask another process to write a snapshot of its memory, or its latest events, at its next pause or resume"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("pid", type=_process, metavar="PID", help="the process, as `top` shows it")
        kind = parser.add_mutually_exclusive_group(required=True)
        kind.add_argument(
            "--snapshot",
            dest="kind",
            action="store_const",
            const="snapshot",
            help="its memory, allocation by allocation, for `compare` and PyTorch's memory_viz",
        )
        kind.add_argument("--events", dest="kind", action="store_const", const="events", help="its latest events")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help="where to write it (default: beside the page of the process)"
        )
        parser.add_argument(
            "--timeout",
            type=_seconds,
            metavar="SECONDS",
            help="how long to wait for the next pause or resume (default: until the process ends)",
        )
        parser.add_argument(
            "--format",
            choices=("json", "chrome"),
            default="json",
            help="of events; json: for load_events() and timelines (default); chrome: a trace for Perfetto and "
            "chrome://tracing",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from torch_memory_saver._cli.ask import Answer

        if arguments.format == "chrome" and arguments.kind != "events":
            raise InvalidArgumentError("--format chrome is a form of events: ask with --events", operation="ask")
        answer = Answer(arguments.pid, arguments.kind, arguments.output, arguments.format == "chrome")
        output.write_path(answer.wait(arguments.timeout))
        return 0


class _Compare(Command):
    """Compares memory snapshots: a table in the terminal, a page, or JSON."""

    name = "compare"
    help = "compare memory snapshots of several moments, and name what leaks (needs no PyTorch)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "snapshots",
            nargs="+",
            metavar="SNAPSHOT",
            help="files, or folders of moments, in the order of time; three moments or more tell a leak from a warm-up",
        )
        parser.add_argument("-o", "--output", metavar="FILE", help="also write a page with pictures (HTML in one file)")
        parser.add_argument(
            "--top", type=_positive, default=_DEFAULT_ROWS, metavar="N", help=f"rows of each kind (default {_DEFAULT_ROWS})"
        )
        parser.add_argument("--varying", action="store_true", help="also list call stacks whose memory rises and falls")
        parser.add_argument("--json", action="store_true", help="print an object with sizes in bytes instead of the table")
        parser.add_argument("--fail-on-leak", action="store_true", help="exit with status 1 if there is a leak")

    def run(self, arguments: argparse.Namespace) -> int:
        """Compare the snapshots.

        Raises:
            InvalidArgumentError: A file is no snapshot, or the page cannot be written.
        """
        import json

        from torch_memory_saver._files import write_text_file
        from torch_memory_saver.memory import compare

        comparison = compare(*arguments.snapshots)
        if arguments.fail_on_leak and len(comparison.moments) < _FEWEST_MOMENTS:
            raise InvalidArgumentError(
                f"compare: --fail-on-leak needs snapshots of three moments or more, because fewer cannot tell a leak from a "
                f"warm-up; these are of {len(comparison.moments)}.",
                operation="compare",
            )
        if arguments.output:
            try:
                write_text_file(comparison.html(), Path(arguments.output), "compare", "the page was")
            except OSError as error:
                raise InvalidArgumentError(
                    f"compare: {arguments.output} cannot be written: {error.strerror}: choose another file.",
                    operation="compare",
                ) from error
        if arguments.json:
            print(json.dumps(comparison.as_dict(arguments.top), indent=2))
        else:
            text = comparison.table(output.width(), arguments.top, arguments.varying)
            output.write_line(text.removesuffix("\n"))
        return 1 if arguments.fail_on_leak and comparison.leaks else 0


class _Timeline(Command):
    """Draws event files as one page."""

    name = "timeline"
    help = "draw event files of several processes as one page: memory over time (needs no PyTorch and no GPU)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE", help="event files, or folders `events` of TMS_DEBUG_DIR")
        parser.add_argument(
            "-o",
            "--output",
            default=_DEFAULT_PAGE,
            metavar="FILE",
            help=f"the page, HTML in one file (default {_DEFAULT_PAGE})",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the page.

        Raises:
            InvalidArgumentError: A file is no event file, or the page cannot be written.
        """
        from torch_memory_saver.events.timeline import read_logs, write_timeline

        logs = read_logs(arguments.files)
        folder = Path(arguments.output).parent
        if not folder.is_dir():
            raise InvalidArgumentError(f"timeline: there is no folder {folder}: make it first.", operation="timeline")
        try:
            path = write_timeline(arguments.output, logs=logs)
        except OSError as error:
            raise InvalidArgumentError(f"timeline: {arguments.output}: {error.strerror}", operation="timeline") from error
        events = sum(len(log.events) for log in logs)
        output.write_line(f"{path}: {events} events of {len(logs)} process{'es' * (len(logs) != 1)}")
        return 0


class _Simulate(Command):
    """Runs a program on the simulated GPU."""

    name = "simulate"
    help = "run a program, also with PyTorch's CUDA build, on a simulated GPU: simulate [options] -- python script.py ..."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [options] -- command ..."
        parser.add_argument(
            "--devices",
            type=int,
            choices=range(simulate.MAX_DEVICES + 1),
            default=1,
            metavar="N",
            help=f"number of GPUs, 0 to {simulate.MAX_DEVICES} (default 1)",
        )
        parser.add_argument("--memory", type=_size, default="8GiB", metavar="SIZE", help="memory of each GPU (default 8GiB)")
        parser.add_argument(
            "--bandwidth",
            type=_size,
            metavar="SIZE",
            help="bytes per second of copies on a stream, such as 20GiB (default: as fast as the host)",
        )
        parser.add_argument("--preload", action="store_true", help='also preload the hook library (hook mode "preload")')
        parser.add_argument(
            "--report", action="store_true", help="print at the end of each process what it still holds on the GPU"
        )
        parser.add_argument(
            "--trace", metavar="FILE", help="append every call of the driver, the runtime and NCCL to this file"
        )
        parser.add_argument(
            "command", nargs=argparse.REMAINDER, help='the program and its arguments; "python" is this interpreter'
        )

    def run(self, arguments: argparse.Namespace) -> int:
        command = _program_of(arguments, self.name)
        if not command:
            raise InvalidArgumentError("there is no command to run: use simulate [options] -- python script.py ...")
        simulate.check_imports(command)
        variables = simulate.environment(
            devices=arguments.devices,
            memory=arguments.memory,
            bandwidth=arguments.bandwidth,
            preload_hook=arguments.preload,
            report=arguments.report,
            trace=arguments.trace,
        )
        return simulate.run_command(command, variables)


#: In the order of the help.
COMMANDS: tuple[type[Command], ...] = (_Demo, _Doctor, _Run, _Top, _Ask, _Compare, _Timeline, _Simulate)


def _program_of(arguments: argparse.Namespace, operation: str) -> list[str]:
    """Return the program and its arguments, without the `--` before them.

    Raises:
        InvalidArgumentError: The program is a Python script that the system cannot run.
    """
    command: list[str] = arguments.command
    command = command[1:] if command[:1] == ["--"] else command
    script = command[0] if command else ""
    if script.endswith(".py") and shutil.which(script) is None:
        raise InvalidArgumentError(
            f"{script} is no program but a Python script: write {operation} -- python {script}", operation=operation
        )
    return command


def _size(text: str) -> int:
    try:
        return simulate.parse_bytes(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def _recordings(text: str) -> list[str]:
    from torch_memory_saver._additions import added
    from torch_memory_saver._engine.background import requested_recordings

    known, unknown = requested_recordings(text)
    if unknown or not known:
        raise argparse.ArgumentTypeError(f"{text!r} is not one or more of {', '.join(added('recording'))}")
    return known


def _process(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _interval(text: str) -> float:
    seconds = _number(text)
    if not _SHORTEST_INTERVAL_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {_SHORTEST_INTERVAL_S}")
    return seconds
