/* Shared by the tests of files and locks of other processes, in addition to disk_fixture.h. */
#ifndef TMS_TESTS_DISK_DIRECTORY_FIXTURE_H
#define TMS_TESTS_DISK_DIRECTORY_FIXTURE_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "backup/disk/directory.h"
#include "backup/disk/domain.h"
#include "captured_stderr.h"
#include "disk_fixture.h"

/* The name of a file of a process in this lock domain, starting at the process number. */
static const char *own(const char *rest) {
    static char names[4][PATH_BYTES];
    static unsigned next;
    char *name = names[next++ % 4];
    snprintf(name, PATH_BYTES, "tms-%016llx-%s", (unsigned long long)tms_disk_domain(), rest);
    return name;
}

static const char *below_own(const char *rest) { return below(own(rest)); }

/* Greater than any process number of Linux. */
#define DEAD "999999991-0123456789abcdef"

#endif
