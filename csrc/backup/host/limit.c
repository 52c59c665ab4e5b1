#include "backup/host/limit.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TEXT_BYTES = 16384, /* bytes read of memory.stat and /proc/meminfo; the relevant lines come early */
    NUMBER_BYTES = 64
};

/* Version 1 represents "no limit" by the largest number of whole pages. */
static const uint64_t no_limit = (uint64_t)1 << 62;
static const uint64_t kib = 1024;

/* The files of a cgroup version. Above `brake` the kernel throttles a group until it uses less, which pinned memory prevents
 * for ever. */
typedef struct cgroup_files {
    const char *limit, *brake, *usage, *statistics, *droppable;
} cgroup_files_t;

static const cgroup_files_t version_1 = {"memory.limit_in_bytes", NULL, "memory.usage_in_bytes", "memory.stat",
                                         "total_inactive_file"};
static const cgroup_files_t version_2 = {"memory.max", "memory.high", "memory.current", "memory.stat", "inactive_file"};

typedef struct tms_host_cgroup {
    const cgroup_files_t *files;
    char *directory; /* without limits->root */
} cgroup_t;

/* ---- files ---- */

/* Whether the system lacked descriptors or memory. A missing or forbidden file sets no limit; a file that could not be
 * opened for this reason may set one. */
static bool is_shortage(int os_error) { return os_error == EMFILE || os_error == ENFILE || os_error == ENOMEM; }

/* Reads the beginning of a file as text. Returns NULL on success, else the failed call with errno set. */
static const char *read_text(const char *root, const char *directory, const char *name, char *text, size_t capacity) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s%s/%s", root, directory, name);
    errno = ENAMETOOLONG;
    if (length < 0 || (size_t)length >= sizeof path) return "open";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return "open";
    size_t used = 0;
    ssize_t got = 1;
    while (got > 0 && used + 1 < capacity) {
        got = read(fd, text + used, capacity - 1 - used);
        if (got > 0) used += (size_t)got;
        if (got < 0 && errno == EINTR) got = 1;
    }
    int os_error = errno;
    close(fd);
    errno = os_error;
    text[used] = '\0';
    return got < 0 ? "read" : NULL;
}

/* Parses a number of bytes. False for "max" and anything else. */
static bool parse_bytes(const char *text, uint64_t *bytes) {
    char *end = NULL;
    if (*text < '0' || *text > '9') return false;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno != 0 || (*end != '\0' && *end != '\n' && *end != ' ')) return false;
    *bytes = value;
    return true;
}

/* Finds the number after `name` and its separator at the beginning of a line. */
static bool find_number(const char *text, const char *name, uint64_t *number) {
    size_t length = strlen(name);
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, name, length) != 0 || (line[length] != ' ' && line[length] != ':')) continue;
        return parse_bytes(line + length + 1 + strspn(line + length + 1, " \t"), number);
    }
    return false;
}

/* ---- finding the cgroups ---- */

static void note_failure(tms_host_limits_t *limits, int os_error) {
    if (is_shortage(os_error)) limits->os_error = os_error;
}

static bool list_has(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ',')) {
        if (*at == ',') at++;
        if (strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == '\0' || at[length] == '\n')) return true;
    }
    return false;
}

/* Finds the path of this process in the hierarchy of a cgroup version, in the text of /proc/self/cgroup. */
static bool find_path(const char *text, bool second, char path[PATH_MAX]) {
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        const char *controllers = strchr(line, ':'), *at = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!at) return false;
        char list[NAME_MAX + 1];
        size_t listed = (size_t)(at - controllers - 1), length = strcspn(at + 1, "\n");
        if (listed >= sizeof list || length >= PATH_MAX) continue;
        memcpy(list, controllers + 1, listed);
        list[listed] = '\0';
        if (second ? strncmp(line, "0::", 3) != 0 : !list_has(list, "memory")) continue;
        memcpy(path, at + 1, length);
        path[length] = '\0';
        return true;
    }
    return false;
}

/* Decodes the octal escapes of blanks in a path. */
static void unescape(char *text) {
    enum { DIGITS = 3 };
    char *to = text;
    for (const char *from = text; *from; to++) {
        unsigned value = 0;
        if (from[0] == '\\' && strspn(from + 1, "01234567") >= DIGITS && sscanf(from + 1, "%3o", &value) == 1) {
            *to = (char)value;
            from += 1 + DIGITS;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

/* Whether a line of mountinfo is the mount of a version's memory controller. *shown: the mounted part of the hierarchy;
 * *mounted: the mount point. */
static bool parse_mount(char *line, bool second, char **shown, char **mounted) {
    enum { SHOWN = 3, MOUNTED = 4 };
    char *rest = NULL, *dash = strstr(line, " - ");
    if (!dash) return false;
    *dash = '\0';
    char *type = strtok_r(dash + 3, " ", &rest);
    (void)strtok_r(NULL, " ", &rest); /* the source */
    const char *options = strtok_r(NULL, " ", &rest);
    if (!type || strcmp(type, second ? "cgroup2" : "cgroup") != 0 || (!second && !(options && list_has(options, "memory"))))
        return false;
    char *field = strtok_r(line, " ", &rest);
    for (int i = 0; field; i++, field = strtok_r(NULL, " ", &rest)) {
        if (i == SHOWN) *shown = field;
        if (i != MOUNTED) continue;
        *mounted = field;
        unescape(*shown);
        unescape(*mounted);
        return true;
    }
    return false;
}

static tms_status_t add(tms_host_limits_t *limits, const cgroup_files_t *files, const char *directory, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    char text[NUMBER_BYTES];
    if (read_text(limits->root, directory, files->limit, text, sizeof text)) {
        note_failure(limits, errno);
        return TMS_OK;
    }
    cgroup_t *grown = realloc(limits->cgroups, (limits->cgroup_count + 1) * sizeof *grown);
    if (!grown) return tms_error_set_os(error, &context, "realloc", ENOMEM, NULL);
    limits->cgroups = grown;
    char *copy = strdup(directory);
    if (!copy) return tms_error_set_os(error, &context, "strdup", ENOMEM, NULL);
    limits->cgroups[limits->cgroup_count++] = (cgroup_t){.files = files, .directory = copy};
    return TMS_OK;
}

/* Adds every directory from the process's own up to the mount. In a container `shown` is often the process's own group, or a
 * path that exists only on the host; then only the mount point is added. */
static tms_status_t add_path(tms_host_limits_t *limits, const cgroup_files_t *files, const char *shown, const char *mounted,
                             const char *path, tms_error_t *error) {
    char directory[PATH_MAX];
    size_t above = strcmp(shown, "/") == 0 ? 0 : strlen(shown);
    bool below = strncmp(path, shown, above) == 0 && (path[above] == '/' || path[above] == '\0');
    const char *rest = below ? path + above : "";
    int length = snprintf(directory, sizeof directory, "%s%s", mounted, strcmp(rest, "/") == 0 ? "" : rest);
    if (length < 0 || (size_t)length >= sizeof directory) return TMS_OK;
    tms_status_t status = add(limits, files, directory, error);
    while (status == TMS_OK && strlen(directory) > strlen(mounted)) {
        *strrchr(directory, '/') = '\0';
        status = add(limits, files, directory, error);
    }
    return status;
}

static tms_status_t find_cgroups(tms_host_limits_t *limits, bool second, const char *groups, tms_error_t *error) {
    char path[PATH_MAX], name[PATH_MAX];
    if (!find_path(groups, second, path)) return TMS_OK;
    int length = snprintf(name, sizeof name, "%s/proc/self/mountinfo", limits->root);
    errno = ENAMETOOLONG;
    FILE *mounts = length > 0 && (size_t)length < sizeof name ? fopen(name, "re") : NULL;
    if (!mounts) {
        note_failure(limits, errno);
        return TMS_OK;
    }
    char *line = NULL, *shown = NULL, *mounted = NULL;
    size_t capacity = 0;
    tms_status_t status = TMS_OK;
    /* The first match suffices: the others mount the same hierarchy elsewhere. */
    while (getline(&line, &capacity, mounts) > 0) {
        if (!parse_mount(line, second, &shown, &mounted)) continue;
        status = add_path(limits, second ? &version_2 : &version_1, shown, mounted, path, error);
        break;
    }
    free(line);
    fclose(mounts);
    return status;
}

tms_status_t tms_host_limits_init(tms_host_limits_t *limits, const char *root, uint64_t cap_bytes, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *limits = (tms_host_limits_t){.cap_bytes = cap_bytes, .floor_bytes = TMS_HOST_FLOOR_BYTES, .root = strdup(root)};
    char *groups = malloc(TEXT_BYTES);
    tms_status_t status = TMS_OK;
    if (!limits->root || !groups) {
        status = tms_error_set_os(error, &context, limits->root ? "malloc" : "strdup", ENOMEM, NULL);
    } else if (read_text(limits->root, "/proc/self", "cgroup", groups, TEXT_BYTES)) {
        note_failure(limits, errno);
    } else {
        status = find_cgroups(limits, true, groups, error);
        if (status == TMS_OK) status = find_cgroups(limits, false, groups, error);
    }
    free(groups);
    if (status != TMS_OK) tms_host_limits_release(limits);
    return status;
}

void tms_host_limits_release(tms_host_limits_t *limits) {
    for (size_t i = 0; i < limits->cgroup_count; i++) free(limits->cgroups[i].directory);
    free(limits->cgroups);
    free(limits->root);
    *limits = (tms_host_limits_t){.cap_bytes = limits->cap_bytes, .floor_bytes = limits->floor_bytes};
}

/* ---- reading ---- */

static uint64_t subtract(uint64_t from, uint64_t amount) { return from > amount ? from - amount : 0; }

/* Returns false if the file cannot be read. If the reason is a lack of descriptors or memory, the headroom becomes zero. */
static bool read_now(const tms_host_limits_t *limits, const char *directory, const char *name, char *text, size_t capacity,
                     tms_host_headroom_t *headroom) {
    const char *call = read_text(limits->root, directory, name, text, capacity);
    if (!call) return true;
    if (!is_shortage(errno)) return false;
    *headroom = (tms_host_headroom_t){.call = call, .os_error = errno};
    (void)snprintf(headroom->where, sizeof headroom->where, "%s/%s", directory, name);
    return false;
}

static bool read_bytes(const tms_host_limits_t *limits, const char *directory, const char *name, uint64_t *bytes,
                       tms_host_headroom_t *headroom) {
    char text[NUMBER_BYTES];
    return read_now(limits, directory, name, text, sizeof text, headroom) && parse_bytes(text, bytes);
}

static void apply_system(const tms_host_limits_t *limits, tms_host_headroom_t *headroom) {
    char text[TEXT_BYTES];
    uint64_t available = 0;
    if (!read_now(limits, "/proc", "meminfo", text, sizeof text, headroom) || !find_number(text, "MemAvailable", &available))
        return;
    *headroom = (tms_host_headroom_t){.bytes = subtract(available * kib, limits->floor_bytes)};
    (void)snprintf(headroom->where, sizeof headroom->where, "MemAvailable in /proc/meminfo");
}

/* Applies one of the limits of a cgroup. */
static void apply_limit(const tms_host_limits_t *limits, const cgroup_t *cgroup, const char *name,
                        tms_host_headroom_t *headroom) {
    uint64_t limit = 0, usage = 0, droppable = 0;
    if (!read_bytes(limits, cgroup->directory, name, &limit, headroom) || limit >= no_limit ||
        !read_bytes(limits, cgroup->directory, cgroup->files->usage, &usage, headroom))
        return;
    /* Droppable page cache only increases the room. Its file is long and expensive to read. */
    if (subtract(subtract(limit, usage), limits->floor_bytes) >= headroom->bytes) return;
    char text[TEXT_BYTES];
    if (!read_text(limits->root, cgroup->directory, cgroup->files->statistics, text, sizeof text))
        (void)find_number(text, cgroup->files->droppable, &droppable);
    uint64_t bytes = subtract(subtract(limit, subtract(usage, droppable)), limits->floor_bytes);
    if (bytes >= headroom->bytes) return;
    *headroom = (tms_host_headroom_t){.bytes = bytes, .limit_bytes = limit};
    (void)snprintf(headroom->where, sizeof headroom->where, "%s/%s", cgroup->directory, name);
}

static void apply_cgroup(const tms_host_limits_t *limits, const cgroup_t *cgroup, tms_host_headroom_t *headroom) {
    apply_limit(limits, cgroup, cgroup->files->limit, headroom);
    if (cgroup->files->brake) apply_limit(limits, cgroup, cgroup->files->brake, headroom);
}

tms_host_headroom_t tms_host_limits_headroom(const tms_host_limits_t *limits, uint64_t held_bytes) {
    tms_host_headroom_t headroom = {.bytes = UINT64_MAX};
    apply_system(limits, &headroom);
    for (size_t i = 0; i < limits->cgroup_count; i++) apply_cgroup(limits, &limits->cgroups[i], &headroom);
    if (limits->cap_bytes == UINT64_MAX) return headroom;
    uint64_t bytes = subtract(limits->cap_bytes, held_bytes);
    if (bytes >= headroom.bytes) return headroom;
    headroom = (tms_host_headroom_t){.bytes = bytes, .limit_bytes = limits->cap_bytes};
    (void)snprintf(headroom.where, sizeof headroom.where, "TMS_HOST_MEMORY_LIMIT_MB");
    return headroom;
}

static tms_status_t fail_unread(const tms_host_headroom_t *headroom, const tms_error_context_t *context,
                                tms_error_t *error) {
    tms_status_t status =
        tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, context,
                      "the memory limit in '%s' could not be read: %s failed with errno %d (%s). Free file descriptors and "
                      "memory, and make the call again",
                      headroom->where, headroom->call, headroom->os_error, TMS_OS_TEXT(headroom->os_error));
    if (!error) return status;
    error->os_error = headroom->os_error;
    (void)snprintf(error->call, sizeof error->call, "%s", headroom->call);
    return status;
}

tms_status_t tms_host_headroom_fail(const tms_host_headroom_t *headroom, uint64_t needed_bytes,
                                    const tms_error_context_t *context, tms_error_t *error) {
    const double mib = 1 << 20;
    tms_error_context_t here = *context;
    char limit[NUMBER_BYTES] = "";
    here.bytes = needed_bytes;
    here.address = 0;
    if (headroom->call) return fail_unread(headroom, &here, error);
    if (headroom->limit_bytes) (void)snprintf(limit, sizeof limit, " (%.1f MiB)", (double)headroom->limit_bytes / mib);
    return tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, &here,
                         "%.1f MiB may still be used before %s%s is reached. Raise this limit, keep backups on disk "
                         "(backup=\"disk\"), or do without them (backup=\"discard\")",
                         (double)headroom->bytes / mib, headroom->where, limit);
}
