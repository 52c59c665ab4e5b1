/* The C functions of the C++ package, on top of the function table. Nothing else in the library depends on them.
 *
 * The setters change the settings of the calling thread's innermost region in place; outside every region those are the
 * initial settings, for this thread only. A failure is logged once, because these functions return no error. Managed
 * allocations have one kind of backup here: if a program enables both CPU and disk backups, the last one wins. */

#include "abi/compat.h"

#include <string.h>

#include "abi/interface.h"
#include "abi/start.h"

/* The backend of this thread's CPU backups if the program chose one before it enabled them, else 0. */
static _Thread_local tms_backup_kind_t chosen_backend;

static const tms_api_t *api(void) { return tms_get_api(tms_interface()); }

static void warn_once(const char *what) {
    tms_state_t *state = tms_state(NULL);
    if (state) tms_log_once(&state->log, &state->warned_malformed_use, TMS_LOG_WARNING, "%s", what);
}

static tms_region_settings_t current(void) {
    tms_region_settings_t settings;
    api()->region_current(&settings, NULL);
    return settings;
}

static void change(const tms_region_settings_t *settings) {
    tms_error_t error;
    if (api()->region_set(settings, &error) != TMS_OK) warn_once(error.message);
}

static bool is_cpu_backup(int32_t kind) { return kind == TMS_BACKUP_PINNED || kind == TMS_BACKUP_MMAP; }

static tms_backup_kind_t backend_of_thread(const tms_region_settings_t *settings) {
    if (is_cpu_backup(settings->backup)) return (tms_backup_kind_t)settings->backup;
    if (chosen_backend != TMS_BACKUP_NONE) return chosen_backend;
    tms_state_t *state = tms_state(NULL);
    return state ? (tms_backup_kind_t)state->config.init_cpu_backup_backend : TMS_BACKUP_PINNED;
}

/* ---- the thread's region ---- */

void tms_set_interesting_region(bool on) {
    tms_region_settings_t settings = current();
    settings.managed = on;
    change(&settings);
}

bool tms_get_interesting_region(void) { return current().managed != 0; }

void tms_set_current_tag(const char *tag) {
    tms_region_settings_t settings = current();
    settings.tag = tag;
    change(&settings);
}

const char *tms_get_current_tag(void) { return current().tag; }

/* Replaces the backup of the thread's region, or removes it. */
static void set_backup(bool on, bool is_on, tms_backup_kind_t kind) {
    tms_region_settings_t settings = current();
    if (on == is_on) return;
    if (on && settings.backup != TMS_BACKUP_NONE)
        warn_once("both the CPU backup and the disk backup are enabled, but an allocation has one backup: the one that was "
                  "enabled last is used");
    settings.backup = on ? kind : TMS_BACKUP_NONE;
    change(&settings);
}

void tms_set_enable_cpu_backup(bool on) {
    tms_region_settings_t settings = current();
    set_backup(on, is_cpu_backup(settings.backup), backend_of_thread(&settings));
}

bool tms_get_enable_cpu_backup(void) { return is_cpu_backup(current().backup); }

void tms_set_cpu_backup_backend(const char *backend) {
    int kind = TMS_BACKUP_NONE;
    if (!backend || !tms_config_parse_backend(backend, &kind)) {
        warn_once("tms_set_cpu_backup_backend: the backend is \"pinned\" or \"mmap\"; the setting stays as it was");
        return;
    }
    tms_region_settings_t settings = current();
    chosen_backend = (tms_backup_kind_t)kind;
    if (!is_cpu_backup(settings.backup)) return; /* applied when the backup is enabled */
    settings.backup = kind;
    change(&settings);
}

const char *tms_get_cpu_backup_backend(void) {
    tms_region_settings_t settings = current();
    return backend_of_thread(&settings) == TMS_BACKUP_MMAP ? "mmap" : "pinned";
}

void tms_set_enable_disk_backup(bool on) { set_backup(on, tms_get_enable_disk_backup(), TMS_BACKUP_DISK); }

bool tms_get_enable_disk_backup(void) { return current().backup == TMS_BACKUP_DISK; }

/* ---- the process ---- */

void tms_set_disk_backup_dir(const char *path) {
    tms_error_t error;
    if (api()->set_disk_directory(path, &error) != TMS_OK) warn_once(error.message);
}

void tms_set_retain_cpu_backup(bool on) { api()->set_retain_backup(on); }

bool tms_get_retain_cpu_backup(void) { return api()->get_retain_backup() != 0; }

void set_memory_margin_bytes(uint64_t bytes) { api()->set_memory_margin(bytes); }

/* ---- pause and resume ---- */

tms_cuda_error_t tms_compat_cuda_error(tms_status_t status, const tms_error_t *error) {
    if (status == TMS_OK) return TMS_CUDA_SUCCESS; /* *error is not filled */
    int driver_result = error ? error->driver_result : 0;
    switch (status) {
    case TMS_INVALID_ARGUMENT:
    case TMS_NOT_MANAGED: return TMS_CUDA_ERROR_INVALID_VALUE;
    case TMS_OUT_OF_DEVICE_MEMORY:
    case TMS_OUT_OF_HOST_MEMORY: return TMS_CUDA_ERROR_MEMORY_ALLOCATION;
    case TMS_CAPTURE_IN_PROGRESS: return TMS_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    case TMS_DRIVER_UNAVAILABLE: return driver_result ? driver_result : TMS_CUDA_ERROR_NO_DEVICE;
    case TMS_FORKED: return TMS_CUDA_ERROR_INITIALIZATION; /* the runtime's error in a forked child */
    case TMS_DRIVER:
    case TMS_DEVICE_LOST: return driver_result ? driver_result : TMS_CUDA_ERROR_UNKNOWN;
    case TMS_OK:
    case TMS_INVALID_STATE:
    case TMS_BACKUP_IO:
    case TMS_INTERRUPTED:
    case TMS_DEVICE_LOCKED: break;
    }
    return TMS_CUDA_ERROR_UNKNOWN;
}

typedef tms_status_t (*move_t)(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error);

/* NULL and "" mean every tag. */
static tms_cuda_error_t move(move_t what, const char *tag) {
    if (tag && !*tag) tag = NULL;
    tms_selection_t selection = {.tags = tag ? &tag : NULL, .tag_count = tag ? 1 : 0};
    tms_report_t report;
    tms_error_t error;
    tms_status_t status = what(&selection, &report, &error);
    tms_state_t *state = tms_state_if_made();
    /* Logged as well, because most callers of these functions ignore the number. */
    if (status != TMS_OK && state) tms_log_write(&state->log, TMS_LOG_ERROR, "%s", error.message);
    if (status == TMS_OK && report.unknown_tags > 0 && state)
        tms_log_write(&state->log, TMS_LOG_WARNING, "no allocation ever had the tag '%s'; nothing to do for it", tag);
    return tms_compat_cuda_error(status, &error);
}

int tms_pause(const char *tag) { return move(api()->pause, tag); }

int tms_resume(const char *tag) { return move(api()->resume, tag); }

uint8_t *tms_get_cpu_backup_pointer(const uint8_t *address, uint64_t bytes) {
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_error_t error;
    if (api()->host_backup((uintptr_t)address, bytes, &buffer, &host, &error) != TMS_OK) {
        warn_once(error.message);
        return NULL;
    }
    /* The caller holds no reference: the copy is valid until a resume discards it. */
    if (buffer) api()->host_buffer_release(buffer);
    return host;
}
