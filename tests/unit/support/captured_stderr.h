/* For tests of output to stderr: redirects it into a pipe and returns it as a string. Single-threaded, and for texts that
 * fit into a pipe (64 KiB). */
#ifndef TMS_TESTS_CAPTURED_STDERR_H
#define TMS_TESTS_CAPTURED_STDERR_H

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

typedef struct captured_stderr {
    int saved, read_end;
} captured_stderr_t;

static inline captured_stderr_t capture_begin(void) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return (captured_stderr_t){-1, -1};
    captured_stderr_t captured = {.saved = dup(STDERR_FILENO), .read_end = ends[0]};
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    return captured;
}

/* Restores stderr and returns the length of the output, which is in `text`. */
static inline size_t capture_end(captured_stderr_t captured, char *text, size_t bytes) {
    size_t length = 0;
    ssize_t got;
    dup2(captured.saved, STDERR_FILENO); /* closes the last write end, so that the reads below end */
    close(captured.saved);
    while (length + 1 < bytes && (got = read(captured.read_end, text + length, bytes - 1 - length)) > 0)
        length += (size_t)got;
    close(captured.read_end);
    text[length] = '\0';
    return length;
}

static inline unsigned count_lines(const char *text) {
    unsigned lines = 0;
    for (; *text; text++) lines += *text == '\n';
    return lines;
}

#endif
