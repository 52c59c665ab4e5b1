#include "core/transition/publish.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/statvfs.h>

#include "backup/host/room.h"
#include "backup/pass.h"
#include "backup/shared/copy.h"
#include "backup/shared/files.h"
#include "backup/shared/published.h"
#include "core/transition/crew.h"
#include "core/transition/object_call.h"

typedef struct publish {
    tms_object_call_t objects; /* first */
    const char *name, *contents;
    uint64_t written;
} publish_t;

static tms_status_t find_fingerprints(publish_t *call, tms_error_t *error) {
    tms_transition_t *t = &call->objects.t;
    tms_pass_t pass = {
        .stores = &t->saver->stores, .wait = &t->wait, .operation = t->requested.operation, .purpose = TMS_PASS_NAMES};
    for (size_t i = 0; i < call->objects.count; i++) {
        tms_object_range_t *range = &call->objects.list[i];
        tms_pass_add(&pass, &range->backup, &range->backup.planned, range->memory->address, (int)range->memory->device);
    }
    return tms_pass_perform(&pass, error);
}

/* Links the objects that exist, and counts the bytes of the others, each once. */
static tms_status_t link_existing(publish_t *call, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (size_t i = 0; status == TMS_OK && i < call->objects.count; i++) {
        tms_object_range_t *range = &call->objects.list[i];
        const tms_error_context_t context = tms_object_call_context(&call->objects, range);
        status = tms_object_call_name(&call->objects, range, &range->name, error);
        if (status == TMS_OK)
            status = tms_shared_contents_make(tms_object_call_store(&call->objects), &range->backup.planned,
                                              range->backup.fingerprints.fresh, (int)range->memory->device, &range->contents,
                                              &context, error);
        if (status == TMS_OK &&
            tms_shared_object_is_new(tms_object_call_store(&call->objects), range->contents->parts->object))
            call->written += range->memory->bytes;
    }
    return status;
}

/* Whether there is room for what is missing. */
static tms_status_t check_room(publish_t *call, tms_error_t *error) {
    const tms_shared_folder_t *folder = &tms_object_call_store(&call->objects)->folder;
    tms_host_store_t *host = &call->objects.t.saver->stores.host;
    tms_error_context_t context = tms_transition_context(&call->objects.t, TMS_NO_DEVICE);
    struct statvfs system;
    context.bytes = call->written;
    if (call->written == 0) return TMS_OK;
    tms_status_t status = tms_host_store_claim(host, call->written, &context, error);
    if (status != TMS_OK) return status;
    tms_host_store_claim_used(host, call->written);
    tms_host_store_disclaim(host, call->written);
    if (fstatvfs(folder->root, &system) != 0) return tms_shared_fail(error, &context, "fstatvfs", errno, folder->path, NULL);
    if (system.f_blocks == 0 || system.f_bavail * system.f_frsize >= call->written) return TMS_OK;
    status = tms_shared_fail(error, &context, "the check for room", ENOSPC, folder->path, NULL);
    tms_error_append(error, " Nothing was written.");
    return status;
}

/* Writes the objects of one device that do not exist. */
static tms_status_t write_objects(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    publish_t *call = (publish_t *)t;
    const tms_error_context_t context = tms_transition_context(t, device);
    tms_copier_t copier = {.open = false};
    tms_status_t status = tms_copier_open(&copier, &t->saver->stores.copying, device, wait, &context, error);
    copier.done = &t->done.copied_bytes;
    for (size_t i = 0; status == TMS_OK && i < call->objects.count; i++) {
        const tms_object_range_t *range = &call->objects.list[i];
        const tms_error_context_t here = tms_object_call_context(&call->objects, range);
        if (range->memory->device == (uint64_t)device)
            status = tms_shared_copy_save(tms_object_call_store(&call->objects), range->contents, &copier,
                                          range->memory->address, &here, error);
    }
    if (status == TMS_OK) status = tms_copier_wait(&copier, &context, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the stream and its context belong to the parent */
    (void)tms_copier_close(&copier);
    return status;
}

/* Gives the objects their common name. A range without an object is one whose writer makes no progress. */
static tms_status_t give_name(const publish_t *call, tms_error_t *error) {
    tms_shared_store_t *store = tms_object_call_store(&call->objects);
    const tms_error_context_t context = tms_transition_context(&call->objects.t, TMS_NO_DEVICE);
    tms_shared_name_t *objects = calloc(call->objects.count + 1, sizeof *objects);
    if (!objects) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    tms_status_t status = TMS_OK;
    for (size_t i = 0; status == TMS_OK && i < call->objects.count; i++) {
        objects[i] = call->objects.list[i].name;
        if (!call->objects.list[i].contents->parts->object)
            status = tms_error_set(error, TMS_BACKUP_IO, &context,
                                   "another process has begun to write the object %s and makes no progress. If it is "
                                   "stopped, let it continue or end it, and publish again",
                                   objects[i].text);
    }
    if (status == TMS_OK) {
        pthread_mutex_lock(&store->lock);
        bool left = false;
        status = tms_shared_publish(&store->folder, call->name, objects, call->objects.count, call->contents, &left,
                                    &context, error);
        store->left_links |= left;
        pthread_mutex_unlock(&store->lock);
    }
    free(objects);
    return status;
}

static tms_status_t publish(tms_transition_t *t, tms_error_t *error) {
    publish_t *call = (publish_t *)t;
    tms_status_t status = tms_object_call_prepare(&call->objects, error);
    if (status == TMS_OK) status = find_fingerprints(call, error);
    if (status == TMS_OK) status = link_existing(call, error);
    t->planned.total_bytes = call->written;
    if (status == TMS_OK) status = check_room(call, error);
    if (status == TMS_OK && call->written > 0) status = tms_crew_perform(t, t->planned.affected, write_objects, error);
    if (status == TMS_FORKED) return status; /* in a forked child: everything belongs to the parent */
    if (status == TMS_OK) status = give_name(call, error);
    tms_object_call_finish(&call->objects, status == TMS_OK);
    return status;
}

tms_status_t tms_publish_perform(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                                 size_t count, const char *name, const char *contents, uint64_t *written,
                                 tms_error_t *error) {
    publish_t call = {.objects = {.memory = pieces, .count = count, .aligned = true}, .name = name, .contents = contents};
    const tms_status_t status = tms_object_call_perform(&call.objects, saver, selection, "publish", publish, error);
    *written = call.written;
    return status;
}
