#include "base/identity.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    STAT_BYTES = 512, /* enough for the beginning of "<pid> (<name>) <state> <ppid> ...", which contains the start time */
    FIELDS_TO_START = 20, /* number of spaces between the name, the second field, and the start time, the 22nd */
    DECIMAL = 10
};

ssize_t tms_identity_read(const char *path, char *text, size_t bytes) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t length;
    do length = read(fd, text, bytes);
    while (length < 0 && errno == EINTR);
    int os_error = errno;
    close(fd);
    errno = os_error;
    return length;
}

bool tms_identity_boot_id(char boot_id[TMS_BOOT_ID_BYTES]) {
    return tms_identity_read("/proc/sys/kernel/random/boot_id", boot_id, TMS_BOOT_ID_BYTES) == TMS_BOOT_ID_BYTES;
}

bool tms_identity_namespace(dev_t *device, ino_t *inode) {
    struct stat found;
    if (stat("/proc/self/ns/pid", &found) != 0) return false;
    *device = found.st_dev;
    *inode = found.st_ino;
    return true;
}

uint64_t tms_identity_started(void) {
    char text[STAT_BYTES + 1];
    ssize_t length = tms_identity_read("/proc/self/stat", text, STAT_BYTES);
    if (length <= 0) return 0;
    text[length] = '\0';
    const char *at = strrchr(text, ')'); /* the name may contain brackets */
    for (int spaces = 0; at && spaces < FIELDS_TO_START; spaces++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, DECIMAL) : 0;
}
