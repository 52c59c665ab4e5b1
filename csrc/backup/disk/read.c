#include "backup/disk/read.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backup/disk/transfer.h"

/* The memory that one read fills: a few blocks, so that a small tensor needs little memory and a large one few calls. */
#define PIECE_BYTES (8 * TMS_DISK_BLOCK_BYTES)

/* Returns the first aligned address in `memory`, which is larger than a piece by TMS_DISK_ALIGNMENT bytes. */
static char *aligned(char *memory) {
    const uintptr_t beyond = (uintptr_t)memory % TMS_DISK_ALIGNMENT;
    return beyond == 0 ? memory : memory + (TMS_DISK_ALIGNMENT - beyond);
}

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

tms_status_t tms_disk_read(tms_disk_file_t *file, uint64_t offset, uint64_t bytes, void *destination, tms_wait_t *wait,
                           const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_handle_t handle = {.file = file, .direct_fd = -1, .plain_fd = -1};
    char *memory = malloc(PIECE_BYTES + TMS_DISK_ALIGNMENT);
    if (!memory) return tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
    char *piece = aligned(memory);
    tms_status_t status = tms_disk_handle_open(&handle, file, false, true, context, error);
    if (status != TMS_OK) goto out;
    const uint64_t end = offset + bytes;
    for (uint64_t begin = offset; status == TMS_OK && begin < end;) {
        /* Reads whole blocks, because each checksum covers a block. The last block ends with the file. */
        const uint64_t first = begin - begin % TMS_DISK_BLOCK_BYTES;
        const uint64_t blocks_end = (end + TMS_DISK_BLOCK_BYTES - 1) / TMS_DISK_BLOCK_BYTES * TMS_DISK_BLOCK_BYTES;
        const uint64_t last = smaller(smaller(first + PIECE_BYTES, blocks_end), file->bytes);
        tms_disk_request_t request = {
            .handle = &handle, .data = piece, .bytes = last - first, .offset = first, .context = *context};
        tms_disk_request_perform(&request);
        status = request.status;
        if (status != TMS_OK && error) *error = request.error;
        if (status == TMS_OK) {
            const uint64_t part = smaller(last, end) - begin;
            memcpy((char *)destination + (begin - offset), piece + (begin - first), part);
            begin += part;
            status = tms_wait_check(wait, context, error);
        }
    }
    (void)tms_disk_handle_close(&handle, context, NULL); /* cannot lose data: the file was only read */
out:
    free(memory);
    return status;
}
