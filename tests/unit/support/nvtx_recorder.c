#include "nvtx_recorder.h"

#ifdef __has_include
#if __has_include(<nvtx3/nvToolsExt.h>)
#define HAS_NVTX
#endif
#endif

#ifndef HAS_NVTX

bool nvtx_recorder_can(void) { return false; }
const char *nvtx_recorder_take(void) { return ""; }
size_t nvtx_recorder_threads(void) { return 0; }
int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    (void)get_export_table;
    return 0;
}

#else

#include <fcntl.h>
#include <inttypes.h>
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RECORD_BYTES = 1 << 16, LINE_BYTES = 512, MAX_THREADS = 16, MAX_NAMES = 32, NAME_BYTES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char record[RECORD_BYTES], taken[RECORD_BYTES];
static size_t length, thread_count, taken_threads;
static pid_t threads[MAX_THREADS];

static void append_to_file(pid_t thread, const char *line) {
    char path[LINE_BYTES], text[2 * LINE_BYTES];
    const char *prefix = getenv("NVTX_RECORD");
    if (!prefix) return;
    (void)snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
    int size = snprintf(text, sizeof text, "%d %s\n", (int)thread, line);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, text, (size_t)size) != size) abort();
    close(file);
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
    char line[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    const pid_t thread = (pid_t)syscall(SYS_gettid);
    size_t known = 0;
    pthread_mutex_lock(&lock);
    append_to_file(thread, line);
    int size = snprintf(record + length, sizeof record - length, "%s\n", line);
    if ((size_t)size < sizeof record - length) length += (size_t)size;
    while (known < thread_count && threads[known] != thread) known++;
    if (known == thread_count && thread_count < MAX_THREADS) threads[thread_count++] = thread;
    pthread_mutex_unlock(&lock);
}

static void note_event(const char *what, const nvtxEventAttributes_t *event) {
    const bool registered = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
    char bytes[LINE_BYTES] = "-";
    if (event->version != NVTX_VERSION || event->size != sizeof *event) abort();
    if (event->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64)
        (void)snprintf(bytes, sizeof bytes, "%" PRIu64, event->payload.ullValue);
    note("%s %" PRIu32 " %s %s%s", what, event->category, bytes, registered ? "*" : "",
         registered ? (const char *)event->message.registered : event->message.ascii);
}

/* A copy that stays, the same for equal names. */
static const char *keep(const char *name) {
    static char names[MAX_NAMES][NAME_BYTES];
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < MAX_NAMES && names[i][0] && strcmp(names[i], name) != 0) i++;
    if (i == MAX_NAMES || strlen(name) >= NAME_BYTES) abort();
    memcpy(names[i], name, strlen(name) + 1);
    pthread_mutex_unlock(&lock);
    return names[i];
}

/* ---- the tool's functions: a domain is its name, and so is a registered string ---- */

static nvtxDomainHandle_t create_domain(const char *name) {
    note("domain %s", name);
    return (nvtxDomainHandle_t)keep(name);
}

static void name_category(nvtxDomainHandle_t domain, uint32_t category, const char *name) {
    (void)domain;
    note("category %" PRIu32 " %s", category, name);
}

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text) {
    (void)domain;
    note("register %s", text);
    return (nvtxStringHandle_t)keep(text);
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    if (strcmp((const char *)domain, "torch_memory_saver") == 0) note_event("push", event);
    return 0;
}

static int pop(nvtxDomainHandle_t domain) {
    if (strcmp((const char *)domain, "torch_memory_saver") == 0) note("pop");
    return 0;
}

static void mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    if (strcmp((const char *)domain, "torch_memory_saver") == 0) note_event("mark", event);
}

/* ---- what NVTX looks for ---- */

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
    const NvtxExportTableCallbacks *callbacks = get_export_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    if (size <= NVTX_CBID_CORE2_DomainCreateA) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    *table[NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category;
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE2_DomainMarkEx] = (NvtxFunctionPointer)mark;
    return 1;
}

/* ---- for the tests in C ---- */

bool nvtx_recorder_can(void) {
#ifdef NVTX_LOAD_SEQUENCE_VERSION
    return true;
#else
    return false;
#endif
}

const char *nvtx_recorder_take(void) {
    pthread_mutex_lock(&lock);
    memcpy(taken, record, length);
    taken[length] = '\0';
    taken_threads = thread_count;
    length = thread_count = 0;
    pthread_mutex_unlock(&lock);
    return taken;
}

size_t nvtx_recorder_threads(void) { return taken_threads; }

#endif
