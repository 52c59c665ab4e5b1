/* Whose file locks this process can rely on, and whether the process behind one lives.
 *
 * A file lock (flock) excludes other processes for certain if they run on the same kernel. Processes of other machines, of
 * other boots or of other containers may see the same directory through a file system whose locks are local to each of them
 * (NFS with local locks, Lustre, FUSE, 9p, virtiofs): a lock that this process gets there proves nothing. So files in a
 * directory of disk backups carry the lock domain of their process in their names, and are cleaned only by processes of the
 * same domain.
 *
 * Any thread, no lock, no state. */
#ifndef TMS_DISK_DOMAIN_H
#define TMS_DISK_DOMAIN_H

#include <stdbool.h>
#include <stdint.h>

enum { TMS_DISK_DOMAIN_DIGITS = 16 }; /* in hexadecimal, as it stands in names */

/* A number made of the boot (boot_id), the host's name and the PID namespace. 0: not known, because /proc is missing or may
 * not be read; then no files are cleaned, and the files of this process are cleaned by no other. */
uint64_t tms_disk_domain(void);

/* Whether a process of this domain runs, as /proc tells; false only where it certainly does not. One that has ended and is
 * not waited for (a zombie) does not run. A number that another process has got since counts as running. */
bool tms_disk_domain_runs(long process);

#endif
