#include "temporary.h"

#include <stdio.h>
#include <stdlib.h>

char *make_temporary_directory(char path[TEMPORARY_BYTES], const char *name) {
    const char *parent = getenv("TMPDIR");
    snprintf(path, TEMPORARY_BYTES, "%.200s/tms-test-%.24s-XXXXXX", parent && *parent ? parent : "/tmp", name);
    return mkdtemp(path);
}

int remove_temporary_directory(const char *path) {
    char command[TEMPORARY_BYTES + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    return system(command);
}
