#include "simulator/memory/stale.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 16 };

static struct {
    sim_stale_t *entries;
    size_t count, capacity;
} stale;

void sim_stale_add(sim_stale_t entry) {
    if (stale.count == stale.capacity) {
        size_t capacity = stale.capacity ? 2 * stale.capacity : FIRST_CAPACITY;
        void *grown = realloc(stale.entries, capacity * sizeof *stale.entries);
        if (!grown) return;
        stale.entries = grown;
        stale.capacity = capacity;
    }
    stale.entries[stale.count++] = entry;
}

sim_stale_t *sim_stale_take(size_t *count) {
    sim_stale_t *taken = stale.entries;
    *count = stale.count;
    stale.entries = NULL;
    stale.count = stale.capacity = 0;
    return taken;
}
