#include "backup/shared/copy.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "backup/host/copy.h"
#include "backup/shared/jobs.h"
#include "base/clock.h"
#include "base/random.h"

typedef struct relay {
    tms_copier_relay_t relay; /* first */
    tms_shared_store_t *store;
    tms_copier_t *copier;
    bool saving;
    tms_shared_jobs_t jobs;
} relay_t;

/* ---- one object ---- */

static tms_status_t write_claimed(relay_t *relay, tms_shared_job_t *job, tms_shared_lane_t *lane, tms_error_t *error) {
    tms_shared_object_t *object = job->part->object;
    tms_host_store_t *host = relay->store->host;
    /* The system counts the pages once they are written. */
    tms_status_t status = tms_host_store_claim(host, object->bytes, &job->context, error);
    if (status == TMS_OK) {
        status = tms_shared_lane_write(lane, relay->store, object, job->address, &job->context, error);
        tms_host_store_claim_used(host, object->bytes);
        tms_host_store_disclaim(host, object->bytes);
    }
    job->claimed = false;
    job->done = true;
    if (status == TMS_OK) return tms_shared_object_finish(relay->store, object, &job->context, error);
    tms_shared_object_abandon(relay->store, object);
    return status;
}

/* Links the object, claims it, or leaves it to its other writer. */
static tms_status_t attempt(relay_t *relay, tms_shared_job_t *job, tms_error_t *error) {
    tms_shared_attempt_t found;
    bool here;
    tms_status_t status = tms_shared_object_try(relay->store, job->part->object, true, &found, &here, &job->context, error);
    if (status != TMS_OK) return status;
    job->claimed = found.state == TMS_SHARED_CLAIMED;
    job->done = found.state == TMS_SHARED_HELD;
    job->polls = here || job->seen != found.written ? 0 : job->polls + 1;
    job->seen = found.written;
    return TMS_OK;
}

static tms_status_t save_object(void *context, size_t index, tms_shared_lane_t *lane, tms_error_t *error) {
    relay_t *relay = context;
    tms_shared_job_t *job = &relay->jobs.list[index];
    tms_status_t status = job->done || job->claimed ? TMS_OK : attempt(relay, job, error);
    return status == TMS_OK && job->claimed ? write_claimed(relay, job, lane, error) : status;
}

static tms_status_t load_object(void *context, size_t index, tms_shared_lane_t *lane, tms_error_t *error) {
    const relay_t *relay = context;
    const tms_shared_job_t *job = &relay->jobs.list[index];
    return tms_shared_lane_read(lane, relay->store, job->part->object, job->address, &job->context, error);
}

/* ---- objects of other writers ---- */

/* Copies the contents of an object to memory of their own. */
static tms_status_t keep_private_copy(relay_t *relay, tms_shared_job_t *job, tms_error_t *error) {
    tms_shared_part_t *part = job->part;
    struct tms_host_batch *batch = NULL;
    const tms_host_request_t wanted = {
        .bytes = part->bytes, .device = relay->copier->device, .kind = TMS_BACKUP_PINNED, .group = relay};
    /* Without a list of extents the copy is queued at once. Gathered ones have been queued before this. */
    const tms_backup_content_t content = {.kind = TMS_BACKUP_PINNED, .bytes = part->bytes};
    tms_log_once(
        relay->store->copying->log, &relay->store->warned_stuck, TMS_LOG_WARNING,
        "another process has been writing the object %s of '%s' for about a second without progress, so this process "
        "keeps a private copy of it. If that process is stopped, let it continue or end it.",
        part->object->name.text, relay->store->folder.path);
    tms_status_t status = tms_host_batch_create(&batch, relay->store->host, &job->context, error);
    if (status == TMS_OK) status = tms_host_batch_add(batch, &wanted, &part->alone, &job->context, error);
    if (status == TMS_OK) status = tms_host_batch_start(batch, &job->context, error);
    if (status == TMS_OK)
        status = tms_host_copy_save(part->alone, &content, relay->copier, job->address, &job->context, error);
    tms_host_batch_destroy(batch);
    if (status != TMS_OK) return status;
    tms_shared_object_drop(relay->store, part->object);
    part->object = NULL;
    job->done = true;
    return TMS_OK;
}

/* Checks each remaining object once. Sets *left to their number, and *claimed if a dead process has left one of them. */
static tms_status_t poll_all(relay_t *relay, size_t *left, bool *claimed, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    *left = 0;
    *claimed = false;
    for (size_t i = 0; status == TMS_OK && i < relay->jobs.count; i++) {
        tms_shared_job_t *job = &relay->jobs.list[i];
        if (job->done) continue;
        status = attempt(relay, job, error);
        if (status == TMS_OK && !job->done && !job->claimed && job->polls >= relay->store->patience)
            status = keep_private_copy(relay, job, error);
        *left += !job->done;
        *claimed |= job->claimed;
    }
    return status;
}

/* Sleeps between two polls. tms_wait_sleep would not sleep in a call without a timeout. */
static tms_status_t sleep_between(relay_t *relay, const tms_error_context_t *context, tms_error_t *error) {
    static const struct timespec millisecond = {.tv_nsec = 1000000};
    (void)nanosleep(&millisecond, NULL); /* a signal ends it early */
    return tms_wait_check(relay->copier->wait, context, error);
}

/* Waits for the objects that other processes are writing. */
static tms_status_t await_others(relay_t *relay, const tms_error_context_t *context, tms_error_t *error) {
    size_t left = 0;
    bool claimed = false;
    const uint64_t began = tms_clock_nanoseconds();
    tms_status_t status = poll_all(relay, &left, &claimed, error);
    while (status == TMS_OK && left > 0) {
        status = claimed ? tms_shared_ring_perform(relay->store, relay->copier, relay->jobs.count, 0, save_object, relay,
                                                   context, error)
                         : sleep_between(relay, context, error);
        if (status == TMS_OK) status = poll_all(relay, &left, &claimed, error);
    }
    atomic_fetch_add(&relay->store->wait_nanoseconds, tms_clock_nanoseconds() - began);
    return status;
}

static void abandon_claims(relay_t *relay) {
    for (size_t i = 0; i < relay->jobs.count; i++) {
        const tms_shared_job_t *job = &relay->jobs.list[i];
        if (job->claimed) tms_shared_object_abandon(relay->store, job->part->object);
    }
}

/* ---- the relay ---- */

static tms_status_t move(relay_t *relay, tms_error_t *error) {
    tms_copier_t *copier = relay->copier;
    const tms_error_context_t context = {.operation = relay->jobs.list[0].context.operation, .device = copier->device};
    if (relay->saving) {
        tms_status_t status =
            tms_shared_ring_perform(relay->store, copier, relay->jobs.count,
                                    (size_t)(tms_random_number() % relay->jobs.count), save_object, relay, &context, error);
        return status == TMS_OK ? await_others(relay, &context, error) : status;
    }
    /* Memory may be filled before its contents are copied. */
    tms_status_t status = TMS_DRIVER_CALL(copier->driver, &context, error, cuStreamSynchronize, copier->stream);
    return status == TMS_OK
               ? tms_shared_ring_perform(relay->store, copier, relay->jobs.count, 0, load_object, relay, &context, error)
               : status;
}

static tms_status_t wait_for_objects(tms_copier_relay_t *base, tms_error_t *error) {
    relay_t *relay = (relay_t *)base;
    if (relay->jobs.count == 0) return TMS_OK;
    tms_status_t status = move(relay, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the claims belong to the parent */
    abandon_claims(relay);
    relay->jobs.count = 0;
    return status;
}

static void release_relay(tms_copier_relay_t *base, const tms_driver_table_t *driver, const tms_wait_t *wait) {
    relay_t *relay = (relay_t *)base;
    (void)driver;
    (void)wait;
    tms_shared_jobs_free(&relay->jobs);
    free(relay);
}

static const tms_copier_relay_table_t relay_table = {.wait = wait_for_objects, .release = release_relay};

/* Returns the copier's relay, which is made at its first object, or NULL if memory is short. */
static relay_t *open_relay(tms_shared_store_t *store, bool saving, tms_copier_t *copier) {
    relay_t *made = (relay_t *)tms_copier_find_relay(copier, &relay_table);
    if (made) return made;
    made = calloc(1, sizeof *made);
    if (!made) return NULL;
    *made = (relay_t){.relay.table = &relay_table, .store = store, .copier = copier, .saving = saving};
    tms_copier_add_relay(copier, &made->relay);
    return made;
}

static tms_status_t add(relay_t *relay, tms_shared_part_t *part, CUdeviceptr address, const tms_error_context_t *context,
                        tms_error_t *error) {
    if (!relay) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    return tms_shared_jobs_add(&relay->jobs, part, address + part->offset, context, error);
}

/* ---- a segment ---- */

tms_status_t tms_shared_copy_save(tms_shared_store_t *store, tms_shared_contents_t *contents, tms_copier_t *copier,
                                  CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    if (contents->rest.bytes > 0)
        status = tms_host_copy_save(contents->buffer, &contents->rest, copier, address, context, error);
    for (size_t i = 0; status == TMS_OK && i < contents->part_count; i++) {
        if (!tms_shared_object_is_here(store, contents->parts[i].object))
            status = add(open_relay(store, true, copier), &contents->parts[i], address, context, error);
    }
    return status;
}

/* Copies from memory that the driver can reach. */
static tms_status_t load_part(const tms_shared_part_t *part, tms_copier_t *copier, CUdeviceptr address,
                              const tms_error_context_t *context, tms_error_t *error) {
    const tms_backup_content_t content = {.kind = TMS_BACKUP_PINNED, .bytes = part->bytes};
    if (part->object)
        return tms_copier_to_device(copier, address + part->offset, part->object->memory, part->bytes, context, error);
    return tms_host_copy_load(part->alone, &content, copier, address + part->offset, context, error);
}

tms_status_t tms_shared_copy_load(tms_shared_store_t *store, tms_shared_contents_t *contents, tms_copier_t *copier,
                                  CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    if (contents->rest.bytes > 0)
        status = tms_host_copy_load(contents->buffer, &contents->rest, copier, address, context, error);
    for (size_t i = 0; status == TMS_OK && i < contents->part_count; i++) {
        tms_shared_part_t *part = &contents->parts[i];
        if (part->object && !tms_shared_object_is_registered(store, part->object))
            status = add(open_relay(store, false, copier), part, address, context, error);
        else
            status = load_part(part, copier, address, context, error);
    }
    return status;
}
