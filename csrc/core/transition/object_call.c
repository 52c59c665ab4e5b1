#include "core/transition/object_call.h"

#include <errno.h>
#include <stdlib.h>

#include "core/transition/steps.h"

_Static_assert((int)TMS_OBJECT_NAME_DIGITS == (int)TMS_SHARED_NAME_DIGITS, "the public header says how long a name is");

tms_error_context_t tms_object_call_context(const tms_object_call_t *call, const tms_object_range_t *range) {
    return (tms_error_context_t){.operation = call->t.requested.operation,
                                 .device = (int)range->memory->device,
                                 .bytes = range->memory->bytes,
                                 .address = range->memory->address};
}

static bool is_usable(const tms_object_call_t *call, const tms_shared_piece_t *piece) {
    enum { VECTOR = TMS_FINGERPRINT_VECTOR_BYTES };
    return piece->device < (uint64_t)call->t.devices->count && piece->bytes >= TMS_MIN_OBJECT_BYTES &&
           piece->bytes <= TMS_MAX_OBJECT_BYTES && piece->bytes % VECTOR == 0 && piece->address != 0 &&
           (!call->aligned || piece->address % VECTOR == 0);
}

/* Under the lock. Returns a segment in the piece that is not active, or NULL. */
static const tms_segment_t *find_inactive(const tms_saver_t *saver, const tms_shared_piece_t *piece) {
    const uint64_t end = piece->address + piece->bytes;
    tms_registry_node_t *node = tms_registry_overlapping(&saver->registry, piece->address, end);
    while (node && tms_segment_of(node)->state == TMS_SEGMENT_ACTIVE)
        node = node->end < end ? tms_registry_overlapping(&saver->registry, node->end, end) : NULL;
    return node ? tms_segment_of(node) : NULL;
}

static tms_status_t check_range(const tms_object_call_t *call, const tms_object_range_t *range, tms_error_t *error) {
    tms_error_context_t context = tms_object_call_context(call, range);
    tms_saver_t *saver = call->t.saver;
    if (!is_usable(call, range->memory))
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "a piece of this place and size cannot be an object");
    pthread_mutex_lock(&saver->lock);
    const tms_segment_t *inactive = find_inactive(saver, range->memory);
    if (inactive) context.tag = inactive->tag->name; /* interned */
    pthread_mutex_unlock(&saver->lock);
    if (!inactive) return TMS_OK;
    return tms_error_set(error, TMS_INVALID_STATE, &context, "the memory is paused; resume it first");
}

tms_status_t tms_object_call_prepare(tms_object_call_t *call, tms_error_t *error) {
    tms_transition_t *t = &call->t;
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_quiesced_t quiesced;
    tms_status_t status = TMS_OK;
    call->list = calloc(call->count + 1, sizeof *call->list);
    if (!call->list) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    for (size_t i = 0; status == TMS_OK && i < call->count; i++) {
        tms_object_range_t *range = &call->list[i];
        range->memory = &call->memory[i];
        range->backup.bytes = range->memory->bytes;
        status = check_range(call, range, error);
        if (status != TMS_OK) return status;
        const tms_error_context_t here = tms_object_call_context(call, range);
        t->planned.affected |= (tms_device_mask_t)1 << range->memory->device;
        t->planned.total_bytes += range->memory->bytes;
        status = tms_backup_content_choose(&range->backup.planned, TMS_BACKUP_SHARED, NULL, range->memory->address,
                                           range->memory->bytes, &here, error);
    }
    if (status == TMS_OK) status = tms_shared_store_open(tms_object_call_store(call), &context, error);
    if (status != TMS_OK) return status;
    return tms_steps_quiesce(t, &quiesced, error);
}

void tms_object_call_finish(tms_object_call_t *call, bool keep) {
    for (size_t i = 0; call->list && i < call->count; i++) {
        tms_object_range_t *range = &call->list[i];
        if (range->contents && keep)
            tms_shared_store_keep(tms_object_call_store(call), range->contents);
        else
            tms_shared_contents_drop(tms_object_call_store(call), range->contents);
        tms_backup_destroy(&range->backup, &call->t.saver->stores);
    }
    free(call->list);
}

tms_status_t tms_object_call_name(const tms_object_call_t *call, const tms_object_range_t *range, tms_shared_name_t *name,
                                  tms_error_t *error) {
    const tms_error_context_t context = tms_object_call_context(call, range);
    const tms_backup_t *backup = &range->backup;
    if (!backup->fingerprints.fresh)
        return tms_error_set(error, TMS_DRIVER, &context,
                             "the fingerprints of the contents could not be computed; the log says why");
    *name = tms_shared_name(tms_object_call_store(call)->folder.key, backup->fingerprints.fresh,
                            (size_t)tms_fingerprints_count(&backup->planned), range->memory->bytes);
    return TMS_OK;
}

tms_status_t tms_object_call_perform(tms_object_call_t *call, tms_saver_t *saver, const tms_selection_t *selection,
                                     const char *operation, tms_status_t (*act)(tms_transition_t *t, tms_error_t *error),
                                     tms_error_t *error) {
    static const char *const no_tags[1] = {NULL};
    tms_selection_t nothing = *selection;
    nothing.tags = no_tags;
    nothing.tag_count = 0;
    call->t = (tms_transition_t){.saver = saver,
                                 .requested = {.selection = &nothing,
                                               .operation = operation,
                                               .from = TMS_SEGMENT_ACTIVE,
                                               .through = TMS_SEGMENT_PAUSING,
                                               .to = TMS_SEGMENT_ACTIVE,
                                               .any_memory = true},
                                 .act = act};
    const tms_status_t status = tms_steps_perform(&call->t, error);
    tms_backup_stores_after_resume(&saver->stores);
    return status;
}
