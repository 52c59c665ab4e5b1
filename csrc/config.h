/* Every TMS_* environment variable that the native code reads, in one table (config.c), read once, validated.
 *
 * Owns the strings it copies. tms_config_read is called once, while the state is being made; afterwards the struct is
 * constant and may be read from any thread without a lock. A malformed value is reported in one warning that names the
 * variable, the value and what is allowed, and the default stays; TMS_LOG_LEVEL is read first and governs those warnings.
 * A malformed limit is an error instead, for the first call that would have to keep to it: a process that only inherited it
 * hears nothing. Booleans: 1/true/yes and 0/false/no in any case. Empty counts as unset. */
#ifndef TMS_CONFIG_H
#define TMS_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "log.h"
#include "tms.h"

typedef struct tms_config {
    bool init_enable;                 /* TMS_INIT_ENABLE: allocations outside regions are managed */
    bool init_enable_cpu_backup;      /* TMS_INIT_ENABLE_CPU_BACKUP */
    bool init_enable_disk_backup;     /* TMS_INIT_ENABLE_DISK_BACKUP */
    int init_cpu_backup_backend;      /* TMS_INIT_CPU_BACKUP_BACKEND: TMS_BACKUP_PINNED or TMS_BACKUP_MMAP */
    bool retain_cpu_backup;           /* TMS_RETAIN_CPU_BACKUP: TMS_HOST_MEMORY=retain */
    int host_policy;                  /* TMS_HOST_MEMORY: tms_host_policy_t, not TMS_HOST_DEFAULT; default release */
    uint64_t host_memory_limit_bytes; /* TMS_HOST_MEMORY_LIMIT_MB, in bytes; 0: no memory; default UINT64_MAX, no limit */
    uint64_t host_pool_limit_bytes;   /* TMS_HOST_POOL_LIMIT_MB, likewise */
    char *disk_backup_directory;      /* TMS_DISK_BACKUP_DIR; default: TMPDIR, else /tmp */
    uint64_t disk_backup_chunk_bytes; /* TMS_DISK_BACKUP_CHUNK_MB, in bytes; default 256 MiB, of which 12 are used */
    char *lock_directory;             /* TMS_LOCK_DIR; "": see device_lock.h */
    char *driver_path;                /* TMS_CUDA_DRIVER; default libcuda.so.1 */
    int log_level;                    /* TMS_LOG_LEVEL: silent|error|warning|info|debug in any case; default warning */
    tms_error_t malformed;            /* TMS_INVALID_ARGUMENT about the first malformed limit; TMS_OK where there is none */
} tms_config_t;

/* Reads the environment and sets the level of `log`. Both backups asked for by the INIT variables is reported and counts as
 * the CPU backup. TMS_OUT_OF_HOST_MEMORY for a string, and then there is nothing to release: settings that somebody made
 * must not be passed over. */
tms_status_t tms_config_read(tms_config_t *config, tms_log_t *log, tms_error_t *error);
void tms_config_release(tms_config_t *config);

/* The names of the variables: the one at `index`, NULL after the last. */
const char *tms_config_name(size_t index);

/* The backup that the INIT variables ask for. */
tms_backup_kind_t tms_config_init_backup(const tms_config_t *config);

/* Parsers, public for tests and fuzzing. False: `text` is malformed, *out is unchanged. */
bool tms_config_parse_bool(const char *text, bool *out);
bool tms_config_parse_backend(const char *text, int *out);          /* "pinned" | "mmap" */
bool tms_config_parse_megabytes(const char *text, uint64_t *bytes); /* decimal, 1 .. 2^40 MiB */
bool tms_config_parse_limit(const char *text, uint64_t *bytes);     /* decimal, 0 .. 2^40 MiB */
bool tms_config_parse_host_policy(const char *text, int *out);      /* "release" | "pool" | "retain" */
bool tms_config_parse_level(const char *text, int *out);            /* in any case */

#endif
