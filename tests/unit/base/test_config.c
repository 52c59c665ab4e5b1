/* Guards config.c: every variable with good, bad, empty and missing values. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/config.h"
#include "captured_stderr.h"
#include "temporary.h"

static const char *const all_variables[] = {
    "TMS_DISABLE",
    "TMS_INIT_ENABLE",
    "TMS_INIT_ENABLE_CPU_BACKUP",
    "TMS_INIT_ENABLE_DISK_BACKUP",
    "TMS_INIT_CPU_BACKUP_BACKEND",
    "TMS_RETAIN_CPU_BACKUP",
    "TMS_HOST_MEMORY",
    "TMS_HOST_MEMORY_LIMIT_MB",
    "TMS_HOST_POOL_LIMIT_MB",
    "TMS_DISK_BACKUP_DIR",
    "TMS_DISK_BACKUP_CHUNK_MB",
    "TMS_CUDA_DRIVER",
    "TMS_LOG_LEVEL",
    "TMS_LOCK_DIR",
    "TMS_SHARED_PAGE",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
};

static char output[1 << 14];
static tms_config_t config;
static tms_log_t log_under_test;

static int clear_environment(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(all_variables) / sizeof(all_variables[0]); i++) unsetenv(all_variables[i]);
    return 0;
}

static int release_config(void **state) {
    tms_config_release(&config);
    return clear_environment(state);
}

/* Reads the environment into `config`; returns the number of lines logged, which are in `output`. */
static int strdup_failures;

char *strdup(const char *text) {
    if (strdup_failures > 0 && strdup_failures-- == 1) return NULL;
    size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

static unsigned read_config(void) {
    tms_config_release(&config);
    memset(&config, 0x5A, sizeof(config));
    tms_log_init(&log_under_test, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    assert_int_equal(tms_config_read(&config, &log_under_test, NULL), TMS_OK);
    capture_end(captured, output, sizeof(output));
    return count_lines(output);
}

static void assert_warned(const char *name, const char *value, const char *allowed) {
    char expected[512];
    assert_int_equal(count_lines(output), 1);
    snprintf(expected, sizeof(expected), " warning: %s='%s' is ignored (allowed: %s); the default '", name, value, allowed);
    if (!strstr(output, expected)) fail_msg("'%s' is not in '%s'", expected, output);
}

static void test_defaults(void **state) {
    (void)state;
    for (int empty = 0; empty <= 1; empty++) {
        for (size_t i = 0; empty && i < sizeof(all_variables) / sizeof(all_variables[0]); i++) {
            setenv(all_variables[i], "", 1);
        }
        assert_int_equal(read_config(), 0);
        assert_false(config.init_enable);
        assert_false(config.init_enable_cpu_backup);
        assert_false(config.init_enable_disk_backup);
        assert_int_equal(config.init_cpu_backup_backend, TMS_BACKUP_PINNED);
        assert_false(config.retain_cpu_backup);
        assert_string_equal(config.disk_backup_directory, "/tmp");
        assert_int_equal(config.disk_backup_chunk_bytes, UINT64_C(256) << 20);
        assert_string_equal(config.driver_path, "libcuda.so.1");
        assert_int_equal(config.log_level, TMS_LOG_WARNING);
        assert_int_equal(tms_config_init_backup(&config), TMS_BACKUP_NONE);
    }
}

static void test_booleans(void **state) {
    (void)state;
    static const struct {
        const char *name;
        const bool *field;
    } variables[] = {
        {"TMS_DISABLE", &config.disable},
        {"TMS_INIT_ENABLE", &config.init_enable},
        {"TMS_INIT_ENABLE_CPU_BACKUP", &config.init_enable_cpu_backup},
        {"TMS_INIT_ENABLE_DISK_BACKUP", &config.init_enable_disk_backup},
        {"TMS_RETAIN_CPU_BACKUP", &config.retain_cpu_backup},
    };
    static const char *const on[] = {"1", "true", "TRUE", "True", "yes", "YES"};
    static const char *const off[] = {"0", "false", "False", "no", "No"};
    static const char *const bad[] = {"2", "on", "off", " 1", "1 ", "truee", "y", "-1", "\xC3\xA9"};
    for (size_t v = 0; v < sizeof(variables) / sizeof(variables[0]); v++) {
        clear_environment(NULL);
        for (size_t i = 0; i < sizeof(on) / sizeof(on[0]); i++) {
            setenv(variables[v].name, on[i], 1);
            assert_int_equal(read_config(), 0);
            assert_true(*variables[v].field);
        }
        for (size_t i = 0; i < sizeof(off) / sizeof(off[0]); i++) {
            setenv(variables[v].name, off[i], 1);
            assert_int_equal(read_config(), 0);
            assert_false(*variables[v].field);
        }
        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
            setenv(variables[v].name, bad[i], 1);
            read_config();
            assert_warned(variables[v].name, bad[i], "1, true, yes, 0, false or no");
            assert_false(*variables[v].field);
        }
    }
}

static void test_backend(void **state) {
    (void)state;
    setenv("TMS_INIT_CPU_BACKUP_BACKEND", "mmap", 1);
    assert_int_equal(read_config(), 0);
    assert_int_equal(config.init_cpu_backup_backend, TMS_BACKUP_MMAP);
    setenv("TMS_INIT_CPU_BACKUP_BACKEND", "pinned", 1);
    assert_int_equal(read_config(), 0);
    assert_int_equal(config.init_cpu_backup_backend, TMS_BACKUP_PINNED);
    setenv("TMS_INIT_CPU_BACKUP_BACKEND", "disk", 1);
    read_config();
    assert_warned("TMS_INIT_CPU_BACKUP_BACKEND", "disk", "pinned or mmap");
    assert_int_equal(config.init_cpu_backup_backend, TMS_BACKUP_PINNED);
}

static void test_chunk(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"1", 1 << 20}, {"64", 64 << 20}, {"007", 7 << 20}, {"1099511627776", UINT64_C(1) << 60}};
    static const char *const bad[] = {"0",    "-1",  "+1",   "1.5",           "1e3",
                                      "64MB", " 64", "0x10", "1099511627777", "99999999999999999999999999999999999999"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        setenv("TMS_DISK_BACKUP_CHUNK_MB", good[i].text, 1);
        assert_int_equal(read_config(), 0);
        assert_int_equal(config.disk_backup_chunk_bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        setenv("TMS_DISK_BACKUP_CHUNK_MB", bad[i], 1);
        read_config();
        assert_warned("TMS_DISK_BACKUP_CHUNK_MB", bad[i], "a whole number from 1 to 2^40");
        assert_int_equal(config.disk_backup_chunk_bytes, UINT64_C(256) << 20);
    }
}

static void test_limits(void **state) {
    (void)state;
    static const struct {
        const char *name;
        const uint64_t *field;
    } limits[] = {{"TMS_HOST_MEMORY_LIMIT_MB", &config.host_memory_limit_bytes},
                  {"TMS_HOST_POOL_LIMIT_MB", &config.host_pool_limit_bytes}};
    static const char *const bad[] = {"abc", "-1", "1.5", "16GiB", " 0", "1099511627777", "none"};
    for (size_t l = 0; l < sizeof(limits) / sizeof(limits[0]); l++) {
        clear_environment(NULL);
        assert_int_equal(read_config(), 0);
        assert_int_equal(*limits[l].field, UINT64_MAX);
        setenv(limits[l].name, "0", 1);
        assert_int_equal(read_config(), 0);
        assert_int_equal(*limits[l].field, 0);
        setenv(limits[l].name, "64", 1);
        assert_int_equal(read_config(), 0);
        assert_int_equal(*limits[l].field, 64 << 20);
        assert_int_equal(config.malformed.status, TMS_OK);
        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
            char expected[128];
            setenv(limits[l].name, bad[i], 1);
            assert_int_equal(read_config(), 0); /* for the first call that has to obey it, not for every process */
            assert_int_equal(config.malformed.status, TMS_INVALID_ARGUMENT);
            snprintf(expected, sizeof(expected), "%s='%s' is not a limit: it must be a whole number from 0 to 2^40",
                     limits[l].name, bad[i]);
            if (!strstr(config.malformed.message, expected)) fail_msg("%s", config.malformed.message);
            assert_null(strstr(config.malformed.message, "start:"));
        }
    }
}

static void test_names(void **state) {
    (void)state;
    size_t count = 0;
    bool has_level = false, has_fallback = false;
    for (const char *name; (name = tms_config_name(count)); count++) {
        has_level |= strcmp(name, "TMS_LOG_LEVEL") == 0;
        has_fallback |= strcmp(name, "TMPDIR") == 0;
    }
    assert_true(count > 10);
    assert_true(has_level);
    assert_false(has_fallback);
    assert_null(tms_config_name(count + 1));
}

static void test_texts_are_copied(void **state) {
    (void)state;
    setenv("TMPDIR", "/scratch", 1);
    setenv("XDG_RUNTIME_DIR", "/run/user/1", 1);
    assert_int_equal(read_config(), 0);
    assert_string_equal(config.disk_backup_directory, "/scratch");
    assert_string_equal(config.lock_directory, ""); /* XDG_RUNTIME_DIR is removed with its user's last login */
    setenv("TMS_LOCK_DIR", "/run/locks", 1);
    setenv("TMS_DISK_BACKUP_DIR", "/data/backups", 1);
    setenv("TMS_CUDA_DRIVER", "/opt/libdriver.so", 1);
    assert_int_equal(read_config(), 0);
    clear_environment(NULL);
    assert_string_equal(config.disk_backup_directory, "/data/backups");
    assert_string_equal(config.driver_path, "/opt/libdriver.so");
    assert_string_equal(config.lock_directory, "/run/locks");
    tms_config_release(&config);
    assert_null(config.driver_path);
    tms_config_release(&config); /* twice is fine */
}

/* Settings are not skipped. */
static void test_a_text_that_cannot_be_copied_is_an_error(void **state) {
    (void)state;
    tms_error_t error;
    setenv("TMS_DISK_BACKUP_DIR", "/data/backups", 1);
    setenv("TMS_CUDA_DRIVER", "/opt/libdriver.so", 1);
    strdup_failures = 2; /* the second */
    assert_int_equal(tms_config_read(&config, &log_under_test, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_string_equal(error.call, "strdup");
    assert_null(config.disk_backup_directory);
    assert_int_equal(tms_config_read(&config, &log_under_test, &error), TMS_OK);
    assert_string_equal(config.driver_path, "/opt/libdriver.so");
}

static void test_level(void **state) {
    (void)state;
    static const char *const words[] = {"silent", "error", "warning", "info", "debug"};
    for (int i = 0; i < 5; i++) {
        setenv("TMS_LOG_LEVEL", words[i], 1);
        assert_int_equal(read_config(), 0);
        assert_int_equal(config.log_level, i);
        assert_int_equal(tms_log_enabled(&log_under_test, TMS_LOG_DEBUG), i == TMS_LOG_DEBUG);
    }
    setenv("TMS_LOG_LEVEL", "INFO", 1);
    assert_int_equal(read_config(), 0);
    assert_int_equal(config.log_level, TMS_LOG_INFO);
    setenv("TMS_LOG_LEVEL", "Error", 1);
    assert_int_equal(read_config(), 0);
    assert_int_equal(config.log_level, TMS_LOG_ERROR);
    setenv("TMS_LOG_LEVEL", "loud", 1);
    read_config();
    assert_warned("TMS_LOG_LEVEL", "loud", "silent, error, warning, info or debug");
    assert_int_equal(config.log_level, TMS_LOG_WARNING);

    /* The level governs the warnings about the other variables. */
    setenv("TMS_INIT_ENABLE", "maybe", 1);
    setenv("TMS_LOG_LEVEL", "error", 1);
    assert_int_equal(read_config(), 0);
    setenv("TMS_LOG_LEVEL", "info", 1);
    assert_int_equal(read_config(), 1);
}

static void test_each_bad_value_is_one_warning(void **state) {
    (void)state;
    setenv("TMS_INIT_ENABLE", "maybe", 1);
    setenv("TMS_DISK_BACKUP_CHUNK_MB", "many", 1);
    setenv("TMS_RETAIN_CPU_BACKUP", "yes", 1);
    assert_int_equal(read_config(), 2);
    assert_true(config.retain_cpu_backup);
}

static void test_a_huge_value_is_cut_in_the_warning(void **state) {
    (void)state;
    char value[5000];
    memset(value, 'x', sizeof(value) - 1);
    value[sizeof(value) - 1] = '\0';
    setenv("TMS_INIT_ENABLE", value, 1);
    assert_int_equal(read_config(), 1);
    assert_non_null(strstr(output, "the default '0' is used"));
}

static void test_the_kill_switch_turns_off_what_would_act(void **state) {
    (void)state;
    setenv("TMS_INIT_ENABLE", "1", 1);
    assert_int_equal(read_config(), 0);
    assert_true(config.init_enable && !config.disable);
    setenv("TMS_DISABLE", "1", 1);
    assert_int_equal(read_config(), 0);
    assert_true(config.disable);
    assert_false(config.init_enable);
}

static void test_initial_backup(void **state) {
    (void)state;
    setenv("TMS_INIT_ENABLE_DISK_BACKUP", "1", 1); /* without TMS_INIT_ENABLE: accepted */
    assert_int_equal(read_config(), 0);
    assert_int_equal(tms_config_init_backup(&config), TMS_BACKUP_DISK);

    setenv("TMS_INIT_ENABLE_CPU_BACKUP", "1", 1);
    setenv("TMS_INIT_CPU_BACKUP_BACKEND", "mmap", 1);
    assert_int_equal(read_config(), 1);
    assert_non_null(strstr(output, "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both set"));
    assert_int_equal(tms_config_init_backup(&config), TMS_BACKUP_MMAP);
    assert_false(config.init_enable_disk_backup);

    unsetenv("TMS_INIT_ENABLE_DISK_BACKUP");
    unsetenv("TMS_INIT_CPU_BACKUP_BACKEND");
    assert_int_equal(read_config(), 0);
    assert_int_equal(tms_config_init_backup(&config), TMS_BACKUP_PINNED);
}

static void test_the_shared_page_is_a_boolean_or_a_directory(void **state) {
    (void)state;
    assert_int_equal(read_config(), 0);
    assert_true(config.shared_page);
    assert_string_equal(config.shared_page_directory, "");
    setenv("TMS_SHARED_PAGE", "No", 1);
    assert_int_equal(read_config(), 0);
    assert_false(config.shared_page);
    assert_string_equal(config.shared_page_directory, "");
    setenv("TMS_SHARED_PAGE", "/pages", 1);
    assert_int_equal(read_config(), 0);
    assert_true(config.shared_page);
    assert_string_equal(config.shared_page_directory, "/pages");
    setenv("TMS_SHARED_PAGE", "pages", 1);
    assert_int_equal(read_config(), 1);
    assert_warned("TMS_SHARED_PAGE", "pages", "1, true, yes, 0, false, no or an absolute path");
    assert_true(config.shared_page);
    assert_string_equal(config.shared_page_directory, "");
}

static void test_a_relative_directory_is_ignored(void **state) {
    (void)state;
    static const char *const relative[] = {"backups", "./backups", "../backups", "."};
    for (size_t i = 0; i < sizeof(relative) / sizeof(relative[0]); i++) {
        setenv("TMS_DISK_BACKUP_DIR", relative[i], 1);
        assert_int_equal(read_config(), 1);
        assert_warned("TMS_DISK_BACKUP_DIR", relative[i], "an absolute path");
        assert_string_equal(config.disk_backup_directory, "/tmp");
        unsetenv("TMS_DISK_BACKUP_DIR");
        setenv("TMPDIR", relative[i], 1);
        assert_int_equal(read_config(), 1);
        assert_warned("TMPDIR", relative[i], "an absolute path");
        assert_string_equal(config.disk_backup_directory, "/tmp");
        unsetenv("TMPDIR");
    }
}

/* ---- secure-execution mode ---- */

/* Users that no system has. */
enum { OWNER = 54321, CALLER = 54322 };
enum { NOT_SECURE = 10, NOT_EXECUTED = 11, HAS_EFFECT = 20 };

/* What the set-user-ID copy of this program does: returns which variable of its caller has an effect. */
static int read_as_owner(void) {
    if (geteuid() != OWNER || getuid() != CALLER || !tms_config_in_secure_execution()) return NOT_SECURE;
    tms_log_init(&log_under_test, TMS_LOG_WARNING);
    if (tms_config_read(&config, &log_under_test, NULL) != TMS_OK) return HAS_EFFECT;
    if (strcmp(config.driver_path, "libcuda.so.1") != 0) return HAS_EFFECT + 1;
    if (strcmp(config.disk_backup_directory, "/tmp") != 0) return HAS_EFFECT + 2;
    if (strcmp(config.lock_directory, "") != 0) return HAS_EFFECT + 3;
    if (strcmp(config.shared_page_directory, "") != 0) return HAS_EFFECT + 4;
    if (config.init_enable || config.log_level != TMS_LOG_WARNING) return HAS_EFFECT + 5;
    return 0;
}

/* Makes a copy of this program that belongs to OWNER and is executed with the owner's rights. */
static void copy_program(const char *folder, char *copy, size_t bytes) {
    char command[2 * TEMPORARY_BYTES];
    snprintf(copy, bytes, "%s/program", folder);
    snprintf(command, sizeof(command), "cp /proc/%d/exe '%s'", (int)getpid(), copy);
    assert_int_equal(system(command), 0);
    assert_int_equal(chown(copy, OWNER, (gid_t)-1), 0);
    assert_int_equal(chmod(copy, S_ISUID | 0755), 0);
    assert_int_equal(chmod(folder, 0755), 0);
}

static void test_variables_of_a_caller_without_the_rights_are_ignored(void **state) {
    (void)state;
    char folder[TEMPORARY_BYTES], copy[TEMPORARY_BYTES + 16];
    struct statvfs system_of_files;
    int status = 0;
    assert_false(tms_config_in_secure_execution());
    assert_non_null(make_temporary_directory(folder, "secure"));
    assert_int_equal(statvfs(folder, &system_of_files), 0);
    if (geteuid() != 0 || getenv("EMULATOR") || (system_of_files.f_flag & ST_NOSUID) ||
        prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 0) {
        remove_temporary_directory(folder);
        print_message(
            "skipped: only root can make a set-user-ID program of another user, on a file system that allows it\n");
        skip();
    }
    copy_program(folder, copy, sizeof(copy));
    setenv("TMS_CUDA_DRIVER", "/foreign/driver.so", 1);
    setenv("TMS_DISK_BACKUP_DIR", "/foreign/backups", 1);
    setenv("TMPDIR", "/foreign/temporary", 1);
    setenv("TMS_LOCK_DIR", "/foreign/locks", 1);
    setenv("TMS_SHARED_PAGE", "/foreign/pages", 1);
    setenv("TMS_INIT_ENABLE", "1", 1);
    setenv("TMS_LOG_LEVEL", "debug", 1);
    pid_t child = fork();
    if (child == 0) {
        if (setgid(CALLER) == 0 && setuid(CALLER) == 0) execl(copy, copy, "read_as_owner", NULL);
        _exit(NOT_EXECUTED);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    remove_temporary_directory(folder);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_parsers_leave_the_result_alone_on_failure(void **state) {
    (void)state;
    bool flag = true;
    int number = 77;
    uint64_t bytes = 77;
    static const char *const bad[] = {NULL, "", "bad"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_false(tms_config_parse_bool(bad[i], &flag));
        assert_false(tms_config_parse_backend(bad[i], &number));
        assert_false(tms_config_parse_level(bad[i], &number));
        assert_false(tms_config_parse_megabytes(bad[i], &bytes));
        assert_false(tms_config_parse_limit(bad[i], &bytes));
    }
    assert_true(flag);
    assert_int_equal(number, 77);
    assert_int_equal(bytes, 77);
}

int main(int count, char **arguments) {
    if (count == 2 && strcmp(arguments[1], "read_as_owner") == 0) _exit(read_as_owner());
#define CONFIG_TEST(test) cmocka_unit_test_setup_teardown(test, clear_environment, release_config)
    const struct CMUnitTest tests[] = {
        CONFIG_TEST(test_defaults),
        CONFIG_TEST(test_booleans),
        CONFIG_TEST(test_the_kill_switch_turns_off_what_would_act),
        CONFIG_TEST(test_backend),
        CONFIG_TEST(test_chunk),
        CONFIG_TEST(test_limits),
        CONFIG_TEST(test_names),
        CONFIG_TEST(test_texts_are_copied),
        CONFIG_TEST(test_a_text_that_cannot_be_copied_is_an_error),
        CONFIG_TEST(test_level),
        CONFIG_TEST(test_each_bad_value_is_one_warning),
        CONFIG_TEST(test_a_huge_value_is_cut_in_the_warning),
        CONFIG_TEST(test_initial_backup),
        CONFIG_TEST(test_the_shared_page_is_a_boolean_or_a_directory),
        CONFIG_TEST(test_a_relative_directory_is_ignored),
        CONFIG_TEST(test_variables_of_a_caller_without_the_rights_are_ignored),
        CONFIG_TEST(test_parsers_leave_the_result_alone_on_failure),
    };
    memset(&config, 0, sizeof(config));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
