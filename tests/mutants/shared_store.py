"""Bugs of the shared store: its folder, its key and its objects."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_FILES = "csrc/backup/shared/files.c"
_KEY = "csrc/backup/shared/key.c"
_FOLDER = "csrc/backup/shared/folder.c"
_ENTRY = "csrc/backup/shared/entry.c"
_TEST_FOLDER = "tests/unit/backup/shared/test_folder.c"
_TEST_ENTRY = "tests/unit/backup/shared/test_entry.c"
_TEST_PROCESSES = "tests/unit/backup/shared/test_processes.c"
_TEST_KILLS = "tests/unit/backup/shared/test_kills.c"
_TEST_FULL = "tests/unit/backup/shared/test_full.c"

MUTANTS = (
    Mutant(
        "the-length-is-no-part-of-an-objects-name",
        "csrc/backup/shared/names.c",
        "sum = add_words(coefficients[0], coefficients + 1, length, LENGTH_WORDS);",
        "sum = coefficients[0] + 0 * length[0];",
        ("tests/unit/backup/shared/test_names.c",),
    ),
    Mutant(
        "a-locked-file-is-not-compared-with-its-name",
        _FILES,
        "return tms_shared_is_named(fd, directory, name) ? 0 : ENOENT;",
        "return (void)directory, (void)name, 0;",
        (_TEST_FOLDER, _TEST_ENTRY),
    ),
    Mutant(
        "the-limit-for-the-size-of-a-file-ends-the-process",
        _FILES,
        "errno = tms_size_limit_check(offset + bytes);",
        "errno = 0 * tms_size_limit_check(offset + bytes);",
        (_TEST_FOLDER, _TEST_ENTRY),
    ),
    Mutant(
        "a-short-write-counts-as-whole",
        _FILES,
        "done += (uint64_t)written;",
        "done = bytes;",
        (_TEST_ENTRY,),
    ),
    Mutant(
        "a-program-that-is-executed-keeps-the-lock",
        _FILES,
        "O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC",
        "O_NOFOLLOW | O_NONBLOCK",
        (_TEST_FOLDER, _TEST_ENTRY, _TEST_PROCESSES),
    ),
    Mutant(
        "an-object-that-somebody-links-is-removed",
        _FILES,
        "found.st_nlink == 1)",
        "found.st_nlink <= 2)",
        (_TEST_FOLDER, _TEST_ENTRY, _TEST_PROCESSES, _TEST_KILLS),
    ),
    Mutant(
        "the-last-key-counts-instead-of-the-first",
        _KEY,
        "linkat(holder, KEY, root, KEY, 0) != 0 && errno != EEXIST",
        "renameat(holder, KEY, root, KEY) != 0",
        (_TEST_FOLDER, _TEST_PROCESSES),
    ),
    Mutant(
        "a-damaged-key-is-used",
        _KEY,
        "else if (found.checksum != wanted.checksum)",
        "else if (found.checksum == 0)",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-key-that-others-can-read-is-used",
        _KEY,
        "(file.st_mode & OTHERS)",
        "(file.st_mode & OTHERS & 022)",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-folder-on-a-disk-is-used",
        _FOLDER,
        "(uint64_t)system.f_type != TMPFS_MAGIC",
        "system.f_type == 0",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-holder-that-was-removed-while-it-was-made-is-an-error",
        _FOLDER,
        "(errno == EEXIST || errno == ENOENT || errno == EWOULDBLOCK)",
        "errno == EEXIST",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-holder-is-removed-while-it-gets-its-lock",
        _FOLDER,
        "        lock = tms_shared_open(holder, LOCK, O_RDWR);\n        if",
        "        if",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-holder-that-cannot-be-removed-loses-its-lock",
        _FOLDER,
        "if (remove_links(folder, holder) && (unlinkat(holder, LOCK, 0) == 0 || errno == ENOENT) &&",
        "if ((unlinkat(holder, LOCK, 0) == 0 || errno == ENOENT) && remove_links(folder, holder) &&",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-file-that-stays-keeps-the-links-after-it",
        _FOLDER,
        "        if (strcmp(name, LOCK) == 0 || tms",
        "        if (strcmp(name, LOCK) == 0 || os_error != 0 || tms",
        (_TEST_FOLDER,),
    ),
    Mutant(
        "a-holder-without-a-lock-stays",
        _FOLDER,
        "        if (remove_directory(folder, name)) return true;\n        lock =",
        "        if (name[0] == 0) return true;\n        errno = EIO;\n        if (name[0]) return false;\n        lock =",
        (_TEST_FOLDER, _TEST_KILLS),
    ),
    Mutant(
        "an-object-with-an-unfinished-name-stays",
        _FOLDER,
        "        if (is_part(name)) remove_part(folder, name);\n    }\n    rewinddir(list);\n",
        "        if (!is_part(name)) tms_shared_remove_unlinked(folder->objects, name);\n    }\n    rewinddir(list);\n"
        "    for (const char *name; (name = tms_shared_next(list));) {\n"
        "        if (is_part(name)) remove_part(folder, name);\n    }\n    rewinddir(list);\n    if (list) {\n"
        "        closedir(list);\n        return;\n    }\n",
        (_TEST_FOLDER, _TEST_KILLS),
    ),
    Mutant(
        "a-forked-child-keeps-the-lock-of-a-holder",
        _FOLDER,
        "{folder->lock, folder->holder, folder->objects, folder->root}",
        "{folder->holder, folder->objects, folder->root}",
        (_TEST_PROCESSES,),
    ),
    Mutant(
        "an-object-is-claimed-that-was-published-before",
        _ENTRY,
        "if (status == TMS_OK && claimed >= 0) status = hold(entry, bytes, &held, error);",
        "",
        (_TEST_ENTRY,),
    ),
    Mutant(
        "an-object-of-another-size-is-used",
        _ENTRY,
        "S_ISREG(found.st_mode) && (uint64_t)found.st_size == bytes",
        "S_ISREG(found.st_mode) && bytes > 0",
        (_TEST_ENTRY,),
    ),
    Mutant(
        "an-object-that-lost-its-name-stays-without",
        _ENTRY,
        "if (lost || linked == ENOENT) (void)restore_name",
        "if (bytes == 0) (void)restore_name",
        (_TEST_ENTRY,),
    ),
    Mutant(
        "a-file-of-another-writer-is-published",
        _ENTRY,
        "int os_error = tms_shared_is_named(fd, folder->holder, name) ? 0 : ENOENT;",
        "int os_error = 0;",
        (_TEST_ENTRY,),
    ),
    Mutant(
        "an-object-that-came-first-is-an-error",
        _ENTRY,
        'if (os_error != EEXIST) return "linkat";',
        'if (os_error != 0) return "linkat";',
        (_TEST_ENTRY,),
    ),
    Mutant(
        "an-unfinished-file-of-a-dead-process-blocks-its-object",
        _ENTRY,
        "    if (os_error == 0 && unlinkat(entry->folder->objects, entry->part, 0) != 0) {",
        "    if (os_error == EIO && unlinkat(entry->folder->objects, entry->part, 0) != 0) {",
        (_TEST_ENTRY, _TEST_PROCESSES),
    ),
    Mutant(
        "a-failed-object-leaves-its-unfinished-file",
        _ENTRY,
        "    remove_part(&entry, *fd);\n    *fd = NOT_OPEN;",
        "    close(*fd);\n    *fd = NOT_OPEN;",
        (_TEST_ENTRY, _TEST_FULL),
    ),
)
