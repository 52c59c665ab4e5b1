/* The socket to the device process, in which PyTorch's CPU kernels do what kernels do on a GPU.
 *
 * Owns the socket, and knows which files the device process has open. It has a lock of its own, because a request takes as
 * long as an operator: the simulator's lock must not be held. One request is under way at a time; requests never wait for
 * one another in the device process, so any order of them is right.
 *
 * The other end is torch_memory_saver/_simulate/operators/device_process.py. Messages, in the byte order of the machine:
 *   sim_message_t{SIM_MESSAGE_FILE, 0, id}     with the file as SCM_RIGHTS: memory that later requests name by the id
 *   sim_message_t{SIM_MESSAGE_FORGET, n, 0}    then n sim_forgotten_t: ranges and files that the program has no more
 *   sim_message_t{SIM_MESSAGE_RUN, n, bytes}   then n sim_placed_t, then the request
 *   sim_message_t{status, 0, bytes}            the reply to a request, then its bytes */
#ifndef TMS_SIM_OPERATORS_CHANNEL_H
#define TMS_SIM_OPERATORS_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/memory/forgotten.h"

typedef enum sim_message_kind { SIM_MESSAGE_FILE = 1, SIM_MESSAGE_RUN, SIM_MESSAGE_FORGET } sim_message_kind_t;

/* The status of a reply. */
typedef enum sim_reply_status { SIM_REPLY_DONE, SIM_REPLY_FAILED } sim_reply_status_t;

typedef struct sim_message {
    uint32_t kind; /* of a reply: its status */
    uint32_t count;
    uint64_t bytes;
} sim_message_t;

/* Where a part of an address range lies in a file. Parts of one range are adjacent for the device process as well. */
typedef struct sim_placed {
    uint64_t range, range_bytes; /* the reservation */
    uint64_t address, bytes;     /* one mapping in it */
    uint64_t file, offset;       /* the file's inode */
} sim_placed_t;

/* One request. `descriptors` are the files of the places, one for each. What is forgotten goes before the places are looked
 * at. */
typedef struct sim_request {
    const sim_placed_t *places;
    const int *descriptors;
    size_t count;
    const sim_forgotten_t *forgotten;
    size_t forgotten_count;
    const char *body;
    size_t bytes;
} sim_request_t;

typedef struct sim_reply {
    sim_reply_status_t status;
    char *text; /* the caller frees it; a NUL follows it */
    size_t bytes;
} sim_reply_t;

/* Takes the socket over. Any other before it is closed. */
void sim_channel_attach(int socket);
bool sim_channel_attached(void);
/* Sends a request and waits for its reply. False if the device process is gone, for good: then stderr was told once. */
bool sim_channel_call(const sim_request_t *request, sim_reply_t *reply);

#endif
