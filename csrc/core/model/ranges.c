#include "core/model/ranges.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "core/model/kinds.h"

/* A range that is reserved, or quarantined. */
typedef struct reserved {
    tms_range_t range; /* first */
    tms_quarantined_t quarantined;
    bool in_quarantine; /* its node is in the saver's `quarantined_ranges`; under the saver's lock */
} reserved_t;

static reserved_t *reserved_of(tms_registry_node_t *node) { return (reserved_t *)(void *)node; }
static uint64_t size_of(const reserved_t *it) { return it->range.node.end - it->range.node.begin; }

/* ---- back to the driver ---- */

/* Under the saver's lock: the driver has given these addresses to a new range, so a quarantined one has lost them. */
static bool claim(tms_saver_t *saver, const tms_registry_node_t *node) {
    tms_registry_node_t *lost;
    if (tms_registry_overlapping(&saver->ranges, node->begin, node->end)) return false;
    while ((lost = tms_registry_overlapping(&saver->quarantined_ranges, node->begin, node->end))) {
        tms_registry_remove(&saver->quarantined_ranges, lost);
        reserved_of(lost)->in_quarantine = false;
    }
    return true;
}

/* Frees a range that no registry has. Returns false and fills *error if the driver fails. */
static bool free_addresses(tms_saver_t *saver, const reserved_t *it, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    const tms_error_context_t context = {
        .operation = "free", .device = TMS_NO_DEVICE, .bytes = size_of(it), .address = it->range.node.begin};
    tms_status_t status = TMS_DRIVER_CALL(driver, &context, error, cuMemAddressFree, it->range.node.begin, size_of(it));
    return status == TMS_OK || tms_driver_is_gone(error);
}

/* Puts a range that the driver failed to free into the registry of such ranges, unless another range has its addresses. */
static bool set_aside(tms_saver_t *saver, reserved_t *it) {
    pthread_mutex_lock(&saver->lock);
    it->in_quarantine = !tms_registry_overlapping(&saver->ranges, it->range.node.begin, it->range.node.end);
    if (it->in_quarantine) tms_registry_insert(&saver->quarantined_ranges, &it->range.node);
    bool kept = it->in_quarantine;
    pthread_mutex_unlock(&saver->lock);
    return kept;
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    reserved_t *it = (reserved_t *)(void *)((char *)node - offsetof(reserved_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_t reason;
    /* The range is removed first: once the driver has freed it, another thread may reserve its addresses. */
    pthread_mutex_lock(&saver->lock);
    bool owned = it->in_quarantine;
    if (owned) tms_registry_remove(&saver->quarantined_ranges, &it->range.node);
    it->in_quarantine = false;
    pthread_mutex_unlock(&saver->lock);
    if (!owned || free_addresses(saver, it, &reason)) {
        free(it);
        return 0;
    }
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason,
                      "The addresses are still reserved; later calls try again.");
    if (set_aside(saver, it)) return TMS_QUARANTINE_BIT(RANGE);
    free(it);
    return 0;
}

static void free_range(tms_saver_t *saver, reserved_t *it) {
    tms_error_t reason;
    if (free_addresses(saver, it, &reason)) {
        free(it);
        return;
    }
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                      "The addresses stay reserved; later calls try again to release them.");
    if (!set_aside(saver, it)) {
        free(it);
        return;
    }
    it->quarantined = (tms_quarantined_t){.retry = retry, .context = saver, .holds = TMS_QUARANTINE_BIT(RANGE)};
    tms_quarantine_add(&saver->quarantine, &it->quarantined);
}

tms_range_t *tms_ranges_remove_bare(tms_saver_t *saver, tms_range_t *range) {
    if (!tms_range_is_bare(range)) return NULL;
    tms_registry_remove(&saver->ranges, &range->node);
    tms_space_remove(range);
    return range;
}

void tms_ranges_free(tms_saver_t *saver, tms_range_t *range) {
    if (range) free_range(saver, (reserved_t *)range);
}

/* ---- from the driver ---- */

/* Reserves a range, which no registry has yet. */
static tms_status_t reserve(const tms_driver_table_t *driver, uint64_t bytes, reserved_t **made,
                            const tms_error_context_t *context, tms_error_t *error) {
    CUdeviceptr address = 0;
    reserved_t *it = calloc(1, sizeof *it);
    if (!it) {
        tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
        return TMS_OUT_OF_HOST_MEMORY;
    }
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuMemAddressReserve, &address, bytes, 0, 0, 0);
    if (status != TMS_OK) {
        free(it);
        return status;
    }
    it->range.node.begin = address;
    it->range.node.end = address + bytes;
    *made = it;
    return TMS_OK;
}

typedef enum added { ADDED, NOT_NEEDED, NOT_OURS, NO_HOST_MEMORY } added_t;

/* Under the saver's lock: adds a new range to the kind, and gives its first span to the segment. NOT_NEEDED: the segment
 * got a span of another range, which has room by now. NOT_OURS: another range has these addresses. */
static added_t add(tms_saver_t *saver, tms_kind_t *kind, reserved_t *it, tms_segment_t *segment, uint64_t bytes) {
    if (!claim(saver, &it->range.node)) return NOT_OURS;
    segment->span = tms_space_take(&kind->space, bytes, segment);
    if (segment->span) return NOT_NEEDED;
    if (!tms_space_add(&kind->space, &it->range)) return NO_HOST_MEMORY;
    segment->span = tms_space_take(&kind->space, bytes, segment);
    if (segment->span) {
        tms_registry_insert(&saver->ranges, &it->range.node);
        return ADDED;
    }
    tms_space_remove(&it->range);
    return NO_HOST_MEMORY;
}

static tms_status_t extend(tms_saver_t *saver, tms_kind_t *kind, tms_segment_t *segment, uint64_t bytes, uint64_t wanted,
                           const tms_driver_table_t *driver, const tms_error_context_t *context, tms_error_t *error) {
    reserved_t *it = NULL;
    tms_status_t status = reserve(driver, wanted, &it, context, error);
    if (status != TMS_OK && status != TMS_OUT_OF_HOST_MEMORY && wanted > bytes)
        status = reserve(driver, bytes, &it, context, error);
    if (status != TMS_OK) return status;
    pthread_mutex_lock(&saver->lock);
    added_t added = add(saver, kind, it, segment, bytes);
    pthread_mutex_unlock(&saver->lock);
    if (added == ADDED) return TMS_OK;
    if (added == NOT_NEEDED || added == NO_HOST_MEMORY) {
        free_range(saver, it);
        return added == NOT_NEEDED ? TMS_OK : tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    }
    status = tms_error_set(error, TMS_DRIVER, context,
                           "the driver reserved the addresses from 0x%llx to 0x%llx, which are already in use",
                           (unsigned long long)it->range.node.begin, (unsigned long long)it->range.node.end);
    free(it); /* frees only the struct, because the addresses are not ours */
    return status;
}

static tms_status_t take(tms_saver_t *saver, tms_kind_t **list, tms_segment_t *segment, uint64_t bytes,
                         const tms_driver_table_t *driver, const tms_error_context_t *context, tms_error_t *error) {
    uint64_t wanted = 0;
    pthread_mutex_lock(&saver->lock);
    tms_kind_t *kind = tms_kinds_of_segment(saver, list, segment);
    if (kind && tms_space_has_room(&kind->space, bytes))
        segment->span = tms_space_take(&kind->space, bytes, segment);
    else if (kind)
        wanted = tms_space_growth(&kind->space, bytes);
    pthread_mutex_unlock(&saver->lock);
    if (wanted) {
        tms_status_t status = extend(saver, kind, segment, bytes, wanted, driver, context, error);
        if (status != TMS_OK) return status;
    }
    const tms_span_t *span = segment->span;
    if (!span) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    segment->node.begin = span->begin;
    segment->node.end = span->end;
    return TMS_OK;
}

tms_status_t tms_ranges_take(tms_saver_t *saver, tms_segment_t *segment, uint64_t bytes, const tms_driver_table_t *driver,
                             const tms_error_context_t *context, tms_error_t *error) {
    return take(saver, &segment->tag->kinds, segment, bytes, driver, context, error);
}

tms_status_t tms_ranges_take_guard_page(tms_saver_t *saver, tms_segment_t *page, uint64_t bytes,
                                        const tms_driver_table_t *driver, const tms_error_context_t *context,
                                        tms_error_t *error) {
    return take(saver, &saver->guard_page_kinds, page, bytes, driver, context, error);
}
