"""Bugs of the shared page, and of what other processes make of it."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_PAGE = "tests/unit/base/test_shared_page.c"
_READERS = "tests/unit/base/test_shared_page_readers.c"
_FILE = "tests/unit/base/test_shared_page_file.c"
_SHOWN = "tests/unit/core/model/test_shared_page_rows.c"

_SOURCES = "torch_memory_saver/observe/_processes/"
_PYTHON = "tests/unit/python/observe/processes/"
_TWO_USERS = "tests/unit/python/two_users/"

MUTANTS = (
    Mutant(
        "readers-do-not-learn-of-a-write-that-is-under-way",
        "csrc/base/shared_page.c",
        "    atomic_store_explicit(sequence, number + 1, memory_order_relaxed);",
        "    atomic_store_explicit(sequence, number, memory_order_relaxed);",
        (_READERS,),
    ),
    Mutant(
        "a-reader-takes-a-copy-that-was-written-to",
        "csrc/base/shared_page_file.c",
        "    *whole = before == after;",
        "    *whole = true;",
        (_READERS,),
    ),
    Mutant(
        "a-full-file-system-raises-sigbus",
        "csrc/base/shared_page_file.c",
        "    do os_error = posix_fallocate(file->fd, 0, TMS_SHARED_PAGE_BYTES);",
        "    do os_error = ftruncate(file->fd, TMS_SHARED_PAGE_BYTES);",
        (_FILE,),
    ),
    Mutant(
        "the-page-of-a-killed-process-seems-alive",
        "csrc/base/shared_page.c",
        "    tms_shared_page_file_close(&page->file);\n    if (!was_open) return;",
        "    if (!was_open) return;",
        (_PAGE, _PYTHON + "test_shared_pages.py::test_a_forked_child_does_not_keep_its_parents_page"),
    ),
    Mutant(
        "totals-of-a-row-that-is-given-away-are-lost",
        "csrc/base/shared_page.c",
        "    to->pauses_total += from->pauses_total;",
        "",
        (_PAGE,),
    ),
    Mutant(
        "a-row-with-allocations-is-given-away",
        "csrc/base/shared_page.c",
        "        if (unused == OTHERS && !holds) unused = row;",
        "        if (unused == OTHERS) unused = row;",
        (_PAGE,),
    ),
    Mutant(
        "a-free-is-shown-by-the-next-change-only",
        "csrc/core/allocation/free.c",
        "            tms_saver_unpublish(saver, segment);\n            tms_shared_page_publish(&saver->shared_page);",
        "            tms_saver_unpublish(saver, segment);",
        (_SHOWN,),
    ),
    Mutant(
        "files-count-as-host-memory",
        "csrc/core/model/account.c",
        "        if (account->stores->list[i].kinds & TMS_BACKUP_BIT(PINNED)) change.host_backup_bytes += backup;",
        "        change.host_backup_bytes += backup;",
        (_SHOWN,),
    ),
    Mutant(
        "another-store-counts-as-host-memory",
        "csrc/core/model/account.c",
        "        if (account->stores->list[i].kinds & TMS_BACKUP_BIT(PINNED)) change.host_backup_bytes += backup;",
        "        if (!(account->stores->list[i].kinds & TMS_BACKUP_BIT(DISK))) change.host_backup_bytes += backup;",
        (_SHOWN,),
    ),
    Mutant(
        "pages-of-dead-processes-stay",
        _SOURCES + "shared_pages.py",
        "    if is_alive(descriptor, page):\n        return page\n    folder.remove(name)\n    return None",
        "    return page if is_alive(descriptor, page) else None",
        (_PYTHON + "test_shared_pages.py::test_the_page_of_a_killed_process_is_removed",),
    ),
    Mutant(
        "a-reused-number-is-taken-for-the-process",
        _SOURCES + "shared_pages.py",
        "    return started is None or started == page.process_started",
        "    return True",
        (_PYTHON + "test_shared_pages.py::test_a_page_whose_process_has_another_start_time_is_dead",),
    ),
    Mutant(
        "a-request-stays-after-ctrl-c",
        _SOURCES + "requests.py",
        "                _core.request_page(descriptor, number, withdraw=True)",
        "                pass",
        (_PYTHON + "test_requests.py::test_ctrl_c_withdraws_the_request",),
    ),
    Mutant(
        "a-file-on-request-is-readable-by-others",
        "torch_memory_saver/_folders.py",
        "PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700",
        "PRIVATE_FILE, PRIVATE_FOLDER = 0o644, 0o700",
        (_PYTHON + "test_requests.py::test_a_request_is_served_once",),
    ),
    Mutant(
        "unmanaged-memory-counts-as-free",
        _SOURCES + "view.py",
        "        other_bytes=None if in_use is None else max(in_use - resident - slack, 0),",
        "        other_bytes=0,",
        (_PYTHON + "test_view.py::test_pages_and_nvml_by_gpu",),
    ),
    Mutant(
        "a-directory-of-another-user-is-read",
        "torch_memory_saver/_folders.py",
        "not (may_be_of_user and not is_changed_by_others(os.fstat(folder.descriptor)))",
        "False",
        (_PYTHON + "test_shared_pages.py::test_nothing_is_read_or_removed_in_a_directory_that_others_can_write_to",),
    ),
    Mutant(
        "a-page-of-another-user-is-read",
        _SOURCES + "shared_pages.py",
        "or found.st_uid not in (os.geteuid(), folder.owner)",
        "or False",
        (_TWO_USERS + "test_pages.py::test_a_page_of_another_user_is_neither_read_nor_asked_nor_removed",),
    ),
    Mutant(
        "files-of-another-user-are-removed",
        "torch_memory_saver/_folders.py",
        "    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()",
        "    return stat.S_ISREG(found.st_mode)",
        (_TWO_USERS + "test_files.py::test_reports_of_others_stay",),
    ),
    Mutant(
        "a-link-of-another-user-is-followed",
        "csrc/base/path_walk.c",
        "    if (found.st_uid != geteuid() && found.st_uid != 0)",
        "    if (false)",
        ("tests/unit/base/test_private_directory.c",),
    ),
    Mutant(
        "a-directory-to-which-others-can-write-is-private",
        "csrc/base/private_directory.c",
        "    else if (now.st_mode & OTHERS_WRITE)",
        "    else if (false)",
        ("tests/unit/base/test_private_directory.c",),
    ),
    Mutant(
        "a-planted-link-is-followed",
        "torch_memory_saver/_folders.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC",
        (_TWO_USERS + "test_files.py::test_even_a_name_that_is_known_is_not_followed",),
    ),
    Mutant(
        "a-page-that-is-being-made-is-broken",
        _SOURCES + "shared_pages.py",
        "if found.st_size < _PAGE_BYTES or not any(magic):",
        "if found.st_size < _PAGE_BYTES:",
        (_PYTHON + "test_shared_pages.py::test_a_page_that_is_being_made_is_not_shown",),
    ),
    Mutant(
        "what-has-no-row-is-nowhere",
        _SOURCES + "view.py",
        "    notes += [\n        _not_shown(page, row)",
        "    [\n        _not_shown(page, row)",
        (_PYTHON + "test_view.py::test_what_has_no_row_is_named_where_its_gpu_is_not_known",),
    ),
    Mutant(
        "a-mig-device-is-unknown-to-its-process",
        _SOURCES + "view.py",
        '    return uuid.partition("-")[2]',
        "    return uuid",
        (_PYTHON + "test_view.py::test_a_mig_device_is_the_gpu_of_its_processes",),
    ),
    Mutant(
        "a-lost-gpu-hides-the-others",
        "torch_memory_saver/observe/_nvml.py",
        '            except self._nvml.NVMLError as error:\n                self._note("NVML fails", error, index, None)',
        '            except KeyError as error:\n                self._note("NVML fails", error, index, None)',
        (_PYTHON + "test_gpus.py::test_a_gpu_that_is_lost_does_not_hide_the_others",),
    ),
    Mutant(
        "names-of-programs-command-the-terminal",
        "torch_memory_saver/_text.py",
        'character if character.isprintable() else "?"',
        "character",
        (
            _PYTHON + "test_shared_pages.py::test_texts_of_programs_cannot_command_a_terminal",
            "tests/unit/python/observe/out_of_memory/test_advice.py::test_the_name_of_another_program_cannot_command_a_terminal",
        ),
    ),
    Mutant(
        "top-shows-processes-of-other-simulated-machines",
        _SOURCES + "top.py",
        "        pages = pages_on(pages, gpus)\n",
        "        pages_on(pages, gpus)\n",
        (_PYTHON + "test_top.py::test_on_simulated_gpus_nvml_says_what_others_use",),
    ),
    Mutant(
        "the-array-of-nvml-s-processes-does-not-grow",
        "torch_memory_saver/observe/_nvml.py",
        "if result != _INSUFFICIENT_SIZE:",
        "if result is not None:",
        (_PYTHON + "test_gpus.py::test_the_array_of_processes_grows",),
    ),
    Mutant(
        "the-help-of-the-screen-is-cut",
        _SOURCES + "top_screen.py",
        "wrapped(text, width, ",
        "wrapped(text, 1000, ",
        (_PYTHON + "test_top.py::test_the_help_key_shows_the_keys_until_the_next_one",),
    ),
)
