"""Bugs of what other processes see of the shared store, and of the clean-up by a command."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/observe/_store/"
_PYTHON = "tests/unit/python/observe/"
_CONTENTS, _CLEANING = _PYTHON + "store/test_contents.py::", _PYTHON + "store/test_cleaning.py::"

MUTANTS = (
    Mutant(
        "shared-bytes-are-in-the-column-of-files",
        "csrc/core/model/account.c",
        "TMS_BACKUP_BIT(SHARED)) change.shared_backup_bytes += backup;",
        "TMS_BACKUP_BIT(SHARED)) change.disk_backup_bytes += backup;",
        ("tests/unit/core/model/test_shared_page_rows.c",),
    ),
    Mutant(
        "links-do-not-count-after-a-resume",
        "csrc/backup/shared/operations.c",
        "kept->parts[i].object ? kept->parts[i].bytes : 0;",
        "0;",
        (_PYTHON + "store/test_processes.py::test_what_two_processes_hold_counts_once",),
    ),
    Mutant(
        "an-object-counts-for-each-link",
        _SOURCES + "contents.py",
        "            yield found.setdefault(_identity(status), _Counted(name, status.st_size))",
        "            yield found.setdefault((0, len(found)), _Counted(name, status.st_size))",
        (_CONTENTS + "test_an_object_counts_once_however_many_processes_hold_it",),
    ),
    Mutant(
        "a-dead-process-holds-objects",
        _SOURCES + "contents.py",
        "                each.holders += alive",
        "                each.holders += 1",
        (_CONTENTS + "test_an_object_counts_once_however_many_processes_hold_it",),
    ),
    Mutant(
        "to-look-takes-a-store-of-another-user",
        "torch_memory_saver/_shared_folder.py",
        "        if folder.owner != os.geteuid():",
        "        if False:",
        (_CONTENTS + "test_the_store_of_another_user_is_refused",),
    ),
    Mutant(
        "the-clean-up-removes-the-objects-of-others",
        "torch_memory_saver/_shared_folder.py",
        "    if not is_object(name, found) or found.st_nlink > 1:",
        "    if not is_object(name, found):",
        (_CLEANING + "test_what_only_dead_processes_held_goes", _CLEANING + "test_a_killed_process"),
    ),
    Mutant(
        "the-clean-up-trusts-the-lock-of-a-removed-holder",
        _SOURCES + "cleaning.py",
        "    return os.path.samestat(os.fstat(descriptor), found)",
        "    return found is not None",
        (_CLEANING + "test_a_lock_that_is_no_longer_the_holders_says_nothing",),
    ),
    Mutant(
        "the-clean-up-removes-what-a-process-writes",
        _SOURCES + "cleaning.py",
        "        if _lock(part, objects, name):",
        "        if part:",
        (_CLEANING + "test_unfinished_objects",),
    ),
    Mutant(
        "top-does-not-count-shared-objects",
        "torch_memory_saver/observe/_processes/table.py",
        "held.disk_backup_bytes + held.shared_backup_bytes",
        "held.disk_backup_bytes",
        (_PYTHON + "processes/test_table.py::test_everything_is_on_it",),
    ),
    Mutant(
        "written-pages-are-huge-where-they-are-not",
        "torch_memory_saver/observe/_doctor/host_checks.py",
        'option in ("huge=always", "huge=within_size")',
        'option in ("huge=always", "huge=within_size", "huge=advise")',
        (_PYTHON + "doctor/test_host_checks.py::test_pages_of_the_shared_store",),
    ),
)
