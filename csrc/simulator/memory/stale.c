#include "simulator/memory/stale.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 16 };

void sim_stale_add(sim_stale_t entry) {
    if (sim_state.stale_count == sim_state.stale_capacity) {
        size_t capacity = sim_state.stale_capacity ? 2 * sim_state.stale_capacity : FIRST_CAPACITY;
        void *grown = realloc(sim_state.stale, capacity * sizeof *sim_state.stale);
        if (!grown) return;
        sim_state.stale = grown;
        sim_state.stale_capacity = capacity;
    }
    sim_state.stale[sim_state.stale_count++] = entry;
}

sim_stale_t *sim_stale_take(size_t *count) {
    sim_stale_t *taken = sim_state.stale;
    *count = sim_state.stale_count;
    sim_state.stale = NULL;
    sim_state.stale_count = sim_state.stale_capacity = 0;
    return taken;
}
