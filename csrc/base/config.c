#include "base/config.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/auxv.h>

#include "base/status.h"

/* X(kind, variable, fallback variable, field, default, allowed values). A default is written like a value of the variable.
 * TMS_LOG_LEVEL comes first because it governs the warnings about the rest. */
#define CONFIG_VARIABLES(X)                                                                                                 \
    X(LEVEL, "TMS_LOG_LEVEL", NULL, log_level, "warning", "silent, error, warning, info or debug")                          \
    X(BOOL, "TMS_DISABLE", NULL, disable, "0", BOOL_ALLOWED)                                                                \
    X(BOOL, "TMS_INIT_ENABLE", NULL, init_enable, "0", BOOL_ALLOWED)                                                        \
    X(BOOL, "TMS_INIT_ENABLE_CPU_BACKUP", NULL, init_enable_cpu_backup, "0", BOOL_ALLOWED)                                  \
    X(BOOL, "TMS_INIT_ENABLE_DISK_BACKUP", NULL, init_enable_disk_backup, "0", BOOL_ALLOWED)                                \
    X(BACKEND, "TMS_INIT_CPU_BACKUP_BACKEND", NULL, init_cpu_backup_backend, "pinned", "pinned or mmap")                    \
    X(BOOL, "TMS_RETAIN_CPU_BACKUP", NULL, retain_cpu_backup, "0", BOOL_ALLOWED)                                            \
    X(POLICY, "TMS_HOST_MEMORY", NULL, host_policy, "release", "release, pool or retain")                                   \
    X(LIMIT, "TMS_HOST_MEMORY_LIMIT_MB", NULL, host_memory_limit_bytes, "", "a whole number from 0 to 2^40")                \
    X(LIMIT, "TMS_HOST_POOL_LIMIT_MB", NULL, host_pool_limit_bytes, "", "a whole number from 0 to 2^40")                    \
    X(FOLDER, "TMS_DISK_BACKUP_DIR", "TMPDIR", disk_backup_directory, "/tmp", "an absolute path")                           \
    X(MEGABYTES, "TMS_DISK_BACKUP_CHUNK_MB", NULL, disk_backup_chunk_bytes, "256", "a whole number from 1 to 2^40")         \
    X(TEXT, "TMS_SHARED_DIR", NULL, shared_directory, "", "an absolute path")                                               \
    X(TEXT, "TMS_LOCK_DIR", NULL, lock_directory, "", "an absolute path")                                                   \
    X(BOOL, "TMS_RUNS", NULL, runs, "1", BOOL_ALLOWED)                                                                      \
    X(BOOL, "TMS_VERIFY_BACKUPS", NULL, verify_backups, "0", BOOL_ALLOWED)                                                  \
    X(BOOL, "TMS_GUARD", NULL, guard, "0", BOOL_ALLOWED)                                                                    \
    X(PAGE, "TMS_SHARED_PAGE", NULL, shared_page_directory, "1", PAGE_ALLOWED)                                              \
    X(TEXT, "TMS_CUDA_DRIVER", NULL, driver_path, "libcuda.so.1", "a library's absolute path or its name")

#define BOOL_ALLOWED "1, true, yes, 0, false or no"
#define PAGE_ALLOWED "1, true, yes, 0, false, no or an absolute path"

typedef enum variable_kind {
    KIND_BOOL,
    KIND_BACKEND,
    KIND_POLICY,
    KIND_MEGABYTES,
    KIND_LIMIT, /* megabytes, 0 included; "": no limit */
    KIND_LEVEL,
    KIND_PAGE,   /* a boolean, or a folder */
    KIND_FOLDER, /* an absolute path: a relative one would name another folder after a chdir */
    KIND_TEXT    /* not checked here, but where it is used */
} variable_kind_t;

typedef struct variable {
    variable_kind_t kind;
    const char *name, *fallback;
    size_t offset; /* offset of the field */
    const char *initial, *allowed;
} variable_t;

static const variable_t variables[] = {
#define ROW(kind, name, fallback, field, initial, allowed)                                                                  \
    {KIND_##kind, name, fallback, offsetof(tms_config_t, field), initial, allowed},
    CONFIG_VARIABLES(ROW)
#undef ROW
};
enum { VARIABLE_COUNT = sizeof(variables) / sizeof(variables[0]) };

enum { MEGABYTE_SHIFT = 20, MEGABYTES_MAX_SHIFT = 40, DECIMAL = 10, LONGEST_VALUE_SHOWN = 200 };

bool tms_config_parse_bool(const char *text, bool *out) {
    static const struct {
        const char *word;
        bool value;
    } words[] = {{"1", true}, {"true", true}, {"yes", true}, {"0", false}, {"false", false}, {"no", false}};
    for (size_t i = 0; text && i < sizeof(words) / sizeof(words[0]); i++) {
        if (strcasecmp(text, words[i].word) == 0) {
            *out = words[i].value;
            return true;
        }
    }
    return false;
}

/* Returns the position of `text` among `words`, or -1. */
static int word_index(const char *text, const char *const *words, int count) {
    for (int i = 0; text && i < count; i++) {
        if (strcmp(text, words[i]) == 0) return i;
    }
    return -1;
}

bool tms_config_parse_backend(const char *text, int *out) {
    static const char *const words[] = {"pinned", "mmap"};
    static const int kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP};
    int index = word_index(text, words, sizeof(words) / sizeof(words[0]));
    if (index < 0) return false;
    *out = kinds[index];
    return true;
}

bool tms_config_parse_host_policy(const char *text, int *out) {
    static const char *const words[] = {"release", "pool", "retain"};
    static const int policies[] = {TMS_HOST_RELEASE, TMS_HOST_POOL, TMS_HOST_RETAIN};
    int index = word_index(text, words, sizeof(words) / sizeof(words[0]));
    if (index < 0) return false;
    *out = policies[index];
    return true;
}

bool tms_config_parse_level(const char *text, int *out) {
    static const char *const words[] = {"silent", "error", "warning", "info", "debug"}; /* in order of tms_log_level_t */
    for (int i = 0; text && i < (int)(sizeof(words) / sizeof(words[0])); i++) {
        if (strcasecmp(text, words[i]) != 0) continue;
        *out = i;
        return true;
    }
    return false;
}

/* A whole number from 0 to `most`, which is far below 2^64 / 10. */
static bool parse_number(const char *text, uint64_t most, uint64_t *out) {
    uint64_t number = 0;
    if (!text || !*text) return false;
    for (const char *digit = text; *digit; digit++) {
        if (*digit < '0' || *digit > '9') return false;
        number = number * DECIMAL + (uint64_t)(*digit - '0');
        if (number > most) return false; /* long before it could overflow */
    }
    *out = number;
    return true;
}

bool tms_config_parse_limit(const char *text, uint64_t *bytes) {
    uint64_t megabytes = 0;
    if (!parse_number(text, (uint64_t)1 << MEGABYTES_MAX_SHIFT, &megabytes)) return false;
    *bytes = megabytes << MEGABYTE_SHIFT;
    return true;
}

bool tms_config_parse_megabytes(const char *text, uint64_t *bytes) {
    uint64_t parsed = 0;
    if (!tms_config_parse_limit(text, &parsed) || parsed == 0) return false;
    *bytes = parsed;
    return true;
}

/* Parses every kind except those of read_text, which need memory. */
static bool parse_value(variable_kind_t kind, const char *text, void *field) {
    switch (kind) {
    case KIND_BOOL: return tms_config_parse_bool(text, field);
    case KIND_BACKEND: return tms_config_parse_backend(text, field);
    case KIND_POLICY: return tms_config_parse_host_policy(text, field);
    case KIND_MEGABYTES: return tms_config_parse_megabytes(text, field);
    case KIND_LIMIT:
        if (*text) return tms_config_parse_limit(text, field);
        *(uint64_t *)field = UINT64_MAX;
        return true;
    case KIND_LEVEL: return tms_config_parse_level(text, field);
    case KIND_PAGE:
    case KIND_FOLDER:
    case KIND_TEXT: break;
    }
    return false;
}

static char **text_field(const variable_t *variable, tms_config_t *config) {
    return (char **)(void *)((char *)config + variable->offset);
}

/* The only place of the library that reads the environment. In secure-execution mode no variable is set. */
static const char *environment_value(const char *name) {
    const char *value = name ? secure_getenv(name) : NULL;
    return value && *value ? value : NULL;
}

bool tms_config_in_secure_execution(void) { return getauxval(AT_SECURE) != 0; }

static const tms_error_context_t read_context = {.operation = "start", .device = TMS_NO_DEVICE};

/* gcc's analyzer does not follow a pointer stored at an offset taken from a table, and reports a leak. */
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
#endif
static tms_status_t copy_text(const char *text, char **field, tms_error_t *error) {
    char *copy = strdup(text);
    if (!copy) return tms_error_set_os(error, &read_context, "strdup", ENOMEM, NULL);
    *field = copy;
    return TMS_OK;
}
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

static void note_malformed(const variable_t *variable, const char *value, tms_config_t *config) {
    if (config->malformed.status != TMS_OK) return;
    tms_error_set(&config->malformed, TMS_INVALID_ARGUMENT, NULL,
                  "%s='%.*s' is not a limit: it must be %s (MiB), or be unset for no limit", variable->name,
                  LONGEST_VALUE_SHOWN, value, variable->allowed);
}

static bool is_text(const variable_t *variable) {
    return variable->kind == KIND_TEXT || variable->kind == KIND_PAGE || variable->kind == KIND_FOLDER;
}

/* `name`: the variable, or its fallback. */
static void warn_malformed(const variable_t *variable, const char *name, const char *value, const tms_log_t *log) {
    tms_log_write(log, TMS_LOG_WARNING, "%s='%.*s' is ignored (allowed: %s); the default '%s' is used", name,
                  LONGEST_VALUE_SHOWN, value, variable->allowed, variable->initial);
}

/* The default directory of TMS_SHARED_PAGE. */
static const char no_text[] = "";

static tms_status_t read_text(const variable_t *variable, tms_config_t *config, const tms_log_t *log, tms_error_t *error) {
    const char *name = environment_value(variable->name) ? variable->name : variable->fallback;
    const char *value = environment_value(name);
    char **text = text_field(variable, config);
    /* The default is not copied; tms_config_release knows it by its address. */
    *text = (char *)(uintptr_t)(variable->kind == KIND_PAGE ? no_text : variable->initial);
    if (variable->kind == KIND_PAGE) {
        config->shared_page = true;
        if (!value || tms_config_parse_bool(value, &config->shared_page)) return TMS_OK;
    }
    if (value && *value != '/' && variable->kind != KIND_TEXT) {
        warn_malformed(variable, name, value, log);
        return TMS_OK;
    }
    return value ? copy_text(value, text, error) : TMS_OK;
}

static tms_status_t read_variable(const variable_t *variable, tms_config_t *config, const tms_log_t *log,
                                  tms_error_t *error) {
    if (is_text(variable)) return read_text(variable, config, log, error);
    const char *value = environment_value(variable->name);
    void *field = (char *)config + variable->offset;
    parse_value(variable->kind, variable->initial, field);
    if (!value || parse_value(variable->kind, value, field)) return TMS_OK;
    if (variable->kind == KIND_LIMIT)
        note_malformed(variable, value, config);
    else
        warn_malformed(variable, variable->name, value, log);
    return TMS_OK;
}

const char *tms_config_name(size_t index) { return index < VARIABLE_COUNT ? variables[index].name : NULL; }

tms_status_t tms_config_read(tms_config_t *config, tms_log_t *log, tms_error_t *error) {
    memset(config, 0, sizeof(*config));
    for (int i = 0; i < VARIABLE_COUNT; i++) {
        tms_status_t status = read_variable(&variables[i], config, log, error);
        if (status != TMS_OK) {
            tms_config_release(config);
            return status;
        }
        if (variables[i].kind == KIND_LEVEL) atomic_store(&log->level, config->log_level);
    }
    config->init_enable = config->init_enable && !config->disable;
    if (config->init_enable_cpu_backup && config->init_enable_disk_backup) {
        tms_log_write(log, TMS_LOG_WARNING,
                      "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both set; the CPU backup is used. "
                      "Unset one of them.");
        config->init_enable_disk_backup = false;
    }
    return TMS_OK;
}

void tms_config_release(tms_config_t *config) {
    for (int i = 0; i < VARIABLE_COUNT; i++) {
        if (!is_text(&variables[i])) continue;
        char **text = text_field(&variables[i], config);
        if (*text != no_text && *text != variables[i].initial) free(*text);
        *text = NULL;
    }
}

tms_backup_kind_t tms_config_init_backup(const tms_config_t *config) {
    if (config->init_enable_cpu_backup) return (tms_backup_kind_t)config->init_cpu_backup_backend;
    return config->init_enable_disk_backup ? TMS_BACKUP_DISK : TMS_BACKUP_NONE;
}
