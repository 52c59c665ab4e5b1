#include "device/uuid.h"

#include <stdio.h>

void tms_uuid_write(const CUuuid *uuid, char text[TMS_UUID_BYTES]) {
    static const unsigned dashes = 1u << 4 | 1u << 6 | 1u << 8 | 1u << 10; /* before these bytes */
    int used = snprintf(text, TMS_UUID_BYTES, "GPU-");
    for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
        used += snprintf(text + used, (size_t)(TMS_UUID_BYTES - used), "%s%02x", dashes >> i & 1 ? "-" : "",
                         (unsigned)(unsigned char)uuid->bytes[i]);
    }
}

tms_status_t tms_uuid_of_device(tms_devices_t *devices, int ordinal, char text[TMS_UUID_BYTES],
                                const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    CUuuid uuid = {.bytes = {0}};
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    if (ordinal < 0 || ordinal >= table->count)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "devices 0 to %d exist", table->count - 1);
    status = TMS_DRIVER_CALL(driver, context, error, cuDeviceGetUuid, &uuid, table->device[ordinal].handle);
    if (status == TMS_OK) tms_uuid_write(&uuid, text);
    return status;
}
