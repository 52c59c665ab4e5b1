#include "base/library_path.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* The longest beginning of a line of /proc/self/maps: addresses, permissions, offset, device and inode. */
enum { FIELDS_BYTES = 128 };

static bool copy_path(const char *from, char path[PATH_MAX]) {
    int length = snprintf(path, PATH_MAX, "%s", from);
    return length > 0 && length < PATH_MAX && path[0] == '/';
}

/* Reads the path from a line of /proc/self/maps if the line is about `address`. */
static bool parse_line(char *line, uintptr_t address, char path[PATH_MAX]) {
    static const char removed[] = " (deleted)";
    uintptr_t begin = 0, end = 0;
    int fields = 0;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %n", &begin, &end, &fields) < 2 || !fields) return false;
    if (address < begin || address >= end) return false;
    size_t length = strcspn(line, "\n");
    if (line[length] != '\n') return false; /* the line is longer than a path may be */
    line[length] = '\0';
    if (length >= strlen(removed) && strcmp(line + length - strlen(removed), removed) == 0) return false;
    return copy_path(line + fields, path);
}

static bool find_mapped_file(uintptr_t address, char path[PATH_MAX]) {
    char line[PATH_MAX + FIELDS_BYTES];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && !found && fgets(line, sizeof line, maps)) found = parse_line(line, address, path);
    if (maps) fclose(maps);
    return found;
}

bool tms_library_path(const void *address, char path[PATH_MAX]) {
    Dl_info library;
    if (!dladdr(address, &library) || !library.dli_fname) return false;
    return copy_path(library.dli_fname, path) || find_mapped_file((uintptr_t)address, path);
}
