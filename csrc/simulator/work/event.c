/* Interprocess events: a piece of shared memory with the number of the last record and of the last completed record. A
 * change sends no signal, so a thread that waits for another process polls every millisecond. */
#include "simulator/work/event.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"

struct sim_shared_event {
    _Atomic(uint64_t) records, completed;
    _Atomic(int) recorder; /* the process that made the last record */
};

bool sim_event_attach(sim_event_t *event, int file) {
    void *shared = mmap(NULL, sizeof(sim_shared_event_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return false;
    event->shared = shared;
    event->shared_file = file;
    return true;
}

bool sim_event_share(sim_event_t *event) {
    int file = memfd_create("simulated event", MFD_CLOEXEC);
    if (file < 0) return false;
    if (ftruncate(file, sizeof(sim_shared_event_t)) == 0 && sim_event_attach(event, file)) return true;
    close(file);
    return false;
}

static void stop_sharing(sim_event_t *event) {
    if (!event->shared) return;
    munmap(event->shared, sizeof *event->shared);
    close(event->shared_file);
    event->shared = NULL;
}

static uint64_t count_shared_record(sim_event_t *event) {
    atomic_store(&event->shared->recorder, getpid());
    return atomic_fetch_add(&event->shared->records, 1) + 1;
}

static void reach_shared(sim_event_t *event, uint64_t number) {
    uint64_t known = atomic_load(&event->shared->completed);
    while (known < number && !atomic_compare_exchange_weak(&event->shared->completed, &known, number)) {
    }
}

bool sim_event_is_remote(const sim_event_t *event, uint64_t *number) {
    if (!event->shared) return false;
    *number = atomic_load(&event->shared->records);
    return *number != event->records;
}

bool sim_event_remote_reached(const sim_event_t *event, uint64_t number) {
    if (atomic_load(&event->shared->completed) >= number) return true;
    /* A GPU completes or cancels the work of an exited process, so the wait must end. */
    return kill(atomic_load(&event->shared->recorder), 0) != 0 && errno == ESRCH;
}

sim_event_t *sim_event_new(unsigned flags) {
    sim_event_t *event = calloc(1, sizeof *event);
    if (!event) return NULL;
    *event = (sim_event_t){.id = sim_state_new_id(), .references = 1, .flags = flags, .shared_file = -1};
    if (sim_table_insert(&sim_state.events, event->id, event)) return event;
    free(event);
    return NULL;
}

void sim_event_release(sim_event_t *event) {
    if (--event->references) return;
    stop_sharing(event);
    sim_ids_clear(&event->nodes);
    free(event);
}

void sim_event_clear(void) {
    for (size_t i = 0; i < sim_state.events.count; i++) sim_event_release(sim_state.events.slots[i].value);
    sim_table_release(&sim_state.events);
}

void sim_event_reach(sim_event_t *event, uint64_t number) {
    if (event->shared) reach_shared(event, number);
    if (number < event->completed) return;
    event->completed = number;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
}

uint64_t sim_event_note(sim_event_t *event, const sim_stream_t *stream, uint64_t position) {
    event->stream = stream->id;
    event->device = stream->context->device;
    event->position = position;
    event->captured = false;
    event->capture = NULL;
    event->records = event->shared ? count_shared_record(event) : event->records + 1;
    return event->records;
}
