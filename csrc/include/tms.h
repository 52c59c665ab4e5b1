/* The public C ABI: status codes, the error value, and the one function table through which a process reaches its state.
 *
 * There is exactly one state in a process. It lives in the preload library if that is loaded, otherwise in `_core`. A caller
 * gets its functions by `tms_get_api` of the library that holds it. Nothing here needs cuda.h or Python.h.
 *
 * Every function may be called on any thread unless its comment says otherwise. It takes no lock of the caller's, never
 * exits and never prints to stdout. Only the functions that take a callback call back. A function that can fail returns a
 * status and fills `*error`, unless `error` is NULL. It writes out-parameters on success only. */
#ifndef TMS_H
#define TMS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "include/tms_events.h"
#include "include/tms_selection.h"
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
    X(BACKUP_IO, 6, "a backup could not be used")                                                                           \
    X(DRIVER, 7, "a CUDA driver call failed")                                                                               \
    X(DRIVER_UNAVAILABLE, 8, "there is no usable CUDA driver or device")                                                    \
    X(DEVICE_LOST, 9, "the device's context is in a sticky error; the process must restart to use it again")                \
    X(CAPTURE_IN_PROGRESS, 10, "a stream capture is under way")                                                             \
    X(FORKED, 11, "this process was forked from one that used the GPU")                                                     \
    X(INTERRUPTED, 12, "the call was interrupted; nothing has changed")                                                     \
    X(DEVICE_LOCKED, 13, "another process holds the exclusive lock or is served first")

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

/* The places for the contents of an allocation while it is paused: TMS_BACKUP_<kind>, its number, its name. The numbers are
 * part of the ABI; `_core` of the Python package has both names. */
#define TMS_BACKUP_KINDS(X)                                                                                                 \
    X(NONE, 0, "none")     /* contents are discarded */                                                                     \
    X(PINNED, 1, "pinned") /* pinned host memory */                                                                         \
    X(MMAP, 2, "mmap")     /* ordinary host memory, given back to the system at resume */                                   \
    X(DISK, 3, "disk")     /* a file in the backup directory */                                                             \
    X(SHARED, 4, "shared") /* one copy in memory for all processes of the user */

typedef enum tms_backup_kind {
#define TMS_BACKUP_KIND(kind, number, name) TMS_BACKUP_##kind = (number),
    TMS_BACKUP_KINDS(TMS_BACKUP_KIND)
#undef TMS_BACKUP_KIND
} tms_backup_kind_t;

/* The treatment of a backup's host memory once the contents are on the device again. The numbers are part of the ABI. */
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
    const char *tag;     /* UTF-8, not empty; the callee copies (interns) it. A returned tag is valid for ever */
    int32_t host_policy; /* tms_host_policy_t */
    int32_t own_handles; /* 1: each allocation has a physical handle of its own, also after a resume (core/model/run.h) */
} tms_region_settings_t;

/* A file descriptor of an allocation's physical memory, by which another process can map it.
 *
 * It belongs to this library and stays open until the allocation is paused or freed. Another process duplicates it by its
 * number (pidfd_getfd). Memory that another process has mapped stays allocated until that process unmaps it; a pause or free
 * here completes nevertheless. */
typedef struct tms_export {
    uint64_t address; /* address of the physical memory in which the allocation lies */
    uint64_t bytes;   /* size of the physical memory, all of which is one handle */
    /* Unique in this process for each piece of physical memory, and the same for every export of that piece. */
    uint64_t generation;
    int32_t device;
    int32_t descriptor;
} tms_export_t;

enum { TMS_REPORT_TAGS = 4 };

/* The report that one pause or resume returns. */
typedef struct tms_report {
    uint64_t allocations;  /* number of allocations that changed state */
    uint64_t bytes;        /* physical bytes released or mapped */
    uint64_t copied_bytes; /* bytes copied to or from backups */
    uint64_t unknown_tags; /* tags in the selection that no allocation ever had */
    double seconds;
    uint64_t unchanged_bytes;          /* a pause: bytes that were not copied, because a retained backup has them already */
    const char *tags[TMS_REPORT_TAGS]; /* names of the first tags of these allocations, valid for good; the rest is NULL */
    uint64_t tag_bytes[TMS_REPORT_TAGS]; /* the part of `bytes` that each of these tags has */
} tms_report_t;

/* A line of the log. Its text does not have the prefix that lines on stderr have. */
typedef struct tms_log_line {
    struct tms_log_line *next;
    int32_t level; /* 1: error, 2: warning, 3: info, 4: debug */
    char text[];   /* UTF-8, perhaps truncated inside a character */
} tms_log_line_t;

/* A resume that runs in the background. */
typedef struct tms_pending tms_pending_t;

/* A host copy that stays valid while a reference is held, even if the allocation it came from is freed. */
typedef struct tms_host_buffer tms_host_buffer_t;

/* Called on the thread that allocates, which may hold torch's locks: it must return at once. 0: it could not take note of
 * the device, and is called again at the next allocation. */
typedef int32_t (*tms_device_listener_t)(void *context, int32_t device);

enum { TMS_NO_SUCH_REGION = -1 }; /* a result of region_leave */

/* The byte that guard mode shows in place of contents: NaN in every floating type that has it. */
enum { TMS_GUARD_BYTE = 0xFF };
/* The result of count_guard_bytes for a range that is not on the device. */
#define TMS_NOT_RESIDENT UINT64_MAX

/* A part of device memory that publish makes an object of, or adopt fills: at least 256 KiB, at most 64 MiB, and a multiple
 * of 16 bytes. The address of a part that is published is a multiple of 16. */
typedef struct tms_shared_piece {
    uint64_t address, bytes, device;
} tms_shared_piece_t;
/* The number of hexadecimal digits in the name of an object. */
enum { TMS_OBJECT_NAME_DIGITS = 32 };

typedef struct tms_api {
#define TMS_C_FUNCTION(result, name, parameters) result(*name) parameters;
#include "include/tms_api.def"
} tms_api_t;

/* The table of the library that exports it, or NULL if that library was built with another interface (abi/interface.h). */
TMS_EXPORT const tms_api_t *tms_get_api(uint32_t interface);

/* The functions for torch.cuda.memory.CUDAPluggableAllocator. Any thread may call them, in or out of a region. A failure
 * returns NULL, which torch turns into torch.OutOfMemoryError. */
TMS_EXPORT void *tms_torch_malloc(ssize_t size, int device, void *stream);
TMS_EXPORT void tms_torch_free(void *address, ssize_t size, int device, void *stream);
/* The functions for pools of memory outside regions, in place of PyTorch's own calls: PyTorch makes no expandable segments
 * in a pool that has an allocator. `ordinary` makes memory that is not managed. `default` makes memory as the interposed
 * cudaMalloc does, which is managed where the calling thread's allocations are. The device gets access to managed memory of
 * the others before the allocation returns, and `ordinary` calls the listener of listen_devices. `free` takes memory of
 * both. */
TMS_EXPORT void *tms_torch_ordinary_malloc(ssize_t size, int device, void *stream);
TMS_EXPORT void *tms_torch_default_malloc(ssize_t size, int device, void *stream);
TMS_EXPORT void tms_torch_default_free(void *address, ssize_t size, int device, void *stream);

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
