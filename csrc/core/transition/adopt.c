#include "core/transition/adopt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backup/pass.h"
#include "backup/shared/copy.h"
#include "core/transition/crew.h"
#include "core/transition/object_call.h"

/* Scratch memory of a device: room for an object for each thread of a ring. Less is tried if that does not fit. */
#define MAX_SCRATCH_BYTES ((uint64_t)1 << 30)

typedef struct adopt {
    tms_object_call_t objects; /* first */
    const char *names;
    size_t missing;
} adopt_t;

static tms_status_t link_all(adopt_t *call, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    bool found = true;
    call->missing = 0;
    while (status == TMS_OK && found && call->missing < call->objects.count) {
        tms_object_range_t *range = &call->objects.list[call->missing];
        const tms_error_context_t context = tms_object_call_context(&call->objects, range);
        memcpy(range->name.text, call->names + call->missing * TMS_OBJECT_NAME_DIGITS, TMS_OBJECT_NAME_DIGITS);
        status = tms_shared_contents_link(tms_object_call_store(&call->objects), &range->name, range->memory->bytes,
                                          (int)range->memory->device, &range->contents, &found, &context, error);
        call->missing += found;
    }
    return status;
}

/* Scratch memory. The copier releases it when the device does not use it any more. */
typedef struct scratch {
    tms_copier_t copier;
    CUdeviceptr address;
    uint64_t bytes;
} scratch_t;

/* Device memory that the copier releases. Allocated on the heap, because that may be after the call. */
typedef struct held_memory {
    tms_quarantined_t quarantined; /* first; its context is the saver */
    int device;
    CUdeviceptr address;
} held_memory_t;

/* In the device's context. */
static tms_status_t free_memory(held_memory_t *memory, tms_error_t *reason) {
    const tms_saver_t *saver = memory->quarantined.context;
    const tms_error_context_t context = {.operation = "adopt", .device = memory->device, .address = memory->address};
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_status_t status = TMS_DRIVER_CALL(driver, &context, reason, cuMemFree, memory->address);
    if (status != TMS_OK && !tms_driver_is_gone(reason)) return status;
    free(memory);
    return TMS_OK;
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    held_memory_t *memory = (held_memory_t *)node;
    const tms_saver_t *saver = node->context;
    const tms_error_context_t context = {.operation = "reclaim", .device = memory->device};
    const int device = memory->device;
    tms_error_t reason;
    if (tms_devices_enter(saver->devices, device, &context, NULL) != TMS_OK) return node->holds;
    tms_status_t status = free_memory(memory, &reason);
    tms_devices_leave(saver->devices, device);
    return status == TMS_OK ? 0 : node->holds;
}

static void release_memory(void *held) {
    held_memory_t *memory = held;
    tms_saver_t *saver = memory->quarantined.context;
    tms_error_t reason;
    if (free_memory(memory, &reason) == TMS_OK) return;
    tms_quarantine_add(&saver->quarantine, &memory->quarantined);
    tms_log_write(saver->log, TMS_LOG_WARNING, "%s Scratch memory stays allocated; later calls try again to release it.",
                  reason.message);
}

/* Allocates scratch memory of at most `wanted` bytes and at least `least`. */
static tms_status_t allocate_scratch(tms_saver_t *saver, scratch_t *scratch, uint64_t wanted, uint64_t least,
                                     const tms_error_context_t *context, tms_error_t *error) {
    held_memory_t *memory = calloc(1, sizeof *memory);
    if (!memory) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    *memory = (held_memory_t){.quarantined = {.retry = retry, .context = saver, .holds = TMS_QUARANTINE_BIT(HANDLE)},
                              .device = context->device};
    tms_status_t status;
    scratch->bytes = wanted;
    for (;;) {
        status = TMS_DRIVER_CALL(scratch->copier.driver, context, error, cuMemAlloc, &memory->address, scratch->bytes);
        if (status != TMS_OUT_OF_DEVICE_MEMORY || scratch->bytes == least) break;
        scratch->bytes = scratch->bytes / 2 > least ? scratch->bytes / 2 : least;
    }
    scratch->address = memory->address;
    if (status != TMS_OK) {
        free(memory);
        return status;
    }
    status = tms_copier_hold(&scratch->copier, memory, release_memory, context, error);
    if (status != TMS_OK) release_memory(memory);
    return status;
}

static tms_status_t open_scratch(const adopt_t *call, scratch_t *scratch, int device, tms_wait_t *wait, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(&call->objects.t, device);
    uint64_t all = 0, largest = 0;
    for (size_t i = 0; i < call->objects.count; i++) {
        const tms_shared_piece_t *piece = &call->objects.memory[i];
        if (piece->device != (uint64_t)device) continue;
        all += piece->bytes;
        if (piece->bytes > largest) largest = piece->bytes;
    }
    *scratch = (scratch_t){0};
    tms_status_t status =
        tms_copier_open(&scratch->copier, &call->objects.t.saver->stores.copying, device, wait, &context, error);
    if (status != TMS_OK) return status;
    context.bytes = all < MAX_SCRATCH_BYTES ? all : MAX_SCRATCH_BYTES;
    return allocate_scratch(call->objects.t.saver, scratch, context.bytes, largest, &context, error);
}

/* The ranges [first, end) of the list that one load of the scratch memory covers, without those of other devices. */
typedef struct group {
    adopt_t *call;
    scratch_t *scratch;
    int device;
    size_t first, end;
} group_t;

#define FOR_EACH_RANGE(range, group)                                                                                        \
    for (tms_object_range_t *range = (group)->call->objects.list + (group)->first;                                          \
         range < (group)->call->objects.list + (group)->end; range++)                                                       \
        if (range->memory->device != (uint64_t)(group)->device) {                                                           \
        } else

/* Places as many ranges as fit in the scratch memory. */
static void extend(group_t *group) {
    adopt_t *call = group->call;
    uint64_t used = 0;
    for (group->end = group->first; group->end < call->objects.count; group->end++) {
        tms_object_range_t *range = &call->objects.list[group->end];
        if (range->memory->device != (uint64_t)group->device) continue;
        if (used + range->memory->bytes > group->scratch->bytes) return;
        range->scratch = group->scratch->address + used;
        used += range->memory->bytes;
    }
}

static tms_status_t load_group(const group_t *group, tms_error_t *error) {
    const adopt_t *call = group->call;
    const tms_error_context_t context = tms_transition_context(&call->objects.t, group->device);
    tms_copier_t *copier = &group->scratch->copier;
    tms_status_t status = TMS_OK;
    FOR_EACH_RANGE(range, group) {
        const tms_error_context_t here = tms_object_call_context(&call->objects, range);
        if (status == TMS_OK)
            status = tms_shared_copy_load(tms_object_call_store(&call->objects), range->contents, copier, range->scratch,
                                          &here, error);
    }
    return status == TMS_OK ? tms_copier_wait(copier, &context, error) : status;
}

/* Fails if an object in the scratch memory has not the contents that its name says. */
static tms_status_t check_group(const group_t *group, tms_wait_t *wait, tms_error_t *error) {
    adopt_t *call = group->call;
    tms_transition_t *t = &call->objects.t;
    tms_pass_t pass = {
        .stores = &t->saver->stores, .wait = wait, .operation = t->requested.operation, .purpose = TMS_PASS_NAMES};
    FOR_EACH_RANGE(range, group) tms_pass_add(&pass, &range->backup, &range->backup.planned, range->scratch, group->device);
    tms_status_t status = tms_pass_perform(&pass, error);
    if (status != TMS_OK) return status;
    FOR_EACH_RANGE(range, group) {
        const tms_error_context_t context = tms_object_call_context(&call->objects, range);
        tms_shared_name_t found;
        if (status != TMS_OK) break;
        status = tms_object_call_name(&call->objects, range, &found, error);
        tms_fingerprints_forget(&range->backup.fingerprints);
        if (status == TMS_OK && memcmp(&found, &range->name, sizeof found) != 0) {
            status = tms_error_set(error, TMS_BACKUP_IO, &context,
                                   "the object '%s/objects/%s' is damaged: its contents are those of another name",
                                   tms_object_call_store(&call->objects)->folder.path, range->name.text);
            tms_shared_object_reject(tms_object_call_store(&call->objects), range->contents->parts->object, error);
        }
    }
    return status;
}

static tms_status_t deliver_group(const group_t *group, tms_error_t *error) {
    const adopt_t *call = group->call;
    const tms_error_context_t context = tms_transition_context(&call->objects.t, group->device);
    tms_copier_t *copier = &group->scratch->copier;
    tms_status_t status = TMS_OK;
    FOR_EACH_RANGE(range, group) {
        const tms_error_context_t here = tms_object_call_context(&call->objects, range);
        if (status == TMS_OK)
            status =
                tms_copier_on_device(copier, range->memory->address, range->scratch, range->memory->bytes, &here, error);
    }
    return status == TMS_OK ? tms_copier_wait(copier, &context, error) : status;
}

/* Fills the ranges of one device. */
static tms_status_t fill_ranges(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    adopt_t *call = (adopt_t *)t;
    scratch_t scratch;
    group_t group = {.call = call, .scratch = &scratch, .device = device};
    tms_status_t status = open_scratch(call, &scratch, device, wait, error);
    scratch.copier.done = &t->done.copied_bytes;
    for (; status == TMS_OK && group.first < call->objects.count; group.first = group.end) {
        extend(&group);
        status = load_group(&group, error);
        if (status == TMS_OK) status = check_group(&group, wait, error);
        if (status == TMS_OK) status = deliver_group(&group, error);
    }
    if (status == TMS_FORKED) return status; /* in a forked child: the stream and its context belong to the parent */
    (void)tms_copier_close(&scratch.copier);
    return status;
}

static tms_status_t adopt(tms_transition_t *t, tms_error_t *error) {
    adopt_t *call = (adopt_t *)t;
    tms_status_t status = tms_object_call_prepare(&call->objects, error);
    if (status == TMS_OK) status = link_all(call, error);
    const bool complete = status == TMS_OK && call->missing == call->objects.count;
    if (complete) status = tms_crew_perform(t, t->planned.affected, fill_ranges, error);
    if (status == TMS_FORKED) return status; /* in a forked child: everything belongs to the parent */
    tms_object_call_finish(&call->objects, complete && status == TMS_OK);
    return status;
}

tms_status_t tms_adopt_perform(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                               size_t count, const char *names, size_t *missing, tms_error_t *error) {
    adopt_t call = {.objects = {.memory = pieces, .count = count}, .names = names};
    const tms_status_t status = tms_object_call_perform(&call.objects, saver, selection, "adopt", adopt, error);
    *missing = call.missing;
    return status;
}
