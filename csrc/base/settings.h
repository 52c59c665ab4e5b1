/* The settings of a region, which apply to the allocations made in it. A value, copied into the thread's stack of regions
 * (core/model/region.h), into announced captures (device/capture.h) and into segments. */
#ifndef TMS_SETTINGS_H
#define TMS_SETTINGS_H

#include "base/tag.h"

typedef struct tms_region {
    tms_tag_t *tag;
    tms_backup_kind_t backup;
    tms_host_policy_t host_policy;
    bool managed;
    bool own_handles; /* its allocations share no run with others (core/model/run.h) */
} tms_region_t;

#endif
