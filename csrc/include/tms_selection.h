/* What pause and resume act on, and how: the table of their options, and the selection, by which the core gets its part of
 * them. Part of the ABI of tms.h. */
#ifndef TMS_INCLUDE_SELECTION_H
#define TMS_INCLUDE_SELECTION_H

#include <stddef.h>
#include <stdint.h>

/* The arguments of pause and resume: X(kind, name, default), in the order of the public signatures and of the functions of
 * `_core`. `default` is the public one, as Python writes it. `kind` says how the Python package checks a value
 * (torch_memory_saver/options.py), and how the extension fetches the checked value (csrc/python/selection.c).
 *
 * PUBLIC(...)  an option that only the Python package reads
 * SHARED(...)  an option whose checked value is an argument of the native functions as well
 * CORE(...)    an argument of the native functions only, which the Python package finds
 *
 * A new option of a kind that exists is a row and a field of tms_selection_t here, the code that acts on it, and the public
 * signature in torch_memory_saver/saver.py. `make stub` and `make pages` write the rest. */
#define TMS_PAUSE_OPTIONS(PUBLIC, SHARED, CORE)                                                                             \
    CORE(INTERRUPTIBLE, interruptible, "False")                                                                             \
    SHARED(BACKUP, backup, "None")                                                                                          \
    PUBLIC(FLAG, live_only, "True")                                                                                         \
    CORE(FIND_LIVE, find_live, "None")                                                                                      \
    SHARED(PROGRESS, progress, "None")                                                                                      \
    PUBLIC(IF_SHARED, if_shared, "'allow'")                                                                                 \
    PUBLIC(SECONDS, timeout, "10.0")                                                                                        \
    CORE(FLAG, preserves, "False")

#define TMS_RESUME_OPTIONS(PUBLIC, SHARED, CORE)                                                                            \
    CORE(INTERRUPTIBLE, interruptible, "False")                                                                             \
    SHARED(SECONDS, timeout, "None")                                                                                        \
    SHARED(FLAG, exclusive, "False")                                                                                        \
    SHARED(HOST_MEMORY, host_memory, "None")                                                                                \
    SHARED(FLAG, zero, "False")                                                                                             \
    SHARED(PROGRESS, progress, "None")                                                                                      \
    PUBLIC(FLAG, wait, "True")

/* The type of an argument of the native functions, and its value if it is not given, by kind. */
#define TMS_ARGUMENT_INTERRUPTIBLE "bool = False"
#define TMS_ARGUMENT_BACKUP        "int | None = None"
#define TMS_ARGUMENT_FIND_LIVE     "_FindLive = None"
#define TMS_ARGUMENT_PROGRESS      "_Progress = None"
#define TMS_ARGUMENT_FLAG          "bool = False"
#define TMS_ARGUMENT_SECONDS       "float = 0.0"
#define TMS_ARGUMENT_HOST_MEMORY   "int = 0"

/* The part of a signature in tms_api.def that is made from the rows. */
#define TMS_ARGUMENT(kind, name, standard) ", " #name ": " TMS_ARGUMENT_##kind
#define TMS_NO_ARGUMENT(kind, name, standard)
#define TMS_PAUSE_ARGUMENTS  TMS_PAUSE_OPTIONS(TMS_NO_ARGUMENT, TMS_ARGUMENT, TMS_ARGUMENT)
#define TMS_RESUME_ARGUMENTS TMS_RESUME_OPTIONS(TMS_NO_ARGUMENT, TMS_ARGUMENT, TMS_ARGUMENT)

/* The live bytes of some allocations, from torch's allocator. The arrays are sorted. The function that filled this in owns
 * them and keeps them valid until the call ends. */
typedef struct tms_live_range {
    uint64_t begin, end; /* [begin, end), inside one of `allocations`: one block, or neighbouring blocks */
} tms_live_range_t;

typedef struct tms_live {
    const uint64_t *allocations; /* addresses of the allocations described here; every byte of any other allocation is
                                    live */
    size_t allocation_count;
    const tms_live_range_t *ranges; /* do not overlap */
    size_t range_count;
    const uint64_t *used; /* NULL, or for each range, which is one block: where the bytes end that the program requested. A
                             shared backup keeps no more than these of a block */
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
    int32_t preserves; /* pause: find_live is called in any case, and the live bytes that it lists for allocations without a
                          backup are kept in pinned host memory. Read if has_backup is not set */
    /* NULL, or called with the number of bytes copied so far: on the calling thread, with no lock held, at most about every
     * 50 ms while the call copies, and once at the end. It must not call pause or resume. */
    void (*on_progress)(void *on_progress_context, uint64_t done_bytes, uint64_t total_bytes);
    void *on_progress_context;
} tms_selection_t;

#endif
