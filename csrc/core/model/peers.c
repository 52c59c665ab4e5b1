#include "core/model/peers.h"

/* The maximum number of consecutive allocations that skip the scan after a failed one. */
enum { MAX_SKIPPED = 1024 };

/* The peers of each owner's segments, queried once for each scan. */
typedef struct wanted {
    tms_device_mask_t queried;
    tms_device_mask_t peers[TMS_MAX_DEVICES];
} wanted_t;

static tms_status_t find_wanted(tms_saver_t *saver, wanted_t *wanted, int owner, const tms_error_context_t *context,
                                tms_error_t *error) {
    if (wanted->queried >> owner & 1) return TMS_OK;
    tms_status_t status = tms_devices_peers(saver->devices, owner, &wanted->peers[owner], context, error);
    if (status == TMS_OK) wanted->queried |= (tms_device_mask_t)1 << owner;
    return status;
}

/* Under the lock: a scan of all segments. Continues after a failure, so that the other segments get access, and returns the
 * first failure. */
static tms_status_t share_all(tms_saver_t *saver, const tms_driver_table_t *driver, const char *operation,
                              tms_error_t *error) {
    wanted_t wanted = {0};
    tms_status_t status = TMS_OK;
    const uint64_t mark = ++saver->marks;
    for (tms_registry_node_t *node = saver->registry.first; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        int owner = segment->device;
        if (segment->state != TMS_SEGMENT_ACTIVE)
            continue; /* the call that makes it ACTIVE records that this scan skipped it */
        if (segment->run->mark == mark) continue;
        segment->run->mark = mark;
        tms_error_context_t here = tms_saver_context(operation, segment);
        tms_error_t *unfilled = status == TMS_OK ? error : NULL;
        tms_status_t one = find_wanted(saver, &wanted, owner, &here, unfilled);
        if (one == TMS_OK) one = tms_run_share(segment->run, driver, wanted.peers[owner], &here, unfilled);
        if (status == TMS_OK) status = one;
    }
    return status;
}

/* Under the lock: whether this allocation skips the scan. */
static bool skips_scan(tms_peer_scans_t *scans, tms_device_mask_t active) {
    if (active & ~scans->seen || scans->skipped >= scans->skip_limit) return false;
    scans->skipped++;
    return true;
}

static void note(tms_peer_scans_t *scans, tms_device_mask_t active, bool succeeded) {
    uint32_t longer = scans->skip_limit == 0 ? 1 : 2 * scans->skip_limit;
    if (active & ~scans->seen) longer = 1;
    scans->seen = active;
    scans->skipped = 0;
    scans->skip_limit = succeeded ? 0 : longer < MAX_SKIPPED ? longer : MAX_SKIPPED;
    if (succeeded) scans->complete = active;
}

static tms_status_t refresh(tms_saver_t *saver, bool after_allocation, tms_error_t *error) {
    tms_error_context_t context = {.operation = "enable_peer_access", .device = TMS_NO_DEVICE};
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    tms_device_mask_t active = 0;
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK) status = tms_devices_load(saver->devices, &driver, &devices, &context, error);
    if (status != TMS_OK || devices->count == 1) return status;
    status = tms_devices_active(saver->devices, &active, &context, error);
    if (status != TMS_OK) return status;

    pthread_mutex_lock(&saver->lock);
    tms_peer_scans_t *scans = &saver->peers;
    if (!after_allocation) scans->skip_limit = 0;
    if (!(active & ~scans->complete)) {
        note(scans, active, true);
    } else if (!after_allocation || !skips_scan(scans, active)) {
        status = share_all(saver, driver, context.operation, error);
        note(scans, active, status == TMS_OK);
    }
    pthread_mutex_unlock(&saver->lock);
    return status;
}

tms_status_t tms_peers_refresh(tms_saver_t *saver, tms_error_t *error) { return refresh(saver, false, error); }

void tms_peers_refresh_after_allocation(tms_saver_t *saver) {
    tms_error_t reason;
    tms_saver_log_peer_failure(saver, refresh(saver, true, &reason), &reason);
}

tms_device_mask_t tms_peers_seen(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    tms_device_mask_t seen = saver->peers.seen;
    pthread_mutex_unlock(&saver->lock);
    return seen;
}

static void restart(tms_peer_scans_t *scans) {
    scans->complete = 0;
    scans->skip_limit = 0;
}

bool tms_peers_note_skipped(tms_saver_t *saver, tms_device_mask_t seen) {
    bool skipped = (saver->peers.seen & ~seen) != 0;
    if (skipped) restart(&saver->peers);
    return skipped;
}

void tms_peers_note_reused(tms_saver_t *saver, const tms_run_t *run) {
    const tms_device_mask_t lacking = ~run->accessible & tms_devices_may_reach(saver->devices, run->device);
    if (saver->peers.complete & lacking) restart(&saver->peers);
}
