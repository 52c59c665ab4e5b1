/* Internal to the disk backups: transfers between memory and one backup file. Used by backup/disk/transfer.c, read.c, the
 * workers (backup/disk/workers.h) and backup/disk/copy.c.
 *
 * A handle is a file opened for one direction, with O_DIRECT if the file system supports it. A request moves one range of
 * it. Checksums are computed before memory is written, and compared before data that was read may be used.
 *
 * Sizes, offsets and addresses of direct transfers are multiples of TMS_DISK_ALIGNMENT. Everything else (the end of a file,
 * the rest of a short transfer, a file system or memory without direct I/O) goes through a second, ordinary descriptor.
 *
 * A request is used by one thread at a time, a handle by several. No lock. */
#ifndef TMS_BACKUP_DISK_TRANSFER_H
#define TMS_BACKUP_DISK_TRANSFER_H

#include "backup/disk/disk.h"

#define TMS_DISK_ALIGNMENT ((uint64_t)4096)

typedef struct tms_disk_handle {
    tms_disk_file_t *file;
    bool write;
    int direct_fd;        /* -1: none */
    _Atomic int plain_fd; /* -1: not needed yet */
    _Atomic bool direct;  /* the direct descriptor has not failed */
} tms_disk_handle_t;

typedef struct tms_disk_request {
    tms_disk_handle_t *handle;
    char *data;
    uint64_t bytes, offset; /* as in tms_disk_file_write */
    tms_error_context_t context;
    tms_status_t status;
    tms_error_t error;
    struct tms_disk_request *next; /* the next one that the workers perform; under their lock, as is `done` */
    bool done;                     /* the workers have performed it: `status` is valid */
} tms_disk_request_t;

/* Opens the file if it is still the original one. `direct`: with direct I/O if possible. */
tms_status_t tms_disk_handle_open(tms_disk_handle_t *handle, tms_disk_file_t *file, bool write, bool direct,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Fails only if written data may be lost. */
tms_status_t tms_disk_handle_close(tms_disk_handle_t *handle, const tms_error_context_t *context, tms_error_t *error);

/* Performs the request on the calling thread, and sets `status`. */
void tms_disk_request_perform(tms_disk_request_t *request);

#endif
