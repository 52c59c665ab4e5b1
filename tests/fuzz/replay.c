/* Runs a fuzz target once for each file named, without libFuzzer: replays the stored inputs with any compiler. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path) {
    long size = -1;
    uint8_t *data = NULL;
    FILE *file = fopen(path, "rb");
    if (file && fseek(file, 0, SEEK_END) == 0) size = ftell(file);
    /* Exactly as large as the input, so that a read beyond its end is detected. */
    if (size >= 0) data = malloc((size_t)size);
    if (data) rewind(file);
    int ok = data && fread(data, 1, (size_t)size, file) == (size_t)size;
    if (file) (void)fclose(file);
    if (ok) (void)LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    if (!ok) perror(path);
    return ok;
}

int main(int count, char **paths) {
    int done = 0;
    for (int i = 1; i < count; i++) done += replay(paths[i]);
    printf("%s: %d inputs\n", paths[0], done);
    return done > 0 && done == count - 1 ? EXIT_SUCCESS : EXIT_FAILURE;
}
