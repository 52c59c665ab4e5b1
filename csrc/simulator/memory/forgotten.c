#include "simulator/memory/forgotten.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 16 };

static struct {
    sim_forgotten_t *notes;
    size_t count, capacity;
} forgotten;

void sim_forgotten_add(sim_forgotten_t what) {
    if (forgotten.count == forgotten.capacity) {
        size_t capacity = forgotten.capacity ? 2 * forgotten.capacity : FIRST_CAPACITY;
        void *grown = realloc(forgotten.notes, capacity * sizeof *forgotten.notes);
        if (!grown) return;
        forgotten.notes = grown;
        forgotten.capacity = capacity;
    }
    forgotten.notes[forgotten.count++] = what;
}

sim_forgotten_t *sim_forgotten_take(size_t *count) {
    sim_forgotten_t *taken = forgotten.notes;
    *count = forgotten.count;
    forgotten.notes = NULL;
    forgotten.count = forgotten.capacity = 0;
    return taken;
}
