/* Fuzzes tags: interning, the thread's regions, and their use in error messages and in the C functions of compat.c.
 *
 * The input is a list of operations: one byte that selects the operation, then a tag that ends at a NUL or with the input.
 * Tags are UTF-8 by contract, but may in fact be any bytes. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "abi/compat.h"
#include "base/status.h"
#include "core/model/region.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)                                                                                                     \
    do {                                                                                                                    \
        if (!(condition)) abort();                                                                                          \
    } while (0)

typedef enum operation { INTERN, ENTER, SET, LEAVE, FAIL, COMPATIBLE, OPERATIONS } operation_t;

enum { UNTOUCHED = 77, BACKUPS_TRIED = 6 };

/* Whether every lead byte is followed by as many continuation bytes as it announces, and there are no others. */
static bool is_utf8(const char *text) {
    while (*text) {
        unsigned char lead = (unsigned char)*text++;
        if ((lead & 0xC0) == 0x80 || lead >= 0xF8) return false;
        for (int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC0 ? 1 : 0; more > 0; more--) {
            if (((unsigned char)*text++ & 0xC0) != 0x80) return false;
        }
    }
    return true;
}

static void intern(tms_tag_table_t *table, const char *name) {
    tms_error_t error;
    tms_tag_t *tag = NULL, *again = NULL, *known = tms_tag_find(table, name);
    tms_status_t status = tms_tag_intern(table, name, &tag, &error);
    MUST(status == (*name ? TMS_OK : TMS_INVALID_ARGUMENT));
    if (!*name) {
        MUST(!tag && !known && error.status == status && error.message[0]);
        return;
    }
    MUST(strcmp(tag->name, name) == 0 && tag->name != name);
    MUST(!known || known == tag);
    MUST(tms_tag_find(table, name) == tag);
    MUST(tms_tag_intern(table, name, &again, NULL) == TMS_OK && again == tag);
}

static void enter_or_set(tms_region_defaults_t *defaults, const char *name, operation_t operation, int backup,
                         bool managed) {
    const bool enter = operation == ENTER;
    tms_error_t error;
    const tms_region_settings_t settings = {.managed = managed, .backup = backup, .tag = name};
    bool good = *name && backup >= TMS_BACKUP_NONE && backup <= TMS_BACKUP_SHARED;
    int before = UNTOUCHED, after = UNTOUCHED;
    uint64_t level = 0;
    tms_region_t old = tms_region_current(defaults, &before);
    bool full = enter && before == TMS_REGION_MAX_DEPTH;
    tms_status_t status =
        enter ? tms_region_enter(defaults, &settings, false, &level, &error) : tms_region_set(defaults, &settings, &error);
    tms_region_t now = tms_region_current(defaults, &after);
    if (!good || full) {
        MUST(status == TMS_INVALID_ARGUMENT || (full && status == TMS_INVALID_STATE));
        MUST(error.status == status);
        MUST(now.tag == old.tag && now.backup == old.backup && now.managed == old.managed);
        MUST(after == before && level == 0);
        return;
    }
    MUST(status == TMS_OK && after == before + (enter ? 1 : 0) && (level != 0) == enter);
    MUST(strcmp(now.tag->name, name) == 0 && (int)now.backup == backup && now.managed == managed);
}

/* An error message truncates a long tag, but not inside a character: Python must be able to decode it. */
static void fail(const char *name, uint64_t bytes) {
    tms_error_t error;
    const tms_error_context_t context = {.operation = "fuzz", .device = 1, .bytes = bytes, .tag = name};
    bool decodable = is_utf8(name);
    MUST(tms_error_set(&error, TMS_INVALID_STATE, &context, "about '%s'", name) == TMS_INVALID_STATE);
    MUST(memchr(error.tag, '\0', sizeof error.tag) && memchr(error.message, '\0', sizeof error.message));
    MUST(strncmp(error.tag, name, strlen(error.tag)) == 0);
    MUST(strlen(name) >= sizeof error.tag || strcmp(error.tag, name) == 0);
    MUST(!decodable || (is_utf8(error.tag) && is_utf8(error.message)));
    tms_error_append(&error, "and '%s'", name);
    MUST(memchr(error.message, '\0', sizeof error.message));
    MUST(!decodable || is_utf8(error.message));
}

/* As programs call it through ctypes: it reports no error, so a bad tag leaves the previous one in force. A process never
 * frees tags, and a fuzzer makes millions: only the first byte counts. */
static void compatible(const char *name) {
    const char one_byte[] = {name[0], '\0'};
    const char *before = tms_get_current_tag();
    tms_set_current_tag(one_byte);
    MUST(strcmp(tms_get_current_tag(), *name ? one_byte : before) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const tms_config_t config = {.init_cpu_backup_backend = TMS_BACKUP_PINNED};
    tms_region_defaults_t defaults;
    char *text = malloc(size + 1);
    if (!text) return 0;
    if (size) memcpy(text, data, size);
    text[size] = '\0';
    (void)setenv("TMS_LOG_LEVEL", "silent", 1); /* before compat.c creates the state */
    MUST(tms_region_init(&defaults, &config, NULL) == TMS_OK);
    for (size_t at = 0; at < size;) {
        unsigned choice = (unsigned char)text[at++];
        const char *name = text + at;
        at += strlen(name) + 1;
        int backup = (int)(choice / OPERATIONS % BACKUPS_TRIED) - 1;
        switch ((operation_t)(choice % OPERATIONS)) {
        case INTERN: intern(&defaults.tags, name); break;
        case ENTER: enter_or_set(&defaults, name, ENTER, backup, choice & 1); break;
        case SET: enter_or_set(&defaults, name, SET, backup, choice & 1); break;
        case LEAVE: (void)tms_region_leave(&defaults, choice / OPERATIONS); break;
        case FAIL: fail(name, choice); break;
        case COMPATIBLE: compatible(name); break;
        case OPERATIONS: break;
        }
    }
    tms_region_release(&defaults);
    free(text);
    return 0;
}
