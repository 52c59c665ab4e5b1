#include "simulator/base/table.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_CAPACITY = 16 };

size_t sim_table_position(const sim_table_t *table, uint64_t key) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->slots[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool sim_table_insert(sim_table_t *table, uint64_t key, void *value) {
    if (table->count == table->capacity) {
        size_t capacity = table->capacity ? 2 * table->capacity : FIRST_CAPACITY;
        sim_slot_t *slots = realloc(table->slots, capacity * sizeof *slots);
        if (!slots) return false;
        table->slots = slots;
        table->capacity = capacity;
    }
    size_t at = sim_table_position(table, key);
    memmove(table->slots + at + 1, table->slots + at, (table->count - at) * sizeof *table->slots);
    table->slots[at] = (sim_slot_t){.key = key, .value = value};
    table->count++;
    return true;
}

void *sim_table_find(const sim_table_t *table, uint64_t key) {
    size_t at = sim_table_position(table, key);
    return at < table->count && table->slots[at].key == key ? table->slots[at].value : NULL;
}

void *sim_table_floor(const sim_table_t *table, uint64_t key) {
    size_t at = sim_table_position(table, key);
    if (at < table->count && table->slots[at].key == key) return table->slots[at].value;
    return at > 0 ? table->slots[at - 1].value : NULL;
}

void *sim_table_remove(sim_table_t *table, uint64_t key) {
    size_t at = sim_table_position(table, key);
    if (at == table->count || table->slots[at].key != key) return NULL;
    void *value = table->slots[at].value;
    table->count--;
    memmove(table->slots + at, table->slots + at + 1, (table->count - at) * sizeof *table->slots);
    return value;
}

void sim_table_release(sim_table_t *table) {
    free(table->slots);
    *table = (sim_table_t){0};
}

bool sim_ids_add(sim_ids_t *set, const uint64_t *ids, size_t count) {
    if (!count) return true;
    uint64_t *grown = realloc(set->ids, (set->count + count) * sizeof *grown);
    if (!grown) return false;
    set->ids = grown;
    size_t known = set->count;
    for (size_t i = 0; i < count; i++) {
        bool is_new = true;
        for (size_t j = 0; j < known && is_new; j++) is_new = grown[j] != ids[i];
        if (is_new) grown[set->count++] = ids[i];
    }
    return true;
}

void sim_ids_clear(sim_ids_t *set) {
    free(set->ids);
    *set = (sim_ids_t){0};
}
