#include "core/page_opening.h"

#include <string.h>

_Static_assert(sizeof(CUuuid) == TMS_SHARED_PAGE_UUID_WORDS * sizeof(uint64_t), "a UUID fits its words");
_Static_assert((int)TMS_MAX_DEVICES <= (int)TMS_SHARED_PAGE_DEVICES, "the page has a place for each device");

/* What is not known stays 0. */
static void describe(const tms_driver_table_t *driver, const tms_device_table_t *devices,
                     tms_shared_page_description_t *description) {
    memset(description, 0, sizeof(*description));
    description->device_count = devices->count;
    for (int i = 0; i < devices->count; i++) {
        CUuuid uuid;
        description->devices[i].total_bytes = devices->device[i].total_bytes;
        if (driver->cuDeviceGetUuid && driver->cuDeviceGetUuid(&uuid, devices->device[i].handle) == CUDA_SUCCESS)
            memcpy(description->devices[i].uuid, &uuid, sizeof(uuid));
    }
}

void tms_saver_open_page(tms_saver_t *saver, const tms_driver_table_t *driver, const tms_device_table_t *devices) {
    tms_shared_page_description_t description;
    tms_private_directory_failure_t failure;
    if (!tms_shared_page_may_open(&saver->page)) return;
    describe(driver, devices, &description);
    if (tms_shared_page_open(&saver->page, &description, &failure)) return;
    char reason[TMS_ERROR_NAME_BYTES];
    tms_log_write(saver->log, TMS_LOG_WARNING,
                  "this process is not shown by `top`: its page '%s' cannot be made: %s failed with errno %d (%s). Nothing "
                  "else depends on it. TMS_SHARED_PAGE names another directory, and TMS_SHARED_PAGE=0 turns the page off",
                  saver->page.file.path, failure.call, failure.os_error,
                  strerror_r(failure.os_error, reason, sizeof(reason)));
}
