#include "simulator/base/process.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 32, STAT_BYTES = 1024, START_TIME_FIELD = 22 };

unsigned long long sim_process_started(int process) {
    char path[PATH_BYTES], text[STAT_BYTES];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = '\0';
    /* The second field is the program's name in parentheses and can contain any character. */
    char *field = strrchr(text, ')');
    unsigned long long started = 0;
    if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X') return 0; /* a zombie holds no resources */
    for (int i = 2; field && i < START_TIME_FIELD; i++) field = strchr(field + 1, ' ');
    return field && sscanf(field, " %llu", &started) == 1 ? started : 0;
}
