#include "device/device_queue.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"

enum {
    /* The text has the record and a line for each device. */
    TEXT_BYTES = TMS_LOCK_RECORD_BYTES + TMS_MAX_DEVICES * TMS_UUID_BYTES,
    BASE = 16,
    NOT_OPEN = -1
};

#define NAME_FORMAT "torch_memory_saver-%016llx-%016llx.ticket"

/* Reads the number of a ticket. False for other names. */
static bool parse(const char *name, unsigned long long *number) {
    char again[TMS_TICKET_BYTES];
    unsigned long long found, random;
    if (sscanf(name, "torch_memory_saver-%16llx-%16llx", &found, &random) != 2) return false;
    snprintf(again, sizeof(again), NAME_FORMAT, found, random);
    if (strcmp(name, again) != 0) return false;
    *number = found;
    return true;
}

static bool fail_at(tms_lock_failure_t *failure, const char *name, const char *call, int os_error) {
    tms_lock_append_name(failure, name);
    return tms_lock_fail(failure, call, os_error);
}

/* ---- the tickets of others ---- */

/* Returns the device that a ticket with this text shares with the request: one that its process holds, if there is one, else
 * one that it wants, or TMS_NO_DEVICE. */
static int find_shared(const char *text, const tms_queue_devices_t *devices) {
    int shared = TMS_NO_DEVICE;
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (!devices->device[i].uuid[0] || !strstr(text, devices->device[i].uuid)) continue;
        if (devices->device[i].held) return i;
        shared = i;
    }
    return shared;
}

/* Notes a ticket that is locked, if it is the earliest that concerns the request. */
static bool note(int fd, const char *name, const tms_queue_devices_t *devices, tms_queue_front_t *front,
                 tms_lock_failure_t *failure) {
    char text[TEXT_BYTES + 1];
    struct stat found;
    ssize_t length = pread(fd, text, TEXT_BYTES, 0);
    if (length < 0) return fail_at(failure, name, "pread", errno);
    if (fstat(fd, &found) != 0) return fail_at(failure, name, "fstat", errno);
    text[length] = '\0';
    int device = find_shared(text, devices);
    if (device == TMS_NO_DEVICE || (front->name[0] && strcmp(front->name, name) < 0)) return true;
    *front = (tms_queue_front_t){.renewed = found.st_mtim, .device = device, .record = tms_lock_record_read(fd)};
    memcpy(front->name, name, strlen(name) + 1);
    return true;
}

/* Looks at one earlier ticket, and removes it if its process is dead. */
static bool look_at(int directory, const char *name, const tms_queue_devices_t *devices, tms_queue_front_t *front,
                    tms_lock_failure_t *failure) {
    int fd = tms_lock_file_open(directory, name, 0, failure);
    if (fd < 0) return failure->os_error == ENOENT || fail_at(failure, name, failure->call, failure->os_error);
    int os_error = tms_lock_file_try(fd);
    bool looked = true;
    if (os_error == 0)
        (void)unlinkat(directory, name, 0); /* if this fails, it does not block: the next process finds it unlocked */
    else if (os_error != EWOULDBLOCK)
        looked = fail_at(failure, name, "flock", os_error);
    else
        looked = note(fd, name, devices, front, failure);
    close(fd);
    return looked;
}

/* Looks at every ticket before the request's own, and finds the highest number. */
static bool look_at_all(int directory, const tms_queue_devices_t *devices, tms_ticket_t *ticket, tms_queue_front_t *front,
                        tms_lock_failure_t *failure) {
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return tms_lock_fail(failure, "openat", errno);
    DIR *list = fdopendir(fd);
    if (!list) {
        tms_lock_fail(failure, "fdopendir", errno);
        close(fd);
        return false;
    }
    bool looked = true, waits = ticket->name[0];
    for (const struct dirent *entry; looked && (entry = readdir(list));) {
        unsigned long long number;
        if (!parse(entry->d_name, &number)) continue;
        if (waits && strcmp(entry->d_name, ticket->name) >= 0) continue;
        if (!waits && number > ticket->number) ticket->number = number;
        looked = look_at(directory, entry->d_name, devices, front, failure);
    }
    closedir(list);
    return looked;
}

/* Removes the ticket in front if its process is stopped. */
static void lose_patience(tms_device_queue_t *queue, int directory, tms_ticket_t *ticket, const tms_queue_front_t *front) {
    bool unchanged = strcmp(ticket->front.name, front->name) == 0 && ticket->front.renewed.tv_sec == front->renewed.tv_sec &&
                     ticket->front.renewed.tv_nsec == front->renewed.tv_nsec;
    ticket->polls = unchanged ? ticket->polls + 1 : 0;
    ticket->front = *front;
    if (ticket->polls < queue->patience) return;
    ticket->polls = 0;
    if (unlinkat(directory, front->name, 0) == 0)
        tms_log_write(queue->log, TMS_LOG_WARNING,
                      "process %ld is served later: it waits for device %d as this process does, came earlier, and has been "
                      "stopped for about five seconds.",
                      front->record.process, front->device);
}

/* ---- the request's own ticket ---- */

static void close_ticket(tms_ticket_t *ticket) {
    if (ticket->fd != NOT_OPEN) close(ticket->fd);
    ticket->fd = NOT_OPEN;
}

static int write_text(char text[TEXT_BYTES], const tms_queue_devices_t *devices) {
    int length = tms_lock_record_write(text);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (devices->device[i].wanted)
            length += snprintf(text + length, TEXT_BYTES - (size_t)length, "%s\n", devices->device[i].uuid);
    }
    return length;
}

/* Makes and locks the file of the ticket. It is written before it is locked, because only a locked ticket is read. Another
 * process may find it unlocked in between and remove it: then it is made again at the next poll. */
static bool make_file(int directory, const tms_queue_devices_t *devices, tms_ticket_t *ticket, tms_lock_failure_t *failure) {
    char text[TEXT_BYTES];
    int length = write_text(text, devices);
    close_ticket(ticket);
    ticket->fd = tms_lock_file_open(directory, ticket->name, O_CREAT, failure);
    if (ticket->fd < 0) return fail_at(failure, ticket->name, failure->call, failure->os_error);
    int os_error = 0;
    const char *call = "pwrite";
    ssize_t written = pwrite(ticket->fd, text, (size_t)length, 0);
    if (written != length) {
        os_error = written < 0 ? errno : ENOSPC;
    } else {
        call = "flock";
        os_error = tms_lock_file_try(ticket->fd);
    }
    if (os_error == 0) return true;
    close_ticket(ticket);
    return os_error == EWOULDBLOCK || fail_at(failure, ticket->name, call, os_error);
}

/* Renews the ticket, or makes it again if it was removed. */
static bool renew(int directory, const tms_queue_devices_t *devices, tms_ticket_t *ticket, tms_lock_failure_t *failure) {
    const size_t length = strlen(failure->path);
    bool current = false;
    if (ticket->fd != NOT_OPEN) {
        tms_lock_append_name(failure, ticket->name);
        if (!tms_lock_file_find_current(ticket->fd, &current, failure)) return false;
        if (current && futimens(ticket->fd, NULL) != 0) return tms_lock_fail(failure, "futimens", errno);
        failure->path[length] = '\0';
    }
    return current || make_file(directory, devices, ticket, failure);
}

bool tms_device_queue_poll(tms_device_queue_t *queue, const char *directory, const tms_queue_devices_t *devices,
                           tms_ticket_t *ticket, tms_lock_failure_t *failure) {
    tms_queue_front_t front = {.device = TMS_NO_DEVICE};
    int fd = tms_lock_directory_open(directory, failure);
    if (fd < 0) return false;
    bool looked =
        (!ticket->name[0] || renew(fd, devices, ticket, failure)) && look_at_all(fd, devices, ticket, &front, failure);
    const bool blocked = looked && front.name[0] && !devices->device[front.device].held;
    if (blocked) lose_patience(queue, fd, ticket, &front);
    close(fd);
    if (!blocked) return looked;
    failure->queued = true;
    failure->device = front.device;
    failure->earlier = front.record;
    return tms_lock_fail(failure, "flock", EWOULDBLOCK);
}

bool tms_device_queue_enter(tms_device_queue_t *queue, const char *directory, const tms_queue_devices_t *devices,
                            tms_ticket_t *ticket, tms_lock_failure_t *failure) {
    int fd = tms_lock_directory_open(directory, failure);
    if (fd < 0) return false;
    const unsigned long long now = tms_clock_nanoseconds(), next = ticket->number + 1;
    ticket->number = next > now ? next : now;
    snprintf(ticket->name, sizeof(ticket->name), NAME_FORMAT, ticket->number, (unsigned long long)tms_random_number());
    ticket->next = queue->waiting;
    queue->waiting = ticket;
    bool made = make_file(fd, devices, ticket, failure);
    close(fd);
    return made;
}

void tms_device_queue_leave(tms_device_queue_t *queue, const char *directory, tms_ticket_t *ticket) {
    tms_lock_failure_t ignored;
    if (!ticket->name[0]) return;
    for (tms_ticket_t **place = &queue->waiting; *place; place = &(*place)->next) {
        if (*place != ticket) continue;
        *place = ticket->next;
        break;
    }
    int fd = tms_lock_directory_open(directory, &ignored);
    if (fd >= 0) (void)unlinkat(fd, ticket->name, 0);
    if (fd >= 0) close(fd);
    /* Unlocked first: closing alone would leave the lock held by a child between fork and exec. */
    if (ticket->fd != NOT_OPEN) (void)flock(ticket->fd, LOCK_UN);
    close_ticket(ticket);
    ticket->name[0] = '\0';
}

void tms_device_queue_after_fork_in_child(tms_device_queue_t *queue) {
    /* Closed without unlocking, which would release the parent's locks. Without a name, a ticket is not removed. */
    for (tms_ticket_t *ticket = queue->waiting; ticket; ticket = ticket->next) {
        close_ticket(ticket);
        ticket->name[0] = '\0';
    }
    queue->waiting = NULL;
}
