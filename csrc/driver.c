#include "driver.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* Without these there is no virtual memory management, which drivers have had since CUDA 10.2 (some since 11). */
#define REQUIRED_ENTRY_POINTS(X)                                                                                            \
    X(cuMemAddressReserve)                                                                                                  \
    X(cuMemAddressFree)                                                                                                     \
    X(cuMemCreate)                                                                                                          \
    X(cuMemRelease)                                                                                                         \
    X(cuMemMap)                                                                                                             \
    X(cuMemUnmap)                                                                                                           \
    X(cuMemSetAccess)

void tms_driver_init(tms_driver_t *driver, const char *path, const tms_log_t *log) {
    driver->path = path;
    driver->log = log;
    atomic_init(&driver->table, NULL);
}

void tms_driver_release(tms_driver_t *driver) { free((void *)(uintptr_t)atomic_exchange(&driver->table, NULL)); }

const char *tms_driver_result_name(const tms_driver_table_t *table, CUresult result) {
    const char *name = NULL;
    if (!table || !table->cuGetErrorName || table->cuGetErrorName(result, &name) != CUDA_SUCCESS) return NULL;
    return name;
}

/* Whether the library lacks the entry point of that name. */
static bool is_missing(const tms_driver_table_t *table, const char *call) {
#define COMPARE(name, symbol, parameters)                                                                                   \
    if (strcmp(call, #name) == 0) return table->name == NULL;
    TMS_DRIVER_ENTRY_POINTS(COMPARE)
#undef COMPARE
    return false;
}

/* Adds to an error made by tms_error_set what it says about a driver call. */
static void set_call(tms_error_t *error, const tms_driver_table_t *table, const char *call, CUresult result) {
    if (!error) return;
    const char *name = tms_driver_result_name(table, result);
    error->driver_result = (int32_t)result;
    strncpy(error->call, call, sizeof(error->call) - 1);
    strncpy(error->result_name, name ? name : "", sizeof(error->result_name) - 1);
}

tms_status_t tms_driver_fail(const tms_driver_table_t *table, const tms_error_context_t *context, const char *call,
                             CUresult result, tms_error_t *error) {
    if (result == CUDA_ERROR_NOT_FOUND && is_missing(table, call)) {
        tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context, "the CUDA driver is too old and has no %s. Update it", call);
        set_call(error, table, call, result);
        return TMS_DRIVER_UNAVAILABLE;
    }
    return tms_error_set_driver(error, context, call, (int)result, tms_driver_result_name(table, result));
}

static void resolve(tms_driver_table_t *table, void *library) {
    /* POSIX gives the address of a function as an object pointer; copying its bytes is the conversion that C allows. */
#define RESOLVE(name, symbol, parameters)                                                                                   \
    {                                                                                                                       \
        void *address = dlsym(library, symbol);                                                                             \
        _Static_assert(sizeof(address) == sizeof(table->name), "function and object pointers differ in size");              \
        memcpy(&table->name, &address, sizeof(address));                                                                    \
    }
    TMS_DRIVER_ENTRY_POINTS(RESOLVE)
#undef RESOLVE
}

/* The first required entry point that the library lacks, or NULL. */
static const char *first_missing(const tms_driver_table_t *table) {
#define CHECK(name)                                                                                                         \
    if (!table->name) return #name;
    REQUIRED_ENTRY_POINTS(CHECK)
#undef CHECK
    return NULL;
}

/* Fills the table from the library and initialises the driver. On success the library stays loaded for good. */
static tms_status_t open_driver(const tms_driver_t *driver, tms_driver_table_t *table, const tms_error_context_t *context,
                                tms_error_t *error) {
    void *library = dlopen(driver->path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context, "the CUDA driver could not be loaded: %s",
                             reason ? reason : driver->path);
    }

    tms_status_t status;
    resolve(table, library);
    const char *missing = first_missing(table);
    if (!table->cuInit) {
        status = tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context, "'%s' is not a CUDA driver: it has no cuInit",
                               driver->path);
        goto unload;
    }
    if (missing) {
        status = tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context,
                               "the CUDA driver '%s' is too old for virtual memory management and has no %s. Update it",
                               driver->path, missing);
        goto unload;
    }

    CUresult result = table->cuInit(0);
    if (result == CUDA_SUCCESS) return TMS_OK;
    /* A driver that has begun to initialise is never unloaded: it may have left threads and handlers behind. */
    const char *name = tms_driver_result_name(table, result);
    status = tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context, "cuInit of '%s' failed with %s (%d)", driver->path,
                           name ? name : "an unnamed error", (int)result);
    set_call(error, table, "cuInit", result);
    return status;

unload:
    dlclose(library);
    return status;
}

tms_status_t tms_driver_load(tms_driver_t *driver, const tms_driver_table_t **table, const tms_error_context_t *context,
                             tms_error_t *error) {
    const tms_driver_table_t *published = atomic_load_explicit(&driver->table, memory_order_acquire);
    if (__builtin_expect(published != NULL, 1)) {
        *table = published;
        return TMS_OK;
    }

    tms_driver_table_t *fresh = calloc(1, sizeof(*fresh));
    if (!fresh) return tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, context, "the table of driver calls was not made");
    tms_status_t status = open_driver(driver, fresh, context, error);
    if (status != TMS_OK) {
        free(fresh);
        return status;
    }
    if (atomic_compare_exchange_strong(&driver->table, &published, fresh)) {
        published = fresh;
        tms_log_write(driver->log, TMS_LOG_DEBUG, "the CUDA driver '%s' is loaded", driver->path);
    } else {
        free(fresh); /* another thread was first; both tables say the same */
    }
    *table = published;
    return TMS_OK;
}
