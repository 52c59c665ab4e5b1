/* The public C ABI: status codes, the error value, and the one function table through which a process reaches its state.
 *
 * There is exactly one state in a process. It lives in the preload library if that is loaded, otherwise in `_core`. A caller
 * gets it by `tms_get_api` of the library that holds it, and checks `version` and `size`. Fields are only ever appended
 * within a version. Nothing here needs cuda.h or Python.h.
 *
 * Every function may be called on any thread unless its comment says otherwise. It takes no lock of the caller's, never
 * exits and never prints to stdout. Only the functions that take a callback call back. Functions that can fail return a
 * status and fill `*error` (which may be NULL); out-parameters are written on success only. */
#ifndef TMS_H
#define TMS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "include/tms_events.h"
#include "include/tms_usage.h"

#define TMS_EXPORT __attribute__((visibility("default")))

/* X(enumerator suffix, number, what it means). The numbers are part of the ABI. */
#define TMS_STATUS_CODES(X)                                                                                                 \
    X(OK, 0, "success")                                                                                                     \
    X(INVALID_ARGUMENT, 1, "an argument has a value that the operation does not take")                                      \
    X(INVALID_STATE, 2, "the operation does not fit the present state")                                                     \
    X(NOT_MANAGED, 3, "the address is not managed by this library")                                                         \
    X(OUT_OF_DEVICE_MEMORY, 4, "the device has too little free memory")                                                     \
    X(OUT_OF_HOST_MEMORY, 5, "the host has too little memory")                                                              \
    X(BACKUP_IO, 6, "a backup file could not be written or read")                                                           \
    X(DRIVER, 7, "a CUDA driver call failed")                                                                               \
    X(DRIVER_UNAVAILABLE, 8, "there is no usable CUDA driver or device")                                                    \
    X(DEVICE_LOST, 9, "the device's context is in a sticky error; the process must restart to use it again")                \
    X(CAPTURE_IN_PROGRESS, 10, "a stream capture is under way")                                                             \
    X(FORKED, 11, "this process was forked from one that used the GPU")                                                     \
    X(INTERRUPTED, 12, "the call was interrupted; nothing has changed")                                                     \
    X(DEVICE_LOCKED, 13, "another process holds the exclusive lock of a device")

typedef enum tms_status {
#define TMS_STATUS_ENUMERATOR(name, number, text) TMS_##name = number,
    TMS_STATUS_CODES(TMS_STATUS_ENUMERATOR)
#undef TMS_STATUS_ENUMERATOR
} tms_status_t;

enum {
    TMS_ERROR_NAME_BYTES = 64,     /* operation, driver call, error name, tag: truncated to this, NUL included */
    TMS_ERROR_MESSAGE_BYTES = 1024 /* the whole sentence */
};

/* An error. Plain data, copied freely. Fields that do not apply are 0, "" or, for `device`, -1. */
typedef struct tms_error {
    tms_status_t status;
    int32_t driver_result; /* CUresult */
    int32_t os_error;      /* errno */
    int32_t device;        /* CUDA ordinal */
    uint64_t bytes;
    uint64_t address;
    char operation[TMS_ERROR_NAME_BYTES];   /* "allocate", "free", "pause", "resume", ... */
    char call[TMS_ERROR_NAME_BYTES];        /* "cuMemCreate", "pwrite", ... */
    char result_name[TMS_ERROR_NAME_BYTES]; /* "CUDA_ERROR_OUT_OF_MEMORY", ... */
    char tag[TMS_ERROR_NAME_BYTES];
    char message[TMS_ERROR_MESSAGE_BYTES];
} tms_error_t;

/* Where the contents of an allocation go while it is paused: TMS_BACKUP_<kind>, its number, its name. The numbers are part
 * of the ABI; `_core` of the Python package has both names. */
#define TMS_BACKUP_KINDS(X)                                                                                                 \
    X(NONE, 0, "none")     /* contents are discarded */                                                                     \
    X(PINNED, 1, "pinned") /* pinned host memory */                                                                         \
    X(MMAP, 2, "mmap")     /* ordinary host memory, given back to the system at resume */                                   \
    X(DISK, 3, "disk")     /* a file in the disk backup directory */

typedef enum tms_backup_kind {
#define TMS_BACKUP_KIND(kind, number, name) TMS_BACKUP_##kind = (number),
    TMS_BACKUP_KINDS(TMS_BACKUP_KIND)
#undef TMS_BACKUP_KIND
} tms_backup_kind_t;

/* What happens to a backup's host memory once the contents are on the device again. The numbers are part of the ABI. */
typedef enum tms_host_policy {
    TMS_HOST_DEFAULT = 0, /* the next wider setting applies: the call, the region, the process */
    TMS_HOST_RELEASE = 1, /* released to the system */
    TMS_HOST_POOL = 2,    /* kept, pinned, for any later backup */
    TMS_HOST_RETAIN = 3   /* kept with its contents, for this allocation */
} tms_host_policy_t;

/* The settings that a region gives to the allocations made in it. */
typedef struct tms_region_settings {
    int32_t managed;     /* 0: allocations are ordinary (`disable()`) */
    int32_t backup;      /* tms_backup_kind_t */
    const char *tag;     /* UTF-8, not empty. Copied (interned) by the callee; valid for ever in what is handed out */
    int32_t host_policy; /* tms_host_policy_t */
    int32_t own_handles; /* 1: each allocation has a physical handle of its own, also after a resume (core/model/run.h) */
} tms_region_settings_t;

/* A file descriptor of an allocation's physical memory, by which another process can map it.
 *
 * It belongs to this library and stays open until the allocation is paused or freed. Another process duplicates it by its
 * number (pidfd_getfd). Memory that another process has mapped stays allocated until that process unmaps it; a pause or free
 * here completes nevertheless. */
typedef struct tms_export {
    uint64_t address; /* of the physical memory, in which the allocation lies */
    uint64_t bytes;   /* of it: all of it is one handle */
    /* Unique in this process for each piece of physical memory, and the same for every export of that piece. */
    uint64_t generation;
    int32_t device;
    int32_t descriptor;
} tms_export_t;

/* The live bytes of some allocations, from torch's allocator. Both arrays are sorted. The function that filled this in owns
 * them and keeps them valid until the call ends. */
typedef struct tms_live_range {
    uint64_t begin, end; /* [begin, end), inside one of `allocations` */
} tms_live_range_t;

typedef struct tms_live {
    const uint64_t *allocations; /* addresses of the allocations described here; every byte of any other allocation is
                                    live */
    size_t allocation_count;
    const tms_live_range_t *ranges; /* do not overlap */
    size_t range_count;
} tms_live_t;

/* Which allocations pause and resume act on, and how. */
typedef struct tms_selection {
    const char *const *tags; /* NULL: every tag */
    size_t tag_count;
    void *stream;       /* the caller's current stream (a CUstream), queried for an active capture; read if has_stream */
    int32_t has_stream; /* 0: no stream to query */
    int32_t exclusive;  /* resume: take the lock of every device concerned, until what was resumed is paused or freed */
    /* resume: how long to wait for device memory that others hold (and for the locks). 0: not at all; INFINITY: for ever */
    double timeout_seconds;
    /* NULL, or polled for cancellation: on the calling thread, with no lock held, about every 50 ms while the call waits and
     * can still be undone. A non-zero result ends the call with TMS_INTERRUPTED. It must not call pause or resume. */
    int32_t (*interrupted)(void *interrupt_context);
    void *interrupt_context;
    /* pause: the kind of backup for this call, in place of the regions' choice. Read if has_backup. TMS_BACKUP_NONE also
     * discards the backups of selected allocations that are paused already. */
    int32_t has_backup;
    int32_t backup;
    int32_t host_policy; /* resume: tms_host_policy_t for what this call resumes; TMS_HOST_DEFAULT: the policies of the
                            regions */
    int32_t zero;        /* resume: memory that comes back without contents is zeroed */
    /* pause: NULL, or called once to find the live bytes: after the devices have been synchronized, on the calling thread,
     * with no lock held. A non-zero result means that the live bytes are unknown; everything is copied then. */
    int32_t (*find_live)(void *live_context, tms_live_t *live);
    void *live_context;
    int32_t preserves; /* pause: find_live is called in any case, and what it lists of allocations without a backup is kept
                          in pinned host memory. Read if has_backup is not set */
    /* NULL, or called with the number of bytes copied so far: on the calling thread, with no lock held, at most about every
     * 50 ms while the call copies, and once at the end. It must not call pause or resume. */
    void (*on_progress)(void *on_progress_context, uint64_t done_bytes, uint64_t total_bytes);
    void *on_progress_context;
} tms_selection_t;

/* What one pause or resume did. */
typedef struct tms_report {
    uint64_t allocations;  /* that changed state */
    uint64_t bytes;        /* physical bytes released or mapped */
    uint64_t copied_bytes; /* to or from backups */
    uint64_t unknown_tags; /* tags in the selection that no allocation ever had */
    double seconds;
} tms_report_t;

/* A line of the log: an error message without the prefix of a line on stderr. */
typedef struct tms_log_line {
    struct tms_log_line *next;
    int32_t level; /* 1: error, 2: warning, 3: info, 4: debug */
    char text[];   /* UTF-8, perhaps truncated inside a character */
} tms_log_line_t;

/* A resume that runs in the background. */
typedef struct tms_pending tms_pending_t;

/* A host copy that stays valid while a reference is held, even if the allocation it came from is freed. */
typedef struct tms_host_buffer tms_host_buffer_t;

/* Called on a thread of the library, with no lock held. */
typedef void (*tms_device_listener_t)(void *context, int32_t device);

#define TMS_API_VERSION 4u

enum { TMS_NO_SUCH_LEVEL = -1 }; /* of region_leave */

/* What guard mode shows in place of contents: NaN in every floating type that has it. */
enum { TMS_GUARD_BYTE = 0xFF };
/* Of count_guard_bytes. */
#define TMS_NOT_RESIDENT UINT64_MAX

typedef struct tms_api {
    uint32_t version; /* TMS_API_VERSION of the library that holds the state */
    uint32_t size;    /* sizeof(tms_api_t) there */

    /* A managed allocation with the settings of the calling thread's region; outside any region those of a visible capture
     * begun with settings, else the process's initial settings. `device` -1 is the current device. The allocation is always
     * managed; the caller checks `region_current` first. Size 0 gives address 0. */
    tms_status_t (*allocate)(uint64_t bytes, int32_t device, uint64_t *address, tms_error_t *error);
    /* Frees an allocation made by `allocate`, in any state. TMS_NOT_MANAGED (without a message) for every address that is
     * not the start of a managed allocation and lies in none; TMS_INVALID_ARGUMENT for one inside. */
    tms_status_t (*free)(uint64_t address, tms_error_t *error);

    /* The thread's stack of regions. region_enter returns an id of the level for region_leave, which leaves that level only,
     * in any order, because tasks of an event loop and generators share a thread and interleave. It returns how many later
     * levels stay in force, or TMS_NO_SUCH_LEVEL if the level was entered on another thread or has been left. */
    tms_status_t (*region_enter)(const tms_region_settings_t *settings, uint64_t *level, tms_error_t *error);
    int32_t (*region_leave)(uint64_t level);
    void (*region_current)(tms_region_settings_t *settings, int32_t *depth);
    /* Changes the innermost settings of the thread in place (the compatibility functions need it). */
    tms_status_t (*region_set)(const tms_region_settings_t *settings, tms_error_t *error);

    tms_status_t (*pause)(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error);
    tms_status_t (*resume)(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error);

    /* The host copy of [address, address + bytes), which must lie in one managed allocation. TMS_OK with *buffer NULL: there
     * is no host copy now (active and not retained, discarded, or on disk). Each *buffer is released with
     * host_buffer_release. */
    tms_status_t (*host_backup)(uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer, void **host,
                                tms_error_t *error);
    void (*host_buffer_release)(tms_host_buffer_t *buffer);

    void (*set_memory_margin)(uint64_t bytes);
    uint64_t (*get_memory_margin)(void);
    void (*set_retain_backup)(int32_t retain);
    int32_t (*get_retain_backup)(void);
    tms_status_t (*set_disk_directory)(const char *path, tms_error_t *error);

    /* Announce that the caller is about to begin a capture, or has ended one. `settings` apply to allocations made during it
     * by threads outside any region (autograd's); NULL: none. Pairs nest. The begin waits for a pause or resume on another
     * thread; inside one on the same thread it fails with TMS_INVALID_STATE. */
    tms_status_t (*capture_begin)(const tms_region_settings_t *settings, tms_error_t *error);
    void (*capture_end)(void);

    /* Grants the devices that this process has begun to use access to ACTIVE allocations. Cheap if none is new. */
    tms_status_t (*refresh_peers)(tms_error_t *error);

    tms_status_t (*device_count)(int32_t *count, tms_error_t *error);
    tms_status_t (*active_devices)(uint64_t *mask, tms_error_t *error); /* bit d: device d's primary context is active */
    tms_status_t (*device_memory)(int32_t device, uint64_t *free_bytes, uint64_t *total_bytes, tms_error_t *error);

    /* Writes up to `capacity` rows in order of allocation and returns how many allocations there are. */
    size_t (*segments)(tms_segment_info_t *rows, size_t capacity);
    tms_status_t (*find)(uint64_t address, tms_segment_info_t *row); /* interior addresses too; else TMS_NOT_MANAGED */
    void (*tag_info)(const char *tag, tms_tag_info_t *info);
    void (*counters)(tms_counters_t *counters);

    /* Begins a resume on a background thread and returns at once. The selection is copied; its callbacks are not called.
     * pending_wait reports a failure. pending_release releases the handle and does not end the resume. */
    tms_status_t (*resume_begin)(const tms_selection_t *selection, tms_pending_t **pending, tms_error_t *error);
    int32_t (*pending_done)(tms_pending_t *pending); /* whether it has ended, successfully or not */
    /* Waits for the end. `interrupted` as in tms_selection_t; TMS_INTERRUPTED ends the wait, not the resume. */
    /* Waits for its end, successful or not, and leaves the result to pending_wait. */
    tms_status_t (*pending_await)(tms_pending_t *pending, int32_t (*interrupted)(void *), void *interrupt_context,
                                  tms_error_t *error);
    tms_status_t (*pending_wait)(tms_pending_t *pending, int32_t (*interrupted)(void *), void *interrupt_context,
                                 tms_report_t *report, tms_error_t *error);
    /* Waits until all memory is mapped on every device and the last copies are queued, then makes `stream` (a CUstream) wait
     * for these copies. Work queued on `stream` afterwards finds memory and contents. From then on the resume is not undone:
     * if a copy fails, the allocations of the call become DAMAGED, their backups stay, and pending_wait reports the failure.
     * A resume that failed earlier is undone, and its failure is returned. */
    tms_status_t (*pending_wait_stream)(tms_pending_t *pending, void *stream, int32_t (*interrupted)(void *),
                                        void *interrupt_context, tms_error_t *error);
    void (*pending_release)(tms_pending_t *pending); /* NULL is fine */

    /* Prepares pinned host memory for later backups, in the background; see tms_host_store_reserve. `device` -1: the current
     * one. */
    tms_status_t (*reserve_host_memory)(uint64_t bytes, int32_t device, tms_error_t *error);
    /* The policy of the process: used where neither call nor region has one. set_retain_backup(1) is TMS_HOST_RETAIN. */
    tms_status_t (*set_host_policy)(int32_t policy, tms_error_t *error);
    int32_t (*get_host_policy)(void);
    /* At exit: no thread of the library calls the driver after this. */
    void (*close)(void);

    /* Whether the calling thread is in a callback of its own pause or resume. Another pause or resume on this thread would
     * fail with TMS_INVALID_STATE. */
    int32_t (*in_transition)(void);

    /* Releases idle memory of the pool to the system, in the background. */
    void (*release_host_memory)(void);

    /* As capture_begin, but returns an identity for capture_retract. It is never 0. Ends may come in any order. */
    tms_status_t (*capture_announce)(const tms_region_settings_t *settings, uint64_t *identity, tms_error_t *error);
    /* A capture is about to begin on `stream` (a CUstream). It completes what this thread has announced and not begun yet.
     * The stream is queried later for an active capture, so an end through the driver's own function need not be reported.
     * If the last capture of this stream has no recorded end, its identity is returned again. Identity 0: the table is full,
     * which is logged. Waits as capture_begin does; after a failure the capture must not begin. */
    tms_status_t (*capture_begin_on)(void *stream, uint64_t *identity, tms_error_t *error);
    /* The capture has ended or failed to begin. `unless_it_goes_on`: only if its stream reports no active capture. Returns
     * whether there was one. */
    int32_t (*capture_retract)(uint64_t identity, int32_t unless_it_goes_on);
    /* The capture of capture_begin_on has begun. The stream is not queried before this call, because it would report no
     * capture yet. If the begin fails, capture_retract is called instead. */
    void (*capture_begun)(uint64_t identity);

    /* Exports the physical memory of the allocation that an address lies in. TMS_NOT_MANAGED, or TMS_INVALID_STATE if it has
     * no memory now, if a pause or resume of it is under way, or if no file descriptor is free. */
    tms_status_t (*export_memory)(uint64_t address, tms_export_t *exported, tms_error_t *error);

    /* From now on `listener` is called once for each device of `mask` on which torch allocates through the entry points
     * below. NULL: nothing is called any more. `close` also removes it. */
    tms_status_t (*listen_devices)(tms_device_listener_t listener, void *context, uint64_t mask, tms_error_t *error);

    /* Guard mode, for the pauses and resumes that begin afterwards. A pause then maps a page of TMS_GUARD_BYTE read-only
     * over the paused addresses, and a resume fills memory that comes back without contents with that byte. */
    void (*set_guard)(int32_t on);
    int32_t (*get_guard)(void);

    /* Writes up to `capacity` rows: the tags that have allocations, then the devices that have any or had any since
     * reset_peaks. Returns how many rows there are. `tag` NULL: all tags; `device` -1: all devices. With either, the rows
     * count the allocations of that tag or device only, except for the peaks. */
    size_t (*usage)(const char *tag, int32_t device, tms_usage_info_t *rows, size_t capacity);
    /* Every peak becomes what is mapped now. */
    void (*reset_peaks)(void);
    /* Writes up to `capacity` tags, the newest first, and returns how many there are. A tag never goes away. */
    size_t (*tags)(tms_tag_row_t *rows, size_t capacity);

    /* For each range the number of its bytes that are TMS_GUARD_BYTE, or TMS_NOT_RESIDENT if it does not lie in one selected
     * allocation that is ACTIVE. The ranges are in order and do not overlap. Waits for the devices, and copies the ranges to
     * host memory. Of the selection, what is about pauses and resumes only is not read. */
    tms_status_t (*count_guard_bytes)(const tms_selection_t *selection, const tms_live_range_t *ranges, size_t range_count,
                                      uint64_t *counts, tms_error_t *error);
    /* Copies `bytes` at `address` of a paused allocation from a backup on disk to host memory, as host_backup finds a copy
     * that is in host memory. *found is 0 if no such backup holds all of it. Waits for running pauses and resumes, and reads
     * the file. Of the selection only `interrupted`, `stream` and their context are read; it has no tags. */
    tms_status_t (*read_backup)(const tms_selection_t *selection, uint64_t address, uint64_t bytes, void *destination,
                                int32_t *found, tms_error_t *error);
    /* The latest events, and what is held after the last of them. Also works while a pause or resume is under way. A forked
     * child has only its own. */
    void (*events)(tms_events_copy_t *copy);
    /* Whether the pauses and resumes that begin afterwards record the free memory of their devices, which costs a driver
     * call for each device before and after. */
    void (*set_event_samples)(int32_t on);
    /* Makes no context. TMS_INVALID_ARGUMENT: there is no such device. */
    tms_status_t (*device_info)(int32_t device, tms_device_info_t *info, tms_error_t *error);
    /* Writes up to `capacity` rows of memory that is not managed, by library and device, and returns how many there are. */
    size_t (*libraries)(tms_library_info_t *rows, size_t capacity);

    /* The shared page of this process (tms_shared_page.h), which is made at its first allocation. `page_role` sets what it
     * says of the process, also before it is made. `name` NULL: the program's. `serves`: requests are served after each
     * pause and resume. */
    void (*page_role)(const char *name, int32_t rank_known, int64_t rank, int32_t serves);
    /* The bits of the requests; 0 without a page. Reads one word. */
    uint64_t (*page_requests)(void);
    /* A request has been served; or not, because of an errno, or of something else (0). */
    void (*page_serve)(uint32_t kind, int32_t served, int32_t os_error);
    /* The path of the page, or "" without one. */
    const char *(*page_path)(void);
    /* Writes the directory of shared pages, also if nothing is there. Returns 0 if it does not fit. */
    int32_t (*page_directory)(char *path, size_t room);
    /* TMS_LEDGER: libraries that look up the driver's functions are counted where this is the ledger library. */
    int32_t (*get_ledger)(void);

    /* From open_log on, lines of the log, of whichever thread, wait for close_log instead of going to stderr. close_log
     * returns all that wait, the oldest first: the caller frees each with free(). For a caller that passes them on. */
    void (*open_log)(void);
    tms_log_line_t *(*close_log)(void);
    /* Writes a line to stderr, as the log does. */
    void (*write_log)(int32_t level, const char *text);
} tms_api_t;

/* The table of the library that exports it, or NULL if that library does not support `version`. */
TMS_EXPORT const tms_api_t *tms_get_api(uint32_t version);

/* For torch.cuda.memory.CUDAPluggableAllocator: any thread, in or out of a region. NULL on failure, which torch turns into
 * torch.OutOfMemoryError. */
TMS_EXPORT void *tms_torch_malloc(ssize_t size, int device, void *stream);
TMS_EXPORT void tms_torch_free(void *address, ssize_t size, int device, void *stream);
/* The same for ordinary memory, which is not managed. The device gets access to managed memory of the others before the
 * allocation returns, and the listener of listen_devices is called. */
TMS_EXPORT void *tms_torch_watch_malloc(ssize_t size, int device, void *stream);
TMS_EXPORT void tms_torch_watch_free(void *address, ssize_t size, int device, void *stream);

/* The C surface of the C++ package, kept for the programs that reach it through ctypes. tms_pause and tms_resume return a
 * cudaError_t; a NULL tag means all. The setters change the calling thread's innermost region. See compat.c. */
TMS_EXPORT void tms_set_interesting_region(_Bool on);
TMS_EXPORT _Bool tms_get_interesting_region(void);
TMS_EXPORT void tms_set_current_tag(const char *tag);
TMS_EXPORT const char *tms_get_current_tag(void);
TMS_EXPORT void tms_set_enable_cpu_backup(_Bool on);
TMS_EXPORT _Bool tms_get_enable_cpu_backup(void);
TMS_EXPORT void tms_set_cpu_backup_backend(const char *backend); /* "pinned" or "mmap" */
TMS_EXPORT const char *tms_get_cpu_backup_backend(void);
TMS_EXPORT void tms_set_enable_disk_backup(_Bool on);
TMS_EXPORT _Bool tms_get_enable_disk_backup(void);
TMS_EXPORT void tms_set_disk_backup_dir(const char *path);
TMS_EXPORT void tms_set_retain_cpu_backup(_Bool on);
TMS_EXPORT _Bool tms_get_retain_cpu_backup(void);
TMS_EXPORT void set_memory_margin_bytes(uint64_t bytes);
TMS_EXPORT int tms_pause(const char *tag);
TMS_EXPORT int tms_resume(const char *tag);
TMS_EXPORT uint8_t *tms_get_cpu_backup_pointer(const uint8_t *address, uint64_t bytes);

#endif
