/* A thread that plays the device process of the simulated GPU: the other end of the socket. A request is text:
 *   "double ADDRESS BYTES"  doubles these bytes, at the program's own address
 *   "say TEXT"              replies TEXT
 *   "fail TEXT"             replies that it failed, with TEXT
 *   "leave"                 closes the socket instead of a reply */
#ifndef TMS_TESTS_DEVICE_PROCESS_H
#define TMS_TESTS_DEVICE_PROCESS_H

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "simulated_cuda.h"
#include "simulator/operators/channel.h"

enum { MAX_PLACES = 8, REQUEST_BYTES = 128 };

/* The received requests. Read with `looked_at` only while no request is in flight. */
typedef struct device_process {
    int socket, ours; /* its end, and the number of the simulator's end */
    bool running;     /* started and not yet ended */
    pthread_t thread;
    pthread_mutex_t lock;
    unsigned requests, files;
    uint64_t last_file;
    uint64_t last_number;                   /* of the last request */
    sim_placement_t placements[MAX_PLACES]; /* of the last request */
    uint32_t place_count;
} device_process_t;

static bool receive_bytes(int socket, void *to, size_t bytes) {
    return bytes == 0 || recv(socket, to, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

/* A message, and the file that came with it, or -1. */
static bool receive_message(int socket, sim_message_t *message, int *file) {
    struct iovec bytes = {.iov_base = message, .iov_len = sizeof *message};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof *file)];
    } control = {0};
    struct msghdr whole = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.space};
    if (recvmsg(socket, &whole, MSG_WAITALL) != (ssize_t)sizeof *message) return false;
    const struct cmsghdr *rights = CMSG_FIRSTHDR(&whole);
    *file = -1;
    if (rights && rights->cmsg_type == SCM_RIGHTS) memcpy(file, CMSG_DATA(rights), sizeof *file);
    return true;
}

/* Returns the status of the reply. */
static uint32_t do_request(const char *request) {
    uint64_t address = 0, bytes = 0;
    if (sscanf(request, "double %" SCNu64 " %" SCNu64, &address, &bytes) == 2) {
        uint8_t *memory = (uint8_t *)(uintptr_t)address; /* NOLINT(performance-no-int-to-ptr) */
        for (uint64_t i = 0; i < bytes; i++) memory[i] = (uint8_t)(2 * memory[i]);
    }
    return strncmp(request, "fail ", 5) == 0 ? SIM_REPLY_FAILED : SIM_REPLY_DONE;
}

static bool answer_request(device_process_t *process, const sim_message_t *message) {
    char request[REQUEST_BYTES] = "";
    bool whole = message->count <= MAX_PLACES && message->bytes < sizeof request;
    pthread_mutex_lock(&process->lock);
    whole = whole && receive_bytes(process->socket, process->placements, message->count * sizeof *process->placements) &&
            receive_bytes(process->socket, request, message->bytes);
    process->requests++;
    process->last_number = message->number;
    process->place_count = message->count;
    pthread_mutex_unlock(&process->lock);
    if (!whole || strcmp(request, "leave") == 0) return false;
    const char *text = strncmp(request, "double", 6) == 0 ? "" : request + strcspn(request, " ") + 1;
    const sim_message_t reply = {.kind = do_request(request), .bytes = strlen(text)};
    return send(process->socket, &reply, sizeof reply, MSG_NOSIGNAL) == (ssize_t)sizeof reply &&
           (reply.bytes == 0 || send(process->socket, text, reply.bytes, MSG_NOSIGNAL) == (ssize_t)reply.bytes);
}

static bool skip_stale(device_process_t *process, uint32_t count) {
    sim_stale_t stale;
    for (; count; count--) {
        if (!receive_bytes(process->socket, &stale, sizeof stale)) return false;
    }
    return true;
}

static void *play_device_process(void *argument) {
    device_process_t *process = argument;
    sim_message_t message;
    int file = -1;
    while (receive_message(process->socket, &message, &file)) {
        if (message.kind == SIM_MESSAGE_RUN) {
            if (!answer_request(process, &message)) break;
            continue;
        }
        if (message.kind == SIM_MESSAGE_FORGET) {
            if (!skip_stale(process, message.count)) break;
            continue;
        }
        pthread_mutex_lock(&process->lock);
        process->files += file >= 0;
        process->last_file = message.bytes;
        pthread_mutex_unlock(&process->lock);
        if (file >= 0) close(file);
    }
    shutdown(process->socket, SHUT_RDWR);
    return NULL;
}

/* Its thread uses `process` until the end: a variable that outlives a failed test, which its teardown ends. */
static void start_device_process(device_process_t *process) {
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    *process = (device_process_t){.socket = ends[0], .ours = ends[1], .lock = PTHREAD_MUTEX_INITIALIZER};
    assert_int_equal(pthread_create(&process->thread, NULL, play_device_process, process), 0);
    process->running = true;
    CALL(attach_device_process, ends[1]);
}

/* Nothing if it was ended before. The simulator's end is closed when another is attached, or was closed when the player
 * left. */
static void end_device_process(device_process_t *process) {
    if (!process->running) return;
    process->running = false;
    shutdown(process->socket, SHUT_RDWR);
    pthread_join(process->thread, NULL);
    close(process->socket);
}

static unsigned requests_of(device_process_t *process) {
    pthread_mutex_lock(&process->lock);
    unsigned requests = process->requests;
    pthread_mutex_unlock(&process->lock);
    return requests;
}

static unsigned files_of(device_process_t *process) {
    pthread_mutex_lock(&process->lock);
    unsigned files = process->files;
    pthread_mutex_unlock(&process->lock);
    return files;
}

#endif
