#include "core/transition/node.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "backup/host/room.h"
#include "backup/pass.h"
#include "backup/shared/copy.h"
#include "backup/shared/published.h"
#include "backup/shared/store.h"
#include "core/transition/crew.h"
#include "core/transition/steps.h"

/* Scratch memory of a device: room for an object for each thread of a ring. Less is tried if that does not fit. */
#define SCRATCH_BYTES_MOST ((uint64_t)1 << 30)

_Static_assert((int)TMS_OBJECT_NAME_DIGITS == (int)TMS_SHARED_NAME_DIGITS, "the public header says how long a name is");

/* One piece, and the object that it is, or becomes. */
typedef struct part {
    const tms_shared_piece_t *piece;
    tms_backup_t backup; /* temporary: its `planned` content and its fingerprints, for a pass */
    tms_shared_contents_t *contents;
    tms_shared_name_t name;
    CUdeviceptr scratch; /* adopt: where the object is checked */
} part_t;

typedef struct node_call {
    tms_transition_t t; /* first */
    const tms_shared_piece_t *pieces;
    size_t count;
    part_t *parts;
    /* publish */
    const char *name, *contents;
    uint64_t written;
    /* adopt */
    const char *names;
    size_t missing;
} node_call_t;

static tms_shared_store_t *store_of(const node_call_t *call) { return &call->t.saver->stores.shared; }
static bool publishes(const node_call_t *call) { return call->name != NULL; }

static tms_error_context_t context_of(const node_call_t *call, const part_t *part) {
    return (tms_error_context_t){.operation = call->t.asked.operation,
                                 .device = (int)part->piece->device,
                                 .bytes = part->piece->bytes,
                                 .address = part->piece->address};
}

/* ---- the pieces ---- */

static bool is_usable(const node_call_t *call, const tms_shared_piece_t *piece) {
    enum { VECTOR = TMS_FINGERPRINT_VECTOR_BYTES };
    return piece->device < (uint64_t)call->t.devices->count && piece->bytes >= TMS_OBJECT_BYTES_LEAST &&
           piece->bytes <= TMS_OBJECT_BYTES_MOST && piece->bytes % VECTOR == 0 && piece->address != 0 &&
           (!publishes(call) || piece->address % VECTOR == 0);
}

/* Under the lock. Returns a segment in the piece that is not active, or NULL. */
static const tms_segment_t *find_inactive(const tms_saver_t *saver, const tms_shared_piece_t *piece) {
    for (uint64_t at = piece->address; at - piece->address < piece->bytes;) {
        tms_registry_node_t *node = tms_registry_find(&saver->registry, at);
        if (!node) return NULL; /* not managed */
        const tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != TMS_SEGMENT_ACTIVE) return segment;
        at = node->end;
    }
    return NULL;
}

static tms_status_t check_piece(const node_call_t *call, const part_t *part, tms_error_t *error) {
    tms_error_context_t context = context_of(call, part);
    tms_saver_t *saver = call->t.saver;
    if (!is_usable(call, part->piece))
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "a piece of this place and size cannot be an object");
    pthread_mutex_lock(&saver->lock);
    const tms_segment_t *inactive = find_inactive(saver, part->piece);
    if (inactive) context.tag = inactive->tag->name; /* interned */
    pthread_mutex_unlock(&saver->lock);
    if (!inactive) return TMS_OK;
    return tms_error_set(error, TMS_INVALID_STATE, &context, "the memory is paused; resume it first");
}

/* Checks the pieces, opens the store, and waits for the devices. */
static tms_status_t prepare(node_call_t *call, tms_error_t *error) {
    tms_transition_t *t = &call->t;
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_quiesced_t quiesced;
    tms_status_t status = TMS_OK;
    call->parts = calloc(call->count + 1, sizeof *call->parts);
    if (!call->parts) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    for (size_t i = 0; status == TMS_OK && i < call->count; i++) {
        part_t *part = &call->parts[i];
        part->piece = &call->pieces[i];
        part->backup.bytes = part->piece->bytes;
        status = check_piece(call, part, error);
        if (status != TMS_OK) return status;
        const tms_error_context_t here = context_of(call, part);
        t->planned.affected |= (tms_device_mask_t)1 << part->piece->device;
        t->planned.total_bytes += part->piece->bytes;
        status = tms_backup_content_choose(&part->backup.planned, TMS_BACKUP_SHARED, NULL, part->piece->address,
                                           part->piece->bytes, &here, error);
    }
    if (status == TMS_OK) status = tms_shared_store_open(store_of(call), &context, error);
    if (status != TMS_OK) return status;
    return tms_steps_quiesce(t, &quiesced, error);
}

/* Gives the contents to the store after a success, or drops them. */
static void finish(node_call_t *call, bool keep) {
    for (size_t i = 0; call->parts && i < call->count; i++) {
        part_t *part = &call->parts[i];
        if (part->contents && keep)
            tms_shared_store_keep(store_of(call), part->contents);
        else
            tms_shared_contents_drop(store_of(call), part->contents);
        tms_backup_destroy(&part->backup, &call->t.saver->stores);
    }
    free(call->parts);
}

/* Names a piece by its fingerprints, which a pass has computed. */
static tms_status_t name_part(const node_call_t *call, const part_t *part, tms_shared_name_t *name, tms_error_t *error) {
    const tms_error_context_t context = context_of(call, part);
    const tms_backup_t *backup = &part->backup;
    if (!backup->fingerprints.fresh)
        return tms_error_set(error, TMS_DRIVER, &context,
                             "the fingerprints of the contents could not be computed; the log says why");
    *name = tms_shared_name(store_of(call)->folder.key, backup->fingerprints.fresh,
                            (size_t)tms_fingerprints_count(&backup->planned), part->piece->bytes);
    return TMS_OK;
}

/* Performs the call, which selects no allocation and has the callbacks of `selection`. */
static tms_status_t run(node_call_t *call, tms_saver_t *saver, const tms_selection_t *selection, const char *operation,
                        tms_status_t (*act)(tms_transition_t *t, tms_error_t *error), tms_error_t *error) {
    static const char *const no_tags[1] = {NULL};
    tms_selection_t nothing = *selection;
    nothing.tags = no_tags;
    nothing.tag_count = 0;
    call->t = (tms_transition_t){.saver = saver,
                                 .asked = {.selection = &nothing,
                                           .operation = operation,
                                           .from = TMS_SEGMENT_ACTIVE,
                                           .through = TMS_SEGMENT_PAUSING,
                                           .to = TMS_SEGMENT_ACTIVE,
                                           .any_memory = true},
                                 .act = act};
    const tms_status_t status = tms_steps_run(&call->t, error);
    tms_backup_stores_after_resume(&saver->stores);
    return status;
}

/* ---- publish ---- */

static tms_status_t find_fingerprints(node_call_t *call, tms_error_t *error) {
    tms_transition_t *t = &call->t;
    tms_pass_t pass = {.stores = &t->saver->stores, .wait = &t->wait, .operation = t->asked.operation, .mapped = true};
    for (size_t i = 0; i < call->count; i++) {
        part_t *part = &call->parts[i];
        tms_pass_add(&pass, &part->backup, &part->backup.planned, part->piece->address, (int)part->piece->device);
    }
    return tms_pass_run(&pass, error);
}

/* Links the objects that exist, and counts the bytes of the others, each once. */
static tms_status_t link_existing(node_call_t *call, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (size_t i = 0; status == TMS_OK && i < call->count; i++) {
        part_t *part = &call->parts[i];
        const tms_error_context_t context = context_of(call, part);
        status = name_part(call, part, &part->name, error);
        if (status == TMS_OK)
            status = tms_shared_contents_make(store_of(call), &part->backup.planned, part->backup.fingerprints.fresh,
                                              (int)part->piece->device, &part->contents, &context, error);
        if (status == TMS_OK && tms_shared_object_is_new(store_of(call), part->contents->parts->object))
            call->written += part->piece->bytes;
    }
    return status;
}

/* Whether there is room for what is missing. */
static tms_status_t check_room(node_call_t *call, tms_error_t *error) {
    const tms_shared_folder_t *folder = &store_of(call)->folder;
    tms_host_store_t *host = &call->t.saver->stores.host;
    tms_error_context_t context = tms_transition_context(&call->t, TMS_NO_DEVICE);
    struct statvfs system;
    context.bytes = call->written;
    if (call->written == 0) return TMS_OK;
    tms_status_t status = tms_host_store_claim(host, call->written, &context, error);
    if (status != TMS_OK) return status;
    tms_host_store_claim_used(host, call->written);
    tms_host_store_disclaim(host, call->written);
    if (fstatvfs(folder->root, &system) != 0) return tms_error_set_os(error, &context, "fstatvfs", errno, folder->path);
    if (system.f_blocks == 0 || system.f_bavail * system.f_frsize >= call->written) return TMS_OK;
    tms_error_set_os(error, &context, "the check for room", ENOSPC, folder->path);
    tms_error_append(error, " Nothing was written: set TMS_SHARED_DIR to a folder on a larger tmpfs. In a container, "
                            "--shm-size sets the size of /dev/shm.");
    return TMS_BACKUP_IO;
}

/* Writes the objects of one device that do not exist. */
static tms_status_t write_objects(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    node_call_t *call = (node_call_t *)t;
    const tms_error_context_t context = tms_transition_context(t, device);
    tms_copier_t copier = {.open = false};
    tms_status_t status = tms_copier_open(&copier, &t->saver->stores.copying, device, wait, &context, error);
    copier.done = &t->done.copied_bytes;
    for (size_t i = 0; status == TMS_OK && i < call->count; i++) {
        const part_t *part = &call->parts[i];
        const tms_error_context_t here = context_of(call, part);
        if (part->piece->device == (uint64_t)device)
            status = tms_shared_copy_save(store_of(call), part->contents, &copier, part->piece->address, &here, error);
    }
    if (status == TMS_OK) status = tms_copier_wait(&copier, &context, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the stream and its context belong to the parent */
    (void)tms_copier_close(&copier);
    return status;
}

/* Gives the objects their common name. A piece without an object is one whose writer makes no progress. */
static tms_status_t give_name(const node_call_t *call, tms_error_t *error) {
    tms_shared_store_t *store = store_of(call);
    const tms_error_context_t context = tms_transition_context(&call->t, TMS_NO_DEVICE);
    tms_shared_name_t *objects = calloc(call->count + 1, sizeof *objects);
    tms_status_t status = objects ? TMS_OK : tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    for (size_t i = 0; status == TMS_OK && i < call->count; i++) {
        objects[i] = call->parts[i].name;
        if (!call->parts[i].contents->parts->object)
            status = tms_error_set(error, TMS_BACKUP_IO, &context,
                                   "another process has begun to write the object %s and makes no progress. If it is "
                                   "stopped, let it continue or end it, and publish again",
                                   objects[i].text);
    }
    if (status == TMS_OK) {
        pthread_mutex_lock(&store->lock);
        bool left = false;
        status =
            tms_shared_publish(&store->folder, call->name, objects, call->count, call->contents, &left, &context, error);
        store->left_links |= left;
        pthread_mutex_unlock(&store->lock);
    }
    free(objects);
    return status;
}

static tms_status_t publish(tms_transition_t *t, tms_error_t *error) {
    node_call_t *call = (node_call_t *)t;
    tms_status_t status = prepare(call, error);
    if (status == TMS_OK) status = find_fingerprints(call, error);
    if (status == TMS_OK) status = link_existing(call, error);
    t->planned.total_bytes = call->written;
    if (status == TMS_OK) status = check_room(call, error);
    if (status == TMS_OK && call->written > 0) status = tms_crew_perform(t, t->planned.affected, write_objects, error);
    if (status == TMS_FORKED) return status; /* in a forked child: everything belongs to the parent */
    if (status == TMS_OK) status = give_name(call, error);
    finish(call, status == TMS_OK);
    return status;
}

tms_status_t tms_publish_run(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                             size_t count, const char *name, const char *contents, uint64_t *written, tms_error_t *error) {
    node_call_t call = {.pieces = pieces, .count = count, .name = name, .contents = contents};
    const tms_status_t status = run(&call, saver, selection, "publish", publish, error);
    *written = call.written;
    return status;
}

/* ---- adopt ---- */

static tms_status_t link_all(node_call_t *call, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    bool found = true;
    call->missing = 0;
    while (status == TMS_OK && found && call->missing < call->count) {
        part_t *part = &call->parts[call->missing];
        const tms_error_context_t context = context_of(call, part);
        memcpy(part->name.text, call->names + call->missing * TMS_OBJECT_NAME_DIGITS, TMS_OBJECT_NAME_DIGITS);
        status = tms_shared_contents_link(store_of(call), &part->name, part->piece->bytes, (int)part->piece->device,
                                          &part->contents, &found, &context, error);
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

/* What the copier releases, on the heap. */
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

static tms_status_t open_scratch(const node_call_t *call, scratch_t *scratch, int device, tms_wait_t *wait,
                                 tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(&call->t, device);
    uint64_t all = 0, largest = 0;
    for (size_t i = 0; i < call->count; i++) {
        const tms_shared_piece_t *piece = &call->pieces[i];
        if (piece->device != (uint64_t)device) continue;
        all += piece->bytes;
        if (piece->bytes > largest) largest = piece->bytes;
    }
    *scratch = (scratch_t){0};
    tms_status_t status = tms_copier_open(&scratch->copier, &call->t.saver->stores.copying, device, wait, &context, error);
    if (status != TMS_OK) return status;
    context.bytes = all < SCRATCH_BYTES_MOST ? all : SCRATCH_BYTES_MOST;
    return allocate_scratch(call->t.saver, scratch, context.bytes, largest, &context, error);
}

/* The parts [first, end) of the list that one load of the scratch memory covers, those of other devices left out. */
typedef struct group {
    node_call_t *call;
    scratch_t *scratch;
    int device;
    size_t first, end;
} group_t;

#define FOR_EACH_PART(part, group)                                                                                          \
    for (part_t *part = (group)->call->parts + (group)->first; part < (group)->call->parts + (group)->end; part++)          \
        if (part->piece->device != (uint64_t)(group)->device) {                                                             \
        } else

/* Places as many parts as fit in the scratch memory. */
static void extend(group_t *group) {
    node_call_t *call = group->call;
    uint64_t used = 0;
    for (group->end = group->first; group->end < call->count; group->end++) {
        part_t *part = &call->parts[group->end];
        if (part->piece->device != (uint64_t)group->device) continue;
        if (used + part->piece->bytes > group->scratch->bytes) return;
        part->scratch = group->scratch->address + used;
        used += part->piece->bytes;
    }
}

static tms_status_t load_group(const group_t *group, tms_error_t *error) {
    const node_call_t *call = group->call;
    const tms_error_context_t context = tms_transition_context(&call->t, group->device);
    tms_copier_t *copier = &group->scratch->copier;
    tms_status_t status = TMS_OK;
    FOR_EACH_PART(part, group) {
        const tms_error_context_t here = context_of(call, part);
        if (status == TMS_OK)
            status = tms_shared_copy_load(store_of(call), part->contents, copier, part->scratch, &here, error);
    }
    return status == TMS_OK ? tms_copier_wait(copier, &context, error) : status;
}

/* Fails if an object in the scratch memory has not the contents that its name says. */
static tms_status_t check_group(const group_t *group, tms_wait_t *wait, tms_error_t *error) {
    node_call_t *call = group->call;
    tms_transition_t *t = &call->t;
    tms_pass_t pass = {
        .stores = &t->saver->stores, .wait = wait, .operation = t->asked.operation, .verifies = true, .mapped = true};
    FOR_EACH_PART(part, group) tms_pass_add(&pass, &part->backup, &part->backup.planned, part->scratch, group->device);
    tms_status_t status = tms_pass_run(&pass, error);
    if (status != TMS_OK) return status;
    FOR_EACH_PART(part, group) {
        const tms_error_context_t context = context_of(call, part);
        tms_shared_name_t found;
        if (status != TMS_OK) break;
        status = name_part(call, part, &found, error);
        tms_fingerprints_forget(&part->backup.fingerprints);
        if (status == TMS_OK && memcmp(&found, &part->name, sizeof found) != 0) {
            status = tms_error_set(error, TMS_BACKUP_IO, &context,
                                   "the object '%s/objects/%s' is damaged: its contents are those of another name",
                                   store_of(call)->folder.path, part->name.text);
            tms_shared_object_reject(store_of(call), part->contents->parts->object, error);
        }
    }
    return status;
}

static tms_status_t deliver_group(const group_t *group, tms_error_t *error) {
    const node_call_t *call = group->call;
    const tms_error_context_t context = tms_transition_context(&call->t, group->device);
    tms_copier_t *copier = &group->scratch->copier;
    tms_status_t status = TMS_OK;
    FOR_EACH_PART(part, group) {
        const tms_error_context_t here = context_of(call, part);
        if (status == TMS_OK)
            status = tms_copier_on_device(copier, part->piece->address, part->scratch, part->piece->bytes, &here, error);
    }
    return status == TMS_OK ? tms_copier_wait(copier, &context, error) : status;
}

/* Fills the pieces of one device. */
static tms_status_t fill_pieces(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    node_call_t *call = (node_call_t *)t;
    scratch_t scratch;
    group_t group = {.call = call, .scratch = &scratch, .device = device};
    tms_status_t status = open_scratch(call, &scratch, device, wait, error);
    scratch.copier.done = &t->done.copied_bytes;
    for (; status == TMS_OK && group.first < call->count; group.first = group.end) {
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
    node_call_t *call = (node_call_t *)t;
    tms_status_t status = prepare(call, error);
    if (status == TMS_OK) status = link_all(call, error);
    const bool complete = status == TMS_OK && call->missing == call->count;
    if (complete) status = tms_crew_perform(t, t->planned.affected, fill_pieces, error);
    if (status == TMS_FORKED) return status; /* in a forked child: everything belongs to the parent */
    finish(call, complete && status == TMS_OK);
    return status;
}

tms_status_t tms_adopt_run(tms_saver_t *saver, const tms_selection_t *selection, const tms_shared_piece_t *pieces,
                           size_t count, const char *names, size_t *missing, tms_error_t *error) {
    node_call_t call = {.pieces = pieces, .count = count, .names = names};
    const tms_status_t status = run(&call, saver, selection, "adopt", adopt, error);
    *missing = call.missing;
    return status;
}
