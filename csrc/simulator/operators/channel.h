/* The connection to the device process, which executes operators with PyTorch's CPU kernels.
 *
 * Owns the socket and the record of the files that the device process has open. Has its own lock, which is held for the
 * duration of an operator; the caller must not hold the simulator's lock. Any thread may call these functions. Only one
 * request is in flight. Requests do not depend on one another in the device process, so their order does not matter.
 *
 * The peer is torch_memory_saver/_simulate/operators/device_process.py. Messages, in host byte order:
 *   sim_message_t{SIM_MESSAGE_FILE, 0, id}     with the file as SCM_RIGHTS: later requests name this memory by its id
 *   sim_message_t{SIM_MESSAGE_FORGET, n, 0}    then n sim_stale_t: released ranges and files
 *   sim_message_t{SIM_MESSAGE_RUN, n, bytes, number}   then n sim_placement_t, then the request; the number is random
 *   sim_message_t{status, 0, bytes}            the reply to a request, then its bytes */
#ifndef TMS_SIM_OPERATORS_CHANNEL_H
#define TMS_SIM_OPERATORS_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/memory/physical.h"

typedef enum sim_message_kind { SIM_MESSAGE_FILE = 1, SIM_MESSAGE_RUN, SIM_MESSAGE_FORGET } sim_message_kind_t;

/* The status of a reply. */
typedef enum sim_reply_status { SIM_REPLY_DONE, SIM_REPLY_FAILED } sim_reply_status_t;

typedef struct sim_message {
    uint32_t kind; /* in a reply: sim_reply_status_t */
    uint32_t count;
    uint64_t bytes;
    uint64_t number; /* SIM_MESSAGE_RUN */
} sim_message_t;

/* The location of one mapping in a file. The device process maps a reservation's placements at the same relative
 * addresses, so adjacent mappings stay adjacent. */
typedef struct sim_placement {
    uint64_t range, range_bytes; /* the reservation */
    uint64_t address, bytes;     /* one mapping in the reservation */
    uint64_t file, offset;       /* inode and offset in the file */
} sim_placement_t;

/* One request. `descriptors` has one file for each placement. The device process handles the stale entries before the
 * placements. */
typedef struct sim_request {
    uint64_t number; /* a random number, or 0 */
    const sim_placement_t *placements;
    const int *descriptors;
    size_t count;
    const sim_stale_t *stale;
    size_t stale_count;
    const char *body;
    size_t bytes;
} sim_request_t;

typedef struct sim_reply {
    sim_reply_status_t status;
    char *text; /* NUL-terminated; the caller frees it */
    size_t bytes;
} sim_reply_t;

/* Takes ownership of the socket and closes an earlier one. */
void sim_channel_attach(int socket);
bool sim_channel_attached(void);
/* Sends a request and waits for its reply. False if the device process has exited; the failure is permanent and reported
 * once on stderr. */
bool sim_channel_call(const sim_request_t *request, sim_reply_t *reply);

#endif
