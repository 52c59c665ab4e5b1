/* UUIDs of devices, as NVML and nvidia-smi write them: "GPU-5d5ba0d6-...". Any thread; no lock. Makes no context. */
#ifndef TMS_UUID_H
#define TMS_UUID_H

#include "device/device.h"

void tms_uuid_write(const CUuuid *uuid, char text[TMS_UUID_BYTES]);
/* TMS_INVALID_ARGUMENT for a device that does not exist. */
tms_status_t tms_uuid_of_device(tms_devices_t *devices, int ordinal, char text[TMS_UUID_BYTES],
                                const tms_error_context_t *context, tms_error_t *error);

#endif
