#include "backup/host/room.h"

#include "backup/host/pool.h"
#include "backup/host/release.h"

bool tms_host_store_fits(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom) {
    pthread_mutex_lock(&store->lock);
    uint64_t in_flight = store->in_flight_bytes, resident = atomic_load(&store->resident_bytes);
    pthread_mutex_unlock(&store->lock);
    /* The system may or may not have counted the bytes in flight already. */
    *headroom = tms_host_limits_headroom(&store->limits, resident - in_flight);
    return in_flight <= headroom->bytes && bytes <= headroom->bytes - in_flight;
}

bool tms_host_store_make_room(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom) {
    if (tms_host_store_fits(store, bytes, headroom)) return true;
    tms_host_store_settle(store);
    if (tms_host_store_fits(store, bytes, headroom)) return true;
    if (headroom->call) return false; /* it is unknown whether releasing memory would help */
    pthread_mutex_lock(&store->lock);
    uint64_t wanted = bytes + store->in_flight_bytes; /* may be less than when the headroom was read */
    uint64_t missing = wanted > headroom->bytes ? wanted - headroom->bytes : 0;
    tms_host_pool_give_up(store, missing);
    bool helps = missing == 0 || store->waiting;
    pthread_mutex_unlock(&store->lock);
    if (!helps) return false;
    tms_host_store_settle(store);
    return tms_host_store_fits(store, bytes, headroom);
}

/* The bytes are counted before the check, so that two claims never rely on the same room. */
tms_status_t tms_host_store_claim(tms_host_store_t *store, uint64_t bytes, const tms_error_context_t *context,
                                  tms_error_t *error) {
    tms_host_headroom_t headroom;
    pthread_mutex_lock(&store->lock);
    store->in_flight_bytes += bytes;
    atomic_fetch_add(&store->resident_bytes, bytes);
    pthread_mutex_unlock(&store->lock);
    if (tms_host_store_make_room(store, 0, &headroom)) return TMS_OK;
    tms_host_store_claim_used(store, bytes);
    tms_host_store_disclaim(store, bytes);
    return tms_host_headroom_fail(&headroom, bytes, context, error);
}

void tms_host_store_claim_used(tms_host_store_t *store, uint64_t bytes) {
    pthread_mutex_lock(&store->lock);
    store->in_flight_bytes -= bytes;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

void tms_host_store_disclaim(tms_host_store_t *store, uint64_t bytes) { atomic_fetch_sub(&store->resident_bytes, bytes); }
