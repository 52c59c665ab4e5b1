#include "simulator/operators/channel.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FIRST_CAPACITY = 16 };

/* Separate from the simulator's state, because the simulator's lock is not held here. */
static struct {
    pthread_mutex_t lock;
    pthread_once_t forks;
    _Atomic(int) socket; /* -1: none */
    uint64_t *sent;      /* inodes of the files that the device process has open */
    size_t sent_count, sent_capacity;
} channel = {.lock = PTHREAD_MUTEX_INITIALIZER, .forks = PTHREAD_ONCE_INIT, .socket = -1};

/* The device process exits when the last descriptor of the socket is closed, so a forked child must not keep one. */
static void close_in_child(void) {
    int socket = atomic_exchange(&channel.socket, -1);
    if (socket >= 0) close(socket);
}

static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, close_in_child); }

void sim_channel_attach(int socket) {
    (void)pthread_once(&channel.forks, watch_forks);
    pthread_mutex_lock(&channel.lock);
    int before = atomic_exchange(&channel.socket, socket);
    if (before >= 0) close(before);
    channel.sent_count = 0;
    pthread_mutex_unlock(&channel.lock);
}

bool sim_channel_attached(void) { return atomic_load(&channel.socket) >= 0; }

static bool send_all(int socket, const void *from, size_t bytes, int flags) {
    const char *next = from;
    while (bytes) {
        ssize_t sent = send(socket, next, bytes, MSG_NOSIGNAL | flags);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return false;
        next += sent;
        bytes -= (size_t)sent;
    }
    return true;
}

static bool receive_all(int socket, void *to, size_t bytes) {
    char *next = to;
    while (bytes) {
        ssize_t got = recv(socket, next, bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        next += got;
        bytes -= (size_t)got;
    }
    return true;
}

static bool was_sent(uint64_t file) {
    for (size_t i = 0; i < channel.sent_count; i++) {
        if (channel.sent[i] == file) return true;
    }
    return false;
}

static bool add_sent(uint64_t file) {
    if (channel.sent_count == channel.sent_capacity) {
        size_t capacity = channel.sent_capacity ? 2 * channel.sent_capacity : FIRST_CAPACITY;
        uint64_t *grown = realloc(channel.sent, capacity * sizeof *grown);
        if (!grown) return false;
        channel.sent = grown;
        channel.sent_capacity = capacity;
    }
    channel.sent[channel.sent_count++] = file;
    return true;
}

static bool send_file(int socket, uint64_t file, int descriptor) {
    sim_message_t message = {.kind = SIM_MESSAGE_FILE, .bytes = file};
    struct iovec bytes = {.iov_base = &message, .iov_len = sizeof message};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof descriptor)];
    } control = {0};
    struct msghdr packet = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.space};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&packet);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    ssize_t sent = 0;
    do {
        sent = sendmsg(socket, &packet, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof message && add_sent(file);
}

static void remove_sent(uint64_t file) {
    for (size_t i = 0; file && i < channel.sent_count; i++) {
        if (channel.sent[i] == file) channel.sent[i--] = channel.sent[--channel.sent_count];
    }
}

static bool send_stale(int socket, const sim_stale_t *stale, size_t count) {
    const sim_message_t message = {.kind = SIM_MESSAGE_FORGET, .count = (uint32_t)count};
    if (!count) return true;
    for (size_t i = 0; i < count; i++) remove_sent(stale[i].file);
    return send_all(socket, &message, sizeof message, MSG_MORE) && send_all(socket, stale, count * sizeof *stale, MSG_MORE);
}

static bool send_request(int socket, const sim_request_t *request) {
    const sim_message_t message = {
        .kind = SIM_MESSAGE_RUN, .count = (uint32_t)request->count, .bytes = request->bytes, .number = request->number};
    if (!send_stale(socket, request->stale, request->stale_count)) return false;
    for (size_t i = 0; i < request->count; i++) {
        uint64_t file = request->placements[i].file;
        if (!was_sent(file) && !send_file(socket, file, request->descriptors[i])) return false;
    }
    return send_all(socket, &message, sizeof message, MSG_MORE) &&
           send_all(socket, request->placements, request->count * sizeof *request->placements, MSG_MORE) &&
           send_all(socket, request->body, request->bytes, 0);
}

static bool receive_reply(int socket, sim_reply_t *reply) {
    sim_message_t message;
    if (!receive_all(socket, &message, sizeof message)) return false;
    char *text = malloc(message.bytes + 1);
    if (!text || !receive_all(socket, text, message.bytes)) {
        free(text);
        return false;
    }
    text[message.bytes] = '\0';
    *reply = (sim_reply_t){.status = (sim_reply_status_t)message.kind, .text = text, .bytes = message.bytes};
    return true;
}

bool sim_channel_call(const sim_request_t *request, sim_reply_t *reply) {
    pthread_mutex_lock(&channel.lock);
    int socket = atomic_load(&channel.socket);
    bool done = socket >= 0 && send_request(socket, request) && receive_reply(socket, reply);
    if (!done && socket >= 0) {
        fprintf(stderr, "simulated GPU: the device process has exited (%s): all further operators fail\n", strerror(errno));
        close(atomic_exchange(&channel.socket, -1));
    }
    pthread_mutex_unlock(&channel.lock);
    return done;
}
