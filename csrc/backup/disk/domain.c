#include "backup/disk/domain.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#include "base/hash.h"
#include "base/identity.h"

enum {
    PATH_BYTES = 64, /* "/proc/<pid>/stat" and its NUL */
    STAT_BYTES = 256 /* enough for the beginning of "<pid> (<name>) <state> ...", which contains the state */
};

uint64_t tms_disk_domain(void) {
    char boot_id[TMS_BOOT_ID_BYTES];
    struct utsname host;
    dev_t device;
    ino_t inode;
    if (!tms_identity_boot_id(boot_id) || uname(&host) != 0 || !tms_identity_namespace(&device, &inode)) return 0;
    uint64_t hash = tms_hash_bytes(TMS_HASH_START, boot_id, sizeof(boot_id));
    hash = tms_hash_bytes(hash, host.nodename, strlen(host.nodename));
    hash = tms_hash_bytes(hash, &device, sizeof(device));
    hash = tms_hash_bytes(hash, &inode, sizeof(inode));
    return hash ? hash : 1;
}

bool tms_disk_domain_runs(long process) {
    char path[PATH_BYTES], text[STAT_BYTES + 1];
    snprintf(path, sizeof(path), "/proc/%ld/stat", process);
    ssize_t length = tms_identity_read(path, text, STAT_BYTES);
    if (length < 0) return errno != ENOENT && errno != ESRCH;
    text[length] = '\0';
    const char *state = strrchr(text, ')'); /* the name may contain brackets */
    return !state || (strncmp(state, ") Z", strlen(") Z")) != 0 && strncmp(state, ") X", strlen(") X")) != 0);
}
