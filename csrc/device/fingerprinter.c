#include "device/fingerprinter.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"

/* The PTX of csrc/kernels/fingerprint.cu, as a string. The driver compiles it. */
extern const char tms_fingerprint_ptx[] __attribute__((visibility("hidden")));
__asm__(".pushsection .rodata\n"
        ".globl tms_fingerprint_ptx\n"
        ".hidden tms_fingerprint_ptx\n"
        ".type tms_fingerprint_ptx, @object\n"
        "tms_fingerprint_ptx:\n"
        ".incbin \"kernels/fingerprint.ptx\"\n"
        ".byte 0\n"
        ".size tms_fingerprint_ptx, . - tms_fingerprint_ptx\n"
        ".popsection\n");

/* Queues the copy of a key to the module. */
static tms_status_t send_key(const tms_fingerprint_module_t *loaded, const tms_fingerprint_key_t *key,
                             const tms_driver_table_t *driver, CUstream stream, const tms_error_context_t *context,
                             tms_error_t *error) {
    CUdeviceptr address = 0;
    size_t bytes = 0;
    tms_status_t status =
        TMS_DRIVER_CALL(driver, context, error, cuModuleGetGlobal, &address, &bytes, loaded->module, "tms_fingerprint_key");
    if (status != TMS_OK) return status;
    /* The driver has read pageable memory when the call returns. */
    return TMS_DRIVER_CALL(driver, context, error, cuMemcpyHtoDAsync, address, key, sizeof *key, stream);
}

/* Draws a key for this module alone. */
static tms_status_t draw_key(const tms_fingerprint_module_t *loaded, const tms_driver_table_t *driver, CUstream stream,
                             const tms_error_context_t *context, tms_error_t *error) {
    tms_fingerprint_key_t *key = malloc(sizeof *key);
    if (!key) return tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
    int os_error = tms_random_fill(key, sizeof *key);
    tms_status_t status = os_error == 0 ? send_key(loaded, key, driver, stream, context, error)
                                        : tms_error_set_os(error, context, "getrandom", os_error, NULL);
    free(key);
    return status;
}

void tms_fingerprinter_set_key(tms_fingerprinter_t *fingerprinter, const tms_fingerprint_key_t *key) {
    fingerprinter->key = key;
    fingerprinter->keys++;
}

/* Makes the steps that are missing until the kernel can be launched. */
static tms_status_t load(const tms_fingerprinter_t *fingerprinter, tms_fingerprint_module_t *loaded,
                         const tms_driver_table_t *driver, CUstream stream, const tms_error_context_t *context,
                         tms_error_t *error) {
    unsigned long long current = 0;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuCtxGetId, NULL, &current);
    if (status != TMS_OK) return status;
    if (loaded->context != current) *loaded = (tms_fingerprint_module_t){.context = current};
    if (!loaded->module)
        status = TMS_DRIVER_CALL(driver, context, error, cuModuleLoadData, &loaded->module, tms_fingerprint_ptx);
    if (status == TMS_OK && !loaded->function)
        status = TMS_DRIVER_CALL(driver, context, error, cuModuleGetFunction, &loaded->function, loaded->module,
                                 "tms_fingerprint");
    if (status == TMS_OK && !(loaded->has_key && loaded->keys == fingerprinter->keys)) {
        status = fingerprinter->key ? send_key(loaded, fingerprinter->key, driver, stream, context, error)
                                    : draw_key(loaded, driver, stream, context, error);
        loaded->has_key = status == TMS_OK;
        loaded->keys = fingerprinter->keys;
    }
    return status;
}

tms_status_t tms_fingerprinter_launch(tms_fingerprinter_t *fingerprinter, const tms_driver_table_t *driver, int device,
                                      CUstream stream, const tms_fingerprint_chunk_t *chunks, uint32_t count,
                                      tms_fingerprint_t *results, const tms_error_context_t *context, tms_error_t *error) {
    tms_fingerprint_module_t *loaded = &fingerprinter->modules[device];
    CUdeviceptr from = 0, to = 0;
    tms_status_t status = load(fingerprinter, loaded, driver, stream, context, error);
    if (status == TMS_OK)
        status = TMS_DRIVER_CALL(driver, context, error, cuMemHostGetDevicePointer, &from, (void *)(uintptr_t)chunks, 0);
    if (status == TMS_OK) status = TMS_DRIVER_CALL(driver, context, error, cuMemHostGetDevicePointer, &to, results, 0);
    if (status != TMS_OK) return status;
    const unsigned int blocks = (count + TMS_FINGERPRINT_GROUP - 1) / TMS_FINGERPRINT_GROUP;
    void *parameters[] = {&from, &count, &to};
    return TMS_DRIVER_CALL(driver, context, error, cuLaunchKernel, loaded->function, blocks, 1, 1, TMS_FINGERPRINT_THREADS,
                           1, 1, 0, stream, parameters, NULL);
}

void tms_fingerprinter_release(tms_fingerprinter_t *fingerprinter, tms_devices_t *devices) {
    const tms_error_context_t context = {.operation = "unload the kernel", .device = TMS_NO_DEVICE};
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    for (int device = 0; driver && device < TMS_MAX_DEVICES; device++) {
        const tms_fingerprint_module_t *loaded = &fingerprinter->modules[device];
        unsigned long long current = 0;
        if (!loaded->module || tms_devices_enter(devices, device, &context, NULL) != TMS_OK) continue;
        if (TMS_DRIVER_CALL(driver, &context, NULL, cuCtxGetId, NULL, &current) == TMS_OK && current == loaded->context)
            (void)TMS_DRIVER_CALL(driver, &context, NULL, cuModuleUnload, loaded->module);
        tms_devices_leave(devices, device);
    }
    *fingerprinter = (tms_fingerprinter_t){0};
}
