#include "backup/shared/entry.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backup/shared/files.h"

enum {
    FINISHED_MODE = 0400,
    PATH_BYTES = 64,    /* "objects/", a name, ".part", and its NUL */
    MAX_ATTEMPTS = 100, /* Each other attempt fails because another process has changed something. */
    NOT_OPEN = -1
};

/* One object of one folder, and the names of its files relative to `objects`. */
typedef struct entry {
    const tms_shared_folder_t *folder;
    const char *name;
    char part[TMS_SHARED_NAME_DIGITS + sizeof(TMS_SHARED_PART)];
    const tms_error_context_t *context;
} entry_t;

static entry_t entry_of(const tms_shared_folder_t *folder, const tms_shared_name_t *name,
                        const tms_error_context_t *context) {
    entry_t entry = {.folder = folder, .name = name->text, .context = context};
    snprintf(entry.part, sizeof(entry.part), "%s" TMS_SHARED_PART, name->text);
    return entry;
}

static tms_status_t fail(const entry_t *entry, const char *call, int os_error, const char *name, tms_error_t *error) {
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "objects/%s", name);
    return tms_shared_fail(error, entry->context, call, os_error, entry->folder->path, path);
}

/* ---- links ---- */

/* Removes the name of the open object that the holder links, unless the name belongs to another file by now, and removes
 * the link. */
static bool reject(const tms_shared_folder_t *folder, const char *name, int fd) {
    const bool named = tms_shared_is_named(fd, folder->objects, name);
    if (named && unlinkat(folder->objects, name, 0) != 0 && errno != ENOENT) return false;
    return tms_shared_remove_link(folder->holder, folder->objects, name);
}

/* Checks the open object that the holder links, and rejects it if it is damaged. *lost: it has no other link. */
static tms_status_t check(const entry_t *entry, int fd, uint64_t bytes, bool *lost, tms_error_t *error) {
    struct stat found;
    if (fd < 0) return fail(entry, "openat", errno, entry->name, error);
    if (fstat(fd, &found) != 0) return fail(entry, "fstat", errno, entry->name, error);
    *lost = found.st_nlink == 1;
    if (S_ISREG(found.st_mode) && (uint64_t)found.st_size == bytes) return TMS_OK;
    const bool rejected = reject(entry->folder, entry->name, fd);
    return tms_error_set(error, TMS_BACKUP_IO, entry->context,
                         "the object '%s/objects/%s' is damaged: it has %lld bytes instead of %llu. %s", entry->folder->path,
                         entry->name, (long long)found.st_size, (unsigned long long)bytes,
                         rejected ? "The next pause or publication writes it again" : "Remove the file");
}

/* Gives an object that the holder links its name again. A failure only costs the next process a copy. */
static bool restore_name(const entry_t *entry) {
    return linkat(entry->folder->holder, entry->name, entry->folder->objects, entry->name, 0) == 0;
}

/* Links the object if it exists, and opens it. *fd is -1 if it does not exist. */
static tms_status_t hold(const entry_t *entry, uint64_t bytes, int *fd, tms_error_t *error) {
    const tms_shared_folder_t *folder = entry->folder;
    bool lost = false;
    int linked = linkat(folder->objects, entry->name, folder->holder, entry->name, 0) == 0 ? 0 : errno;
    *fd = NOT_OPEN;
    if (linked != 0 && linked != EEXIST && linked != ENOENT) return fail(entry, "linkat", linked, entry->name, error);
    int opened = tms_shared_open(folder->holder, entry->name, O_RDONLY);
    if (opened < 0 && errno == ENOENT && linked == ENOENT) return TMS_OK;
    tms_status_t status = check(entry, opened, bytes, &lost, error);
    if (status != TMS_OK) {
        if (opened >= 0) close(opened);
        if (linked == 0) (void)unlinkat(folder->holder, entry->name, 0);
        return status;
    }
    if (lost || linked == ENOENT) (void)restore_name(entry);
    *fd = opened;
    return TMS_OK;
}

/* ---- claims ---- */

/* Removes the name of a file that this process has locked. */
static void withdraw(const entry_t *entry, int fd) {
    if (tms_shared_is_named(fd, entry->folder->objects, entry->part)) (void)unlinkat(entry->folder->objects, entry->part, 0);
}

/* Removes the file that this process has locked, and closes it, which unlocks it. */
static void remove_part(const entry_t *entry, int fd) {
    withdraw(entry, fd);
    close(fd);
}

/* Makes an unfinished file and locks it. *fd stays -1 if another process was faster: it has made the file, or has taken it
 * for the one of a dead process, and removes it. */
static tms_status_t make_part(const entry_t *entry, int *fd, tms_error_t *error) {
    int made = tms_shared_open(entry->folder->objects, entry->part, O_WRONLY | O_CREAT | O_EXCL);
    if (made < 0) return errno == EEXIST ? TMS_OK : fail(entry, "openat", errno, entry->part, error);
    int os_error = tms_shared_lock(made, entry->folder->objects, entry->part);
    if (os_error == 0) {
        *fd = made;
        return TMS_OK;
    }
    if (os_error == EWOULDBLOCK || os_error == ENOENT) {
        close(made);
        return TMS_OK;
    }
    remove_part(entry, made);
    return fail(entry, "flock", os_error, entry->part, error);
}

/* Removes the unfinished file of a dead process. *busy: a process writes it, and it has *written bytes. */
static tms_status_t remove_abandoned(const entry_t *entry, bool *busy, uint64_t *written, tms_error_t *error) {
    struct stat found;
    int fd = tms_shared_open(entry->folder->objects, entry->part, O_RDONLY);
    if (fd < 0) return errno == ENOENT ? TMS_OK : fail(entry, "openat", errno, entry->part, error);
    int os_error = tms_shared_lock(fd, entry->folder->objects, entry->part);
    const char *call = "flock";
    if (os_error == EWOULDBLOCK) {
        *busy = true;
        *written = fstat(fd, &found) == 0 ? (uint64_t)found.st_size : 0;
    }
    if (os_error == 0 && unlinkat(entry->folder->objects, entry->part, 0) != 0) {
        os_error = errno;
        call = "unlinkat";
    }
    close(fd);
    if (os_error == 0 || os_error == EWOULDBLOCK || os_error == ENOENT) return TMS_OK;
    return fail(entry, call, os_error, entry->part, error);
}

/* Makes one attempt to hold or claim the object. *again: another process was faster. */
static tms_status_t try_once(const entry_t *entry, uint64_t bytes, bool claim, tms_shared_attempt_t *attempt, bool *again,
                             tms_error_t *error) {
    int held = NOT_OPEN, claimed = NOT_OPEN;
    bool busy = !claim;
    uint64_t written = 0;
    tms_status_t status = hold(entry, bytes, &held, error);
    if (status == TMS_OK && held < 0 && claim) status = make_part(entry, &claimed, error);
    /* Another process may have finished the object between these two calls. From here on none can. */
    if (status == TMS_OK && claimed >= 0) status = hold(entry, bytes, &held, error);
    if (claimed >= 0 && (status != TMS_OK || held >= 0)) {
        remove_part(entry, claimed);
        claimed = NOT_OPEN;
    }
    if (status == TMS_OK && claim && held < 0 && claimed < 0) status = remove_abandoned(entry, &busy, &written, error);
    if (status != TMS_OK) return status;
    const tms_shared_state_t state = held >= 0 ? TMS_SHARED_HELD : claimed >= 0 ? TMS_SHARED_CLAIMED : TMS_SHARED_BUSY;
    *again = state == TMS_SHARED_BUSY && !busy;
    *attempt = (tms_shared_attempt_t){.state = state, .fd = held >= 0 ? held : claimed, .written = written};
    return TMS_OK;
}

tms_status_t tms_shared_entry_try(const tms_shared_folder_t *folder, const tms_shared_name_t *name, uint64_t bytes,
                                  bool claim, tms_shared_attempt_t *attempt, const tms_error_context_t *context,
                                  tms_error_t *error) {
    const entry_t entry = entry_of(folder, name, context);
    bool again = true;
    tms_status_t status = TMS_OK;
    for (int i = 0; status == TMS_OK && again && i < MAX_ATTEMPTS; i++)
        status = try_once(&entry, bytes, claim, attempt, &again, error);
    return status;
}

int tms_shared_entry_open(const tms_shared_folder_t *folder, const tms_shared_name_t *name) {
    return tms_shared_open(folder->holder, name->text, O_RDONLY);
}

bool tms_shared_entry_read(int fd, void *data, uint64_t bytes, uint64_t offset) {
    return tms_shared_read(fd, data, bytes, offset) == (int64_t)bytes;
}

tms_status_t tms_shared_entry_write(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int fd,
                                    const void *data, uint64_t bytes, uint64_t offset, const tms_error_context_t *context,
                                    tms_error_t *error) {
    const entry_t entry = entry_of(folder, name, context);
    const char *failed = tms_shared_write(fd, data, bytes, offset);
    return failed ? fail(&entry, failed, errno, entry.part, error) : TMS_OK;
}

/* Links a whole file to the holder and gives it its name. If another file has the name, that one is linked. Returns NULL, or
 * the name of the failed call with errno set. After a failure the holder has no link. */
static const char *publish(const entry_t *entry, int fd) {
    const tms_shared_folder_t *folder = entry->folder;
    const char *name = entry->name;
    if (fchmod(fd, FINISHED_MODE) != 0) return "fchmod";
    for (int i = 0; i < MAX_ATTEMPTS; i++) {
        if (linkat(folder->objects, entry->part, folder->holder, name, 0) != 0) return "linkat";
        /* The user may have removed the unfinished file although it is locked. */
        int os_error = tms_shared_is_named(fd, folder->holder, name) ? 0 : ENOENT;
        if (os_error == 0 && linkat(folder->holder, name, folder->objects, name, 0) == 0) return NULL;
        if (os_error == 0) os_error = errno;
        (void)unlinkat(folder->holder, name, 0);
        errno = os_error;
        if (os_error != EEXIST) return "linkat";
        if (linkat(folder->objects, name, folder->holder, name, 0) == 0) return NULL;
        if (errno != ENOENT) return "linkat";
    }
    return "linkat";
}

tms_status_t tms_shared_entry_finish(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int *fd,
                                     const tms_error_context_t *context, tms_error_t *error) {
    const entry_t entry = entry_of(folder, name, context);
    struct stat whole;
    bool lost;
    const char *failed = fstat(*fd, &whole) != 0 ? "fstat" : publish(&entry, *fd);
    tms_status_t status = failed ? fail(&entry, failed, errno, entry.part, error) : TMS_OK;
    remove_part(&entry, *fd);
    *fd = NOT_OPEN;
    if (status != TMS_OK) return status;
    int opened = tms_shared_open(folder->holder, name->text, O_RDONLY);
    status = check(&entry, opened, (uint64_t)whole.st_size, &lost, error);
    if (status == TMS_OK) {
        *fd = opened;
        return TMS_OK;
    }
    if (opened >= 0) close(opened);
    (void)tms_shared_entry_drop(folder, name);
    return status;
}

void tms_shared_entry_withdraw(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int fd) {
    const entry_t entry = entry_of(folder, name, NULL);
    withdraw(&entry, fd);
}

void tms_shared_entry_abandon(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int fd) {
    const entry_t entry = entry_of(folder, name, NULL);
    remove_part(&entry, fd);
}

bool tms_shared_entry_reject(const tms_shared_folder_t *folder, const tms_shared_name_t *name) {
    const int fd = tms_shared_open(folder->holder, name->text, O_RDONLY);
    if (fd < 0) return errno == ENOENT;
    const bool rejected = reject(folder, name->text, fd);
    const int os_error = errno;
    close(fd);
    errno = os_error;
    return rejected;
}

bool tms_shared_entry_drop(const tms_shared_folder_t *folder, const tms_shared_name_t *name) {
    return tms_shared_remove_link(folder->holder, folder->objects, name->text);
}
