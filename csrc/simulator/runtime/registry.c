/* Libraries register tens of thousands of kernels while they are loaded, before the simulator is used, and in processes
 * that fork later. So the registry is separate from the simulator's state, has its own lock and survives a reset. Its
 * lookup table is built at first use. */
#include "simulator/runtime/registry.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "simulator/simulator.h"

typedef struct function {
    const void *host;
    const char *name; /* memory of the library that registered it */
} function_t;

/* Functions registered through one __cudaRegisterFatBinary. */
typedef struct module {
    struct module *next;
    function_t *functions;
    size_t count, capacity;
} module_t;

static struct {
    pthread_mutex_t lock;
    module_t *modules;
    function_t *index; /* open addressing by host address; NULL until the next lookup */
    size_t slots;      /* a power of two */
} registry = {.lock = PTHREAD_MUTEX_INITIALIZER};

enum { FIRST_CAPACITY = 64, LOAD_INVERSE = 2, HASH_SHIFT = 32 };

static const uint64_t hash_factor = 0x9E3779B97F4A7C15U; /* 2^64 divided by the golden ratio */

static size_t slot_of(const void *host) {
    return (size_t)(((uint64_t)(uintptr_t)host * hash_factor) >> HASH_SHIFT) & (registry.slots - 1);
}

static void drop_index(void) {
    free(registry.index);
    registry.index = NULL;
    registry.slots = 0;
}

static void make_index(void) {
    size_t count = 0, slots = FIRST_CAPACITY;
    for (const module_t *module = registry.modules; module; module = module->next) count += module->count;
    while (slots < LOAD_INVERSE * count) slots *= 2;
    registry.index = calloc(slots, sizeof *registry.index);
    if (!registry.index) return;
    registry.slots = slots;
    for (const module_t *module = registry.modules; module; module = module->next) {
        for (size_t i = 0; i < module->count; i++) {
            size_t slot = slot_of(module->functions[i].host);
            while (registry.index[slot].host) slot = (slot + 1) & (slots - 1);
            registry.index[slot] = module->functions[i];
        }
    }
}

const char *sim_kernel_registered(const void *function) {
    const char *name = NULL;
    pthread_mutex_lock(&registry.lock);
    if (!registry.index) make_index();
    if (registry.index && function) {
        size_t slot = slot_of(function);
        while (registry.index[slot].host && registry.index[slot].host != function) slot = (slot + 1) & (registry.slots - 1);
        name = registry.index[slot].name;
    }
    pthread_mutex_unlock(&registry.lock);
    return name;
}

/* The functions that nvcc's start-up code calls. They are not counted and no fault applies, because the state may not be
 * initialised. */
TMS_SIM_EXPORT void **__cudaRegisterFatBinary(void *binary);
TMS_SIM_EXPORT void __cudaRegisterFatBinaryEnd(void **handle);
TMS_SIM_EXPORT void __cudaUnregisterFatBinary(void **handle);
TMS_SIM_EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads,
                                           void *thread, void *block, void *block_size, void *grid_size, int *warp_size);
TMS_SIM_EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                                      int constant, int global);
TMS_SIM_EXPORT char __cudaInitModule(void **handle);

/* If out of memory, the module is not registered and its kernels are unknown at launch. */
void **__cudaRegisterFatBinary(void *binary) {
    module_t *module = calloc(1, sizeof *module);
    (void)binary;
    if (!module) return NULL;
    pthread_mutex_lock(&registry.lock);
    module->next = registry.modules;
    registry.modules = module;
    pthread_mutex_unlock(&registry.lock);
    return (void **)module;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

void __cudaUnregisterFatBinary(void **handle) {
    module_t *module = (module_t *)handle;
    if (!module) return;
    pthread_mutex_lock(&registry.lock);
    module_t **link = &registry.modules;
    while (*link && *link != module) link = &(*link)->next;
    if (*link) {
        *link = module->next;
        drop_index();
        free(module->functions);
        free(module);
    }
    pthread_mutex_unlock(&registry.lock);
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp_size) {
    module_t *module = (module_t *)handle;
    (void)device, (void)threads, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp_size;
    if (!module) return;
    pthread_mutex_lock(&registry.lock);
    if (module->count == module->capacity) {
        size_t capacity = module->capacity ? 2 * module->capacity : FIRST_CAPACITY;
        function_t *grown = realloc(module->functions, capacity * sizeof *grown);
        if (grown) {
            module->functions = grown;
            module->capacity = capacity;
        }
    }
    if (module->count < module->capacity) module->functions[module->count++] = (function_t){host, name};
    drop_index();
    pthread_mutex_unlock(&registry.lock);
}

/* Device variables have no memory in the simulation: a query of their address fails. */
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes, int constant,
                       int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant, (void)global;
}

char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}
