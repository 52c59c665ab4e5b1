#include "base/callers.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_CAPACITY = 16 };

void tms_callers_init(tms_callers_t *callers) { *callers = (tms_callers_t){.paths = NULL}; }

void tms_callers_release(tms_callers_t *callers) {
    for (size_t i = 0; i < callers->count; i++) free(callers->paths[i]);
    free(callers->paths);
    free(callers->ranges);
    tms_callers_init(callers);
}

/* ---- the loader ---- */

/* The callbacks run under the loader's lock, so they only read and copy. A non-zero result ends the walk. */

static int read_unloads(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    *(uint64_t *)data = info->dlpi_subs;
    return 1;
}

uint64_t tms_callers_unloads(void) {
    uint64_t unloads = 0;
    (void)dl_iterate_phdr(read_unloads, &unloads);
    return unloads;
}

typedef struct object_search {
    uintptr_t address;
    tms_caller_object_t *object;
} object_search_t;

static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    const object_search_t *search = data;
    uintptr_t begin = UINTPTR_MAX, end = 0;
    search->object->unloads = info->dlpi_subs;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type != PT_LOAD) continue;
        uintptr_t first = info->dlpi_addr + header->p_vaddr;
        if (first < begin) begin = first;
        if (first + header->p_memsz > end) end = first + header->p_memsz;
    }
    if (search->address < begin || search->address >= end) return 0;
    search->object->begin = begin;
    search->object->end = end;
    const char *name = info->dlpi_name ? info->dlpi_name : "";
    size_t length = strnlen(name, sizeof(search->object->path) - 1);
    memcpy(search->object->path, name, length);
    search->object->path[length] = '\0';
    return 1;
}

void tms_caller_find(uintptr_t address, tms_caller_object_t *object) {
    object_search_t search = {.address = address, .object = object};
    object->begin = object->end = 0;
    object->path[0] = '\0';
    (void)dl_iterate_phdr(visit, &search);
    if (object->end == 0 || object->path[0] != '\0') return;
    /* The loader has no name for the program itself. */
    ssize_t length = readlink("/proc/self/exe", object->path, sizeof(object->path) - 1);
    object->path[length > 0 ? length : 0] = '\0';
}

/* ---- known objects ---- */

int32_t tms_callers_cached(const tms_callers_t *callers, uintptr_t address, uint64_t unloads) {
    if (callers->unloads != unloads) return TMS_NO_CALLER;
    for (size_t i = 0; i < callers->range_count; i++) {
        const tms_caller_range_t *range = &callers->ranges[i];
        if (address >= range->begin && address < range->end) return range->caller;
    }
    return TMS_NO_CALLER;
}

/* Makes room for one more element. */
static bool reserve(void **array, size_t count, size_t *capacity, size_t element_bytes) {
    if (count < *capacity) return true;
    size_t wanted = *capacity ? *capacity * 2 : FIRST_CAPACITY;
    void *grown = realloc(*array, wanted * element_bytes);
    if (!grown) return false;
    *array = grown;
    *capacity = wanted;
    return true;
}

static int32_t intern(tms_callers_t *callers, const char *path) {
    for (size_t i = 0; i < callers->count; i++) {
        if (strcmp(callers->paths[i], path) == 0) return (int32_t)i;
    }
    void *paths = callers->paths;
    bool has_room = reserve(&paths, callers->count, &callers->capacity, sizeof(*callers->paths));
    callers->paths = paths;
    char *copy = has_room ? strdup(path) : NULL;
    if (!copy) return TMS_NO_CALLER;
    callers->paths[callers->count] = copy;
    return (int32_t)callers->count++;
}

int32_t tms_callers_remember(tms_callers_t *callers, const tms_caller_object_t *object) {
    int32_t caller = intern(callers, object->path);
    /* If two threads have asked the loader, the later answer counts. */
    if (caller == TMS_NO_CALLER || object->end == 0 || object->unloads < callers->unloads) return caller;
    if (object->unloads > callers->unloads) callers->range_count = 0;
    callers->unloads = object->unloads;
    if (tms_callers_cached(callers, object->begin, object->unloads) != TMS_NO_CALLER) return caller;
    void *ranges = callers->ranges;
    /* If memory is short, the next call asks the loader again. */
    if (reserve(&ranges, callers->range_count, &callers->range_capacity, sizeof(*callers->ranges)))
        ((tms_caller_range_t *)ranges)[callers->range_count++] = (tms_caller_range_t){object->begin, object->end, caller};
    callers->ranges = ranges;
    return caller;
}

const char *tms_callers_path(const tms_callers_t *callers, int32_t caller) { return callers->paths[caller]; }
