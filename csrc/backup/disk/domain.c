#include "backup/disk/domain.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/hash.h"

enum {
    BOOT_ID_BYTES = 36, /* a UUID as text */
    PATH_BYTES = 64,    /* "/proc/<pid>/stat" and its NUL */
    STAT_BYTES = 256    /* "<pid> (<name>) <state> ...", up to the state */
};

/* Reads the beginning of a file. -1 and errno on failure. */
static ssize_t read_start(const char *path, char *text, size_t bytes) {
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

static bool read_boot_id(char boot_id[BOOT_ID_BYTES]) {
    return read_start("/proc/sys/kernel/random/boot_id", boot_id, BOOT_ID_BYTES) == BOOT_ID_BYTES;
}

uint64_t tms_disk_domain(void) {
    char boot_id[BOOT_ID_BYTES];
    struct utsname host;
    struct stat processes;
    if (!read_boot_id(boot_id) || uname(&host) != 0 || stat("/proc/self/ns/pid", &processes) != 0) return 0;
    uint64_t hash = tms_hash_bytes(TMS_HASH_START, boot_id, sizeof(boot_id));
    hash = tms_hash_bytes(hash, host.nodename, strlen(host.nodename));
    hash = tms_hash_bytes(hash, &processes.st_dev, sizeof(processes.st_dev));
    hash = tms_hash_bytes(hash, &processes.st_ino, sizeof(processes.st_ino));
    return hash ? hash : 1;
}

bool tms_disk_domain_runs(long process) {
    char path[PATH_BYTES], text[STAT_BYTES + 1];
    snprintf(path, sizeof(path), "/proc/%ld/stat", process);
    ssize_t length = read_start(path, text, STAT_BYTES);
    if (length < 0) return errno != ENOENT && errno != ESRCH;
    text[length] = '\0';
    const char *state = strrchr(text, ')'); /* the name may contain brackets */
    return !state || (strncmp(state, ") Z", strlen(") Z")) != 0 && strncmp(state, ") X", strlen(") X")) != 0);
}
