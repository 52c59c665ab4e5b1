#include "backup/disk/copy.h"

#include <errno.h>
#include <stdlib.h>

#include "backup/disk/queue.h"
#include "backup/disk/staging.h"

/* The maximum numbers of pieces in each stage. The pieces on the disk are enough to keep it busy, and few enough to end soon
 * when the call is cancelled. Reads complete in any order and are taken in the order of the file. More pieces are begun than
 * are on the disk, so that the disk never waits for a late read.
 *
 * Only a few pieces are on the device, because its copies finish long before the disk's and fewer buffers are faster
 * (backup/disk/staging.h). */
enum { MAX_WITH_DISK = 16, MAX_READ_AHEAD = 22, WITH_DEVICE_FIRST = 1, WITH_DEVICE_LAST = 2 };
_Static_assert((int)MAX_WITH_DISK <= (int)TMS_DISK_URING_ENTRIES, "the queue has room");
_Static_assert((int)MAX_WITH_DISK < (int)MAX_READ_AHEAD &&
                   (int)MAX_READ_AHEAD + (int)WITH_DEVICE_LAST <= (int)TMS_MAX_DISK_BUFFERS,
               "while the disk is busy the device can be too");

/* An open file, which is closed with its last piece. */
typedef struct open_file {
    tms_disk_handle_t handle;
    const tms_backup_content_t *content; /* the contents that the file has or will have */
    size_t extent;                       /* index of the extent in which the last piece begins */
    int pieces;                          /* number of pieces that have not completed the disk's stage */
    bool in_use;
    bool is_read; /* no more pieces follow */
} open_file_t;

/* A part of a file that occupies one buffer. */
typedef struct piece {
    tms_disk_request_t request;
    open_file_t *file;
    const tms_backup_content_t *content; /* the file's content; the file is closed before the device has all of it */
    size_t extent;                       /* index of the extent in which the piece begins */
    uint64_t bytes;                      /* number of bytes of the content */
    CUdeviceptr segment;                 /* address of the segment */
    CUevent event;                       /* the buffer's event */
    int buffer;
} piece_t;

typedef struct pipe {
    tms_copier_relay_t relay; /* first */
    tms_disk_directory_t *directory;
    tms_copier_t *copier; /* until it is closed */
    tms_disk_staging_t *staging;
    tms_disk_queue_t queue;
    bool saving;
    bool has_all_buffers; /* no more will be added */
    /* Numbers of pieces: pieces from `first` on are in the pipe, and those from `middle` on are in their first stage. `next`
     * is the number of the next piece. */
    uint64_t first, middle, next;
    piece_t pieces[TMS_MAX_DISK_BUFFERS]; /* a ring */
    int idle[TMS_MAX_DISK_BUFFERS];       /* buffers without a piece */
    int idle_count;
    open_file_t files[TMS_MAX_DISK_BUFFERS + 1];
    tms_status_t status; /* the first failure, and its error */
    tms_error_t error;
} pipe_t;

static piece_t *piece_at(pipe_t *pipe, uint64_t number) { return &pipe->pieces[number % TMS_MAX_DISK_BUFFERS]; }

/* ---- files ---- */

static tms_status_t open_for(pipe_t *pipe, tms_disk_file_t *file, const tms_backup_content_t *content, open_file_t **opened,
                             const tms_error_context_t *context, tms_error_t *error) {
    open_file_t *found = pipe->files; /* one is free: each buffer belongs to at most one file */
    while (found->in_use) found++;
    tms_status_t status = tms_disk_handle_open(&found->handle, file, pipe->saving, true, context, error);
    if (status != TMS_OK) return status;
    found->content = content;
    found->extent = 0;
    found->pieces = 0;
    found->is_read = false;
    found->in_use = true;
    *opened = found;
    return TMS_OK;
}

static tms_status_t close_if_done(open_file_t *file, const tms_error_context_t *context, tms_error_t *error) {
    if (file->pieces > 0 || !file->is_read) return TMS_OK;
    file->in_use = false;
    return tms_disk_handle_close(&file->handle, context, error);
}

/* ---- stages ---- */

static tms_status_t start_on_device(pipe_t *pipe, piece_t *piece, tms_error_t *error) {
    const tms_driver_table_t *driver = pipe->copier->driver;
    const tms_error_context_t *context = &piece->request.context;
    CUstream stream = pipe->copier->stream;
    tms_status_t status = TMS_OK;
    tms_extent_t whole;
    size_t count;
    pipe->copier->idle = false;
    const tms_extent_t *extent = tms_backup_extents(piece->content, &whole, &count) + piece->extent;
    for (uint64_t part, done = 0; status == TMS_OK && done < piece->bytes; done += part, extent++) {
        uint64_t into = piece->request.offset + done - extent->packed;
        char *data = piece->request.data + done;
        CUdeviceptr address = piece->segment + extent->offset + into;
        part = extent->bytes - into;
        if (part > piece->bytes - done) part = piece->bytes - done;
        status = pipe->saving ? TMS_DRIVER_CALL(driver, context, error, cuMemcpyDtoHAsync, data, address, part, stream)
                              : TMS_DRIVER_CALL(driver, context, error, cuMemcpyHtoDAsync, address, data, part, stream);
    }
    return status == TMS_OK ? TMS_DRIVER_CALL(driver, context, error, cuEventRecord, piece->event, stream) : status;
}

static tms_status_t finish_on_device(pipe_t *pipe, piece_t *piece, tms_error_t *error) {
    return TMS_DRIVER_CALL(pipe->copier->driver, &piece->request.context, error, cuEventSynchronize, piece->event);
}

static tms_status_t finish_on_disk(pipe_t *pipe, piece_t *piece, tms_error_t *error) {
    tms_disk_request_t *request = &piece->request;
    tms_status_t status = tms_disk_queue_await(&pipe->queue, request, pipe->copier->wait, &request->context, error);
    if (status != TMS_OK) return status;
    piece->file->pieces--;
    if (request->status == TMS_OK) return close_if_done(piece->file, &request->context, error);
    if (error) *error = request->error;
    return request->status;
}

/* Completes the oldest piece, which is in its second stage. */
static tms_status_t retire(pipe_t *pipe, tms_error_t *error) {
    piece_t *piece = piece_at(pipe, pipe->first);
    tms_status_t status = pipe->saving ? finish_on_disk(pipe, piece, error) : finish_on_device(pipe, piece, error);
    if (status != TMS_OK) return status;
    if (pipe->copier->done) atomic_fetch_add(pipe->copier->done, piece->bytes);
    pipe->idle[pipe->idle_count++] = piece->buffer;
    pipe->first++;
    return TMS_OK;
}

/* Moves the oldest piece of the first stage to the second. */
static tms_status_t pass_on(pipe_t *pipe, tms_error_t *error) {
    piece_t *piece = piece_at(pipe, pipe->middle);
    const uint64_t most = pipe->saving ? MAX_WITH_DISK : WITH_DEVICE_LAST;
    tms_status_t status = TMS_OK;
    while (status == TMS_OK && pipe->middle - pipe->first >= most) status = retire(pipe, error);
    if (status == TMS_OK) status = pipe->saving ? finish_on_device(pipe, piece, error) : finish_on_disk(pipe, piece, error);
    if (status == TMS_OK && pipe->saving)
        tms_disk_queue_submit(&pipe->queue, &piece->request);
    else if (status == TMS_OK)
        status = start_on_device(pipe, piece, error);
    if (status == TMS_OK) pipe->middle++;
    return status;
}

/* ---- buffers ---- */

/* Adds buffers, if the limit and memory allow. `pieces`: the number left in the file. */
static tms_status_t add_buffers(pipe_t *pipe, uint64_t pieces, const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_staging_t *staging = pipe->staging;
    int before = staging->count;
    /* Doubles the number each time: a small backup does not wait for memory that it does not use. The minimum fills a huge
     * page. */
    int wanted = before > 0 ? before : pieces < TMS_MAX_DISK_BUFFERS ? (int)pieces : TMS_MAX_DISK_BUFFERS;
    if (wanted < TMS_MIN_DISK_BUFFERS) wanted = TMS_MIN_DISK_BUFFERS;
    tms_error_t reason;
    tms_status_t status =
        tms_disk_staging_grow(staging, pipe->directory->host, pipe->copier->driver, wanted, context, &reason);
    for (int i = before; i < staging->count; i++) pipe->idle[pipe->idle_count++] = i;
    pipe->has_all_buffers = staging->count == staging->most || status != TMS_OK;
    if (status == TMS_OUT_OF_HOST_MEMORY && before > 0) {
        tms_log_write(pipe->directory->log, TMS_LOG_WARNING, "%s The copy continues with %d buffers.", reason.message,
                      before);
        return TMS_OK;
    }
    if (status != TMS_OK && error) *error = reason;
    return status;
}

static tms_status_t need_buffer(pipe_t *pipe, uint64_t pieces, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    if (pipe->idle_count == 0 && !pipe->has_all_buffers) status = add_buffers(pipe, pieces, context, error);
    while (status == TMS_OK && pipe->idle_count == 0)
        status = pipe->first == pipe->middle ? pass_on(pipe, error) : retire(pipe, error);
    return status;
}

/* ---- the pipe ---- */

/* Completes every piece in the pipe. */
static tms_status_t empty(pipe_t *pipe, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    while (status == TMS_OK && pipe->first < pipe->next)
        status = pipe->first == pipe->middle ? pass_on(pipe, error) : retire(pipe, error);
    return status;
}

static uint64_t at_most(uint64_t bytes, uint64_t limit) { return bytes < limit ? bytes : limit; }

/* Fills a piece with the content from `offset` on and an idle buffer. */
static void fill_piece(pipe_t *pipe, piece_t *piece, open_file_t *file, uint64_t offset) {
    const tms_backup_content_t *content = file->content;
    while (content->extents && content->extents[file->extent].packed + content->extents[file->extent].bytes <= offset)
        file->extent++;
    piece->file = file;
    piece->content = content;
    piece->extent = file->extent;
    piece->bytes = at_most(content->bytes - offset, TMS_DISK_BUFFER_BYTES);
    piece->buffer = pipe->idle[--pipe->idle_count];
    piece->event = pipe->staging->events[piece->buffer];
    piece->request.handle = &file->handle;
    piece->request.data = pipe->staging->buffers[piece->buffer];
    piece->request.bytes = at_most(file->handle.file->bytes - offset, TMS_DISK_BUFFER_BYTES);
    piece->request.offset = offset;
}

/* Waits until the disk can take another read. While the disk is busy, moves completed reads on. */
static tms_status_t make_room(pipe_t *pipe, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    while (status == TMS_OK && tms_disk_queue_in_kernel(&pipe->queue) >= MAX_WITH_DISK)
        status = tms_disk_queue_kernel_has_done(&piece_at(pipe, pipe->middle)->request)
                     ? pass_on(pipe, error)
                     : tms_disk_queue_wait(&pipe->queue, pipe->copier->wait, context, error);
    return status;
}

/* Adds the piece at `offset` of the file, for the segment at `address`. `is_last`: no more pieces of the file follow. */
static tms_status_t add_piece(pipe_t *pipe, open_file_t *file, uint64_t offset, CUdeviceptr address, bool is_last,
                              const tms_error_context_t *context, tms_error_t *error) {
    uint64_t bytes = TMS_DISK_BUFFER_BYTES, left = file->content->bytes - offset;
    tms_status_t status = tms_wait_check(pipe->copier->wait, context, error);
    if (status == TMS_OK) status = need_buffer(pipe, (left + bytes - 1) / bytes, context, error);
    if (status != TMS_OK) return status;
    piece_t *piece = piece_at(pipe, pipe->next);
    fill_piece(pipe, piece, file, offset);
    piece->segment = address;
    piece->request.context = *context;
    status = pipe->saving ? start_on_device(pipe, piece, error) : make_room(pipe, context, error);
    if (status != TMS_OK) return status;
    file->pieces++;
    file->is_read = is_last;
    if (!pipe->saving) tms_disk_queue_submit(&pipe->queue, &piece->request);
    pipe->next++;
    uint64_t ahead = pipe->saving ? WITH_DEVICE_FIRST : MAX_READ_AHEAD - 1;
    while (status == TMS_OK && pipe->next - pipe->middle > ahead) status = pass_on(pipe, error);
    return status;
}

/* Keeps the first failure and returns it. */
static tms_status_t keep(pipe_t *pipe, tms_status_t status, const tms_error_t *reason, tms_error_t *error) {
    if (status == TMS_OK) return TMS_OK;
    if (pipe->status == TMS_OK) {
        pipe->status = status;
        pipe->error = *reason;
    }
    if (error) *error = pipe->error;
    return pipe->status;
}

static tms_status_t wait_for_pipe(tms_copier_relay_t *relay, tms_error_t *error) {
    pipe_t *pipe = (pipe_t *)relay;
    tms_error_t reason;
    tms_error_clear(&reason);
    tms_status_t status = pipe->status == TMS_OK ? empty(pipe, &reason) : pipe->status;
    return keep(pipe, status, &reason, error);
}

static void close_pipe(tms_copier_relay_t *relay) {
    pipe_t *pipe = (pipe_t *)relay;
    pipe->copier = NULL;
    tms_disk_queue_close(&pipe->queue);
    /* Files are open only after a failure, which has been reported. */
    for (int i = 0; i <= TMS_MAX_DISK_BUFFERS; i++) {
        if (pipe->files[i].in_use) (void)tms_disk_handle_close(&pipe->files[i].handle, NULL, NULL);
    }
}

static void release_pipe(tms_copier_relay_t *relay, const tms_driver_table_t *driver, const tms_wait_t *wait) {
    pipe_t *pipe = (pipe_t *)relay;
    tms_disk_staging_destroy(pipe->staging, driver, wait, pipe->directory->log, pipe->directory->quarantine);
    free(pipe);
}

static const tms_copier_relay_table_t relay_table = {.wait = wait_for_pipe, .close = close_pipe, .release = release_pipe};

/* Returns the copier's pipe, which is created at its first copy. Returns NULL and sets *status if it cannot be created. */
static pipe_t *open_pipe(tms_disk_directory_t *directory, tms_copier_t *copier, tms_status_t *status,
                         const tms_error_context_t *context, tms_error_t *error) {
    pipe_t *made = (pipe_t *)tms_copier_find_relay(copier, &relay_table);
    *status = TMS_OK;
    if (made) return made;
    made = calloc(1, sizeof *made);
    if (!made) {
        *status = tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
        return NULL;
    }
    *status = tms_disk_staging_create(&made->staging, copier->copying->devices, copier->device, directory->staging_bytes,
                                      context, error);
    if (*status != TMS_OK) {
        free(made);
        return NULL;
    }
    made->relay.table = &relay_table;
    made->directory = directory;
    made->copier = copier;
    tms_disk_queue_open(&made->queue, directory->no_uring ? NULL : &made->staging->uring, directory);
    tms_copier_add_relay(copier, &made->relay);
    return made;
}

/* ---- copies ---- */

/* Returns the offset of the first piece from `offset` on that is to be copied. *next is the first changed extent that may
 * lie there. At least the size of the content: there is none. */
static uint64_t first_piece(const tms_backup_content_t *content, const tms_backup_content_t *changed, uint64_t offset,
                            size_t *next) {
    if (!changed) return offset;
    while (*next < changed->extent_count && changed->extents[*next].packed + changed->extents[*next].bytes <= offset)
        ++*next;
    if (*next == changed->extent_count) return content->bytes;
    const uint64_t begin = changed->extents[*next].packed; /* the beginning of a piece, unless it lies in this one */
    return begin > offset ? begin / TMS_DISK_BUFFER_BYTES * TMS_DISK_BUFFER_BYTES : offset;
}

static tms_status_t copy(tms_disk_file_t *backup, const tms_backup_content_t *content, const tms_backup_content_t *changed,
                         tms_copier_t *copier, CUdeviceptr address, bool saving, const tms_error_context_t *context,
                         tms_error_t *error) {
    open_file_t *file = NULL;
    tms_error_t reason;
    tms_error_clear(&reason);
    tms_status_t status;
    pipe_t *pipe = open_pipe(backup->directory, copier, &status, context, error);
    if (!pipe) return status;
    status = pipe->status;
    if (status == TMS_OK && pipe->saving != saving) status = empty(pipe, &reason);
    pipe->saving = saving;
    if (status == TMS_OK) status = open_for(pipe, backup, content, &file, context, &reason);
    size_t next = 0;
    for (uint64_t offset = first_piece(content, changed, 0, &next), after; status == TMS_OK && offset < content->bytes;
         offset = after) {
        after = first_piece(content, changed, offset + TMS_DISK_BUFFER_BYTES, &next);
        status = add_piece(pipe, file, offset, address, after >= content->bytes, context, &reason);
    }
    return keep(pipe, status, &reason, error);
}

tms_status_t tms_disk_copy_save(tms_disk_file_t *file, const tms_backup_content_t *content,
                                const tms_backup_content_t *changed, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error) {
    return copy(file, content, changed, copier, address, true, context, error);
}

tms_status_t tms_disk_copy_load(tms_disk_file_t *file, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    return copy(file, content, NULL, copier, address, false, context, error);
}
