#include "base/identity.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PATH_BYTES = 64,  /* "/proc/<pid>/stat" and its NUL */
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

/* Reads the beginning of a stat file into `text`. Returns the bracket after the name, which may contain brackets, or NULL.
 */
static const char *read_stat(const char *path, char text[STAT_BYTES + 1]) {
    ssize_t length = tms_identity_read(path, text, STAT_BYTES);
    text[length < 0 ? 0 : length] = '\0';
    return strrchr(text, ')');
}

char tms_identity_state(long process) {
    char path[PATH_BYTES], text[STAT_BYTES + 1];
    snprintf(path, sizeof(path), "/proc/%ld/stat", process);
    const char *name_end = read_stat(path, text);
    return name_end && name_end[1] == ' ' ? name_end[2] : '\0';
}

uint64_t tms_identity_started(void) {
    char text[STAT_BYTES + 1];
    const char *at = read_stat("/proc/self/stat", text);
    for (int spaces = 0; at && spaces < FIELDS_TO_START; spaces++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, DECIMAL) : 0;
}
