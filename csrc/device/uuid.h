/* UUIDs of devices, as NVML and nvidia-smi write them: "GPU-5d5ba0d6-...". Any thread; no lock. */
#ifndef TMS_UUID_H
#define TMS_UUID_H

#include <cuda.h>

#include "include/tms.h"

void tms_uuid_write(const CUuuid *uuid, char text[TMS_UUID_BYTES]);

#endif
