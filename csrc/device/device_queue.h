/* The order of the requests that wait for locks of devices (device_lock.h): first come, first served.
 *
 * A request that has to wait takes a *ticket*: a file torch_memory_saver-<number>-<random number>.ticket in the directory
 * of the locks. Its number is greater than every number found there, and at least the monotonic time in nanoseconds, so
 * that a ticket which was removed and is made again comes before all that were made in between. The order of the requests
 * is that of the names, in which the random number decides between requests that come at the same moment.
 * The file contains the process id, for messages, and the UUIDs of all devices that the request wants. Its waiter keeps it
 * locked (flock), and removes it when it is served, runs out of time or is interrupted. The kernel releases the lock of a
 * process that ends in any way, also one in another PID namespace. A process that finds an unlocked ticket removes it.
 *
 * The earliest ticket that names a device which the request wants, or which its process holds, decides. If it names a held
 * device, the request goes on, because that ticket waits for its process, and those behind it may wait for that ticket.
 * Otherwise it *blocks* the request. A process that holds all wanted devices does not look at the queue.
 *
 * A request tries the locks of its devices only while no ticket blocks it. All tickets are in one order, so requests for
 * several devices cannot wait for each other, and a request keeps its place at all of them. A process that releases its
 * devices and asks again is behind everybody who waits. So each of N processes that take the devices in turns is served
 * after N - 1 turns at most. A turn ends when the process holds none of the devices: its threads share it.
 *
 * Each poll of a waiter renews the modification time of its ticket. A waiter that is blocked by the same ticket, with the
 * same time, at TMS_QUEUE_PATIENCE polls in a row (about five seconds) removes the ticket, because its process is stopped. A
 * process that goes on makes its ticket again, under the same name, and so has its old place.
 *
 * Only the order depends on tickets. If some are removed, no two processes hold a device at once.
 *
 * The queue of a process lists its own waiting tickets, so that a forked child closes the copies of their descriptors.
 * Every function is called with the mutex of the device locks held. */
#ifndef TMS_DEVICE_QUEUE_H
#define TMS_DEVICE_QUEUE_H

#include <time.h>

#include "base/log.h"
#include "device/device.h"
#include "device/lock_file.h"

enum {
    TMS_TICKET_BYTES = 64,  /* "torch_memory_saver-<16 digits>-<16 digits>.ticket" and its NUL */
    TMS_QUEUE_PATIENCE = 50 /* polls, 0.1 seconds apart */
};

/* The devices that concern a request, by number. */
typedef struct tms_queue_devices {
    struct {
        char uuid[TMS_UUID_BYTES]; /* "": neither wanted nor held */
        bool wanted, held;         /* by the request; by its process */
    } device[TMS_MAX_DEVICES];
} tms_queue_devices_t;

/* A ticket of another request. */
typedef struct tms_queue_front {
    char name[TMS_TICKET_BYTES]; /* "": none */
    struct timespec renewed;
    int device; /* one that it names */
    tms_lock_record_t record;
} tms_queue_front_t;

/* A request. Lives on the stack of its thread. */
typedef struct tms_ticket {
    struct tms_ticket *next;
    int fd;                      /* locked; -1: not made yet, or removed */
    char name[TMS_TICKET_BYTES]; /* "": does not wait */
    unsigned long long number;   /* the highest found; its own once it waits */
    tms_queue_front_t front;     /* the ticket that blocks it */
    int polls;                   /* consecutive polls at which `front` was unchanged */
} tms_ticket_t;

typedef struct tms_device_queue {
    const tms_log_t *log;
    int patience;          /* TMS_QUEUE_PATIENCE, except in tests */
    tms_ticket_t *waiting; /* of the threads of this process */
} tms_device_queue_t;

/* Whether no ticket blocks the request. If one does, the failure is EWOULDBLOCK, `queued`, with the process of the ticket.
 * Renews the request's own ticket. */
bool tms_device_queue_poll(tms_device_queue_t *queue, const char *directory, const tms_queue_devices_t *devices,
                           tms_ticket_t *ticket, tms_lock_failure_t *failure);
/* Takes a ticket, after a poll. */
bool tms_device_queue_enter(tms_device_queue_t *queue, const char *directory, const tms_queue_devices_t *devices,
                            tms_ticket_t *ticket, tms_lock_failure_t *failure);
/* Removes the ticket, if there is one. A failure leaves a file that is not locked, which others remove. */
void tms_device_queue_leave(tms_device_queue_t *queue, const char *directory, tms_ticket_t *ticket);
void tms_device_queue_after_fork_in_child(tms_device_queue_t *queue);

#endif
