#include "backup/shared/key.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backup/shared/files.h"
#include "base/hash.h"
#include "base/random.h"

enum {
    KEY_MODE = 0400,
    OTHERS = 077, /* permissions that a secret must not have */
    REASON_BYTES = 128
};

#define KEY "key"

typedef struct header {
    char magic[8];
    uint32_t format, bytes; /* `bytes` of the key */
    uint64_t checksum;      /* of the key */
} header_t;

static header_t header_of(const tms_shared_key_t *key) {
    return (header_t){.magic = "TMSSTORE",
                      .format = TMS_SHARED_FORMAT,
                      .bytes = sizeof(*key),
                      .checksum = tms_hash_bytes(TMS_HASH_START, key, sizeof(*key))};
}

/* Reads an open key. Returns NULL, or the name of the failed call with errno set. If the file is no usable key, writes the
 * reason, as the end of a sentence about it. */
static const char *read_file(int fd, tms_shared_key_t *key, char reason[REASON_BYTES]) {
    struct stat file;
    header_t found;
    if (fstat(fd, &file) != 0) return "fstat";
    if (!S_ISREG(file.st_mode) || file.st_uid != geteuid() || (file.st_mode & OTHERS)) {
        snprintf(reason, REASON_BYTES, "is no file that only this user can use");
        return NULL;
    }
    int64_t head = tms_shared_read(fd, &found, sizeof(found), 0);
    int64_t body = head < 0 ? head : tms_shared_read(fd, key, sizeof(*key), sizeof(found));
    if (body < 0) return "pread";
    const header_t wanted = header_of(key);
    if (head != sizeof(found) || memcmp(found.magic, wanted.magic, sizeof(found.magic)) != 0)
        snprintf(reason, REASON_BYTES, "is no key of this package");
    else if (found.format != wanted.format)
        snprintf(reason, REASON_BYTES, "has format %" PRIu32 ", and this release needs format %" PRIu32, found.format,
                 wanted.format);
    else if (found.bytes != wanted.bytes || file.st_size != (off_t)(sizeof(found) + sizeof(*key)))
        snprintf(reason, REASON_BYTES, "has %lld bytes instead of %zu", (long long)file.st_size,
                 sizeof(found) + sizeof(*key));
    else if (found.checksum != wanted.checksum)
        snprintf(reason, REASON_BYTES, "is damaged");
    return NULL;
}

tms_status_t tms_shared_key_read(int root, const char *path, tms_shared_key_t *key, bool *found,
                                 const tms_error_context_t *context, tms_error_t *error) {
    char reason[REASON_BYTES] = "";
    int fd = tms_shared_open(root, KEY, O_RDONLY);
    bool exists = fd >= 0 || errno != ENOENT;
    if (fd < 0 && exists) return tms_shared_fail(error, context, "openat", errno, path, KEY);
    if (exists) {
        const char *failed = read_file(fd, key, reason);
        int os_error = errno;
        close(fd);
        if (failed) return tms_shared_fail(error, context, failed, os_error, path, KEY);
        if (reason[0])
            return tms_error_set(error, TMS_BACKUP_IO, context,
                                 "the key '%s/" KEY "' %s. Remove the folder when no process uses it, or set "
                                 "TMS_SHARED_DIR to another",
                                 path, reason);
    }
    *found = exists;
    return TMS_OK;
}

/* Writes a new file of the holder, and links it. Returns NULL, or the name of the failed call with errno set. */
static const char *write_file(int fd, int root, int holder, const tms_shared_key_t *key) {
    const header_t header = header_of(key);
    const char *failed = tms_shared_write(fd, &header, sizeof(header), 0);
    if (!failed) failed = tms_shared_write(fd, key, sizeof(*key), sizeof(header));
    if (!failed && fchmod(fd, KEY_MODE) != 0) failed = "fchmod";
    if (!failed && linkat(holder, KEY, root, KEY, 0) != 0 && errno != EEXIST) failed = "linkat";
    return failed;
}

tms_status_t tms_shared_key_make(int root, int holder, const char *path, tms_shared_key_t *key,
                                 const tms_error_context_t *context, tms_error_t *error) {
    int os_error = tms_random_fill(key, sizeof(*key));
    if (os_error != 0) return tms_shared_fail(error, context, "getrandom", os_error, path, KEY);
    int fd = tms_shared_open(holder, KEY, O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0) return tms_shared_fail(error, context, "openat", errno, path, KEY);
    const char *failed = write_file(fd, root, holder, key);
    os_error = errno;
    (void)unlinkat(holder, KEY, 0);
    close(fd);
    return failed ? tms_shared_fail(error, context, failed, os_error, path, KEY) : TMS_OK;
}
