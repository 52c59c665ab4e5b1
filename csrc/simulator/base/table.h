/* A table sorted by a 64-bit key (an address or an identifier), with a search for the nearest key below an address; and sets
 * of identifiers. Both own only their arrays, not the objects. Called with the simulator's lock held. */
#ifndef TMS_SIM_BASE_TABLE_H
#define TMS_SIM_BASE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct sim_slot {
    uint64_t key;
    void *value;
} sim_slot_t;

typedef struct sim_table {
    sim_slot_t *slots;
    size_t count;
    size_t capacity;
} sim_table_t;

/* Adds an object. Returns false if out of memory. The key must not be in the table. */
bool sim_table_insert(sim_table_t *table, uint64_t key, void *value);
/* Returns the object with this key, or NULL. */
void *sim_table_find(const sim_table_t *table, uint64_t key);
/* Returns the object with the largest key that is not above `key`, or NULL. */
void *sim_table_floor(const sim_table_t *table, uint64_t key);
/* Returns the number of keys below `key`, which is the start index of an iteration from `key`. */
size_t sim_table_position(const sim_table_t *table, uint64_t key);
/* Removes the key and returns its object, or NULL. */
void *sim_table_remove(sim_table_t *table, uint64_t key);
void sim_table_release(sim_table_t *table);

typedef struct sim_ids {
    uint64_t *ids;
    size_t count;
} sim_ids_t;

/* Adds the identifiers that are missing. Returns false if out of memory; then the set is unchanged. */
bool sim_ids_add(sim_ids_t *set, const uint64_t *ids, size_t count);
void sim_ids_clear(sim_ids_t *set);

#endif
