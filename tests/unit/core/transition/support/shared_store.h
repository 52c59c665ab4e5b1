/* Shared by the tests of pauses and resumes with shared backups: a folder in memory for each test, and what is in it.
 * Included once in a program, before everything else. */
#ifndef TMS_TEST_SHARED_STORE_H
#define TMS_TEST_SHARED_STORE_H

#include "changes.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backup/shared/registrar.h"

enum { PATH_BYTES = 320, MAX_NAMES = 16, TEXT_BYTES = 16384 };
#define KEPT TMS_BACKUP_SHARED

static char parent[] = "/dev/shm/tms-test-shared-XXXXXX", folder[PATH_BYTES];

static inline tms_shared_store_t *store_of(fixture_t *f) { return &f->saver.stores.shared; }

static inline void make_folder(fixture_t *f) {
    strcpy(parent + sizeof parent - 7, "XXXXXX");
    assert_non_null(mkdtemp(parent));
    snprintf(folder, sizeof folder, "%s/store", parent);
    store_of(f)->configured = folder;
}

static inline int setup(void **state) {
    if (setup_one_device(state) != 0) return -1;
    make_folder(*state);
    return 0;
}

static inline int remove_tree(const char *path) {
    char command[PATH_BYTES + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    return system(command);
}

static inline int end(void **state) {
    int result = teardown(state);
    return remove_tree(parent) == 0 ? result : -1;
}

typedef struct listing {
    size_t count;
    char names[MAX_NAMES][NAME_MAX + 1];
} listing_t;

static inline int by_name(const void *one, const void *other) { return strcmp(one, other); }

static inline listing_t list(const char *part) {
    char path[2 * PATH_BYTES + 1];
    listing_t found = {0};
    snprintf(path, sizeof path, "%s/%s", folder, part);
    DIR *directory = opendir(path);
    for (const struct dirent *entry; directory && (entry = readdir(directory));) {
        if (entry->d_name[0] == '.') continue;
        assert_true(found.count < MAX_NAMES);
        snprintf(found.names[found.count++], NAME_MAX + 1, "%s", entry->d_name);
    }
    if (directory) closedir(directory);
    qsort(found.names, found.count, sizeof *found.names, by_name);
    return found;
}

static inline void assert_objects(size_t count) { assert_int_equal(list("objects").count, count); }

static inline tms_shared_name_t only_object(void) {
    tms_shared_name_t name;
    const listing_t found = list("objects");
    assert_int_equal(found.count, 1);
    assert_int_equal(strlen(found.names[0]), TMS_SHARED_NAME_DIGITS);
    memcpy(name.text, found.names[0], sizeof name.text);
    return name;
}

static inline tms_counters_t counters_of(fixture_t *f) {
    tms_counters_t counters;
    tms_host_store_settle(&f->saver.stores.host);
    tms_inspect_counters(&f->saver, &counters);
    return counters;
}

/* Waits until the registrar has nothing to do. */
static inline void settle(fixture_t *f) {
    tms_shared_store_t *store = store_of(f);
    pthread_mutex_lock(&store->lock);
    while (store->registrar_runs) pthread_cond_wait(&store->changed, &store->lock);
    pthread_mutex_unlock(&store->lock);
}

static inline uint64_t made(fixture_t *f) { return counters_of(f).shared_made_bytes; }
static inline uint64_t held(fixture_t *f) { return counters_of(f).shared_backup_bytes; }

/* Flips a bit of an object. */
static inline void flip(const char *name) {
    char path[2 * PATH_BYTES];
    uint8_t byte = 0;
    snprintf(path, sizeof path, "%s/objects/%s", folder, name);
    assert_int_equal(chmod(path, 0600), 0);
    const int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, CHUNK + 7), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, CHUNK + 7), 1);
    assert_int_equal(close(fd), 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup, end)

/* ---- the registration of objects ---- */

static CUresult (*registers)(void *memory, size_t bytes, unsigned int flags);

static inline CUresult refuse_read_only(void *memory, size_t bytes, unsigned int flags) {
    return flags & CU_MEMHOSTREGISTER_READ_ONLY ? CUDA_ERROR_NOT_PERMITTED : registers(memory, bytes, flags);
}

/* From here on no object is registered, so that resumes copy through pinned memory. */
static inline void refuse_registration(fixture_t *f) {
    registers = f->cuda->cuMemHostRegister;
    writable(f)->cuMemHostRegister = refuse_read_only;
    f->log.level = TMS_LOG_SILENT;
}

#endif
