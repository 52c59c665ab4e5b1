#include "backup/shared/published.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backup/shared/files.h"
#include "base/random.h"

enum {
    DIRECTORY_MODE = 0700,
    MANIFEST_MODE = 0400,
    PATH_BYTES = 64,    /* "holders/<random>/publishing-<random>" and its NUL */
    MAX_ATTEMPTS = 100, /* Each other attempt fails because another process has published or removed the name. */
    NOT_OPEN = -1
};

#define BEGIN    "{\"objects\":["
#define CONTENTS "],\n\"contents\":"
#define END      "}\n"

/* One publication. */
typedef struct publication {
    const tms_shared_folder_t *folder;
    int directory;         /* the new one, in the holder */
    char made[PATH_BYTES]; /* its name there */
    const tms_error_context_t *context;
} publication_t;

static tms_status_t fail(const publication_t *all, const char *call, const char *name, tms_error_t *error) {
    return tms_shared_fail(error, all->context, call, errno, all->folder->path, name);
}

static tms_status_t make_directory(publication_t *all, tms_error_t *error) {
    const tms_shared_folder_t *folder = all->folder;
    if (mkdirat(folder->root, TMS_SHARED_NAMES, DIRECTORY_MODE) != 0 && errno != EEXIST)
        return fail(all, "mkdirat", TMS_SHARED_NAMES, error);
    snprintf(all->made, sizeof all->made, "publishing-%016" PRIx64, tms_random_number());
    if (mkdirat(folder->holder, all->made, DIRECTORY_MODE) != 0) return fail(all, "mkdirat", all->made, error);
    all->directory = tms_shared_open(folder->holder, all->made, O_RDONLY | O_DIRECTORY);
    if (all->directory >= 0) return TMS_OK;
    tms_status_t status = fail(all, "openat", all->made, error);
    (void)unlinkat(folder->holder, all->made, AT_REMOVEDIR);
    return status;
}

/* ---- its files ---- */

/* An object that has lost its name (entry.h) gets it again, so that other processes find it. */
static tms_status_t link_objects(const publication_t *all, const tms_shared_name_t *objects, size_t count,
                                 tms_error_t *error) {
    for (size_t i = 0; i < count; i++) {
        const char *name = objects[i].text;
        if (linkat(all->folder->holder, name, all->directory, name, 0) != 0 && errno != EEXIST)
            return fail(all, "linkat", name, error);
        if (linkat(all->directory, name, all->folder->objects, name, 0) != 0 && errno != EEXIST)
            return fail(all, "linkat", name, error);
    }
    return TMS_OK;
}

/* Returns the text of the manifest, which the caller frees, or NULL. */
static char *manifest_of(const tms_shared_name_t *objects, size_t count, const char *contents) {
    enum { MARKS = 3 }; /* of a name: two quotation marks and a comma */
    const size_t bytes = sizeof BEGIN CONTENTS END + strlen(contents) + count * (TMS_SHARED_NAME_DIGITS + MARKS);
    char *text = malloc(bytes), *at = text;
    if (!text) return NULL;
    at = stpcpy(at, BEGIN);
    for (size_t i = 0; i < count; i++)
        at += snprintf(at, bytes - (size_t)(at - text), "%s\"%s\"", i > 0 ? "," : "", objects[i].text);
    stpcpy(stpcpy(stpcpy(at, CONTENTS), contents), END);
    return text;
}

static tms_status_t write_manifest(const publication_t *all, const tms_shared_name_t *objects, size_t count,
                                   const char *contents, tms_error_t *error) {
    char *text = manifest_of(objects, count, contents);
    if (!text) return tms_error_set_os(error, all->context, "malloc", ENOMEM, NULL);
    int fd = tms_shared_open(all->directory, TMS_SHARED_MANIFEST, O_WRONLY | O_CREAT | O_EXCL);
    const char *failed = fd < 0 ? "openat" : tms_shared_write(fd, text, strlen(text), 0);
    if (!failed && fchmod(fd, MANIFEST_MODE) != 0) failed = "fchmod";
    tms_status_t status = failed ? fail(all, failed, TMS_SHARED_MANIFEST, error) : TMS_OK;
    if (fd >= 0) close(fd);
    free(text);
    return status;
}

/* ---- its name ---- */

/* Moves the directory to its name. *replaced: the directory that had the name is in the holder now. */
static tms_status_t rename_directory(const publication_t *all, const char *name, bool *replaced, tms_error_t *error) {
    const int holder = all->folder->holder;
    int names = tms_shared_open(all->folder->root, TMS_SHARED_NAMES, O_RDONLY | O_DIRECTORY);
    if (names < 0) return fail(all, "openat", TMS_SHARED_NAMES, error);
    int failed = -1;
    for (int i = 0; failed != 0 && i < MAX_ATTEMPTS; i++) {
        *replaced = i % 2 == 1;
        failed = renameat2(holder, all->made, names, name, *replaced ? RENAME_EXCHANGE : RENAME_NOREPLACE);
        if (failed != 0 && errno != EEXIST && errno != ENOENT) break;
    }
    tms_status_t status = failed == 0 ? TMS_OK : fail(all, "renameat2", name, error);
    close(names);
    return status;
}

/* Removes what the holder has under the name of the new directory: the old one, or the new one after a failure. Returns
 * whether it has gone. */
static bool remove_made(const publication_t *all) {
    int directory = tms_shared_open(all->folder->holder, all->made, O_RDONLY | O_DIRECTORY);
    if (directory < 0) return errno == ENOENT;
    const bool removed = tms_shared_remove_directory(directory, all->folder->objects, all->folder->holder, all->made);
    close(directory);
    return removed;
}

tms_status_t tms_shared_publish(const tms_shared_folder_t *folder, const char *name, const tms_shared_name_t *objects,
                                size_t count, const char *contents, bool *left, const tms_error_context_t *context,
                                tms_error_t *error) {
    publication_t all = {.folder = folder, .directory = NOT_OPEN, .context = context};
    bool replaced = false;
    tms_status_t status = make_directory(&all, error);
    *left = status != TMS_OK;
    if (status != TMS_OK) return status;
    status = link_objects(&all, objects, count, error);
    if (status == TMS_OK) status = write_manifest(&all, objects, count, contents, error);
    if (status == TMS_OK) status = rename_directory(&all, name, &replaced, error);
    close(all.directory);
    *left = (status != TMS_OK || replaced) && !remove_made(&all);
    return status;
}
