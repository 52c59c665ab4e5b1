/* Scenarios of test_process.py: the state cannot be made, because the library's mutexes cannot. */

#include <errno.h>
#include <pthread.h>

#include "support.h"

int cudaDeviceReset(void);

static bool out_of_memory;

static bool is_of_library(const void *address) {
    Dl_info here, library;
    return dladdr(address, &here) && dladdr(find_function("tms_get_api"), &library) && here.dli_fbase == library.dli_fbase;
}

/* Interposes the function of the C library. */
int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    if (out_of_memory && is_of_library(__builtin_return_address(0))) return ENOMEM;
    return ((__typeof__(&pthread_mutex_init))dlsym(RTLD_NEXT, "pthread_mutex_init"))(mutex, attributes);
}

/* A call that needs the state is refused, and says why. */
#define REFUSED(call)                                                                                                       \
    do {                                                                                                                    \
        tms_error_t error = {.message = ""};                                                                                \
        EQUAL(call, TMS_OUT_OF_HOST_MEMORY);                                                                                \
        CHECK(strstr(error.message, "pthread_mutex_init"));                                                                 \
    } while (0)

static void functions(void) {
    const tms_api_t *api = API();
    const tms_selection_t all = {.tags = NULL};
    const tms_region_settings_t region = {.managed = 1, .tag = "weights"};
    tms_region_settings_t current = {.managed = 1, .tag = NULL};
    tms_report_t report;
    tms_export_t exported;
    tms_host_buffer_t *buffer = NULL;
    tms_pending_t *pending = NULL;
    void *host = NULL;
    uint64_t number = 0, total = 0;
    int32_t depth = 7;
    out_of_memory = true;

    REFUSED(api->allocate(MIB, 0, &number, &error));
    REFUSED(api->free(MIB, &error));
    REFUSED(api->region_enter(&region, 0, &number, &error));
    REFUSED(api->region_set(&region, &error));
    REFUSED(api->pause(&all, &report, &error));
    REFUSED(api->resume(&all, &report, &error));
    REFUSED(api->resume_begin(&all, &pending, &error));
    REFUSED(api->export_memory(MIB, &exported, &error));
    REFUSED(api->host_backup(MIB, MIB, &buffer, &host, &error));
    REFUSED(api->set_host_policy(TMS_HOST_POOL, &error));
    REFUSED(api->reserve_host_memory(MIB, 0, &error));
    REFUSED(api->set_disk_directory("/", &error));
    REFUSED(api->capture_begin(&region, &number, &error));
    REFUSED(api->capture_begin_on(NULL, &number, &error));
    REFUSED(api->refresh_peers(&error));
    REFUSED(api->listen_devices(NULL, NULL, 0, &error));
    REFUSED(api->device_count(&depth, &error));
    REFUSED(api->active_devices(&number, &error));
    REFUSED(api->device_memory(0, &number, &total, &error));
    CHECK(number == 0 && depth == 7 && !pending && !buffer && !host); /* outputs are written on success only */

    /* Without a state nothing is managed, and every setting is the default. */
    api->region_current(&current, &depth);
    CHECK(!current.managed && current.backup == TMS_BACKUP_NONE && strcmp(current.tag, "default") == 0 && depth == 0);
    api->region_current(&current, NULL);
    EQUAL(api->region_leave(1), TMS_NO_SUCH_REGION);
    api->set_memory_margin(MIB);
    EQUAL(api->get_memory_margin(), 0);
    api->set_retain_backup(1);
    EQUAL(api->get_retain_backup(), 0);
    EQUAL(api->get_host_policy(), TMS_HOST_RELEASE);
    EQUAL(api->capture_end(0, 0), 0);
    api->capture_begun(1);
    EQUAL(api->capture_end(1, 0), 0);
    api->release_host_memory();
    api->close();
    EQUAL(counters().allocations_total, 0);
    CHECK(!is_managed((void *)MIB));

    CHECK(TMS(tms_torch_malloc)(MIB, 0, NULL) == NULL);
    CHECK(TMS(tms_torch_ordinary_malloc)(MIB, 0, NULL) == NULL);
    TMS(tms_torch_default_free)((void *)MIB, MIB, 0, NULL);
    TMS(tms_torch_free)((void *)MIB, MIB, 0, NULL);
    TMS(tms_set_current_tag)("weights");
    EQUAL(strcmp(TMS(tms_get_current_tag)(), "default"), 0);
    TMS(tms_set_enable_cpu_backup)(true);
    CHECK(!TMS(tms_get_enable_cpu_backup)());
    EQUAL(TMS(tms_pause)(NULL), MEMORY_ALLOCATION);
    CHECK(TMS(tms_get_cpu_backup_pointer)((const uint8_t *)MIB, 1) == NULL);

    /* A later call makes it. */
    out_of_memory = false;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    CHECK(is_managed(address));
    EQUAL(cudaFree(address), SUCCESS);
}

static void capture_with(int (*begin)(void *stream, int mode), int (*end)(void *stream, void **graph), void *stream) {
    void *graph = NULL;
    EQUAL(begin(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(end(stream, &graph), SUCCESS);
    CHECK(graph != NULL);
}

/* The hooks call the real functions. */
static void hooks(void) {
    void *stream = NULL, *graph = NULL;
    char handle[64];
    out_of_memory = true;
    void *address = allocate(2 * MIB);
    EQUAL(cudaMemset(address, 3, 2 * MIB), SUCCESS);
    EQUAL(cudaDeviceEnablePeerAccess(1, 0), SUCCESS);
    EQUAL(cudaIpcGetMemHandle(handle, address), SUCCESS);
    EQUAL(cudaStreamCreateWithFlags(&stream, STREAM_NON_BLOCKING), SUCCESS);
    capture_with(cudaStreamBeginCapture, cudaStreamEndCapture, stream);
    capture_with(cudaStreamBeginCapture_ptsz, cudaStreamEndCapture_ptsz, stream);
    EQUAL(cudaGraphCreate(&graph, 0), SUCCESS);
    EQUAL(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(cudaStreamDestroy(stream), SUCCESS);
    EQUAL(cudaDeviceSynchronize(), SUCCESS);
    EQUAL(((unsigned char *)address)[MIB], 3);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(cudaDeviceReset(), SUCCESS);
}

MAIN(SCENARIO(functions), SCENARIO(hooks))
