/* Guards library_path.c: the file of a loaded object, also if the loader has a relative name of it and the working directory
 * has changed since. This program starts copies of itself by a relative name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/library_path.h"
#include "temporary.h"

enum { FOUND = 0, NOT_FOUND = 10, ANOTHER_FILE = 11, NOT_EXECUTED = 12, NO_FOLDER = 13 };

static const char anchor = 0;
static const char relative[] = "./with (two) spaces ";

/* A copy of this program changes into `folder`, where a file has the same relative name, and compares what is found. */
static int compare_path(const char *folder, const char *expected) {
    char path[PATH_MAX];
    if (chdir(folder) != 0) return NO_FOLDER;
    if (!tms_library_path(&anchor, path)) return NOT_FOUND;
    return strcmp(path, expected) == 0 ? FOUND : ANOTHER_FILE;
}

/* Starts a copy by its relative name, which the loader takes from the arguments. `expected`: NULL if the copy removes itself
 * first. */
static int start_copy(const char *folder, const char *other, const char *expected) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        if (chdir(folder) == 0) execl(relative, relative, expected ? "compare" : "remove", other, expected, NULL);
        _exit(NOT_EXECUTED);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void copy_program(const char *folder, char path[2 * TEMPORARY_BYTES]) {
    char command[4 * TEMPORARY_BYTES];
    snprintf(path, 2 * TEMPORARY_BYTES, "%s/%s", folder, relative + 2);
    snprintf(command, sizeof(command), "cp /proc/%d/exe '%s'", (int)getpid(), path);
    assert_int_equal(system(command), 0);
}

static void the_relative_name_of_a_loaded_file_stays_its_own(void **state) {
    (void)state;
    char folder[TEMPORARY_BYTES], other[TEMPORARY_BYTES], path[2 * TEMPORARY_BYTES], foreign[2 * TEMPORARY_BYTES];
    if (getenv("EMULATOR")) skip(); /* the loaded file would be the emulator */
    assert_non_null(make_temporary_directory(folder, "own"));
    assert_non_null(make_temporary_directory(other, "other"));
    copy_program(folder, path);
    copy_program(other, foreign);
    assert_int_equal(start_copy(folder, other, path), FOUND);
    assert_int_equal(start_copy(folder, other, foreign), ANOTHER_FILE);
    assert_int_equal(start_copy(folder, other, NULL), NOT_FOUND);
    remove_temporary_directory(folder);
    remove_temporary_directory(other);
}

static void an_absolute_name_is_returned(void **state) {
    (void)state;
    char path[PATH_MAX] = "";
    assert_true(tms_library_path((void *)(uintptr_t)&strlen, path));
    assert_int_equal(path[0], '/');
    assert_non_null(strstr(path, ".so"));
}

static void an_address_of_no_library_is_not_found(void **state) {
    (void)state;
    char path[PATH_MAX] = "";
    assert_false(tms_library_path(path, path));
}

int main(int count, char **arguments) {
    if (count == 4 && strcmp(arguments[1], "compare") == 0) return compare_path(arguments[2], arguments[3]);
    if (count == 3 && strcmp(arguments[1], "remove") == 0)
        return unlink(arguments[0]) == 0 ? compare_path(arguments[2], "") : NO_FOLDER;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_relative_name_of_a_loaded_file_stays_its_own),
        cmocka_unit_test(an_absolute_name_is_returned),
        cmocka_unit_test(an_address_of_no_library_is_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
