#include "simulator/base/simulation.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

sim_state_t sim_state = {.lock = PTHREAD_MUTEX_INITIALIZER, .trace_file = -1, .shared_file = -1};

bool sim_state_forked(void) {
    int pid = atomic_load_explicit(&sim_state.pid, memory_order_relaxed);
    return pid != 0 && pid != getpid();
}

sim_thread_t *sim_state_thread(void) {
    static _Thread_local sim_thread_t thread;
    if (thread.epoch != sim_state.epoch) {
        uint64_t id = thread.id ? thread.id : atomic_fetch_add(&sim_state.next_thread, 1) + 1;
        thread = (sim_thread_t){.epoch = sim_state.epoch, .id = id, .mode = CU_STREAM_CAPTURE_MODE_GLOBAL};
    }
    return &thread;
}

bool sim_state_wait(void) {
    if (sim_state.stopping || sim_state.deinitialized) return false;
    pthread_cond_wait(&sim_state.changed, &sim_state.lock);
    return !sim_state.stopping && !sim_state.deinitialized;
}

bool sim_state_wait_briefly(void) {
    enum { POLL_NANOSECONDS = 1000000, NANOSECONDS = 1000000000 };
    struct timespec end;
    if (sim_state.stopping) return false;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += POLL_NANOSECONDS;
    if (end.tv_nsec >= NANOSECONDS) {
        end.tv_nsec -= NANOSECONDS;
        end.tv_sec++;
    }
    pthread_cond_timedwait(&sim_state.changed, &sim_state.lock, &end);
    return !sim_state.stopping && !sim_state.deinitialized;
}

void sim_state_changed(void) { pthread_cond_broadcast(&sim_state.changed); }

/* Signals once per wait. A signal at each check would let two waiting threads wake each other forever. */
void sim_state_begin_synchronizing(void) {
    sim_state.synchronizing++;
    sim_state_changed();
}

void sim_state_end_synchronizing(void) { sim_state.synchronizing--; }

/* Steps of 16 give identifiers the alignment of real pointers. */
uint64_t sim_state_new_id(void) { return sim_state.next_id += 16; }

bool sim_state_may_continue(const sim_stream_t *stream) {
    return !sim_state.stopping && !stream->cancelling && stream->context->error == CUDA_SUCCESS;
}
