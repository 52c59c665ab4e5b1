/* Fuzzes the parsers of environment variables: each parser alone, then all variables at once through the environment.
 *
 * The input is split at newlines into one text for each variable, in the order of `names`. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Must hold for every input; the fuzzer looks for an input that violates it. */
#define MUST(condition)                                                                                                     \
    do {                                                                                                                    \
        if (!(condition)) abort();                                                                                          \
    } while (0)

static const char *const names[] = {
    "TMS_LOG_LEVEL",
    "TMS_INIT_ENABLE",
    "TMS_INIT_ENABLE_CPU_BACKUP",
    "TMS_INIT_ENABLE_DISK_BACKUP",
    "TMS_INIT_CPU_BACKUP_BACKEND",
    "TMS_RETAIN_CPU_BACKUP",
    "TMS_DISK_BACKUP_DIR",
    "TMPDIR",
    "TMS_DISK_BACKUP_CHUNK_MB",
    "TMS_LOCK_DIR",
    "TMS_CUDA_DRIVER",
};
enum { NAMES = sizeof names / sizeof names[0] };

enum { UNTOUCHED = 77, MEGABYTE_SHIFT = 20 };

/* The value of a text of digits according to the C library, or 0. */
static uint64_t megabytes_of(const char *text) {
    char *end = NULL;
    if (!*text || strspn(text, "0123456789") != strlen(text)) return 0;
    unsigned long long value = strtoull(text, &end, 10);
    return *end == '\0' && value <= (1ULL << 40) ? value : 0;
}

static void parse(const char *text) {
    static const char *const levels[] = {"silent", "error", "warning", "info", "debug"};
    bool on = true, off = false;
    int backend = UNTOUCHED, level = UNTOUCHED;
    uint64_t bytes = UNTOUCHED;
    bool known = tms_config_parse_bool(text, &on);
    MUST(known == tms_config_parse_bool(text, &off));
    MUST(known ? on == off : on && !off);
    if (known && on) MUST(strcasecmp(text, "1") == 0 || strcasecmp(text, "true") == 0 || strcasecmp(text, "yes") == 0);
    if (tms_config_parse_backend(text, &backend))
        MUST(strcmp(text, backend == TMS_BACKUP_PINNED ? "pinned" : "mmap") == 0);
    else
        MUST(backend == UNTOUCHED);
    if (tms_config_parse_level(text, &level))
        MUST(level >= TMS_LOG_SILENT && level <= TMS_LOG_DEBUG && strcasecmp(text, levels[level]) == 0);
    else
        MUST(level == UNTOUCHED);
    uint64_t megabytes = megabytes_of(text);
    MUST(tms_config_parse_megabytes(text, &bytes) == (megabytes != 0));
    MUST(bytes == (megabytes ? megabytes << MEGABYTE_SHIFT : UNTOUCHED));
    bool zero = *text && strspn(text, "0") == strlen(text);
    bytes = UNTOUCHED;
    MUST(tms_config_parse_limit(text, &bytes) == (zero || megabytes != 0));
    MUST(bytes == (zero ? 0 : megabytes ? megabytes << MEGABYTE_SHIFT : UNTOUCHED));
}

/* The text of the variable that the field holds, that of its fallback, or the value for neither. */
static const char *text_of(const char *name, const char *fallback, const char *otherwise) {
    const char *text = getenv(name);
    if ((!text || !*text) && fallback) text = getenv(fallback);
    return text && *text ? text : otherwise;
}

static void read_all(void) {
    tms_config_t config;
    tms_log_t log = {0};
    tms_error_t error;
    MUST(tms_config_read(&config, &log, &error) == TMS_OK);
    MUST(config.log_level == log.level && log.level >= TMS_LOG_SILENT && log.level <= TMS_LOG_DEBUG);
    MUST(config.init_cpu_backup_backend == TMS_BACKUP_PINNED || config.init_cpu_backup_backend == TMS_BACKUP_MMAP);
    MUST(!(config.init_enable_cpu_backup && config.init_enable_disk_backup));
    MUST(config.disk_backup_chunk_bytes >= (1ULL << MEGABYTE_SHIFT));
    const char *folder = text_of("TMS_DISK_BACKUP_DIR", "TMPDIR", "/tmp");
    MUST(strcmp(config.disk_backup_directory, *folder == '/' ? folder : "/tmp") == 0);
    MUST(strcmp(config.lock_directory, text_of("TMS_LOCK_DIR", NULL, "")) == 0);
    MUST(strcmp(config.driver_path, text_of("TMS_CUDA_DRIVER", NULL, "libcuda.so.1")) == 0);
    tms_backup_kind_t backup = tms_config_init_backup(&config);
    MUST(backup >= TMS_BACKUP_NONE && backup <= TMS_BACKUP_DISK);
    tms_config_release(&config);
    MUST(!config.disk_backup_directory && !config.lock_directory && !config.driver_path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    /* An environment of our own: setenv never frees a text. */
    char *variables[NAMES + 1] = {NULL};
    char **before = environ;
    char *text = malloc(size + 1);
    if (!text) return 0;
    if (size) memcpy(text, data, size);
    text[size] = '\0'; /* a NUL in the input ends its variable */
    char *part = text;
    for (int i = 0; i < NAMES && part < text + size; i++) {
        char *end = memchr(part, '\n', (size_t)(text + size - part));
        if (end) *end = '\0';
        parse(part);
        MUST(asprintf(&variables[i], "%s=%s", names[i], part) > 0);
        part = end ? end + 1 : text + size;
    }
    free(text);
    environ = variables;
    read_all();
    environ = before;
    for (int i = 0; i < NAMES; i++) free(variables[i]);
    return 0;
}
