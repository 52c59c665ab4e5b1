/* File descriptors that other processes duplicate by their numbers (pidfd_getfd).
 *
 * Such a number must not come to mean another file soon after it was closed, because messages that name it may still be on
 * their way. So descriptors are moved into a window of numbers that the kernel gives to other files only if all lower ones
 * are in use, and each new one gets the next number of the window. A number returns after as many descriptors as the window
 * is wide.
 *
 * Descriptors are closed on exec and in forked children: a copy there would keep the memory behind it.
 *
 * Any thread. `lock` is a leaf, and is held during dup and close. */
#ifndef TMS_DESCRIPTORS_H
#define TMS_DESCRIPTORS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { TMS_MAX_DESCRIPTORS = 4096, TMS_DESCRIPTORS_LOWEST = 4096 };

typedef struct tms_descriptors {
    pthread_mutex_t lock;
    int first, count;                        /* the window: [first, first + count). count 0: not chosen yet */
    int next;                                /* where the search for the next number begins */
    uint64_t open[TMS_MAX_DESCRIPTORS / 64]; /* bit i: first + i is open */
} tms_descriptors_t;

/* One descriptor; all zero if there is none. Its holder calls the functions below with its own lock held, or is its only
 * user. */
typedef struct tms_descriptor {
    tms_descriptors_t *among;
    int number;
} tms_descriptor_t;

tms_status_t tms_descriptors_init(tms_descriptors_t *descriptors, tms_error_t *error);
void tms_descriptors_release(tms_descriptors_t *descriptors);
/* In a forked child, with `lock` held by the forking thread: closes all of them. */
void tms_descriptors_after_fork_in_child(tms_descriptors_t *descriptors);

/* Moves the open file `given` into the window; closes `given` in any case. TMS_INVALID_STATE if the window is full or the
 * process may not open more files. */
tms_status_t tms_descriptors_adopt(tms_descriptors_t *descriptors, int given, tms_descriptor_t *adopted,
                                   const tms_error_context_t *context, tms_error_t *error);
/* Closes the descriptor, if there is one. */
void tms_descriptor_close(tms_descriptor_t *descriptor);

#endif
