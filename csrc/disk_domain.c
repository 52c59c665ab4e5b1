#include "disk_domain.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { BOOT_ID_BYTES = 36 }; /* a UUID as text */

/* FNV-1a: names must differ, and need not be hard to guess. */
static const uint64_t hash_start = 14695981039346656037u, hash_prime = 1099511628211u;

static uint64_t add(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * hash_prime;
    return hash;
}

static bool read_boot_id(char boot_id[BOOT_ID_BYTES]) {
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t length;
    do length = read(fd, boot_id, BOOT_ID_BYTES);
    while (length < 0 && errno == EINTR);
    close(fd);
    return length == BOOT_ID_BYTES;
}

uint64_t tms_disk_domain(void) {
    char boot_id[BOOT_ID_BYTES];
    struct utsname host;
    struct stat processes;
    if (!read_boot_id(boot_id) || uname(&host) != 0 || stat("/proc/self/ns/pid", &processes) != 0) return 0;
    uint64_t hash = add(hash_start, boot_id, sizeof(boot_id));
    hash = add(hash, host.nodename, strlen(host.nodename));
    hash = add(hash, &processes.st_dev, sizeof(processes.st_dev));
    hash = add(hash, &processes.st_ino, sizeof(processes.st_ino));
    return hash ? hash : 1;
}
