/* Shared by the test programs that start themselves again with run_again(): the roles of the other process, and the devices'
 * UUIDs. */
#ifndef TMS_TESTS_PROCESSES_FIXTURE_H
#define TMS_TESTS_PROCESSES_FIXTURE_H

#include <string.h>

#include "simulated_cuda.h"

/* For the stderr of the other process, and the first of its statuses that say what failed. */
enum { OUTPUT_BYTES = 4096, CHILD_FAILED = 3 };

/* As nvidia-smi would print them. */
#define UUID_OF_0 "GPU-53696d75-6c61-7465-6420-475055000000"
#define UUID_OF_2 "GPU-53696d75-6c61-7465-6420-475055000002"

/* What the other process does. Returns its status. */
typedef struct role {
    const char *name;
    int (*run)(void);
} role_t;

static int run_role(const role_t *roles, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(roles[i].name, name) == 0) return roles[i].run();
    }
    return CHILD_FAILED;
}

#endif
