/* The public C ABI: status codes, the error value, and the one function table through which a process reaches its state.
 *
 * There is exactly one state in a process. It lives in the preload library if that is loaded, otherwise in `_core`. A caller
 * gets it by `tms_get_api` of the library that holds it, and checks `version` and `size`. Fields are only ever appended
 * within a version. Nothing here needs cuda.h or Python.h.
 *
 * Every function may be called on any thread unless its comment says otherwise, takes no lock of the caller's, never calls
 * back (pause and resume do, where they are given a function to ask), never exits and never prints to stdout. Functions that
 * can fail return a status and fill `*error` (which may be NULL); out-parameters are written on success only. */
#ifndef TMS_H
#define TMS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

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

/* What went wrong. Plain data, copied freely. Fields that do not apply are 0, "" or, for `device`, -1. */
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

/* What becomes of host memory when the contents are on the device again. The numbers are part of the ABI. */
typedef enum tms_host_policy {
    TMS_HOST_DEFAULT = 0, /* as the next wider setting says: the call, the region, the process */
    TMS_HOST_RELEASE = 1, /* back to the system */
    TMS_HOST_POOL = 2,    /* kept, pinned, for any later backup */
    TMS_HOST_RETAIN = 3   /* kept with its contents, for this allocation */
} tms_host_policy_t;

/* The settings that a region gives to the allocations made in it. */
typedef struct tms_region_settings {
    int32_t managed;     /* 0: allocations are ordinary (`disable()`) */
    int32_t backup;      /* tms_backup_kind_t */
    const char *tag;     /* UTF-8, not empty. Copied (interned) by the callee; valid for ever in what is handed out */
    int32_t host_policy; /* tms_host_policy_t */
    int32_t reserved;
} tms_region_settings_t;

typedef enum tms_segment_state {
    TMS_SEGMENT_ACTIVE = 0,   /* mapped, readable and writable on the device */
    TMS_SEGMENT_PAUSING = 1,  /* owned by a pause() under way; mapped until it is done */
    TMS_SEGMENT_PAUSED = 2,   /* address reserved, no physical memory */
    TMS_SEGMENT_RESUMING = 3, /* owned by a resume() under way */
    TMS_SEGMENT_DAMAGED = 4,  /* the driver refused to unmap it, or to undo: the address is kept and never used again */
    TMS_SEGMENT_REPAIRING = 5 /* DAMAGED, and owned by a call that tries again */
} tms_segment_state_t;

/* One allocation, as seen at one moment. */
typedef struct tms_segment_info {
    uint64_t address;
    uint64_t bytes;          /* as asked for */
    uint64_t reserved_bytes; /* of the address range, and of physical memory while resident: a multiple of the granularity */
    uint64_t backup_bytes;   /* held in a backup now */
    int32_t device;
    int32_t state;  /* tms_segment_state_t */
    int32_t backup; /* tms_backup_kind_t */
    int32_t reserved;
    const char *tag; /* valid for ever */
} tms_segment_info_t;

/* Which bytes of some allocations are live, as torch's allocator knows. Both arrays are sorted, and stay the property of the
 * function that filled this in, until the call ends. */
typedef struct tms_live_range {
    uint64_t begin, end; /* [begin, end), inside one of `allocations` */
} tms_live_range_t;

typedef struct tms_live {
    const uint64_t *allocations; /* addresses of the allocations that this is about: of others everything is live */
    size_t allocation_count;
    const tms_live_range_t *ranges; /* do not overlap */
    size_t range_count;
} tms_live_t;

/* Which allocations pause and resume act on, and how. */
typedef struct tms_selection {
    const char *const *tags; /* NULL: every tag */
    size_t tag_count;
    void *stream;       /* the caller's current stream (a CUstream), asked whether it is capturing; read if has_stream */
    int32_t has_stream; /* 0: no stream to ask */
    int32_t exclusive;  /* resume: take the lock of every device concerned, until what was resumed is paused or freed */
    /* resume: how long to wait for device memory that others hold (and for the locks). 0: not at all; INFINITY: for ever */
    double timeout_seconds;
    /* NULL, or asked whether the call is cancelled: on the calling thread, with no lock held, about every 50 ms while the
     * call waits and can still be undone. Not 0: the call ends with TMS_INTERRUPTED. It must not call pause or resume. */
    int32_t (*interrupted)(void *interrupt_context);
    void *interrupt_context;
    /* pause: where contents go this time, whatever the region said: TMS_BACKUP_NONE, TMS_BACKUP_DISK, or
     * TMS_BACKUP_PINNED (host memory; allocations with a backup of kind MMAP keep that). Read if has_backup. */
    int32_t has_backup;
    int32_t backup;
    int32_t host_policy; /* resume: tms_host_policy_t for what this call resumes; TMS_HOST_DEFAULT: as the regions said */
    int32_t zero;        /* resume: memory that comes back without contents is zeroed */
    /* pause: NULL, or asked once, after the devices have been waited for, on the calling thread and with no lock held: which
     * bytes are live. Not 0: it does not know, and everything is copied. */
    int32_t (*find_live)(void *live_context, tms_live_t *live);
    void *live_context;
    /* NULL, or told how many bytes of the call's copies are done: on the calling thread, with no lock held, at most about
     * every 50 ms while it copies, and once at the end of them. It must not call pause or resume. */
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

typedef struct tms_counters {
    uint64_t allocations;         /* managed allocations alive, every state */
    uint64_t allocations_total;   /* ever made */
    uint64_t frees_total;         /* ever freed */
    uint64_t resident_bytes;      /* physical bytes mapped now */
    uint64_t paused_bytes;        /* reserved bytes without physical memory now */
    uint64_t host_backup_bytes;   /* host memory held in backups now */
    uint64_t disk_backup_bytes;   /* bytes of backup files now */
    uint64_t pauses_total;        /* calls that succeeded */
    uint64_t resumes_total;       /* calls that succeeded */
    uint64_t failures_total;      /* pauses, resumes and allocations that failed */
    uint64_t damaged;             /* allocations in state DAMAGED */
    uint64_t quarantined_handles; /* physical allocations that the driver refused to release; retried by the next call */
    uint64_t quarantined_ranges;  /* address ranges that the driver refused to free; retried likewise */
    uint64_t deferred_frees;   /* frees that wait: for the end of a stream capture, for a device that cannot be waited for */
    uint64_t visible_captures; /* stream captures that we know to be under way */
    uint64_t quarantined_host; /* pieces of host memory that could not be given back; retried likewise */
    uint64_t quarantined_other;   /* streams, events, context references, files: likewise */
    uint64_t host_resident_bytes; /* host memory used now: backups, pool, what is being released, backup files on a tmpfs */
    uint64_t host_pooled_bytes;   /* of it kept for later backups, with no contents */
} tms_counters_t;

/* How far a tag is paused. A pool of torch's whose memory may be paused must not be entered: see _torch/pools.py. */
typedef struct tms_tag_info {
    uint64_t paused;      /* allocations of the tag that are not ACTIVE */
    uint64_t pause_epoch; /* number of pauses that ever changed an allocation of this tag */
} tms_tag_info_t;

/* A resume that goes on while its caller does something else. */
typedef struct tms_pending tms_pending_t;

/* A host copy that stays valid while a reference is held, whatever happens to the allocation it came from. */
typedef struct tms_host_buffer tms_host_buffer_t;

#define TMS_API_VERSION 2u

enum { TMS_NO_SUCH_LEVEL = -1 }; /* of region_leave */

typedef struct tms_api {
    uint32_t version; /* TMS_API_VERSION of the library that holds the state */
    uint32_t size;    /* sizeof(tms_api_t) there */

    /* A managed allocation with the settings of the calling thread's region; outside any region those of a visible capture
     * begun with settings, else the process's initial settings. `device` -1 is the current device. Always managed: whether
     * the thread's allocations should be is for the caller to ask (`region_current`). Size 0 gives address 0. */
    tms_status_t (*allocate)(uint64_t bytes, int32_t device, uint64_t *address, tms_error_t *error);
    /* Frees what `allocate` gave, in any state. TMS_NOT_MANAGED (without a message) for every address that is not the start
     * of a managed allocation and lies in none; TMS_INVALID_ARGUMENT for one inside. */
    tms_status_t (*free)(uint64_t address, tms_error_t *error);

    /* The thread's stack of regions. `push` gives the depth to hand to `pop`, which also drops whatever was pushed later. */
    tms_status_t (*region_push)(const tms_region_settings_t *settings, int32_t *depth, tms_error_t *error);
    void (*region_pop)(int32_t depth);
    void (*region_current)(tms_region_settings_t *settings, int32_t *depth);
    /* Changes the innermost settings of the thread in place (the compatibility functions need it). */
    tms_status_t (*region_set)(const tms_region_settings_t *settings, tms_error_t *error);

    tms_status_t (*pause)(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error);
    tms_status_t (*resume)(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error);

    /* The host copy of [address, address + bytes), which must lie in one managed allocation. TMS_OK with *buffer NULL: there
     * is none now (active and not retained, discarded, or on disk). Each *buffer is given back with host_buffer_release. */
    tms_status_t (*host_backup)(uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer, void **host,
                                tms_error_t *error);
    void (*host_buffer_release)(tms_host_buffer_t *buffer);

    void (*set_memory_margin)(uint64_t bytes);
    uint64_t (*get_memory_margin)(void);
    void (*set_retain_backup)(int32_t retain);
    int32_t (*get_retain_backup)(void);
    tms_status_t (*set_disk_directory)(const char *path, tms_error_t *error);

    /* A capture that the caller is about to begin, or has ended, on `device`. `settings` are for allocations made during it
     * by threads outside any region (autograd's); NULL where the caller has none. Pairs nest. The begin waits for a pause or
     * resume that is under way on another thread; inside one of its own thread it is TMS_INVALID_STATE. */
    tms_status_t (*capture_begin)(const tms_region_settings_t *settings, tms_error_t *error);
    void (*capture_end)(void);

    /* Gives the devices that this process has begun to use access to what is ACTIVE. Cheap where none is new. */
    tms_status_t (*refresh_peers)(tms_error_t *error);

    tms_status_t (*device_count)(int32_t *count, tms_error_t *error);
    tms_status_t (*active_devices)(uint64_t *mask, tms_error_t *error); /* bit d: device d's primary context is active */
    tms_status_t (*device_memory)(int32_t device, uint64_t *free_bytes, uint64_t *total_bytes, tms_error_t *error);

    /* Writes up to `capacity` rows in order of allocation and returns how many allocations there are. */
    size_t (*segments)(tms_segment_info_t *rows, size_t capacity);
    tms_status_t (*find)(uint64_t address, tms_segment_info_t *row); /* interior addresses too; else TMS_NOT_MANAGED */
    void (*tag_info)(const char *tag, tms_tag_info_t *info);
    void (*counters)(tms_counters_t *counters);

    /* Begins a resume on a thread of the library's and returns at once; the selection is copied, its functions are not
     * called. What goes wrong is told by pending_wait. A handle is given back with pending_release, which does not end the
     * resume. */
    tms_status_t (*resume_begin)(const tms_selection_t *selection, tms_pending_t **pending, tms_error_t *error);
    int32_t (*pending_done)(tms_pending_t *pending); /* whether it has ended, well or not */
    /* Waits for the end. `interrupted` as in tms_selection_t: TMS_INTERRUPTED ends the wait, not the resume. */
    tms_status_t (*pending_wait)(tms_pending_t *pending, int32_t (*interrupted)(void *), void *interrupt_context,
                                 tms_report_t *report, tms_error_t *error);
    /* Waits until all memory is mapped, on every device, and the last copies have been queued, and has `stream` (a CUstream)
     * wait for these: what is queued there afterwards finds memory and contents. From then on nothing is undone: where a
     * copy fails, the allocations of the call become DAMAGED (their backups stay), and pending_wait tells. A resume that has
     * failed before is undone, and its failure returned. */
    tms_status_t (*pending_wait_stream)(tms_pending_t *pending, void *stream, int32_t (*interrupted)(void *),
                                        void *interrupt_context, tms_error_t *error);
    void (*pending_release)(tms_pending_t *pending); /* NULL is fine */

    /* Has pinned host memory made ready for later backups, in the background (TMS_HOST_POOL keeps to it); see
     * tms_host_store_reserve. `device` -1: the current one. */
    tms_status_t (*reserve_host_memory)(uint64_t bytes, int32_t device, tms_error_t *error);
    /* What TMS_HOST_DEFAULT means where neither call nor region says; set_retain_backup(1) is TMS_HOST_RETAIN. */
    tms_status_t (*set_host_policy)(int32_t policy, tms_error_t *error);
    int32_t (*get_host_policy)(void);
    /* At exit of the program: no thread of the library's own calls the driver after this. */
    void (*close)(void);

    /* Whether the calling thread is inside a pause or resume, which then asks whether it is cancelled: another one on this
     * thread would fail with TMS_INVALID_STATE. */
    int32_t (*in_transition)(void);

    /* Gives idle memory of the pool back to the system, in the background. */
    void (*release_host_memory)(void);

    /* As region_push, but gives an id of the level, for region_leave: that level and no other is left, in whatever order.
     * Tasks of an event loop and generators share a thread and interleave. Returns how many levels entered after it stay in
     * force, or TMS_NO_SUCH_LEVEL: it was entered on another thread, or has been left. */
    tms_status_t (*region_enter)(const tms_region_settings_t *settings, uint64_t *level, tms_error_t *error);
    int32_t (*region_leave)(uint64_t level);

    /* As capture_begin, but gives an identity for capture_retract, which is never 0: ends may come in any order. */
    tms_status_t (*capture_announce)(const tms_region_settings_t *settings, uint64_t *identity, tms_error_t *error);
    /* A capture is about to begin on `stream` (a CUstream). What this thread has announced and not begun yet is this one.
     * The stream is asked later whether the capture goes on, so an end by the driver's own function may go unseen. A
     * stream that has not been seen to end its last capture keeps that one's identity. 0: there is no room for it, which is
     * logged. Waits as capture_begin does; after a failure the capture must not begin. */
    tms_status_t (*capture_begin_on)(void *stream, uint64_t *identity, tms_error_t *error);
    /* That has ended, or failed to begin. `unless_it_goes_on`: only if its stream does not say that it captures. Whether
     * there was one. */
    int32_t (*capture_retract)(uint64_t identity, int32_t unless_it_goes_on);
    /* What capture_begin_on announced has begun. The stream is not asked before this: it would say that it does not capture.
     * Where the begin fails capture_retract takes its place. */
    void (*capture_begun)(uint64_t identity);
} tms_api_t;

/* The table of the library that it is called in, or NULL if that library does not speak `version`. */
TMS_EXPORT const tms_api_t *tms_get_api(uint32_t version);

/* For torch.cuda.memory.CUDAPluggableAllocator: any thread, in or out of a region. NULL on failure, which torch turns into
 * torch.OutOfMemoryError. */
TMS_EXPORT void *tms_torch_malloc(ssize_t size, int device, void *stream);
TMS_EXPORT void tms_torch_free(void *address, ssize_t size, int device, void *stream);

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
