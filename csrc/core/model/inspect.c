#include "core/model/inspect.h"

#include "core/model/kinds.h"
#include "core/model/tag_bytes.h"

/* Returns the copy of a part of a segment if it is in host memory, else NULL. If `buffer` is not NULL, *buffer becomes a
 * reference to the copy. */
static void *find_copy(tms_saver_t *saver, const tms_segment_t *segment, uint64_t offset, uint64_t bytes,
                       tms_host_buffer_t **buffer) {
    if (!tms_segment_is_settled(segment)) return NULL;
    return tms_backup_find(&segment->backup, &saver->stores, offset, bytes, buffer);
}

/* `hand_out`: the program gets the reference. */
static tms_status_t find_backup(tms_saver_t *saver, uint64_t address, uint64_t bytes, bool hand_out,
                                tms_host_buffer_t **buffer, void **host, tms_error_t *error) {
    tms_error_context_t context = {
        .operation = "get_cpu_backup", .device = TMS_NO_DEVICE, .bytes = bytes, .address = address};
    tms_status_t status = TMS_OK;
    uint64_t begin = 0, whole = 0;
    tms_host_buffer_t *found = NULL;
    void *copy = NULL;
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_find(&saver->registry, address);
    tms_segment_t *segment = node ? tms_segment_of(node) : NULL;
    if (!segment) {
        status = TMS_NOT_MANAGED;
    } else {
        begin = tms_segment_address(segment);
        whole = segment->bytes;
        context.device = segment->device;
        context.tag = segment->tag->name;
        if (bytes > whole || address - begin > whole - bytes) {
            status = TMS_INVALID_ARGUMENT;
        } else if (atomic_load(&saver->forked)) {
            /* The pages belong to the parent and are not mapped in this process. */
            if (find_copy(saver, segment, address - begin, bytes, NULL)) status = TMS_FORKED;
        } else {
            copy = find_copy(saver, segment, address - begin, bytes, &found);
            if (found && hand_out) tms_host_buffer_hand_out(found);
        }
    }
    pthread_mutex_unlock(&saver->lock);

    if (status == TMS_NOT_MANAGED)
        return tms_error_set(
            error, status, &context,
            "it was not allocated in a region. Allocate it inside region(), or pass its tensor to manage()");
    if (status == TMS_INVALID_ARGUMENT)
        return tms_error_set(error, status, &context, "the range goes beyond its allocation of %llu bytes at 0x%llx",
                             (unsigned long long)whole, (unsigned long long)begin);
    if (status == TMS_FORKED) return tms_saver_check_process(saver, &context, error);
    *buffer = found;
    *host = copy;
    return TMS_OK;
}

tms_status_t tms_inspect_host_backup(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer,
                                     void **host, tms_error_t *error) {
    return find_backup(saver, address, bytes, true, buffer, host, error);
}

tms_status_t tms_inspect_read_only_backup(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer,
                                          void **host, tms_error_t *error) {
    return find_backup(saver, address, bytes, false, buffer, host, error);
}

/* Returns the bytes of the backup, or 0 during a transition. */
static uint64_t taken_bytes(const tms_saver_t *saver, const tms_segment_t *segment) {
    return tms_segment_is_settled(segment) ? tms_backup_taken_bytes(&segment->backup, &saver->stores) : 0;
}

static tms_segment_info_t describe(const tms_saver_t *saver, const tms_segment_t *segment) {
    return (tms_segment_info_t){
        .address = tms_segment_address(segment),
        .bytes = segment->bytes,
        .reserved_bytes = tms_segment_reserved(segment),
        .backup_bytes = taken_bytes(saver, segment),
        .device = segment->device,
        .state = segment->state,
        .backup = segment->backup.kind,
        /* Only a resume writes to it, and without the lock. */
        .contents = segment->state == TMS_SEGMENT_RESUMING ? TMS_CONTENTS_OWN : segment->contents,
        .tag = segment->tag->name,
        .allocated_at = segment->allocated_at,
        .changed_at = segment->changed_at,
    };
}

size_t tms_inspect_segments(tms_saver_t *saver, tms_segment_info_t *rows, size_t capacity) {
    size_t written = 0;
    pthread_mutex_lock(&saver->lock);
    for (tms_registry_node_t *node = saver->registry.first; node && written < capacity; node = node->next)
        rows[written++] = describe(saver, tms_segment_of(node));
    size_t count = saver->registry.count;
    pthread_mutex_unlock(&saver->lock);
    return count;
}

/* ---- usage ---- */

static void add_to_row(const tms_saver_t *saver, tms_usage_info_t *row, const tms_segment_t *segment) {
    const uint64_t reserved = tms_segment_reserved(segment);
    row->allocations++;
    row->bytes += segment->bytes;
    row->backup_bytes += taken_bytes(saver, segment);
    switch (segment->state) {
    case TMS_SEGMENT_ACTIVE:
    case TMS_SEGMENT_PAUSING: /* mapped until the pause commits */
    case TMS_SEGMENT_REPAIRING: row->resident_bytes += reserved; break;
    case TMS_SEGMENT_PAUSED:
    case TMS_SEGMENT_RESUMING: row->paused_bytes += reserved; break;
    case TMS_SEGMENT_DAMAGED: row->damaged_bytes += reserved; break;
    }
}

/* Under the lock: the memory that a deferred free still holds. A free of paused memory may wait for its guard page only. */
static uint64_t deferred_bytes(const tms_segment_t *segment) {
    return tms_segment_is_mapped(segment) ? tms_segment_reserved(segment) : 0;
}

/* Under the lock: returns the row of the segment's tag, or NULL if there is no room for it. The walk's mark shows whether
 * the tag has a row. */
static tms_usage_info_t *row_of(tms_segment_t *segment, int device, uint64_t mark, tms_usage_info_t *rows, size_t *count,
                                size_t capacity) {
    tms_tag_t *tag = segment->tag;
    if (tag->mark != mark) {
        tag->mark = mark;
        tag->row = (*count)++;
        if (tag->row < capacity)
            rows[tag->row] = (tms_usage_info_t){.tag = tag->name,
                                                .device = TMS_NO_DEVICE,
                                                .resident_peak_bytes = tms_stats_read(&tag->mapped.peak),
                                                .slack_bytes = tms_kinds_slack(tag->kinds, device)};
    }
    return tag->row < capacity ? &rows[tag->row] : NULL;
}

/* Whether the segment has the tag (NULL: any) and the device (TMS_NO_DEVICE: any). */
static bool is_of(const tms_segment_t *segment, const tms_tag_t *tag, int device) {
    return (!tag || segment->tag == tag) && (device == TMS_NO_DEVICE || segment->device == device);
}

size_t tms_inspect_usage(tms_saver_t *saver, const char *tag, int device, tms_usage_info_t *rows, size_t capacity) {
    tms_usage_info_t by_device[TMS_MAX_DEVICES] = {{0}};
    const tms_tag_t *only = tag ? tms_tag_find(&saver->regions->tags, tag) : NULL;
    size_t count = 0;
    if (tag && !only) return 0;
    pthread_mutex_lock(&saver->lock);
    const uint64_t mark = ++saver->marks;
    for (tms_registry_node_t *node = saver->registry.first; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (!is_of(segment, only, device)) continue;
        tms_usage_info_t *row = row_of(segment, device, mark, rows, &count, capacity);
        if (row) add_to_row(saver, row, segment);
        add_to_row(saver, &by_device[segment->device], segment);
    }
    for (tms_segment_t *segment = saver->deferred; segment; segment = segment->next_in_transition) {
        if (!is_of(segment, only, device)) continue;
        tms_usage_info_t *row = row_of(segment, device, mark, rows, &count, capacity);
        if (row) row->deferred_bytes += deferred_bytes(segment);
        by_device[segment->device].deferred_bytes += deferred_bytes(segment);
    }
    for (int d = 0; d < TMS_MAX_DEVICES; d++) {
        by_device[d].device = d;
        by_device[d].slack_bytes = only ? tms_kinds_slack(only->kinds, d) : tms_stats_read(&saver->account.slack[d]);
        by_device[d].resident_peak_bytes = tms_stats_read(&saver->account.by_device[d].peak);
        const bool is_asked = !only && (device == TMS_NO_DEVICE || device == d);
        if (by_device[d].allocations == 0 && by_device[d].deferred_bytes == 0 &&
            !(is_asked && by_device[d].resident_peak_bytes > 0))
            continue;
        if (count < capacity) rows[count] = by_device[d];
        count++;
    }
    pthread_mutex_unlock(&saver->lock);
    return count;
}

void tms_inspect_reset_peaks(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    tms_account_reset_peaks(&saver->account);
    tms_tag_reset_peaks(&saver->regions->tags);
    pthread_mutex_unlock(&saver->lock);
}

tms_status_t tms_inspect_find(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_segment_info_t *row) {
    const uint64_t end = bytes > UINT64_MAX - address ? UINT64_MAX : address + bytes;
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_overlapping(&saver->registry, address, end);
    if (node) *row = describe(saver, tms_segment_of(node));
    pthread_mutex_unlock(&saver->lock);
    return node ? TMS_OK : TMS_NOT_MANAGED;
}

/* Under the lock: returns the number of handles that DAMAGED segments have. */
static uint64_t damaged_handles(tms_saver_t *saver) {
    uint64_t count = 0;
    const uint64_t mark = ++saver->marks;
    for (tms_registry_node_t *node = saver->account.damaged ? saver->registry.first : NULL; node; node = node->next) {
        tms_run_t *run = tms_segment_of(node)->run;
        if (tms_segment_of(node)->state != TMS_SEGMENT_DAMAGED || !run || run->mark == mark) continue;
        run->mark = mark;
        count += run->has_handle;
    }
    return count;
}

static uint64_t slack_bytes(const tms_saver_t *saver) {
    uint64_t bytes = 0;
    for (int device = 0; device < TMS_MAX_DEVICES; device++) bytes += tms_stats_read(&saver->account.slack[device]);
    return bytes;
}

void tms_inspect_counters(tms_saver_t *saver, tms_counters_t *counters) {
    const tms_calls_t *pauses = &saver->stats.pauses, *resumes = &saver->stats.resumes;
    uint64_t failed_pauses = tms_stats_read(&pauses->failures), failed_resumes = tms_stats_read(&resumes->failures);
    uint64_t failed_allocations = tms_stats_read(&saver->stats.failed_allocations);
    *counters = (tms_counters_t){
        .allocations_total = tms_stats_read(&saver->stats.allocations_total),
        .frees_total = tms_stats_read(&saver->stats.frees_total),
        .resident_bytes = tms_stats_read(&saver->account.mapped.now),
        .paused_bytes = tms_stats_read(&saver->account.paused_bytes),
        .pauses_total = tms_stats_read(&pauses->successes),
        .resumes_total = tms_stats_read(&resumes->successes),
        .failures_total = failed_pauses + failed_resumes + failed_allocations,
        .quarantined_handles = tms_quarantine_held(&saver->quarantine, TMS_QUARANTINE_HANDLE),
        .quarantined_ranges = tms_quarantine_held(&saver->quarantine, TMS_QUARANTINE_RANGE),
        .quarantined_host = tms_quarantine_held(&saver->quarantine, TMS_QUARANTINE_HOST),
        .quarantined_other =
            tms_quarantine_held(&saver->quarantine, TMS_QUARANTINE_OTHER) + tms_devices_unreleased(saver->devices),
        .visible_captures = (uint64_t)tms_capture_visible(&saver->capture),
        .guard = atomic_load(&saver->guard.on),
        .guarded_bytes = tms_stats_read(&saver->stats.guarded_bytes),
        .guard_failures_total = tms_stats_read(&saver->stats.guard_failures_total),
        .resident_peak_bytes = tms_stats_read(&saver->account.mapped.peak),
        .failed_pauses_total = failed_pauses,
        .failed_resumes_total = failed_resumes,
        .failed_allocations_total = failed_allocations,
        .pause_nanoseconds_total = tms_stats_read(&pauses->nanoseconds),
        .pause_bytes_total = tms_stats_read(&pauses->bytes),
        .pause_copied_bytes_total = tms_stats_read(&pauses->copied_bytes),
        .pause_unchanged_bytes_total = tms_stats_read(&pauses->unchanged_bytes),
        .resume_nanoseconds_total = tms_stats_read(&resumes->nanoseconds),
        .resume_bytes_total = tms_stats_read(&resumes->bytes),
        .resume_copied_bytes_total = tms_stats_read(&resumes->copied_bytes),
        .slack_bytes = slack_bytes(saver),
    };
    tms_backup_stores_count(&saver->stores, counters);
    pthread_mutex_lock(&saver->lock);
    counters->allocations = saver->registry.count;
    counters->damaged = saver->account.damaged;
    for (tms_segment_t *s = saver->deferred; s; s = s->next_in_transition) {
        counters->deferred_frees++;
        counters->deferred_bytes += deferred_bytes(s);
    }
    counters->quarantined_handles += damaged_handles(saver);
    pthread_mutex_unlock(&saver->lock);
}

/* ---- events ---- */

/* Adds what a segment holds to the last row, if that has its tag and device, else to a new one. */
static void add_level(tms_events_copy_t *copy, const tms_segment_t *segment, const tms_tag_t **tag, int *device) {
    if (copy->level_count == 0 || *tag != segment->tag || *device != segment->device) {
        *tag = segment->tag;
        *device = segment->device;
        if (copy->level_count++ < copy->level_room)
            copy->levels[copy->level_count - 1] = (tms_event_level_t){.tag = segment->tag->name, .device = segment->device};
    }
    if (copy->level_count > copy->level_room) return;
    tms_footprint_t *holds = &copy->levels[copy->level_count - 1].holds;
    holds->resident_bytes += segment->counted.resident_bytes;
    holds->paused_bytes += segment->counted.paused_bytes;
    for (int i = 0; i < TMS_MAX_BACKUP_STORES; i++) holds->backup_bytes += segment->counted.backup_bytes[i];
}

void tms_inspect_copy_events(tms_saver_t *saver, tms_events_copy_t *copy) {
    const tms_tag_t *tag = NULL;
    int device = TMS_NO_DEVICE;
    copy->level_count = 0;
    copy->capacity = saver->events.capacity;
    pthread_mutex_lock(&saver->lock);
    copy->event_count = tms_events_copy(&saver->events, copy->events, copy->event_room, &copy->recorded);
    /* A forked child holds nothing of its parent's. */
    bool holds = !atomic_load(&saver->forked);
    for (tms_registry_node_t *node = holds ? saver->registry.first : NULL; node; node = node->next)
        add_level(copy, tms_segment_of(node), &tag, &device);
    pthread_mutex_unlock(&saver->lock);
}

/* ---- memory that was paused when a device was lost ---- */

tms_status_t tms_inspect_explain_loss(tms_saver_t *saver, tms_status_t status, tms_error_t *error) {
    tms_tag_bytes_t paused = {.named = 0};
    if (status != TMS_DEVICE_LOST || !error) return status;
    pthread_mutex_lock(&saver->lock);
    for (tms_registry_node_t *node = saver->registry.first; node; node = node->next) {
        const tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != TMS_SEGMENT_ACTIVE) tms_tag_bytes_add(&paused, segment->tag, tms_segment_reserved(segment));
    }
    pthread_mutex_unlock(&saver->lock);
    if (paused.total == 0) {
        tms_error_append(error, " No managed memory was paused when this was found.");
        return status;
    }
    tms_error_append(error, " ");
    tms_error_append_bytes(error, paused.total);
    tms_error_append(error,
                     " of managed memory were paused when this was found. A kernel that accesses a paused tensor loses "
                     "the device; is_paused(tensor) tells which are. By tag: ");
    tms_tag_bytes_append(&paused, error);
    tms_error_append(error, ".");
    return status;
}
