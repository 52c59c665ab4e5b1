#include "backup/shared/store.h"

/* With the lock held. Its key is not used any more when it goes. */
static void close_folder(tms_shared_store_t *store) {
    if (store->folder.root < 0) return;
    tms_fingerprinter_set_key(store->fingerprinter, NULL);
    tms_shared_objects_forget_names(store);
    tms_shared_folder_close(&store->folder, store->copying->log);
    store->left_links = false; /* the holder is gone, or belongs to the next clean-up */
}

/* With the lock held. */
static tms_status_t open_folder(tms_shared_store_t *store, const tms_error_context_t *context, tms_error_t *error) {
    const tms_log_t *log = store->copying->log;
    if (store->closing)
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "the shared store is closed, because the process is exiting");
    if (tms_shared_folder_is_current(&store->folder, store->configured)) {
        tms_shared_folder_clean(&store->folder, log);
        return TMS_OK;
    }
    close_folder(store);
    tms_status_t status = tms_shared_folder_open(&store->folder, store->configured, log, context, error);
    if (status != TMS_OK) return status;
    tms_shared_folder_clean(&store->folder, log);
    tms_fingerprinter_set_key(store->fingerprinter, &store->folder.key->fingerprints);
    return TMS_OK;
}

tms_status_t tms_shared_store_open(tms_shared_store_t *store, const tms_error_context_t *context, tms_error_t *error) {
    pthread_mutex_lock(&store->lock);
    store->refuses = false;
    tms_status_t status = open_folder(store, context, error);
    pthread_mutex_unlock(&store->lock);
    return status;
}

static bool is_kept(const void *store, const char *name) { return tms_shared_objects_have(store, name); }

void tms_shared_store_sweep(tms_shared_store_t *store) {
    pthread_mutex_lock(&store->lock);
    if (store->left_links && store->folder.root >= 0 && !store->closing)
        store->left_links = !tms_shared_folder_sweep(&store->folder, is_kept, store);
    pthread_mutex_unlock(&store->lock);
}

void tms_shared_store_close(tms_shared_store_t *store) {
    pthread_mutex_lock(&store->lock);
    close_folder(store);
    pthread_mutex_unlock(&store->lock);
}

void tms_shared_store_keep(tms_shared_store_t *store, tms_shared_contents_t *contents) {
    pthread_mutex_lock(&store->lock);
    contents->next_kept = store->kept;
    store->kept = contents;
    pthread_mutex_unlock(&store->lock);
}

void tms_shared_store_drop_kept(tms_shared_store_t *store) {
    pthread_mutex_lock(&store->lock);
    tms_shared_contents_t *contents = store->kept;
    store->kept = NULL;
    pthread_mutex_unlock(&store->lock);
    while (contents) {
        tms_shared_contents_t *next = contents->next_kept;
        tms_shared_contents_drop(store, contents);
        contents = next;
    }
}
