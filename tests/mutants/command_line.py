"""Bugs of the command line: the doctor's checks, errors and exit statuses, and what `run` gives to programs."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_CLI = "torch_memory_saver/_cli/"
_DOCTORS = "torch_memory_saver/observe/_doctor/"
_TESTS = "tests/unit/python/cli/"
_OF_DOCTOR = "tests/unit/python/observe/doctor/"

_COMMANDS = (
    Mutant(
        "the-output-of-a-lost-reader-is-written-again",
        _CLI + "main.py",
        "        os.dup2(null, sys.stdout.fileno())\n",
        "",
        (_TESTS + "test_commands.py::test_output_that_cannot_be_written_is_an_error",),
    ),
    Mutant(
        "debug-behind-the-command-is-forgotten",
        _CLI + "main.py",
        "default=argparse.SUPPRESS, help",
        "help",
        (_TESTS + "test_commands.py::test_the_traceback_is_shown_on_request",),
    ),
)

_DOCTOR = (
    Mutant(
        "a-check-that-raises-ends-the-doctor",
        _DOCTORS + "doctor.py",
        "    except Exception as error:",
        "    except OSError as error:",
        (_OF_DOCTOR + "test_doctor.py::test_a_check_that_raises_is_a_failure_of_that_check",),
    ),
    Mutant(
        "a-process-that-crashes-has-answered",
        _DOCTORS + "check.py",
        "    if child.returncode < 0:",
        "    if child.returncode < -1000:",
        (_OF_DOCTOR + "test_facts.py::test_a_driver_that_crashes",),
    ),
    Mutant(
        "a-driver-without-devices-has-a-problem",
        _DOCTORS + "driver_probe.py",
        "_NO_DEVICE = 100",
        "_NO_DEVICE = 101",
        (_OF_DOCTOR + "test_facts.py::test_no_device_is_no_problem_of_the_driver",),
    ),
    Mutant(
        "a-static-runtime-is-not-noticed",
        _DOCTORS + "installation_checks.py",
        "if has_driver and not has_runtime:",
        "if has_driver and has_runtime:",
        (_OF_DOCTOR + "test_installation_checks.py::test_preloaded_programs", "tests/unit/preload/test_static_runtime.py"),
    ),
    Mutant(
        "only-the-cgroup-of-the-process-counts",
        _DOCTORS + "host_checks.py",
        "range(len(parts), -1, -1)",
        "range(len(parts), len(parts) - 1, -1)",
        (_OF_DOCTOR + "test_host_checks.py::test_the_tightest_cgroup_is_named",),
    ),
    Mutant(
        "a-folder-in-memory-is-a-disk",
        _DOCTORS + "host_checks.py",
        '_IN_MEMORY = ("tmpfs", "ramfs")',
        '_IN_MEMORY = ("tmpfs",)',
        (_OF_DOCTOR + "test_host_checks.py::test_a_folder_that_is_memory",),
    ),
    Mutant(
        "the-library-of-another-release-is-taken-for-ours",
        _DOCTORS + "installation_checks.py",
        "shallow=False",
        "shallow=False) or True  # (",
        (_OF_DOCTOR + "test_installation_checks.py::test_the_library_of_another_installation",),
    ),
    Mutant(
        "libraries-of-the-cpp-package-are-taken-for-ours",
        "torch_memory_saver/_engine/preload.py",
        "if path.name != LIBRARY_NAME])",
        'if "_cu" not in path.name and path.name != LIBRARY_NAME])',
        (
            _OF_DOCTOR + "test_installation_checks.py::test_files_that_the_cpp_package_has_left",
            _OF_DOCTOR + "test_installation_checks.py::test_the_first_use_warns_once_of_libraries_of_the_cpp_package",
        ),
    ),
    Mutant(
        "what-the-core-says-of-a-value-is-not-asked",
        _DOCTORS + "installation_checks.py",
        '    variables = {_LEVEL: "warning"} if quiet else {}',
        "    variables: dict[str, str] = {}",
        (_OF_DOCTOR + "test_settings_checks.py::test_one_mistake_is_named",),
    ),
)

_RUN = (
    Mutant(
        "a-program-inherits-the-signals-that-python-ignores",
        "torch_memory_saver/_replace.py",
        "        signal.signal(number, signal.SIG_DFL)",
        "        signal.getsignal(number)",
        (_TESTS + "test_run.py::test_signals_are_the_program_s",),
    ),
    Mutant(
        "the-package-is-imported-with-torch",
        "torch_memory_saver/_site/sitecustomize.py",
        '    patches.replace("torch.cuda._lazy_init", cuda, "_lazy_init", initialize_and_start)\n',
        "    _start()\n",
        (_TESTS + "test_run.py::test_nothing_happens_without_cuda",),
    ),
    Mutant(
        "a-finder-of-torch-is-asked-once",
        "torch_memory_saver/_startup.py",
        "        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:\n            specification =",
        "        position = sys.meta_path.index(self)\n        sys.meta_path.remove(self)\n"
        "        for finder in sys.meta_path[position:]:\n            specification =",
        (_TESTS + "test_run.py::test_a_program_may_look_for_torch_before_it_imports_it",),
    ),
    Mutant(
        "a-call-inside-the-initialisation-of-cuda-starts-it",
        "torch_memory_saver/_site/sitecustomize.py",
        "        if not cuda.is_initialized():  # a call inside of the initialisation\n            return\n",
        "",
        (_TESTS + "test_run.py::test_nothing_starts_inside_the_initialisation",),
    ),
    Mutant(
        "the-user-s-own-sitecustomize-does-not-run",
        "torch_memory_saver/_startup.py",
        "    others = sys.path[entries.index(folder) + 1 :]",
        "    others = sys.path[: entries.index(folder)]",
        (_TESTS + "test_run.py::test_the_users_own_sitecustomize_runs_once",),
    ),
    Mutant(
        "the-hook-library-comes-last",
        "torch_memory_saver/_engine/preload.py",
        '":".join([path, *entries])',
        '":".join([*entries, path])',
        (_TESTS + "test_run.py::test_the_hook_library_comes_before_what_is_preloaded",),
    ),
    Mutant(
        "values-for-the-shell-are-not-quoted",
        _CLI + "child_environment.py",
        "{shlex.quote(value)}",
        "{value}",
        (_TESTS + "test_print_env.py::test_a_shell_gives_a_program_these_variables",),
    ),
    Mutant(
        "a-hook-library-behind-the-simulated-runtime",
        "torch_memory_saver/simulate.py",
        "    if preload_hook or str(preload.library_path()) in preloaded:",
        "    if preload_hook:",
        ("tests/unit/python/simulate/test_simulate.py",),
    ),
)

MUTANTS = (*_COMMANDS, *_DOCTOR, *_RUN)
