#include "device/uuid.h"

#include <stdio.h>

void tms_uuid_write(const CUuuid *uuid, char text[TMS_UUID_BYTES]) {
    static const unsigned dashes = 1u << 4 | 1u << 6 | 1u << 8 | 1u << 10; /* a dash precedes each of these bytes */
    int used = snprintf(text, TMS_UUID_BYTES, "GPU-");
    for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
        used += snprintf(text + used, (size_t)(TMS_UUID_BYTES - used), "%s%02x", dashes >> i & 1 ? "-" : "",
                         (unsigned)(unsigned char)uuid->bytes[i]);
    }
}
