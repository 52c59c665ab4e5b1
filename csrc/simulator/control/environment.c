#include "simulator/control/environment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/control/calls.h"
#include "simulator/devices/visible.h"
#include "simulator/simulator.h"

static void report(const char *name, const char *text, const char *wrong) {
    fprintf(stderr, "simulated GPU: %s=%s is ignored: %s\n", name, text, wrong);
}

static void report_invalid(const char *name, const char *text) { report(name, text, "invalid value"); }

/* Parses an integer with an optional binary suffix. */
static bool parse_bytes(const char *text, uint64_t *bytes) {
    static const struct {
        const char *text;
        unsigned shift;
    } suffixes[] = {{"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
    if (*text < '0' || *text > '9') return false;
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno) return false;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        if (strcmp(end, suffixes[i].text) == 0 && value <= UINT64_MAX >> suffixes[i].shift) {
            *bytes = (uint64_t)value << suffixes[i].shift;
            return true;
        }
    }
    return false;
}

/* Reads the value of a variable, limited to `limit`. Returns false if it is unset, empty or malformed. */
static bool read_number(const char *name, uint64_t limit, uint64_t *value) {
    const char *text = secure_getenv(name);
    if (!text || !*text) return false;
    uint64_t number = 0;
    if (!parse_bytes(text, &number) || number > limit) {
        report_invalid(name, text);
        return false;
    }
    *value = number;
    return true;
}

static bool read_switch(const char *name, bool fallback) {
    uint64_t value = fallback;
    read_number(name, 1, &value);
    return value != 0;
}

/* Parses one rule, "call:succeed:fail:code". Returns NULL, or what is wrong. */
static const char *parse_fault(const char *rule) {
    static const char wrong_form[] = "the form is call:succeed:fail:code";
    char name[SIM_NAME_BYTES];
    unsigned long long succeed = 0, fail = 0;
    int code = 0, end = 0;
    const char *colon = strchr(rule, ':');
    if (!colon || colon == rule || (size_t)(colon - rule) >= sizeof name) return wrong_form;
    memcpy(name, rule, (size_t)(colon - rule));
    name[colon - rule] = '\0';
    if (sscanf(colon, ":%llu:%llu:%d%n", &succeed, &fail, &code, &end) != 3 || colon[end] != '\0') return wrong_form;
    return sim_call_fail_after(name, succeed, fail, code) == 0 ? NULL : "there is no such function";
}

static void read_faults(void) {
    const char *name = "TMS_SIMULATED_FAULT", *text = secure_getenv(name);
    if (!text || !*text) return;
    char *rules = strdup(text), *rest = rules;
    if (!rules) return report_invalid(name, text);
    for (char *rule = strsep(&rest, ","); rule; rule = strsep(&rest, ",")) {
        const char *wrong = *rule ? parse_fault(rule) : NULL;
        if (wrong) report(name, rule, wrong);
    }
    free(rules);
}

static void open_trace(void) {
    const char *name = "TMS_SIMULATED_TRACE", *path = secure_getenv(name);
    if (!path || !*path) return;
    /* A relative path would name another file once the program has changed its working directory. */
    if (*path != '/') return report_invalid(name, path);
    enum { TRACE_MODE = 0644 };
    sim_state.trace_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, TRACE_MODE);
    if (sim_state.trace_file < 0) fprintf(stderr, "simulated GPU: cannot open %s: %s\n", path, strerror(errno));
}

int sim_environment_devices(void) {
    uint64_t devices = 1;
    read_number("TMS_SIMULATED_DEVICES", TMS_SIM_MAX_DEVICES, &devices);
    return (int)devices;
}

uint64_t sim_environment_memory(void) {
    uint64_t bytes = (uint64_t)8 << 30;
    read_number("TMS_SIMULATED_MEMORY", INT64_MAX, &bytes);
    return bytes;
}

bool sim_environment_shared_name(char *name, size_t size) {
    const char *shared = secure_getenv("TMS_SIMULATED_SHARED");
    *name = '\0';
    if (!shared || !*shared || strlen(shared) >= size / 2 || strchr(shared, '/')) return false;
    snprintf(name, size, "/tms_simulated_%s", shared);
    return true;
}

void sim_environment_read(void) {
    sim_state.machine_count = sim_environment_devices();
    if (read_switch("TMS_SIMULATED_VISIBLE", false))
        sim_visible_read();
    else
        sim_visible_all();
    sim_state.device_bytes = sim_environment_memory();
    read_number("TMS_SIMULATED_BANDWIDTH", INT64_MAX, &sim_state.bandwidth);
    read_number("TMS_SIMULATED_POISON", INT64_MAX, &sim_state.poison_limit);
    read_number("TMS_SIMULATED_NCCL_MEMORY", INT64_MAX, &sim_state.nccl_bytes);
    sim_state.peer_capable = read_switch("TMS_SIMULATED_PEERS", true);
    sim_state.report = read_switch("TMS_SIMULATED_REPORT", false);
    const char *shared = secure_getenv("TMS_SIMULATED_SHARED");
    if (!sim_environment_shared_name(sim_state.shared_name, sizeof sim_state.shared_name) && shared && *shared)
        report_invalid("TMS_SIMULATED_SHARED", shared);
    open_trace();
    read_faults();
}
