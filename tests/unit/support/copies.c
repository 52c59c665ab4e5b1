#include "copies.h"

#include <stdatomic.h>

void hold_copies(void) { simulator()->set_bandwidth(1); }
void release_copies(void) { simulator()->set_bandwidth(0); }

/* ---- until a wait ---- */

static _Atomic int waits_left;
static tms_driver_table_t original;

static void note_wait(void) {
    if (atomic_fetch_sub(&waits_left, 1) == 1) release_copies();
}

static CUresult wait_for_event(CUevent event) {
    note_wait();
    return original.cuEventSynchronize(event);
}

static CUresult wait_for_stream(CUstream stream) {
    note_wait();
    return original.cuStreamSynchronize(stream);
}

static CUresult wait_for_context(void) {
    note_wait();
    return original.cuCtxSynchronize();
}

void hold_copies_until_wait(fixture_t *fixture, int number) {
    tms_driver_table_t *table = writable(fixture);
    if (table->cuEventSynchronize != wait_for_event) original = *table;
    table->cuEventSynchronize = wait_for_event;
    table->cuStreamSynchronize = wait_for_stream;
    table->cuCtxSynchronize = wait_for_context;
    atomic_store(&waits_left, number);
    hold_copies();
}

/* ---- slowly ---- */

void copy_slowly(fixture_t *fixture, uint64_t chunk_bytes) {
    const double margin = 1.25, chunk_seconds = margin * TMS_WAIT_POLL_SECONDS;
    fixture->saver.stores.copying.chunk_bytes = chunk_bytes;
    fixture->saver.stores.disk.staging_bytes = chunk_bytes; /* rounded up */
    simulator()->set_bandwidth((uint64_t)((double)chunk_bytes / chunk_seconds));
}
