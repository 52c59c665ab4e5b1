/* The part of the public C ABI that describes events (`events` of tms_api_t, base/events.h). Plain data. Needs neither
 * cuda.h nor Python.h. Include tms.h. */
#ifndef TMS_EVENTS_ABI_H
#define TMS_EVENTS_ABI_H

#include <stddef.h>
#include <stdint.h>

/* Events: TMS_EVENT_<kind>, its number, its name. The numbers are part of the ABI; `_core` has the names. A failure is an
 * event whose status is not TMS_OK. */
#define TMS_EVENT_KINDS(X)                                                                                                  \
    X(ALLOCATE, 0, "allocate")                                                                                              \
    X(FREE, 1, "free")                                                                                                      \
    X(BEGIN, 2, "begin")   /* a call of pause or resume has begun */                                                        \
    X(END, 3, "end")       /* it has ended: from its begin to its end */                                                    \
    X(PHASE, 4, "phase")   /* a part of it */                                                                               \
    X(MOVE, 5, "move")     /* what the call changed for one tag on one device */                                            \
    X(REPAIR, 6, "repair") /* an attempt to release the memory of a damaged allocation */                                   \
    X(MEMORY, 7, "memory") /* the free memory of a device, if sampled */

/* The phases of a call, in this order. Phases of `device` -1 follow each other on the thread of the call. Phases of a device
 * may overlap, because memory is mapped while contents are copied, and devices work in parallel. */
#define TMS_EVENT_PHASES(X)                                                                                                 \
    X(NONE, 0, "")                                                                                                          \
    X(TURN, 1, "turn")               /* waits for another pause or resume */                                                \
    X(SYNCHRONIZE, 2, "synchronize") /* waits for the devices */                                                            \
    X(PLAN, 3, "plan")               /* finds the live bytes, and reserves space for the backups */                         \
    X(CREATE, 4, "create")           /* a device's: makes physical memory */                                                \
    X(MAP, 5, "map")                 /* a device's: maps it and gives access */                                             \
    X(COPY, 6, "copy")               /* a device's: to the backups or from them */                                          \
    X(UNMAP, 7, "unmap")             /* unmaps and releases, or undoes a resume */                                          \
    X(DISCARD, 8, "discard")         /* backups that are no longer needed */                                                \
    X(WAIT, 9, "wait")               /* a resume with a timeout: for memory that others hold */

typedef enum tms_event_kind {
#define TMS_EVENT_KIND(kind, number, name) TMS_EVENT_##kind = (number),
    TMS_EVENT_KINDS(TMS_EVENT_KIND)
#undef TMS_EVENT_KIND
} tms_event_kind_t;

typedef enum tms_event_phase {
#define TMS_EVENT_PHASE(phase, number, name) TMS_PHASE_##phase = (number),
    TMS_EVENT_PHASES(TMS_EVENT_PHASE)
#undef TMS_EVENT_PHASE
} tms_event_phase_t;

/* The memory that one or more allocations hold. In a change, each member is a difference modulo 2^64. */
typedef struct tms_footprint {
    uint64_t resident_bytes; /* physical memory that is mapped */
    uint64_t paused_bytes;   /* reserved, without physical memory */
    uint64_t backup_bytes;   /* in host memory or a file */
} tms_footprint_t;

/* One event. Fields that do not apply are 0, NULL or, for `device`, -1. */
typedef struct tms_event {
    uint64_t began, ended;    /* nanoseconds of CLOCK_MONOTONIC; equal for an event without a duration */
    uint64_t busy;            /* PHASE: nanoseconds inside it, where it alternates with another one */
    uint64_t call;            /* the number of its call of pause or resume; the first is 1 */
    uint64_t address;         /* ALLOCATE, FREE, REPAIR */
    uint64_t allocations;     /* END, PHASE, MOVE: their number */
    uint64_t bytes;           /* ALLOCATE: requested; END: moved; PHASE: moved or copied; MEMORY: free */
    uint64_t copied_bytes;    /* END */
    uint64_t unchanged_bytes; /* END of a pause: not copied, because retained backups have them already */
    uint64_t total_bytes;     /* MEMORY: of the device */
    tms_footprint_t change;
    const char *operation; /* the call's operation: "pause", "resume", ...; valid for ever, like the tag */
    const char *tag;
    int32_t kind;          /* tms_event_kind_t */
    int32_t phase;         /* PHASE: tms_event_phase_t */
    int32_t status;        /* tms_status_t */
    int32_t driver_result; /* CUresult of the failed driver call */
    int32_t device;
    int32_t thread; /* the kernel's number of the thread that recorded it */
} tms_event_t;

/* The memory that allocations of one tag on one device hold after the last event. */
typedef struct tms_event_level {
    const char *tag;
    int32_t device;
    int32_t reserved;
    tms_footprint_t holds;
} tms_event_level_t;

/* The answer of `events`. The caller sets the arrays and their room. */
typedef struct tms_events_copy {
    tms_event_t *events; /* the latest events, the oldest first */
    size_t event_room, event_count;
    tms_event_level_t *levels;      /* several rows may have the same tag and device, and add up */
    size_t level_room, level_count; /* `level_count` may be larger than the room; the rows are not complete then */
    uint64_t recorded;              /* events so far: the first one copied is number recorded - event_count */
    uint64_t capacity;              /* maximum number of events that are kept */
} tms_events_copy_t;

#endif
