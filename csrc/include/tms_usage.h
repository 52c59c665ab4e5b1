/* What is managed, in numbers: the counters of the process, and rows about allocations, tags, devices and libraries. Part of
 * the ABI of tms.h, which has the functions that fill these in. */
#ifndef TMS_INCLUDE_USAGE_H
#define TMS_INCLUDE_USAGE_H

#include <stdint.h>

/* The counters of the process: X(name). */
#define TMS_COUNTERS(X)                                                                                                     \
    X(allocations)          /* managed allocations alive, every state */                                                    \
    X(allocations_total)    /* allocations ever made */                                                                     \
    X(frees_total)          /* allocations ever freed */                                                                    \
    X(resident_bytes)       /* physical bytes mapped now */                                                                 \
    X(paused_bytes)         /* reserved bytes without physical memory now */                                                \
    X(host_backup_bytes)    /* host memory held in backups now */                                                           \
    X(disk_backup_bytes)    /* bytes of backup files now */                                                                 \
    X(shared_backup_bytes)  /* bytes of the shared objects that this process holds now, each once */                        \
    X(shared_made_bytes)    /* part of shared_backup_bytes: objects that this process wrote */                              \
    X(pauses_total)         /* pauses that succeeded */                                                                     \
    X(resumes_total)        /* resumes that succeeded */                                                                    \
    X(failures_total)       /* pauses, resumes and allocations that failed */                                               \
    X(damaged)              /* allocations in state DAMAGED */                                                              \
    X(quarantined_handles)  /* physical allocations that the driver failed to release; the next call tries again */         \
    X(quarantined_ranges)   /* address ranges that the driver failed to free; the next call tries again */                  \
    X(deferred_frees)       /* frees that wait for the end of a capture, or for a device that could not be synchronized */  \
    X(visible_captures)     /* stream captures known to be active */                                                        \
    X(quarantined_host)     /* chunks of host memory that could not be released; the next call tries again */               \
    X(quarantined_other)    /* streams, events, context references and files that could not be released */                  \
    X(host_resident_bytes)  /* host memory in use: backups, pool, memory being released, files on a tmpfs */                \
    X(host_pooled_bytes)    /* part of host_resident_bytes: memory without contents, kept for later backups */              \
    X(guard)                /* 1: guard mode is on (set_guard) */                                                           \
    X(guarded_bytes)        /* reserved bytes of paused allocations at which a guard page is mapped now */                  \
    X(guard_failures_total) /* allocations paused without a guard page although guard mode was on */                        \
    X(resident_peak_bytes)  /* the most resident_bytes since the start, or since reset_peaks */                             \
    X(failed_pauses_total)  /* part of failures_total */                                                                    \
    X(failed_resumes_total) /* part of failures_total */                                                                    \
    X(failed_allocations_total)      /* part of failures_total */                                                           \
    X(pause_nanoseconds_total)       /* time of the pauses that succeeded */                                                \
    X(pause_bytes_total)             /* device memory that the pauses released */                                           \
    X(pause_copied_bytes_total)      /* bytes that the pauses copied */                                                     \
    X(pause_unchanged_bytes_total)   /* bytes that the pauses did not copy, as retained backups had them already */         \
    X(resume_nanoseconds_total)      /* time of the resumes that succeeded */                                               \
    X(resume_bytes_total)            /* device memory that the resumes mapped */                                            \
    X(resume_copied_bytes_total)     /* bytes that the resumes copied */                                                    \
    X(uncounted_allocations_total)   /* allocations of other libraries not counted for lack of host memory */               \
    X(slack_bytes)                   /* memory of freed allocations that their runs still hold; not in resident_bytes */    \
    X(deferred_bytes)                /* mapped memory of deferred_frees; not in resident_bytes */                           \
    X(shared_file_nanoseconds_total) /* time in which threads wrote or read the files of shared objects, summed */          \
    X(shared_copy_nanoseconds_total) /* time in which these threads waited for the device */                                \
    X(shared_wait_nanoseconds_total) /* time in which calls waited for objects that other processes were writing */

typedef struct tms_counters {
#define TMS_COUNTER(name) uint64_t name;
    TMS_COUNTERS(TMS_COUNTER)
#undef TMS_COUNTER
} tms_counters_t;

/* The states of an allocation: TMS_SEGMENT_<state>, its number, its name. */
#define TMS_SEGMENT_STATES(X)                                                                                               \
    X(ACTIVE, 0, "active")       /* mapped, readable and writable on the device */                                          \
    X(PAUSING, 1, "pausing")     /* owned by a pause() under way; mapped until it is done */                                \
    X(PAUSED, 2, "paused")       /* address reserved, no physical memory */                                                 \
    X(RESUMING, 3, "resuming")   /* owned by a resume() under way */                                                        \
    X(DAMAGED, 4, "damaged")     /* the driver failed to unmap it or to undo a resume: the address is never reused */       \
    X(REPAIRING, 5, "repairing") /* DAMAGED, and owned by a call that retries the release */

typedef enum tms_segment_state {
#define TMS_SEGMENT_STATE(state, number, name) TMS_SEGMENT_##state = (number),
    TMS_SEGMENT_STATES(TMS_SEGMENT_STATE)
#undef TMS_SEGMENT_STATE
} tms_segment_state_t;

/* The origin of the contents of an allocation. */
typedef enum tms_contents {
    TMS_CONTENTS_OWN = 0,      /* it was not resumed yet; also during a resume */
    TMS_CONTENTS_RESTORED = 1, /* the last resume has restored all that was live at the pause */
    TMS_CONTENTS_ZEROED = 2,   /* the last resume has zeroed it, except for preserved blocks */
    TMS_CONTENTS_GUARD = 3,    /* the last resume has filled it with TMS_GUARD_BYTE, except for preserved blocks */
    TMS_CONTENTS_UNDEFINED = 4 /* the last resume has done neither */
} tms_contents_t;

/* One allocation, as seen at one moment. */
typedef struct tms_segment_info {
    uint64_t address;
    uint64_t bytes;          /* size that was requested */
    uint64_t reserved_bytes; /* size of the address range, and of the physical memory while resident: whole granules */
    uint64_t backup_bytes;   /* size of its backup now */
    int32_t device;
    int32_t state;                   /* tms_segment_state_t */
    int32_t backup;                  /* tms_backup_kind_t */
    int32_t contents;                /* tms_contents_t */
    const char *tag;                 /* valid for ever */
    double allocated_at, changed_at; /* when it was made, and when its state last changed: seconds of CLOCK_MONOTONIC */
} tms_segment_info_t;

/* The allocations of one tag (`device` -1) or of one device (`tag` NULL). */
typedef struct tms_usage_info {
    const char *tag;
    int32_t device;
    uint64_t allocations;                                 /* number of allocations in every state */
    uint64_t bytes;                                       /* sum of the requested sizes */
    uint64_t resident_bytes, paused_bytes, damaged_bytes; /* reserved bytes, by state; their sum is all that is reserved */
    uint64_t backup_bytes;                                /* size of the backups now; 0 of those in transition */
    uint64_t resident_peak_bytes; /* the most physical memory of the tag or the device that was mapped at once, since the
                                     start or since reset_peaks; without what failed calls mapped and unmapped again */
    uint64_t slack_bytes;         /* memory of freed allocations that runs hold; in none of the other numbers */
    uint64_t deferred_bytes;      /* mapped memory of frees that wait (deferred_frees); in none of the other numbers */
} tms_usage_info_t;

enum { TMS_UUID_BYTES = 41 }; /* NUL included */

/* A device, as every process of the machine knows it. */
typedef struct tms_device_info {
    char uuid[TMS_UUID_BYTES]; /* UUID of the GPU as NVML writes it: "GPU-5d5ba0d6-..." */
    uint64_t total_bytes;
} tms_device_info_t;

/* Device memory that is not managed, of one library (or the program) that allocated it on one device. Preload mode only. */
typedef struct tms_library_info {
    const char *path; /* path of its file; "" for code that lies in no file; valid for ever */
    int32_t device;   /* -1: not known */
    int32_t reserved;
    uint64_t bytes;       /* sum of the requested sizes */
    uint64_t allocations; /* pieces of physical memory (cuMemCreate) included */
} tms_library_info_t;

/* The effects of pauses on a tag. A torch pool whose memory may be paused must not be entered; see _torch/pools/idle.py. */
typedef struct tms_tag_info {
    uint64_t paused;      /* allocations of the tag that are not ACTIVE */
    uint64_t pause_epoch; /* number of pauses that ever changed an allocation of this tag */
    uint64_t discards;    /* number of times that a pause discarded contents of an allocation of this tag */
} tms_tag_info_t;

/* One tag that a region or an allocation has had. */
typedef struct tms_tag_row {
    const char *name; /* valid for ever */
    int32_t used;     /* an allocation has had it */
    int32_t reserved;
} tms_tag_row_t;

#endif
