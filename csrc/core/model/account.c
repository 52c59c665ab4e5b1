#include "core/model/account.h"

#include <string.h>

#include "base/hash.h"
#include "device/wait.h"

/* ---- what a segment holds ---- */

/* Returns what the segment holds in `state`, which is settled or REPAIRING. While it is REPAIRING another thread may be
 * changing the run. */
static tms_holding_t holding_of(const tms_account_t *account, const tms_segment_t *segment, tms_segment_state_t state) {
    const uint64_t bytes = tms_segment_reserved(segment);
    tms_holding_t holding = {.state = state, .paused_bytes = state == TMS_SEGMENT_PAUSED ? bytes : 0};
    if (state == TMS_SEGMENT_REPAIRING)
        holding.resident_bytes = segment->counted.resident_bytes;
    else if (tms_segment_is_mapped(segment))
        holding.resident_bytes = bytes;
    if (state == TMS_SEGMENT_ACTIVE || state == TMS_SEGMENT_PAUSED)
        tms_backup_taken_by_store(&segment->backup, account->stores, holding.backup_bytes);
    return holding;
}

static bool is_damaged(const tms_holding_t *holding) {
    return holding->state == TMS_SEGMENT_DAMAGED || holding->state == TMS_SEGMENT_REPAIRING;
}

static uint64_t backup_bytes(const tms_holding_t *holding) {
    uint64_t bytes = 0;
    for (int i = 0; i < TMS_MAX_BACKUP_STORES; i++) bytes += holding->backup_bytes[i];
    return bytes;
}

/* ---- the totals ---- */

/* The shared page has a column for each of the library's stores. The bytes of any other store are in no column. */
static void change_page(const tms_account_t *account, const tms_segment_t *segment, const tms_holding_t *before,
                        const tms_holding_t *now) {
    tms_shared_page_change_t change = {.resident_bytes = now->resident_bytes - before->resident_bytes,
                                       .paused_bytes = now->paused_bytes - before->paused_bytes,
                                       .damaged = (uint64_t)is_damaged(now) - (uint64_t)is_damaged(before)};
    for (int i = 0; i < account->stores->count; i++) {
        const uint64_t backup = now->backup_bytes[i] - before->backup_bytes[i];
        if (account->stores->list[i].kinds & TMS_BACKUP_BIT(PINNED)) change.host_backup_bytes += backup;
        if (account->stores->list[i].kinds & TMS_BACKUP_BIT(DISK)) change.disk_backup_bytes += backup;
        if (account->stores->list[i].kinds & TMS_BACKUP_BIT(SHARED)) change.shared_backup_bytes += backup;
    }
    tms_shared_page_change(account->shared_page, segment->row, &change);
}

/* Counts what the segment holds now, and returns the change since it was last counted. */
static tms_footprint_t count(tms_account_t *account, tms_segment_t *segment, tms_holding_t now) {
    const tms_holding_t before = segment->counted;
    const tms_footprint_t change = {.resident_bytes = now.resident_bytes - before.resident_bytes,
                                    .paused_bytes = now.paused_bytes - before.paused_bytes,
                                    .backup_bytes = backup_bytes(&now) - backup_bytes(&before)};
    segment->counted = now;
    tms_gauge_change(&account->mapped, change.resident_bytes);
    tms_gauge_change(&account->by_device[segment->device], change.resident_bytes);
    tms_gauge_change(&segment->tag->mapped, change.resident_bytes);
    tms_stats_add(&account->paused_bytes, change.paused_bytes);
    account->damaged += (uint64_t)is_damaged(&now) - (uint64_t)is_damaged(&before);
    const int inactive = (now.state != TMS_SEGMENT_ACTIVE) - (before.state != TMS_SEGMENT_ACTIVE);
    if (inactive != 0) atomic_fetch_add_explicit(&segment->tag->paused, inactive, memory_order_relaxed);
    change_page(account, segment, &before, &now);
    return change;
}

static void record(const tms_account_t *account, const tms_segment_t *segment, tms_footprint_t change, tms_event_t event) {
    event.tag = segment->tag->name;
    event.device = segment->device;
    event.address = tms_segment_address(segment);
    event.change = change;
    tms_events_record(account->events, event);
}

/* ---- states ---- */

static tms_footprint_t set_state(tms_account_t *account, tms_segment_t *segment, tms_segment_state_t state, double now) {
    segment->state = state;
    segment->changed_at = now;
    return count(account, segment, holding_of(account, segment, state));
}

void tms_account_publish(tms_account_t *account, tms_segment_t *segment) {
    segment->allocated_at = tms_wait_now();
    segment->row = tms_shared_page_row(account->shared_page, segment->tag, segment->device);
    tms_shared_page_add_allocation(account->shared_page, segment->row);
    record(account, segment, set_state(account, segment, TMS_SEGMENT_ACTIVE, segment->allocated_at),
           (tms_event_t){.kind = TMS_EVENT_ALLOCATE, .bytes = segment->bytes});
}

void tms_account_own(tms_segment_t *segment, tms_segment_state_t state) { segment->state = state; }

void tms_account_settle(tms_account_t *account, tms_segment_t *segment, tms_segment_state_t state, tms_event_t event) {
    record(account, segment, set_state(account, segment, state, tms_wait_now()), event);
}

void tms_account_remove(tms_account_t *account, tms_segment_t *segment) {
    record(account, segment, count(account, segment, (tms_holding_t){.state = TMS_SEGMENT_ACTIVE}),
           (tms_event_t){.kind = TMS_EVENT_FREE, .bytes = segment->bytes});
    tms_shared_page_remove_allocation(account->shared_page, segment->row);
}

void tms_account_reset_peaks(tms_account_t *account) {
    tms_gauge_reset_peak(&account->mapped);
    for (int device = 0; device < TMS_MAX_DEVICES; device++) tms_gauge_reset_peak(&account->by_device[device]);
}

/* ---- the changes of a call ---- */

static bool is_nothing(tms_footprint_t change) {
    return change.resident_bytes == 0 && change.paused_bytes == 0 && change.backup_bytes == 0;
}

static void empty(tms_account_moves_t *moves, size_t slot) {
    if (!moves->slots[slot].tag) return;
    if (!is_nothing(moves->slots[slot].change))
        tms_events_record(moves->account->events, (tms_event_t){.kind = TMS_EVENT_MOVE,
                                                                .call = moves->call,
                                                                .operation = moves->operation,
                                                                .allocations = moves->slots[slot].allocations,
                                                                .change = moves->slots[slot].change,
                                                                .tag = moves->slots[slot].tag->name,
                                                                .device = moves->slots[slot].device});
    moves->slots[slot].tag = NULL;
}

/* Returns the slot of a tag and device, or an empty slot. If all slots are full, returns one that the caller must empty. */
static size_t find_slot(const tms_account_moves_t *moves, const tms_segment_t *segment) {
    const size_t first = (size_t)(tms_hash_number(segment->tag->hash, (uint64_t)segment->device) % TMS_ACCOUNT_SLOTS);
    for (size_t i = 0; i < TMS_ACCOUNT_SLOTS; i++) {
        const size_t slot = (first + i) % TMS_ACCOUNT_SLOTS;
        if (!moves->slots[slot].tag) return slot;
        if (moves->slots[slot].tag == segment->tag && moves->slots[slot].device == segment->device) return slot;
    }
    return first;
}

static void add(tms_account_moves_t *moves, const tms_segment_t *segment, tms_footprint_t change) {
    const size_t slot = find_slot(moves, segment);
    tms_shared_page_count(moves->account->shared_page, segment->row, &moves->outcome);
    if (moves->slots[slot].tag != segment->tag || moves->slots[slot].device != segment->device) {
        empty(moves, slot);
        moves->slots[slot].tag = segment->tag;
        moves->slots[slot].device = segment->device;
        moves->slots[slot].allocations = 0;
        moves->slots[slot].change = (tms_footprint_t){.resident_bytes = 0};
    }
    moves->slots[slot].allocations++;
    moves->slots[slot].change.resident_bytes += change.resident_bytes;
    moves->slots[slot].change.paused_bytes += change.paused_bytes;
    moves->slots[slot].change.backup_bytes += change.backup_bytes;
}

void tms_account_move(tms_account_moves_t *moves, tms_segment_t *segment, tms_segment_state_t state) {
    add(moves, segment,
        set_state(moves->account, segment, state, state == segment->counted.state ? segment->changed_at : moves->now));
}

void tms_account_recount(tms_account_moves_t *moves, tms_segment_t *segment) {
    add(moves, segment, count(moves->account, segment, holding_of(moves->account, segment, segment->state)));
}

void tms_account_record_moves(tms_account_moves_t *moves) {
    for (size_t slot = 0; slot < TMS_ACCOUNT_SLOTS; slot++) empty(moves, slot);
}

/* ---- making the shared page ---- */

_Static_assert(sizeof(CUuuid) == TMS_SHARED_PAGE_UUID_WORDS * sizeof(uint64_t), "a UUID fits its words");
_Static_assert((int)TMS_MAX_DEVICES <= (int)TMS_SHARED_PAGE_DEVICES, "the shared page has a place for each device");

/* Members that are not known stay 0. */
static void describe(const tms_driver_table_t *driver, const tms_device_table_t *devices,
                     tms_shared_page_description_t *description) {
    memset(description, 0, sizeof(*description));
    description->device_count = devices->count;
    for (int i = 0; i < devices->count; i++) {
        CUuuid uuid;
        description->devices[i].total_bytes = devices->device[i].total_bytes;
        if (driver->cuDeviceGetUuid && driver->cuDeviceGetUuid(&uuid, devices->device[i].handle) == CUDA_SUCCESS)
            memcpy(description->devices[i].uuid, &uuid, sizeof(uuid));
    }
}

void tms_account_open_page(tms_account_t *account, const tms_log_t *log, const tms_driver_table_t *driver,
                           const tms_device_table_t *devices) {
    tms_shared_page_t *page = account->shared_page;
    tms_shared_page_description_t description;
    tms_directory_failure_t failure;
    if (!tms_shared_page_may_open(page)) return;
    describe(driver, devices, &description);
    if (tms_shared_page_open(page, &description, &failure)) return;
    tms_log_write(
        log, TMS_LOG_WARNING,
        "this process has no shared page, because '%s' cannot be made: %s failed with errno %d (%s). `top` and `ask` "
        "cannot find this process; everything else works. Set TMS_SHARED_PAGE to another directory, or to 0 to "
        "turn the page off",
        page->file.path, failure.call, failure.os_error, TMS_OS_TEXT(failure.os_error));
}
