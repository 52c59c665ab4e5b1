#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "backup_disk.h"
#include "backup_disk_directory.h"

/* Opens a backup file, and nothing else that may have its name by now. What is read is known by its checksum; what is
 * written to must be the very file that was made. -1, errno (ESTALE for another file) and the call that failed. */
static int open_file(tms_disk_file_t *file, int flags, struct stat *found, const char **call) {
    int fd = -1;
    *call = "openat";
    errno = ENOENT;
    /* Under the lock, because at exit another thread may let the directory go. */
    pthread_mutex_lock(&file->directory->lock);
    /* O_NONBLOCK: opening a FIFO would wait for its other end. */
    if (file->owner_lock) fd = tms_disk_open_at(file->owner_lock->directory, file->name, flags | O_NONBLOCK);
    pthread_mutex_unlock(&file->directory->lock);
    if (fd < 0) return -1;
    tms_disk_identity_t any = {.known = false};
    if (fstat(fd, found) != 0) {
        *call = "fstat";
    } else {
        if (tms_disk_is_same(found, flags == O_RDONLY ? &any : &file->identity)) return fd;
        errno = tms_disk_is_same(found, &any) ? ESTALE : EPERM;
    }
    int os_error = errno;
    close(fd);
    errno = os_error;
    return -1;
}

static tms_status_t fail_to_open(const tms_disk_file_t *file, const char *call, int os_error,
                                 const tms_error_context_t *context, tms_error_t *error) {
    if (os_error != ESTALE) return tms_error_set_os(error, context, call, os_error, file->path);
    tms_error_set(error, TMS_BACKUP_IO, context, "the backup file '%s' was replaced by another one, which is left alone",
                  file->path);
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

static tms_status_t check_range(const tms_disk_file_t *file, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error) {
    bool inside = offset <= file->bytes && bytes <= file->bytes - offset;
    if (inside && offset % TMS_DISK_BLOCK_BYTES == 0 && (bytes % TMS_DISK_BLOCK_BYTES == 0 || offset + bytes == file->bytes))
        return TMS_OK;
    return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "not a range of blocks of the backup file '%s'", file->path);
}

/* Writes one block. 0 or errno. */
static int write_block(int fd, const char *data, size_t bytes, uint64_t offset) {
    while (bytes > 0) {
        ssize_t written = pwrite(fd, data, bytes, (off_t)offset);
        if (written > 0) {
            data += written;
            offset += (uint64_t)written;
            bytes -= (size_t)written;
        } else if (written == 0) {
            return EIO; /* cannot happen to a regular file; must not loop for ever if it does */
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

static size_t block_at(uint64_t bytes) { return bytes < TMS_DISK_BLOCK_BYTES ? (size_t)bytes : TMS_DISK_BLOCK_BYTES; }

tms_status_t tms_disk_file_write(tms_disk_file_t *file, const void *data, uint64_t bytes, uint64_t offset,
                                 const tms_error_context_t *context, tms_error_t *error) {
    struct stat found;
    const char *call, *cursor = data;
    tms_status_t status = check_range(file, bytes, offset, context, error);
    if (status != TMS_OK) return status;
    int fd = open_file(file, O_WRONLY, &found, &call);
    if (fd < 0) return fail_to_open(file, call, errno, context, error);
    call = "pwrite";
    int os_error = tms_disk_check_size_limit(offset + bytes);
    while (bytes > 0 && os_error == 0) {
        size_t part = block_at(bytes);
        /* Of the memory, before it is written: what goes wrong from here on is seen. */
        file->checksums[offset / TMS_DISK_BLOCK_BYTES] = file->checksum_of(cursor, part);
        os_error = write_block(fd, cursor, part, offset);
        cursor += part;
        offset += part;
        bytes -= part;
    }
    if (close(fd) != 0 && os_error == 0 && errno != EINTR) {
        os_error = errno; /* network file systems report here that the disk is full */
        call = "close";
    }
    return os_error == 0 ? TMS_OK : tms_error_set_os(error, context, call, os_error, file->path);
}

static tms_status_t read_block(const tms_disk_file_t *file, int fd, char *data, size_t bytes, uint64_t offset,
                               const tms_error_context_t *context, tms_error_t *error) {
    const uint64_t begin_offset = offset;
    const uint32_t expected = file->checksums[offset / TMS_DISK_BLOCK_BYTES];
    const char *begin = data;
    size_t wanted = bytes;
    while (bytes > 0) {
        ssize_t got = pread(fd, data, bytes, (off_t)offset);
        if (got > 0) {
            data += got;
            offset += (uint64_t)got;
            bytes -= (size_t)got;
        } else if (got == 0) {
            return tms_error_set(error, TMS_BACKUP_IO, context,
                                 "the backup file '%s' was changed or truncated: it ends at offset %llu of %llu", file->path,
                                 (unsigned long long)offset, (unsigned long long)file->bytes);
        } else if (errno != EINTR) {
            return tms_error_set_os(error, context, "pread", errno, file->path);
        }
    }
    uint32_t checksum = file->checksum_of(begin, wanted);
    if (checksum == expected) return TMS_OK;
    return tms_error_set(error, TMS_BACKUP_IO, context,
                         "the backup file '%s' was changed or truncated: the %zu bytes at offset %llu have the checksum "
                         "%08lx and were written with %08lx",
                         file->path, wanted, (unsigned long long)begin_offset, (unsigned long)checksum,
                         (unsigned long)expected);
}

tms_status_t tms_disk_file_read(tms_disk_file_t *file, void *data, uint64_t bytes, uint64_t offset,
                                const tms_error_context_t *context, tms_error_t *error) {
    struct stat found;
    const char *call;
    tms_status_t status = check_range(file, bytes, offset, context, error);
    if (status != TMS_OK) return status;
    int fd = open_file(file, O_RDONLY, &found, &call);
    if (fd < 0) return fail_to_open(file, call, errno, context, error);
    for (char *cursor = data; bytes > 0 && status == TMS_OK;) {
        size_t part = block_at(bytes);
        status = read_block(file, fd, cursor, part, offset, context, error);
        cursor += part;
        offset += part;
        bytes -= part;
    }
    close(fd);
    return status;
}
