#include "backup/disk/domain.h"

#include <errno.h>
#include <string.h>
#include <sys/utsname.h>

#include "base/hash.h"
#include "base/identity.h"

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
    errno = 0;
    char state = tms_identity_state(process);
    return state ? state != 'Z' && state != 'X' : errno != ENOENT && errno != ESRCH;
}
