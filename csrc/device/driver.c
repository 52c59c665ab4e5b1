#include "device/driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Required for virtual memory management, which drivers support since CUDA 10.2 (some since 11). */
#define REQUIRED_ENTRY_POINTS(X)                                                                                            \
    X(cuMemAddressReserve)                                                                                                  \
    X(cuMemAddressFree)                                                                                                     \
    X(cuMemCreate)                                                                                                          \
    X(cuMemRelease)                                                                                                         \
    X(cuMemMap)                                                                                                             \
    X(cuMemUnmap)                                                                                                           \
    X(cuMemSetAccess)

void tms_driver_init(tms_driver_t *driver, const char *path, tms_log_t *log) {
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

/* Adds the driver call and its result to an error made by tms_error_set. */
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

/* Returns the first required entry point that the library lacks, or NULL. */
static const char *first_missing(const tms_driver_table_t *table) {
#define CHECK(name)                                                                                                         \
    if (!table->name) return #name;
    REQUIRED_ENTRY_POINTS(CHECK)
#undef CHECK
    return NULL;
}

/* Whether a loadable segment of an ELF file extends beyond the end of the file. */
static bool is_truncated(int fd, uint64_t size) {
    ElfW(Ehdr) header;
    ElfW(Phdr) segment;
    if (pread(fd, &header, sizeof(header), 0) != (ssize_t)sizeof(header) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_phentsize != sizeof(segment))
        return false; /* not an ELF file; dlopen reports it */
    for (unsigned i = 0; i < header.e_phnum; i++) {
        off_t offset = (off_t)(header.e_phoff + i * sizeof(segment));
        ssize_t got = pread(fd, &segment, sizeof(segment), offset);
        if (got < 0) return false; /* dlopen reads it again and reports the error */
        if (got != (ssize_t)sizeof(segment)) return true;
        if (segment.p_type == PT_LOAD && (segment.p_offset > size || segment.p_filesz > size - segment.p_offset))
            return true;
    }
    return false;
}

/* Returns why this path must not be passed to dlopen, or NULL. A relative path may lead to another user's library once the
 * program has changed its working directory. dlopen would block on a FIFO and crash on a truncated library. */
static const char *find_rejection(const char *path) {
    struct stat found;
    if (*path != '/') return "is not an absolute path";
    if (stat(path, &found) != 0) return NULL;
    if (!S_ISREG(found.st_mode)) return "is not a regular file";
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return NULL;
    bool truncated = is_truncated(fd, (uint64_t)found.st_size);
    close(fd);
    return truncated ? "is truncated" : NULL;
}

/* Fills the table from the library and initialises the driver. On success the library stays loaded. */
static tms_status_t open_driver(const tms_driver_t *driver, tms_driver_table_t *table, const tms_error_context_t *context,
                                tms_error_t *error) {
    const char *unfit = strchr(driver->path, '/') ? find_rejection(driver->path) : NULL;
    if (unfit)
        return tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context,
                             "the CUDA driver could not be loaded: TMS_CUDA_DRIVER is '%s', which %s", driver->path, unfit);
    void *library = dlopen(driver->path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context, "the CUDA driver could not be loaded: %s",
                      reason ? reason : driver->path);
        if (error) strncpy(error->call, "dlopen", sizeof(error->call) - 1);
        return TMS_DRIVER_UNAVAILABLE;
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
    /* A driver whose initialisation failed is never unloaded: it may have left threads and handlers behind. */
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
    if (!fresh) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    tms_status_t status = open_driver(driver, fresh, context, error);
    if (status != TMS_OK) {
        free(fresh);
        return status;
    }
    if (atomic_compare_exchange_strong(&driver->table, &published, fresh)) {
        published = fresh;
        tms_log_write(driver->log, TMS_LOG_DEBUG, "the CUDA driver '%s' is loaded", driver->path);
    } else {
        free(fresh); /* another thread was first; both tables are equal */
    }
    *table = published;
    return TMS_OK;
}
