/* Interprocess events: a page of shared memory with the number of the last record and of the last completed record. A
 * change sends no signal, so a thread that waits for another process polls every millisecond. */
#include "simulator/work/event_shared.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct sim_shared_event {
    _Atomic(uint64_t) records, completed;
    _Atomic(int) recorder; /* the process that made the last record */
};

bool sim_event_attach(sim_event_t *event, int file) {
    void *page = mmap(NULL, sizeof(sim_shared_event_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return false;
    event->shared = page;
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

void sim_event_unshare(sim_event_t *event) {
    if (!event->shared) return;
    munmap(event->shared, sizeof *event->shared);
    close(event->shared_file);
    event->shared = NULL;
}

uint64_t sim_event_shared_record(sim_event_t *event) {
    atomic_store(&event->shared->recorder, getpid());
    return atomic_fetch_add(&event->shared->records, 1) + 1;
}

void sim_event_shared_reach(sim_event_t *event, uint64_t number) {
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
