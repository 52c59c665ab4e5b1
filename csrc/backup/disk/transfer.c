#include "backup/disk/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "backup/disk/directory.h"
#include "base/cache.h"
#include "base/size_limit.h"

/* ---- files ---- */

/* Opens a backup file, and no other file that may have its name now. Checksums verify data that is read; a file that is
 * written must be the original one. On failure returns -1, and sets errno (ESTALE for another file) and *call. */
static int open_file(tms_disk_file_t *file, int flags, struct stat *found, const char **call) {
    int fd = -1;
    *call = "openat";
    errno = ENOENT;
    /* Under the lock, because at exit another thread may close the directory. */
    pthread_mutex_lock(&file->directory->lock);
    /* O_NONBLOCK: opening a FIFO would wait for its other end. */
    if (file->owner_lock) fd = tms_disk_open_at(file->owner_lock->directory, file->name, flags | O_NONBLOCK);
    pthread_mutex_unlock(&file->directory->lock);
    if (fd < 0) return -1;
    tms_disk_identity_t any = {.known = false};
    if (fstat(fd, found) != 0) {
        *call = "fstat";
    } else {
        if (tms_disk_is_same(found, (flags & O_ACCMODE) == O_RDONLY ? &any : &file->identity)) return fd;
        errno = tms_disk_is_same(found, &any) ? ESTALE : EPERM;
    }
    int os_error = errno;
    close(fd);
    errno = os_error;
    return -1;
}

static tms_status_t fail_to_open(const tms_disk_file_t *file, const char *call, int os_error,
                                 const tms_error_context_t *context, tms_error_t *error) {
    if (os_error != ESTALE) return tms_disk_fail(error, context, call, os_error, file->path);
    tms_error_set(error, TMS_BACKUP_IO, context,
                  "the backup file '%s' was replaced by another file, which is left unchanged", file->path);
    if (error) error->os_error = os_error;
    return TMS_BACKUP_IO;
}

bool tms_disk_file_is_usable(tms_disk_file_t *file) {
    struct stat found;
    const char *call;
    int fd = open_file(file, O_WRONLY, &found, &call);
    if (fd < 0) return false;
    close(fd);
    return (uint64_t)found.st_size == file->bytes;
}

/* ---- direct I/O ---- */

/* Whether the file system has a disk and has not rejected direct I/O yet. */
static bool may_be_direct(tms_disk_file_t *file) {
    tms_disk_directory_t *directory = file->directory;
    if (file->identity.in_memory) return false;
    pthread_mutex_lock(&directory->lock);
    bool refused = directory->no_direct || (directory->has_indirect && directory->indirect == file->identity.device);
    pthread_mutex_unlock(&directory->lock);
    return !refused;
}

/* Records that the file system rejects direct I/O. Logged once for each file system, unless several alternate. */
static void note_indirect(tms_disk_file_t *file, int os_error) {
    tms_disk_directory_t *directory = file->directory;
    pthread_mutex_lock(&directory->lock);
    bool known = directory->has_indirect && directory->indirect == file->identity.device;
    directory->has_indirect = true;
    directory->indirect = file->identity.device;
    pthread_mutex_unlock(&directory->lock);
    if (known) return;
    tms_log_write(directory->log, TMS_LOG_INFO,
                  "the file system of '%s' refuses direct I/O (%s): backups there go through the page cache", file->path,
                  TMS_OS_TEXT(os_error));
}

/* The errors of a direct transfer if the file system needs another alignment, has no direct I/O, or cannot use this
 * memory. */
static bool is_refusal(int os_error) {
    return os_error == EINVAL || os_error == EOPNOTSUPP || os_error == ENOSYS || os_error == EFAULT;
}

static void give_up_direct(tms_disk_handle_t *handle, int os_error) {
    if (atomic_exchange(&handle->direct, false)) note_indirect(handle->file, os_error);
}

/* ---- handles ---- */

static int flags_of(bool write) { return write ? O_WRONLY : O_RDONLY; }

tms_status_t tms_disk_handle_open(tms_disk_handle_t *handle, tms_disk_file_t *file, bool write, bool direct,
                                  const tms_error_context_t *context, tms_error_t *error) {
    struct stat found;
    const char *call = NULL;
    int limit = write ? tms_size_limit_check(file->bytes) : 0;
    if (limit != 0) return tms_disk_fail(error, context, "pwrite", limit, file->path);
    int direct_fd = -1, plain_fd = -1;
    if (direct && may_be_direct(file)) {
        direct_fd = open_file(file, flags_of(write) | O_DIRECT, &found, &call);
        if (direct_fd < 0 && !is_refusal(errno)) return fail_to_open(file, call, errno, context, error);
        if (direct_fd < 0) note_indirect(file, errno);
    }
    if (direct_fd < 0) {
        plain_fd = open_file(file, flags_of(write), &found, &call);
        if (plain_fd < 0) return fail_to_open(file, call, errno, context, error);
    }
    handle->file = file;
    handle->write = write;
    handle->direct_fd = direct_fd;
    atomic_store(&handle->plain_fd, plain_fd);
    atomic_store(&handle->direct, direct_fd >= 0);
    return TMS_OK;
}

tms_status_t tms_disk_handle_close(tms_disk_handle_t *handle, const tms_error_context_t *context, tms_error_t *error) {
    int os_error = 0;
    const int descriptors[] = {handle->direct_fd, atomic_load(&handle->plain_fd)};
    for (size_t i = 0; i < sizeof descriptors / sizeof *descriptors; i++) {
        if (descriptors[i] >= 0 && close(descriptors[i]) != 0 && errno != EINTR) os_error = errno;
    }
    handle->direct_fd = -1;
    atomic_store(&handle->plain_fd, -1);
    /* Network file systems report a full disk here. */
    if (os_error == 0 || !handle->write) return TMS_OK;
    return tms_disk_fail(error, context, "close", os_error, handle->file->path);
}

/* Returns the ordinary descriptor, which is opened by the first thread that needs it. On failure returns -1, and sets errno
 * and *call. */
static int plain_descriptor(tms_disk_handle_t *handle, const char **call) {
    struct stat found;
    int known = atomic_load(&handle->plain_fd);
    if (known >= 0) return known;
    int fd = open_file(handle->file, flags_of(handle->write), &found, call);
    if (fd < 0 || atomic_compare_exchange_strong(&handle->plain_fd, &known, fd)) return fd;
    close(fd); /* another thread has opened one first */
    return known;
}

/* ---- requests ---- */

static size_t block_at(uint64_t bytes) { return bytes < TMS_DISK_BLOCK_BYTES ? (size_t)bytes : TMS_DISK_BLOCK_BYTES; }

void tms_disk_request_begin(tms_disk_request_t *request) {
    tms_disk_file_t *file = request->handle->file;
    request->status = TMS_OK;
    if (!request->handle->write) return;
    /* The checksums are computed from the memory before it is written, so that any later change is detected. */
    for (uint64_t done = 0; done < request->bytes; done += TMS_DISK_BLOCK_BYTES)
        file->checksums[(request->offset + done) / TMS_DISK_BLOCK_BYTES] =
            file->checksum_of(request->data + done, block_at(request->bytes - done));
}

/* Returns how many of the bytes after `done` direct I/O can move. */
static uint64_t direct_part(const tms_disk_request_t *request, uint64_t done) {
    const uint64_t below = TMS_DISK_ALIGNMENT - 1;
    if (!atomic_load(&request->handle->direct)) return 0;
    if (((uint64_t)(uintptr_t)(request->data + done) | (request->offset + done)) & below) return 0;
    return (request->bytes - done) & ~below;
}

uint64_t tms_disk_request_part(const tms_disk_request_t *request) { return direct_part(request, 0); }

/* Moves some of the bytes after `done`. Returns their number; 0 at the end of the file; -1, errno and *call on failure. */
static ssize_t move_some(const tms_disk_request_t *request, uint64_t done, const char **call) {
    tms_disk_handle_t *handle = request->handle;
    char *data = request->data + done;
    off_t offset = (off_t)(request->offset + done);
    for (;;) {
        uint64_t direct = direct_part(request, done);
        uint64_t part = direct > 0 ? direct : request->bytes - done;
        int fd = direct > 0 ? handle->direct_fd : plain_descriptor(handle, call);
        if (fd < 0) return -1;
        *call = handle->write ? "pwrite" : "pread";
        ssize_t moved = handle->write ? pwrite(fd, data, part, offset) : pread(fd, data, part, offset);
        if (moved >= 0) return moved;
        if (direct > 0 && is_refusal(errno))
            give_up_direct(handle, errno);
        else if (errno != EINTR)
            return -1;
    }
}

static tms_status_t verify(const tms_disk_request_t *request, tms_error_t *error) {
    const tms_disk_file_t *file = request->handle->file;
    for (uint64_t done = 0; done < request->bytes; done += TMS_DISK_BLOCK_BYTES) {
        uint64_t offset = request->offset + done;
        size_t bytes = block_at(request->bytes - done);
        uint32_t checksum = file->checksum_of(request->data + done, bytes);
        /* The next read writes there, and the host of a virtual disk copies slower into lines in this CPU's cache
         * (docs/performance.md). */
        tms_cache_demote(request->data + done, bytes);
        uint32_t expected = file->checksums[offset / TMS_DISK_BLOCK_BYTES];
        if (checksum == expected) continue;
        return tms_error_set(error, TMS_BACKUP_IO, &request->context,
                             "the backup file '%s' was changed or truncated: the %zu bytes at offset %llu have the "
                             "checksum %08lx and were written with %08lx",
                             file->path, bytes, (unsigned long long)offset, (unsigned long)checksum,
                             (unsigned long)expected);
    }
    return TMS_OK;
}

static tms_status_t finish(const tms_disk_request_t *request, uint64_t moved, tms_error_t *error) {
    const tms_disk_file_t *file = request->handle->file;
    while (moved < request->bytes) {
        const char *call = "";
        const uint64_t at = request->offset + moved;
        ssize_t more = move_some(request, moved, &call);
        if (more < 0 && strcmp(call, "openat") == 0) return fail_to_open(file, call, errno, &request->context, error);
        if (more < 0) return tms_disk_fail(error, &request->context, call, errno, file->path);
        if (more == 0 && request->handle->write) /* impossible for a regular file; prevents an endless loop */
            return tms_disk_fail(error, &request->context, call, EIO, file->path);
        if (more == 0)
            return tms_error_set(error, TMS_BACKUP_IO, &request->context,
                                 "the backup file '%s' was changed or truncated: it ends at offset %llu of %llu", file->path,
                                 (unsigned long long)at, (unsigned long long)file->bytes);
        moved += (uint64_t)more;
    }
    return request->handle->write ? TMS_OK : verify(request, error);
}

void tms_disk_request_end(tms_disk_request_t *request, uint64_t moved) {
    request->status = finish(request, moved, &request->error);
}

void tms_disk_request_perform(tms_disk_request_t *request) {
    tms_disk_request_begin(request);
    tms_disk_request_end(request, 0);
}

/* ---- whole ranges ---- */

static tms_status_t transfer(tms_disk_file_t *file, bool write, char *data, uint64_t bytes, uint64_t offset,
                             const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_handle_t handle = {.file = file, .direct_fd = -1, .plain_fd = -1};
    bool inside = offset <= file->bytes && bytes <= file->bytes - offset;
    if (!inside || offset % TMS_DISK_BLOCK_BYTES != 0 ||
        (bytes % TMS_DISK_BLOCK_BYTES != 0 && offset + bytes != file->bytes))
        return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "not a range of blocks of the backup file '%s'",
                             file->path);
    bool aligned = ((uintptr_t)data & (TMS_DISK_ALIGNMENT - 1)) == 0;
    tms_status_t status = tms_disk_handle_open(&handle, file, write, aligned, context, error);
    if (status != TMS_OK) return status;
    tms_disk_request_t request = {.handle = &handle, .data = data, .bytes = bytes, .offset = offset, .context = *context};
    tms_disk_request_perform(&request);
    if (request.status != TMS_OK && error) *error = request.error;
    status = tms_disk_handle_close(&handle, context, request.status == TMS_OK ? error : NULL);
    return request.status != TMS_OK ? request.status : status;
}

tms_status_t tms_disk_file_write(tms_disk_file_t *file, const void *data, uint64_t bytes, uint64_t offset,
                                 const tms_error_context_t *context, tms_error_t *error) {
    return transfer(file, true, (char *)(uintptr_t)data, bytes, offset, context, error);
}

tms_status_t tms_disk_file_read(tms_disk_file_t *file, void *data, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error) {
    return transfer(file, false, data, bytes, offset, context, error);
}
