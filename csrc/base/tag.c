#include "base/tag.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

/* Tags are interned when a region is entered, so errors name that operation. */
static const tms_error_context_t region_context = {.operation = "region", .device = TMS_NO_DEVICE};

void tms_tag_table_init(tms_tag_table_t *table) {
    pthread_mutex_init(&table->lock, NULL);
    table->first = NULL;
    table->count = 0;
    table->index = NULL;
    table->steps = 0;
}

void tms_tag_table_release(tms_tag_table_t *table) {
    while (table->first) {
        tms_tag_t *tag = table->first;
        table->first = tag->next;
        free(tag);
    }
    free(table->index);
    pthread_mutex_destroy(&table->lock);
}

void tms_tag_table_after_fork_in_child(tms_tag_table_t *table) { pthread_mutex_init(&table->lock, NULL); }

/* ---- the index; the caller holds the table's lock ---- */

enum { FIRST_SLOTS = 16 };

/* The upper half is folded into the lower, which chooses the slot. */
static uint64_t hash_of(const char *name) {
    uint64_t hash = tms_hash_bytes(TMS_HASH_START, name, strlen(name));
    return hash ^ hash >> 32;
}

/* Returns the slot of the tag with this name, or the free slot for it. */
static tms_tag_t **find_slot(tms_tag_table_t *table, tms_tag_index_t *index, const char *name, uint64_t hash) {
    for (uint64_t i = hash;; i++) {
        tms_tag_t **slot = &index->slots[i & (index->size - 1)];
        table->steps++;
        if (!*slot || ((*slot)->hash == hash && strcmp((*slot)->name, name) == 0)) return slot;
    }
}

static bool grow(tms_tag_table_t *table) {
    size_t size = table->index ? 2 * table->index->size : FIRST_SLOTS;
    tms_tag_index_t *grown = calloc(1, sizeof *grown + size * sizeof(void *));
    if (!grown) return false;
    grown->size = size;
    for (tms_tag_t *tag = table->first; tag; tag = tag->next) {
        uint64_t i = tag->hash;
        while (grown->slots[i & (size - 1)]) i++;
        grown->slots[i & (size - 1)] = tag;
    }
    free(table->index);
    table->index = grown;
    return true;
}

/* Makes room for one more tag, with half of the slots free. */
static bool make_room(tms_tag_table_t *table) {
    size_t size = table->index ? table->index->size : 0;
    return table->count < size / 2 || grow(table);
}

/* Adds a new tag. Returns NULL if memory is short; the table is unchanged then. */
static tms_tag_t *insert(tms_tag_table_t *table, const char *name, uint64_t hash) {
    size_t bytes = strlen(name) + 1;
    if (!make_room(table)) return NULL;
    tms_tag_t *tag = calloc(1, sizeof *tag + bytes);
    if (!tag) return NULL;
    memcpy(tag->name, name, bytes);
    tag->hash = hash;
    tag->next = table->first;
    table->first = tag;
    table->count++;
    *find_slot(table, table->index, name, hash) = tag;
    return tag;
}

/* ---- tags ---- */

tms_tag_t *tms_tag_find(tms_tag_table_t *table, const char *name) {
    if (!name) return NULL;
    uint64_t hash = hash_of(name);
    pthread_mutex_lock(&table->lock);
    tms_tag_t *tag = table->index ? *find_slot(table, table->index, name, hash) : NULL;
    pthread_mutex_unlock(&table->lock);
    return tag;
}

tms_status_t tms_tag_intern(tms_tag_table_t *table, const char *name, tms_tag_t **tag, tms_error_t *error) {
    if (!name || !*name) {
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &region_context, "a tag must be a non-empty string");
    }
    uint64_t hash = hash_of(name);
    pthread_mutex_lock(&table->lock);
    tms_tag_t *found = table->index ? *find_slot(table, table->index, name, hash) : NULL;
    if (!found) found = insert(table, name, hash);
    pthread_mutex_unlock(&table->lock);
    if (!found) return tms_error_set_os(error, &region_context, "calloc", ENOMEM, NULL);
    *tag = found;
    return TMS_OK;
}

size_t tms_tag_list(tms_tag_table_t *table, tms_tag_row_t *rows, size_t capacity) {
    size_t written = 0;
    pthread_mutex_lock(&table->lock);
    for (const tms_tag_t *tag = table->first; tag && written < capacity; tag = tag->next)
        rows[written++] = (tms_tag_row_t){.name = tag->name, .used = atomic_load(&tag->used)};
    size_t count = table->count;
    pthread_mutex_unlock(&table->lock);
    return count;
}

void tms_tag_reset_peaks(tms_tag_table_t *table) {
    pthread_mutex_lock(&table->lock);
    for (tms_tag_t *tag = table->first; tag; tag = tag->next) tms_gauge_reset_peak(&tag->mapped);
    pthread_mutex_unlock(&table->lock);
}
