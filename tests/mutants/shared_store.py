"""Bugs of the shared store: its folder, its key and its objects, and what pauses and resumes do with them."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_FILES = "csrc/backup/shared/files.c"
_KEY = "csrc/backup/shared/key.c"
_FOLDER = "csrc/backup/shared/folder.c"
_ENTRY = "csrc/backup/shared/entry.c"
_TEST_FOLDER = "tests/unit/backup/shared/test_folder.c"
_TEST_KEY = "tests/unit/backup/shared/test_key.c"
_TEST_CLEAN_UP = "tests/unit/backup/shared/test_clean_up.c"
_TEST_ENTRY = "tests/unit/backup/shared/test_entry.c"
_TEST_PROCESSES = "tests/unit/backup/shared/test_processes.c"
_TEST_KILLS = "tests/unit/backup/shared/test_kills.c"
_TEST_FULL = "tests/unit/backup/shared/test_full.c"
_OBJECT = "csrc/backup/shared/object.c"
_REGISTRAR = "csrc/backup/shared/registrar.c"
_RING = "csrc/backup/shared/ring.c"
_CONTENTS = "csrc/backup/shared/contents.c"
_COPY = "csrc/backup/shared/copy.c"
_OPERATIONS = "csrc/backup/shared/operations.c"
_TEST_SHARED = "tests/unit/core/transition/test_shared.c"
_TEST_COPIES = "tests/unit/core/transition/test_shared_copies.c"
_TEST_LINKS = "tests/unit/core/transition/test_shared_links.c"
_TEST_REPLICAS = "tests/unit/abi/test_shared_processes.c"
_TEST_KILLED = "tests/unit/abi/test_shared_kills.c"

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
        (_TEST_CLEAN_UP, _TEST_ENTRY),
    ),
    Mutant(
        "the-limit-for-the-size-of-a-file-ends-the-process",
        _FILES,
        "errno = tms_size_limit_check(offset + bytes);",
        "errno = 0 * tms_size_limit_check(offset + bytes);",
        (_TEST_KEY, _TEST_ENTRY),
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
        "csrc/base/path_walk.c",
        "flags | O_CLOEXEC",
        "flags",
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
        (_TEST_KEY, _TEST_PROCESSES),
    ),
    Mutant(
        "a-damaged-key-is-used",
        _KEY,
        "else if (found.checksum != wanted.checksum)",
        "else if (found.checksum == 0)",
        (_TEST_KEY,),
    ),
    Mutant(
        "a-key-that-others-can-read-is-used",
        _KEY,
        "(file.st_mode & OTHERS)",
        "(file.st_mode & OTHERS & 022)",
        (_TEST_KEY,),
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
        (_TEST_CLEAN_UP,),
    ),
    Mutant(
        "a-holder-is-removed-while-it-gets-its-lock",
        _FOLDER,
        "        lock = tms_shared_open(holder, LOCK, O_RDWR);\n        if",
        "        if",
        (_TEST_CLEAN_UP,),
    ),
    Mutant(
        "a-holder-that-cannot-be-removed-loses-its-lock",
        _FOLDER,
        "if (remove_links(folder, holder) && (unlinkat(holder, LOCK, 0) == 0 || errno == ENOENT) &&",
        "if ((unlinkat(holder, LOCK, 0) == 0 || errno == ENOENT) && remove_links(folder, holder) &&",
        (_TEST_CLEAN_UP,),
    ),
    Mutant(
        "a-file-that-stays-keeps-the-links-after-it",
        _FOLDER,
        "        if (strcmp(name, LOCK) != 0 && !remove",
        "        if (strcmp(name, LOCK) != 0 && os_error == 0 && !remove",
        (_TEST_CLEAN_UP,),
    ),
    Mutant(
        "a-holder-without-a-lock-stays",
        _FOLDER,
        "        if (remove_directory(folder, name)) return true;\n        lock =",
        "        if (name[0] == 0) return true;\n        errno = EIO;\n        if (name[0]) return false;\n        lock =",
        (_TEST_CLEAN_UP, _TEST_KILLS),
    ),
    Mutant(
        "an-object-with-an-unfinished-name-stays",
        _FOLDER,
        "        if (is_part(name)) remove_part(folder, name);\n    }\n    rewinddir(list);\n"
        "    if (!remove_unlinked(folder, list))",
        "        if (!is_part(name)) (void)tms_shared_remove_unlinked(folder->objects, name);\n    }\n    rewinddir(list);\n"
        "    for (const char *name; (name = tms_shared_next(list));) {\n"
        "        if (is_part(name)) remove_part(folder, name);\n    }\n    if (!list)",
        (_TEST_CLEAN_UP, _TEST_KILLS),
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
    Mutant(
        "a-link-stays-after-its-last-user",
        _OBJECT,
        "if (object->known) remove_link",
        "if (object->known && object->memory && object->users > 0) remove_link",
        (_TEST_SHARED,),
    ),
    Mutant(
        "objects-that-are-held-do-not-count",
        _OBJECT,
        "atomic_fetch_add(&store->held_bytes, object->bytes);",
        "atomic_fetch_add(&store->held_bytes, 0);",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-thread-claims-what-another-one-writes",
        _OBJECT,
        "if (!object->memory && !object->being_written) status =",
        "if (!object->memory) status =",
        (_TEST_SHARED,),
    ),
    Mutant(
        "an-exit-leaves-what-a-thread-is-writing",
        _OBJECT,
        "if (object->claim >= 0) tms_shared_entry_withdraw",
        "if (object->claim == 0) tms_shared_entry_withdraw",
        (_TEST_REPLICAS,),
    ),
    Mutant(
        "an-object-of-others-counts-as-made-here",
        _OBJECT,
        "return map(store, object, attempt->fd, false, context, error);",
        "return map(store, object, attempt->fd, true, context, error);",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-registration-that-could-not-be-ended-stays",
        _REGISTRAR,
        "object->stuck = false;",
        "object->stuck |= false;",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-registration-is-not-ended",
        _REGISTRAR,
        "return object->registration_users == 0 && !object->stuck;",
        "return object->users == 0 && !object->stuck;",
        (_TEST_SHARED,),
    ),
    Mutant(
        "objects-are-registered-while-a-resume-begins",
        "csrc/core/transition/steps.c",
        "    tms_backup_stores_enter_call(&t->saver->stores);\n",
        "",
        (_TEST_COPIES,),
    ),
    Mutant(
        "a-link-that-stayed-is-forgotten",
        _OBJECT,
        "    store->left_links = true;\n    tms_log_once",
        "    tms_log_once",
        (_TEST_LINKS,),
    ),
    Mutant(
        "a-link-that-stayed-is-removed-once",
        "csrc/backup/shared/store.c",
        "store->left_links = !tms_shared_folder_sweep(&store->folder, is_kept, store);",
        "store->left_links = tms_shared_folder_sweep(&store->folder, is_kept, store) && false;",
        (_TEST_LINKS,),
    ),
    Mutant(
        "an-object-is-unmapped-only-by-a-drop",
        _REGISTRAR,
        "if (object->users == 0 && !object->registered) tms_shared_object_free(store, object);",
        "",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-large-object-has-its-last-bytes-first",
        _RING,
        "object->claim, memory, part, done, context, error)",
        "object->claim, memory, part, object->bytes - part - done, context, error)",
        (_TEST_COPIES,),
    ),
    Mutant(
        "a-large-object-is-read-from-its-beginning",
        _RING,
        "memcpy(memory, object->memory + done, part);",
        "memcpy(memory, object->memory, part);",
        (_TEST_COPIES,),
    ),
    Mutant(
        "a-lane-that-fails-is-not-noticed",
        _RING,
        "    note(run, status, &reason);\n    (void)tms_copier_close",
        "    (void)status;\n    (void)tms_copier_close",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-wish-for-registration-stays",
        _CONTENTS,
        "object->registration_users += wants_registration ? 1u : (unsigned)-1;",
        "object->registration_users += wants_registration;",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-private-piece-takes-the-fingerprint-of-the-next",
        _CONTENTS,
        "if (fingerprints) fingerprints += chunks_of(&extents[i]);",
        "if (fingerprints && extents[i].bytes >= TMS_MIN_OBJECT_BYTES) fingerprints += chunks_of(&extents[i]);",
        (_TEST_COPIES,),
    ),
    Mutant(
        "a-replaced-object-that-others-use-goes",
        _OBJECT,
        "const bool last = object->users == 1;",
        "const bool last = object->users >= 1;",
        (_TEST_REPLICAS,),
    ),
    Mutant(
        "a-claim-is-not-given-up-after-a-failure",
        _COPY,
        "    tms_shared_object_abandon(relay->store, object);\n    return status;",
        "    return status;",
        (_TEST_SHARED, _TEST_REPLICAS),
    ),
    Mutant(
        "what-another-process-writes-counts-as-written",
        _COPY,
        "job->done = found.state == TMS_SHARED_HELD;",
        "job->done = found.state != TMS_SHARED_CLAIMED;",
        (_TEST_SHARED,),
    ),
    Mutant(
        "an-object-that-was-not-copied-gets-its-name",
        _COPY,
        "if (status == TMS_OK) return tms_shared_object_finish(relay->store, object, &job->context, error);",
        "return tms_shared_object_finish(relay->store, object, &job->context, error);",
        (_TEST_SHARED, _TEST_REPLICAS),
    ),
    Mutant(
        "a-private-tail-is-not-copied",
        _COPY,
        "    if (contents->rest.bytes > 0)\n        status = tms_host_copy_save(",
        "    if (contents->rest.bytes > TMS_MIN_OBJECT_BYTES)\n        status = tms_host_copy_save(",
        (_TEST_SHARED, _TEST_REPLICAS),
    ),
    Mutant(
        "a-private-copy-waits-for-copies-that-have-been-queued",
        _COPY,
        "content = {.kind = TMS_BACKUP_PINNED, .bytes = part->bytes};\n    tms_log_once(",
        "content = {.kind = TMS_BACKUP_PINNED, .bytes = part->bytes, .extent_count = 1, .extents = &(tms_extent_t){0, 0, "
        "part->bytes}};\n    tms_log_once(",
        (_TEST_REPLICAS,),
    ),
    Mutant(
        "contents-are-copied-while-memory-is-filled",
        _COPY,
        "tms_status_t status = TMS_DRIVER_CALL(copier->driver, &context, error, cuStreamSynchronize, copier->stream);",
        "tms_status_t status = TMS_OK;",
        (_TEST_COPIES,),
    ),
    Mutant(
        "a-cancelled-pause-keeps-its-links",
        _OPERATIONS,
        "    (void)backup;\n    drop(store, &slot->fresh);\n}",
        "    (void)backup;\n    (void)store;\n    slot->fresh = NULL;\n}",
        (_TEST_SHARED, _TEST_REPLICAS),
    ),
    Mutant(
        "objects-are-not-registered",
        _OPERATIONS,
        "    if (slot->fresh) tms_shared_contents_want_registration(store, slot->fresh, true);\n",
        "",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-resume-gives-up-the-links",
        _OPERATIONS,
        "    tms_shared_contents_want_registration(store, kept, false);\n"
        "    tms_shared_contents_drop_private(kept, policy);",
        "    drop(store, &slot->kept);",
        (_TEST_SHARED, _TEST_REPLICAS),
    ),
    Mutant(
        "another-object-is-called-damaged",
        _OPERATIONS,
        "|| offset - part->offset >= part->bytes) continue;",
        "|| offset - part->offset < part->bytes) continue;",
        (_TEST_SHARED,),
    ),
    Mutant(
        "what-was-freed-stays-registered",
        _OPERATIONS,
        "    drop(store, &slot->kept);\n    tms_shared_registrar_start(store);",
        "    drop(store, &slot->kept);",
        (_TEST_SHARED,),
    ),
    Mutant(
        "a-registrar-that-cannot-start-wakes-nobody",
        _REGISTRAR,
        "    end_run(store);\n    pthread_mutex_unlock(&store->lock);\n    tms_log_once(",
        "    store->registrar_runs = false;\n    pthread_mutex_unlock(&store->lock);\n    tms_log_once(",
        (_TEST_COPIES,),
    ),
    Mutant(
        "every-process-has-a-key-of-its-own",
        "csrc/backup/shared/store.c",
        "    tms_fingerprinter_set_key(store->fingerprinter, &store->folder.key->fingerprints);\n",
        "",
        (_TEST_KILLED,),
    ),
    Mutant(
        "a-forked-child-keeps-the-claims-of-its-parent",
        _OPERATIONS,
        "if (object->claim >= 0) close(object->claim);",
        "if (object->claim == 0) close(object->claim);",
        (_TEST_REPLICAS,),
    ),
    Mutant(
        "an-exit-takes-the-key-from-other-threads",
        _OPERATIONS,
        "    tms_shared_folder_leave(&store->folder, store->copying->log);",
        "    tms_shared_folder_close(&store->folder, store->copying->log);",
        (_TEST_REPLICAS,),
    ),
)
