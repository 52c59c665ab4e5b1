/* The types of the shared store: the store, the objects that this process holds, and what a segment keeps in it.
 * docs/architecture-shared-store.md describes the whole. Only backup/shared includes this, operations.h for the store, and
 * the calls publish and adopt of the core (core/transition/object_call.h).
 *
 * Layers, each of which calls only those before it: names; folder; published; entry; types; object; jobs; registrar;
 * ring; contents; store; copy; operations.
 *
 * Lock: `lock` is a leaf but for the host store's. It is held across opening, linking and unlinking files, and
 * writing a manifest, never across a driver call or a copy of contents. */
#ifndef TMS_SHARED_TYPES_H
#define TMS_SHARED_TYPES_H

#include <pthread.h>
#include <stdatomic.h>

#include "backup/host/store.h"
#include "backup/shared/entry.h"
#include "device/copier.h"
#include "device/fingerprinter.h"

/* An object that segments of this process keep. Under the store's lock; `name`, `bytes` and `device` are constant, and so is
 * `memory` once it is set. The lanes of a ring read `known` without the lock. */
typedef struct tms_shared_object {
    struct tms_shared_object *of_bucket;       /* the next one with the same first digits */
    struct tms_shared_object *previous, *next; /* of all objects, also of those that the registrar has yet to end */
    tms_shared_name_t name;
    uint64_t bytes;
    const char *memory;          /* all of it, PROT_READ; NULL: this process does not have it yet */
    int device;                  /* it is registered in the context of this device, for all devices */
    unsigned users;              /* contents that refer to it */
    unsigned registration_users; /* number of users that want it registered */
    _Atomic bool known; /* it is found by its name: the holder of the folder that is open has a link, or will have */
    bool being_written; /* a thread of this process writes it */
    int claim;          /* the descriptor of the file that it writes, whose lock is the claim; -1: none */
    bool made;          /* by this process, and by no other one before */
    bool registered;
    bool busy;  /* the registrar makes a driver call for it */
    bool stuck; /* the driver has failed to end its registration, and no call has tried again */
} tms_shared_object_t;

enum { TMS_SHARED_BUCKETS = 1024 };

/* A process that makes no progress with an object that it writes, at so many polls in a row, a millisecond apart, is
 * stopped, or as good as that. Looks are counted and no time, so that a stall of the whole machine does not count. */
enum { TMS_SHARED_PATIENCE = 1000 };

/* The registrar begins no registration for so long after a call. */
#define TMS_SHARED_QUIET_SECONDS 0.25

typedef struct tms_shared_store {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* the registrar has ended, or an object is no longer being written */
    const char *configured; /* TMS_SHARED_DIR; owned by the configuration */
    const tms_copying_t *copying;
    tms_host_store_t *host; /* the memory of private contents and of the ring */
    tms_fingerprinter_t *fingerprinter;
    tms_shared_folder_t folder;
    tms_shared_object_t *buckets[TMS_SHARED_BUCKETS];
    tms_shared_object_t *objects;
    struct tms_shared_contents *kept; /* contents of no segment (store.h) */
    _Atomic bool committed;           /* a pause has kept something in the store, and has not ended */
    int patience;                     /* TMS_SHARED_PATIENCE; tests use others */
    bool left_links; /* an unlink has failed, or may have: the holder may have a link that belongs to no object here */
    bool registrar_runs;
    bool in_call;                /* a call has the turn, so the registrar begins no driver call */
    double quiet_until;          /* the registrar begins no registration before (tms_wait_now) */
    bool refuses;                /* the driver has failed to register an object since the last pause */
    bool closing;                /* at exit: no driver call may begin any more, and no object is linked or claimed */
    _Atomic uint64_t held_bytes; /* of all objects that this process has and uses */
    _Atomic uint64_t made_bytes; /* part of them: objects that this process has made */
    _Atomic uint64_t file_nanoseconds, copy_nanoseconds, wait_nanoseconds;         /* the counters of these names */
    _Atomic bool warned_private, warned_not_registered, warned_stuck, warned_left; /* the line has been logged */
} tms_shared_store_t;

/* One extent that is an object. */
typedef struct tms_shared_part {
    uint64_t offset; /* in the segment */
    uint64_t bytes;
    tms_shared_object_t *object; /* a reference; NULL: `alone` has the contents */
    tms_host_buffer_t *alone;    /* a private copy, because the object's writer made no progress */
} tms_shared_part_t;

/* The contents of one segment in the shared store: the slot's `kept` and `fresh`. */
typedef struct tms_shared_contents {
    tms_shared_part_t *parts; /* sorted */
    size_t part_count;
    tms_backup_content_t rest;             /* the other extents, packed in `buffer` */
    tms_host_buffer_t *buffer;             /* NULL: `rest` is empty, or was discarded after a resume */
    bool wants_registration;               /* its objects are to be registered */
    struct tms_shared_contents *next_kept; /* in the store's list of contents of no segment */
} tms_shared_contents_t;

#endif
