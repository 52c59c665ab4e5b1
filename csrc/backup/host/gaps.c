#include "backup/host/gaps.h"

#include <stdlib.h>

/* The maximum number of gaps of one list that a search compares. */
enum { MAX_COMPARED = 64, BITS = 64 };
_Static_assert((int)BITS == (int)TMS_HOST_GAP_CLASSES, "a bit of a mask for each list of a device");

static int class_of(uint64_t bytes) { return BITS - 1 - __builtin_clzll(bytes); }
static uint64_t bytes_of(const tms_host_gap_t *gap) { return gap->node.end - gap->node.begin; }
static tms_host_gap_t *gap_of(tms_registry_node_t *node) { return (tms_host_gap_t *)node; }

/* ---- the gaps of a block that are not in use ---- */

static void put_aside(struct tms_host_block *block, tms_host_gap_t *gap) {
    gap->next = block->spare_gaps;
    block->spare_gaps = gap;
}

void tms_host_gaps_prepare(struct tms_host_block *block) {
    block->spare_gaps = NULL;
    block->gap_count = block->chunk_count;
    for (size_t i = 0; i < block->chunk_count; i++) {
        block->chunks[i].gap = (tms_host_gap_t){.block = block};
        put_aside(block, &block->chunks[i].gap);
    }
}

void tms_host_gaps_release(struct tms_host_block *block) {
    for (tms_host_gap_t *next, *gap = block->spare_gaps; gap; gap = next) {
        next = gap->next;
        if (gap->allocated) free(gap);
    }
    block->spare_gaps = NULL;
    block->gap_count = 0;
}

/* Makes sure that the block has a gap for one more buffer. */
static bool has_enough(struct tms_host_block *block) {
    if (block->gap_count > block->chunk_count + block->placed) return true;
    tms_host_gap_t *gap = calloc(1, sizeof *gap);
    if (!gap) return false;
    *gap = (tms_host_gap_t){.block = block, .allocated = true};
    put_aside(block, gap);
    block->gap_count++;
    return true;
}

/* ---- the tree and the lists ---- */

static tms_host_gap_t **list_of(const tms_host_gap_t *gap) {
    return &gap->block->store->gap_lists[gap->block->device].by_class[class_of(bytes_of(gap))];
}

static void insert(struct tms_host_block *block, uint64_t begin, uint64_t end) {
    tms_host_store_t *store = block->store;
    tms_host_gap_t *gap = block->spare_gaps;
    block->spare_gaps = gap->next;
    gap->node.begin = begin;
    gap->node.end = end;
    tms_registry_insert(&store->gaps, &gap->node);
    tms_host_gap_t **list = list_of(gap);
    gap->previous = NULL;
    gap->next = *list;
    if (gap->next) gap->next->previous = gap;
    *list = gap;
    store->gap_lists[block->device].used |= (uint64_t)1 << class_of(end - begin);
}

static void take_out(tms_host_gap_t *gap) {
    tms_host_store_t *store = gap->block->store;
    tms_host_gap_t **list = list_of(gap);
    *(gap->previous ? &gap->previous->next : list) = gap->next;
    if (gap->next) gap->next->previous = gap->previous;
    if (!*list) store->gap_lists[gap->block->device].used &= ~((uint64_t)1 << class_of(bytes_of(gap)));
    tms_registry_remove(&store->gaps, &gap->node);
    put_aside(gap->block, gap);
}

/* ---- changes ---- */

/* The gap of the block that contains the address, or NULL. Blocks may lie side by side in the address space. */
static tms_host_gap_t *find_at(const struct tms_host_block *block, uint64_t address) {
    tms_registry_node_t *node = tms_registry_find(&block->store->gaps, address);
    return node && gap_of(node)->block == block ? gap_of(node) : NULL;
}

void tms_host_gaps_add(struct tms_host_block *block, uint64_t offset, uint64_t end) {
    const uint64_t memory = (uintptr_t)block->memory;
    uint64_t begin = memory + offset, until = memory + end;
    tms_host_gap_t *before = find_at(block, begin - 1), *after = find_at(block, until);
    if (before) {
        begin = before->node.begin;
        take_out(before);
    }
    if (after) {
        until = after->node.end;
        take_out(after);
    }
    insert(block, begin, until);
}

void tms_host_gaps_remove(struct tms_host_block *block, uint64_t offset, uint64_t end) {
    const uint64_t memory = (uintptr_t)block->memory, begin = memory + offset, until = memory + end;
    tms_registry_node_t *node;
    while ((node = tms_registry_overlapping(&block->store->gaps, begin, until))) {
        const uint64_t from = node->begin, to = node->end;
        take_out(gap_of(node));
        if (from < begin) insert(block, from, begin);
        if (to > until) insert(block, until, to);
    }
}

/* ---- searches ---- */

/* The smallest of the compared gaps that is large enough, or NULL. */
static tms_host_gap_t *compare(tms_host_store_t *store, tms_host_gap_t *gap, uint64_t bytes) {
    tms_host_gap_t *best = NULL;
    for (int compared = 0; gap && compared < MAX_COMPARED; compared++, gap = gap->next) {
        store->steps++;
        if (bytes_of(gap) >= bytes && (!best || bytes_of(gap) < bytes_of(best))) best = gap;
    }
    return best;
}

static tms_host_gap_t *find_on(tms_host_store_t *store, int device, uint64_t bytes) {
    const tms_host_gap_lists_t *lists = &store->gap_lists[device];
    const int class = class_of(bytes);
    tms_host_gap_t *gap = lists->used >> class & 1 ? compare(store, lists->by_class[class], bytes) : NULL;
    const uint64_t larger = class + 1 < BITS ? lists->used >> (class + 1) : 0;
    return gap || !larger ? gap : lists->by_class[class + 1 + __builtin_ctzll(larger)];
}

tms_host_gap_t *tms_host_gaps_find(tms_host_store_t *store, int device, uint64_t bytes) {
    if (store->gaps.count == 0) return NULL;
    tms_host_gap_t *gap = find_on(store, device, bytes);
    for (int other = 0; other < TMS_MAX_DEVICES && !gap; other++) {
        if (other != device) gap = find_on(store, other, bytes);
    }
    return gap;
}

bool tms_host_gaps_take(tms_host_gap_t *gap, uint64_t bytes, uint64_t *offset) {
    struct tms_host_block *block = gap->block;
    if (!has_enough(block)) return false;
    block->placed++;
    *offset = gap->node.begin - (uintptr_t)block->memory;
    tms_host_gaps_remove(block, *offset, *offset + bytes);
    return true;
}
