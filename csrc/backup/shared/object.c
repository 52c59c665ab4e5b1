#include "backup/shared/object.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- the table ---- */

static tms_shared_object_t **bucket_of(tms_shared_store_t *store, const tms_shared_name_t *name) {
    enum { DIGITS = 4, HEXADECIMAL = 16 };
    char first[DIGITS + 1] = {0};
    memcpy(first, name->text, DIGITS);
    return &store->buckets[strtoul(first, NULL, HEXADECIMAL) % TMS_SHARED_BUCKETS];
}

static tms_shared_object_t *find(tms_shared_store_t *store, const tms_shared_name_t *name) {
    tms_shared_object_t *object = *bucket_of(store, name);
    while (object && memcmp(&object->name, name, sizeof *name) != 0) object = object->of_bucket;
    return object;
}

static tms_shared_object_t *make(tms_shared_store_t *store, const tms_shared_name_t *name, uint64_t bytes, int device) {
    tms_shared_object_t **bucket = bucket_of(store, name), *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    *made = (tms_shared_object_t){.name = *name,
                                  .bytes = bytes,
                                  .device = device,
                                  .claim = -1,
                                  .known = true,
                                  .of_bucket = *bucket,
                                  .next = store->objects};
    *bucket = made;
    if (store->objects) store->objects->previous = made;
    store->objects = made;
    return made;
}

static void forget_name(tms_shared_store_t *store, tms_shared_object_t *object) {
    if (!object->known) return;
    tms_shared_object_t **link = bucket_of(store, &object->name);
    while (*link != object) link = &(*link)->of_bucket;
    *link = object->of_bucket;
    object->known = false;
}

void tms_shared_objects_forget_names(tms_shared_store_t *store) {
    for (tms_shared_object_t *object = store->objects; object; object = object->next) forget_name(store, object);
}

bool tms_shared_objects_have(const tms_shared_store_t *store, const char *name) {
    const tms_shared_object_t *object = store->objects;
    while (object && !(object->known && strcmp(object->name.text, name) == 0)) object = object->next;
    return object;
}

void tms_shared_objects_withdraw_claims(tms_shared_store_t *store) {
    for (tms_shared_object_t *object = store->objects; object; object = object->next) {
        if (object->claim >= 0) tms_shared_entry_withdraw(&store->folder, &object->name, object->claim);
    }
}

void tms_shared_object_free(tms_shared_store_t *store, tms_shared_object_t *object) {
    if (object->memory) munmap((void *)(uintptr_t)object->memory, tms_host_round(object->bytes, tms_host_page_bytes()));
    *(object->previous ? &object->previous->next : &store->objects) = object->next;
    if (object->next) object->next->previous = object->previous;
    free(object);
}

tms_shared_object_t *tms_shared_object_use(tms_shared_store_t *store, const tms_shared_name_t *name, uint64_t bytes,
                                           int device) {
    pthread_mutex_lock(&store->lock);
    tms_shared_object_t *object = find(store, name);
    if (!object) object = make(store, name, bytes, device);
    if (object) object->users++;
    pthread_mutex_unlock(&store->lock);
    return object;
}

/* With the lock held. A link that stays keeps the memory of the object. */
static void remove_link(tms_shared_store_t *store, const tms_shared_object_t *object) {
    if (tms_shared_entry_drop(&store->folder, &object->name)) return;
    store->left_links = true;
    tms_log_once(store->copying->log, &store->warned_left, TMS_LOG_WARNING,
                 "'%s/objects/%s' was not given up (unlinkat: %s), so its memory stays allocated; later calls try again",
                 store->folder.path, object->name.text, TMS_OS_TEXT(errno));
}

/* With the lock held. */
static void drop(tms_shared_store_t *store, tms_shared_object_t *object) {
    if (--object->users > 0) return;
    if (object->memory) {
        if (object->known) remove_link(store, object);
        atomic_fetch_sub(&store->held_bytes, object->bytes);
        if (object->made) atomic_fetch_sub(&store->made_bytes, object->bytes);
    }
    forget_name(store, object);
    if (!object->registered && !object->busy) tms_shared_object_free(store, object);
}

void tms_shared_object_drop(tms_shared_store_t *store, tms_shared_object_t *object) {
    pthread_mutex_lock(&store->lock);
    drop(store, object);
    pthread_mutex_unlock(&store->lock);
}

bool tms_shared_object_drop_last(tms_shared_store_t *store, tms_shared_object_t *object, bool wants_registration) {
    pthread_mutex_lock(&store->lock);
    const bool last = object->users == 1;
    if (last) {
        object->registration_users -= wants_registration;
        drop(store, object);
    }
    pthread_mutex_unlock(&store->lock);
    return last;
}

void tms_shared_object_reject(tms_shared_store_t *store, tms_shared_object_t *object, tms_error_t *error) {
    pthread_mutex_lock(&store->lock);
    if (object->known && !tms_shared_entry_reject(&store->folder, &object->name)) {
        tms_error_append(error, " It could not be removed (unlinkat: %s): remove the file.", TMS_OS_TEXT(errno));
    } else {
        forget_name(store, object);
        tms_error_append(error, " The next pause or publication writes it again.");
    }
    pthread_mutex_unlock(&store->lock);
}

bool tms_shared_object_is_new(tms_shared_store_t *store, const tms_shared_object_t *object) {
    pthread_mutex_lock(&store->lock);
    const bool is_new = !object->memory && object->users == 1;
    pthread_mutex_unlock(&store->lock);
    return is_new;
}

bool tms_shared_object_is_here(tms_shared_store_t *store, const tms_shared_object_t *object) {
    pthread_mutex_lock(&store->lock);
    const bool here = object->memory != NULL;
    pthread_mutex_unlock(&store->lock);
    return here;
}

bool tms_shared_object_is_registered(tms_shared_store_t *store, const tms_shared_object_t *object) {
    pthread_mutex_lock(&store->lock);
    const bool registered = object->registered && !object->busy;
    pthread_mutex_unlock(&store->lock);
    return registered;
}

/* ---- one object ---- */

/* With the lock held: the object has `memory` from here on, or is not being written any more (NULL). */
static void end(tms_shared_store_t *store, tms_shared_object_t *object, const char *memory, bool made) {
    object->being_written = false;
    object->claim = -1;
    object->memory = memory;
    if (!memory) return;
    object->made = made;
    atomic_fetch_add(&store->held_bytes, object->bytes);
    if (made) atomic_fetch_add(&store->made_bytes, object->bytes);
}

/* With the lock held: maps the object, and closes the descriptor. */
static tms_status_t map(tms_shared_store_t *store, tms_shared_object_t *object, int fd, bool made,
                        const tms_error_context_t *context, tms_error_t *error) {
    const uint64_t bytes = tms_host_round(object->bytes, tms_host_page_bytes());
    void *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    const int os_error = errno;
    close(fd);
    if (memory == MAP_FAILED) {
        remove_link(store, object);
        end(store, object, NULL, false);
        return tms_error_set_os(error, context, "mmap", os_error, object->name.text);
    }
    (void)madvise(memory, bytes, MADV_DONTFORK); /* if it fails, a child keeps the memory in use */
    end(store, object, memory, made);
    return TMS_OK;
}

/* With the lock held. At exit the holder is gone, and no process would remove the file of a new claim. */
static tms_status_t try(tms_shared_store_t *store, tms_shared_object_t *object, bool claim, tms_shared_attempt_t *attempt,
                        const tms_error_context_t *context, tms_error_t *error) {
    if (store->closing)
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "the shared store is closed, because the process is exiting");
    tms_status_t status = tms_shared_entry_try(&store->folder, &object->name, object->bytes, claim, attempt, context, error);
    if (status != TMS_OK) return status;
    if (attempt->state == TMS_SHARED_HELD) return map(store, object, attempt->fd, false, context, error);
    object->being_written = attempt->state == TMS_SHARED_CLAIMED;
    object->claim = attempt->fd;
    return TMS_OK;
}

tms_status_t tms_shared_object_try(tms_shared_store_t *store, tms_shared_object_t *object, bool claim,
                                   tms_shared_attempt_t *attempt, bool *here, const tms_error_context_t *context,
                                   tms_error_t *error) {
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&store->lock);
    *here = object->being_written;
    *attempt = (tms_shared_attempt_t){.state = object->memory ? TMS_SHARED_HELD : TMS_SHARED_BUSY, .fd = -1};
    if (!object->memory && !object->being_written) status = try(store, object, claim, attempt, context, error);
    pthread_mutex_unlock(&store->lock);
    return status;
}

tms_status_t tms_shared_object_finish(tms_shared_store_t *store, tms_shared_object_t *object,
                                      const tms_error_context_t *context, tms_error_t *error) {
    pthread_mutex_lock(&store->lock);
    int fd = object->claim;
    tms_status_t status = tms_shared_entry_finish(&store->folder, &object->name, &fd, context, error);
    if (status == TMS_OK) {
        status = map(store, object, fd, true, context, error);
    } else {
        store->left_links = true;
        end(store, object, NULL, false);
    }
    pthread_mutex_unlock(&store->lock);
    return status;
}

void tms_shared_object_abandon(tms_shared_store_t *store, tms_shared_object_t *object) {
    pthread_mutex_lock(&store->lock);
    tms_shared_entry_abandon(&store->folder, &object->name, object->claim);
    end(store, object, NULL, false);
    pthread_mutex_unlock(&store->lock);
}
