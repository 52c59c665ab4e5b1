/* The TMS_* environment variables of the native code: one table (config.c), read and validated once.
 *
 * Owns the strings it copies. tms_config_read is called once, while the state is being made; afterwards the struct is
 * constant and may be read from any thread without a lock. A malformed value is reported in one warning that names the
 * variable, the value and the allowed values, and the default stays. TMS_LOG_LEVEL is read first and governs those warnings.
 * A malformed limit is an error of the first call that depends on it. A process that only inherited the variable is not
 * affected. Booleans: 1/true/yes and 0/false/no in any case. Empty counts as unset.
 *
 * In secure-execution mode (ld.so(8): a set-user-ID program, or one with file capabilities) every variable counts as unset,
 * because it is the caller's, and could make the program load a library or write a file with rights that the caller lacks.
 */
#ifndef TMS_CONFIG_H
#define TMS_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "include/tms.h"

/* docs/generated.py copies the comment of each variable's field, from the name to the end, into the documentation. The
 * defaults and allowed values are in the table of config.c. Limits and sizes are kept in bytes; UINT64_MAX is no limit. The
 * backend is TMS_BACKUP_PINNED or TMS_BACKUP_MMAP, the policy is never TMS_HOST_DEFAULT, and an empty lock_directory or
 * shared_page_directory is explained in device_lock.h and shared_page_file.h. */
typedef struct tms_config {
    bool disable;                 /* TMS_DISABLE: the kill switch: the package does nothing in this process. Nothing is
                                     replaced, the preload library passes every call on, `TMS_INIT_ENABLE` is ignored, and
                                     regions, pauses and resumes have no effect */
    bool init_enable;             /* TMS_INIT_ENABLE: preload mode: allocations outside regions are managed too, with the tag
                                     `default` */
    bool init_enable_cpu_backup;  /* TMS_INIT_ENABLE_CPU_BACKUP: these allocations have a backup in host memory */
    bool init_enable_disk_backup; /* TMS_INIT_ENABLE_DISK_BACKUP: these allocations have a backup in a file */
    int init_cpu_backup_backend;  /* TMS_INIT_CPU_BACKUP_BACKEND: the host memory of these backups */
    bool retain_cpu_backup;       /* TMS_RETAIN_CPU_BACKUP: the same as `TMS_HOST_MEMORY=retain` */
    int host_policy;              /* TMS_HOST_MEMORY: what happens to a backup's host memory after a resume: it is released
                                     to the system, kept for any later pause, or kept with its contents */
    uint64_t host_memory_limit_bytes; /* TMS_HOST_MEMORY_LIMIT_MB: the most host memory that backups may use, the pool
                                         included, in MiB; 0 means no host memory */
    uint64_t host_pool_limit_bytes;   /* TMS_HOST_POOL_LIMIT_MB: the most host memory that the pool keeps, in MiB; 0 means
                                         that nothing is kept */
    char *disk_backup_directory;      /* TMS_DISK_BACKUP_DIR: the directory of backup files. It is created if it is missing,
                                         but its parents are not */
    uint64_t disk_backup_chunk_bytes; /* TMS_DISK_BACKUP_CHUNK_MB: pinned staging memory of disk backups for each GPU that
                                         copies, in MiB; more than 12 are never used */
    char *shared_directory; /* TMS_SHARED_DIR: the folder in memory (tmpfs) in which the processes of one user share
                               the contents of backups. It is created if it is missing, but its parents are not.
                               Unset means `/dev/shm/torch_memory_saver-store-<uid>`. No other user may be able to
                               write to it. In `/dev/shm` or `/tmp`, `torch_memory_saver-store-<uid>` is used */
    char *lock_directory;   /* TMS_LOCK_DIR: the directory in which `resume(exclusive=True)` keeps lock files of
                               GPUs and of waiting calls. Unset means `/tmp/torch_memory_saver-<uid>`. All
                               processes that take turns use the same directory and belong to the same user. No
                               other user may be able to write to it. In `/tmp`, `torch_memory_saver-<uid>` is used */
    bool runs;              /* TMS_RUNS: whether a resume backs neighbouring allocations by one physical handle; 0: each
                               has a handle of its own, as in `region(runs=False)` */
    bool verify_backups;    /* TMS_VERIFY_BACKUPS: for debugging: each pause copies all contents of retained backups once
                               more, and fails before it releases anything if a byte that was not copied differs. A
                               backup file that is damaged is written again */
    bool guard;             /* TMS_GUARD: guard mode, for debugging: paused memory reads as 0xFF, and so does memory
                               that is resumed without contents */
    bool shared_page;       /* whether TMS_SHARED_PAGE is not false */
    char *shared_page_directory; /* TMS_SHARED_PAGE: whether a process shows what it holds to `top` and `ask`, in a file that
                                    only its user can read, and the directory of these files. Unset means on, in
                                    `/dev/shm/torch_memory_saver-<uid>`. The directory must be local to the machine, and is
                                    the same for the process and for the commands. No other user may be able to write to
                                    it. In `/dev/shm` or `/tmp`, `torch_memory_saver-<uid>` is used */
    char *driver_path;     /* TMS_CUDA_DRIVER: names the CUDA driver library that is loaded. A relative path is refused */
    int log_level;         /* TMS_LOG_LEVEL: the level of the native log, written in upper or lower case. `info` adds
                              a line for each pause, resume, publish and adopt. `debug` also logs messages that recur,
                              which are otherwise logged once and then counted. Lines go to Python's logger
                              `torch_memory_saver` or to stderr */
    tms_error_t malformed; /* TMS_INVALID_ARGUMENT about the first malformed limit; TMS_OK if there is none */
} tms_config_t;

/* Reads the environment and sets the level of `log`. If the INIT variables request both backups, the CPU backup is used and
 * a warning is logged. TMS_OUT_OF_HOST_MEMORY if a string cannot be copied; nothing needs to be released then. */
tms_status_t tms_config_read(tms_config_t *config, tms_log_t *log, tms_error_t *error);
void tms_config_release(tms_config_t *config);

/* Whether this process ignores its variables. Python's variables follow the same rule. */
bool tms_config_in_secure_execution(void);

/* Returns the name of the variable at `index`, or NULL after the last one. */
const char *tms_config_name(size_t index);

/* Returns the kind of backup that the INIT variables select. */
tms_backup_kind_t tms_config_init_backup(const tms_config_t *config);

/* Parsers, public for tests and fuzzing. False: `text` is malformed, *out is unchanged. */
bool tms_config_parse_bool(const char *text, bool *out);
bool tms_config_parse_backend(const char *text, int *out);          /* "pinned" | "mmap" */
bool tms_config_parse_megabytes(const char *text, uint64_t *bytes); /* decimal, 1 .. 2^40 MiB */
bool tms_config_parse_limit(const char *text, uint64_t *bytes);     /* decimal, 0 .. 2^40 MiB */
bool tms_config_parse_host_policy(const char *text, int *out);      /* "release" | "pool" | "retain" */
bool tms_config_parse_level(const char *text, int *out);            /* in any case */

#endif
