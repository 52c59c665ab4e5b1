/* Starts the Python that REAL_PYTHON names with the sanitizer's runtime (RUNTIME) loaded before everything else.
 *
 * It is linked statically, so that an LD_PRELOAD of the caller's, whose libraries may need that runtime, does not reach it.
 * It hands its own name on: the Python takes that for sys.executable, and so every Python that a test starts comes through
 * here again. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CANNOT_EXECUTE = 126 };

int main(int count, char **arguments) {
    const char *others = getenv("LD_PRELOAD");
    char *all = NULL;
    (void)count;
    if (asprintf(&all, "%s%s%s", RUNTIME, others ? ":" : "", others ? others : "") >= 0 && setenv("LD_PRELOAD", all, 1) == 0)
        execv(REAL_PYTHON, arguments);
    fprintf(stderr, "%s: %s: %s\n", arguments[0], REAL_PYTHON, strerror(errno));
    free(all);
    return CANNOT_EXECUTE;
}
