/* Events that processes share: a page of memory that both see, with the number of the last record and of the last that was
 * reached. Nobody announces a change there, so who waits for another process's record looks again every millisecond. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_ipc.h"
#include "sim_modules.h"

struct sim_shared_event {
    _Atomic(uint64_t) records, completed;
    _Atomic(int) recorder; /* the process of the last record */
};

static bool attach(sim_event_t *event, int file) {
    void *page = mmap(NULL, sizeof(sim_shared_event_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return false;
    event->shared = page;
    event->shared_file = file;
    return true;
}

bool sim_event_share(sim_event_t *event) {
    int file = memfd_create("simulated event", MFD_CLOEXEC);
    if (file < 0) return false;
    if (ftruncate(file, sizeof(sim_shared_event_t)) == 0 && attach(event, file)) return true;
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
    /* A GPU finishes what a dead process gave it, or drops it; nobody waits for ever. */
    return kill(atomic_load(&event->shared->recorder), 0) != 0 && errno == ESRCH;
}

CUresult sim_ipc_event_handle(CUipcEventHandle *handle, CUevent event_handle) {
    const sim_event_t *event = sim_table_find(&sim_state.events, (uint64_t)(uintptr_t)event_handle);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->shared || event->imported) return CUDA_ERROR_INVALID_VALUE;
    const sim_ipc_name_t name = {.kind = SIM_IPC_EVENT, .process = getpid(), .file = event->shared_file};
    return sim_ipc_write(&name, handle->reserved);
}

CUresult sim_ipc_open_event(CUevent *event, CUipcEventHandle handle) {
    sim_ipc_name_t name;
    if (!event) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_ipc_read(&name, handle.reserved, SIM_IPC_EVENT)) return CUDA_ERROR_INVALID_VALUE;
    if (name.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int file = sim_ipc_open(&name);
    if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
    sim_event_t *opened = sim_event_new(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    if (!opened || !attach(opened, file)) {
        if (opened) {
            sim_table_remove(&sim_state.events, opened->id);
            sim_event_release(opened);
        }
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    opened->imported = true;
    *event = (CUevent)(uintptr_t)opened->id;
    return CUDA_SUCCESS;
}
