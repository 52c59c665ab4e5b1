#include "base/nvtx.h"

#include "base/status.h"

#if TMS_NVTX_IS_BUILT

#include <stdio.h>
#include <string.h>

#include <nvtx3/nvToolsExt.h>

enum {
    CALL_CATEGORY = TMS_NVTX_PHASES, /* the category of a phase is its number */
    MESSAGE_BYTES = 256
};

/* ARGB values of Okabe and Ito's colours, which people with colour blindness can distinguish. */
static const uint32_t no_color = 0, call_color = 0xFF0072B2, failure_color = 0xFFD55E00;

static const char *const phase_names[TMS_NVTX_PHASES] = {
#define NAME(phase, number, name) [number] = (name),
    TMS_EVENT_PHASES(NAME)
#undef NAME
};

/* ---- the domain ---- */

static void attach(tms_nvtx_t *nvtx) {
    nvtxDomainHandle_t domain = nvtxDomainCreateA("torch_memory_saver");
    if (!domain) return;
    nvtxDomainNameCategoryA(domain, CALL_CATEGORY, "call");
    for (uint32_t phase = TMS_PHASE_NONE + 1; phase < TMS_NVTX_PHASES; phase++) {
        nvtxDomainNameCategoryA(domain, phase, phase_names[phase]);
        nvtx->phases[phase] = nvtxDomainRegisterStringA(domain, phase_names[phase]);
    }
    atomic_store_explicit(&nvtx->domain, (void *)domain, memory_order_release);
}

static nvtxDomainHandle_t domain_of(tms_nvtx_t *nvtx) {
    return (nvtxDomainHandle_t)atomic_load_explicit(&nvtx->domain, memory_order_acquire);
}

tms_nvtx_t *tms_nvtx_attach(tms_nvtx_t *nvtx) {
    if (!atomic_load_explicit(&nvtx->asked, memory_order_relaxed) && !atomic_exchange(&nvtx->asked, true)) attach(nvtx);
    return domain_of(nvtx) ? nvtx : NULL;
}

void tms_nvtx_after_fork_in_child(tms_nvtx_t *nvtx) { atomic_store(&nvtx->domain, NULL); }

/* ---- ranges ---- */

static nvtxEventAttributes_t event_of(uint32_t category, uint32_t color) {
    return (nvtxEventAttributes_t){.version = NVTX_VERSION,
                                   .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                   .category = category,
                                   .colorType = color ? NVTX_COLOR_ARGB : NVTX_COLOR_UNKNOWN,
                                   .color = color,
                                   .payloadType = NVTX_PAYLOAD_UNKNOWN};
}

static void set_bytes(nvtxEventAttributes_t *event, uint64_t bytes) {
    event->payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    event->payload.ullValue = bytes;
}

static void set_text(nvtxEventAttributes_t *event, const char *text) {
    event->messageType = NVTX_MESSAGE_TYPE_ASCII;
    event->message.ascii = text;
}

/* Writes "pause weights, kv_cache" with the tags that fit. A tag is never cut, because it may be UTF-8. */
static void name_call(char message[MESSAGE_BYTES], const char *operation, const char *const *tags, size_t tag_count) {
    static const char more[] = ", ...";
    size_t length = (size_t)snprintf(message, MESSAGE_BYTES, "%s", operation);
    for (size_t i = 0; tags && i < tag_count; i++) {
        const char *separator = i ? ", " : " ";
        const bool fits = length + strlen(separator) + strlen(tags[i]) + sizeof more <= MESSAGE_BYTES;
        length +=
            (size_t)snprintf(message + length, MESSAGE_BYTES - length, "%s%s", fits ? separator : more, fits ? tags[i] : "");
        if (!fits) return;
    }
}

void tms_nvtx_push_call(tms_nvtx_t *nvtx, const char *operation, const char *const *tags, size_t tag_count) {
    nvtxDomainHandle_t domain = domain_of(nvtx);
    nvtxEventAttributes_t event = event_of(CALL_CATEGORY, call_color);
    char message[MESSAGE_BYTES];
    if (!domain) return;
    name_call(message, operation, tags, tag_count);
    set_text(&event, message);
    (void)nvtxDomainRangePushEx(domain, &event);
}

void tms_nvtx_push(tms_nvtx_t *nvtx, tms_event_phase_t phase, uint64_t bytes) {
    nvtxDomainHandle_t domain = domain_of(nvtx);
    nvtxEventAttributes_t event = event_of((uint32_t)phase, no_color);
    if (!domain) return;
    if (bytes > 0) set_bytes(&event, bytes);
    if (nvtx->phases[phase]) {
        event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
        event.message.registered = (nvtxStringHandle_t)nvtx->phases[phase];
    } else { /* the tool registers no strings */
        set_text(&event, phase_names[phase]);
    }
    (void)nvtxDomainRangePushEx(domain, &event);
}

void tms_nvtx_pop(tms_nvtx_t *nvtx) {
    nvtxDomainHandle_t domain = domain_of(nvtx);
    if (domain) (void)nvtxDomainRangePop(domain);
}

void tms_nvtx_mark(tms_nvtx_t *nvtx, tms_status_t status, uint64_t bytes) {
    nvtxDomainHandle_t domain = domain_of(nvtx);
    nvtxEventAttributes_t event = event_of(CALL_CATEGORY, status == TMS_OK ? no_color : failure_color);
    char message[MESSAGE_BYTES];
    if (!domain) return;
    if (status == TMS_OK) set_bytes(&event, bytes);
    (void)snprintf(message, sizeof message, status == TMS_OK ? "moved" : "failed: %s", tms_status_name(status));
    set_text(&event, message);
    nvtxDomainMarkEx(domain, &event);
}

#else

tms_nvtx_t *tms_nvtx_attach(tms_nvtx_t *nvtx) {
    (void)nvtx;
    return NULL;
}

void tms_nvtx_after_fork_in_child(tms_nvtx_t *nvtx) { (void)nvtx; }

void tms_nvtx_push_call(tms_nvtx_t *nvtx, const char *operation, const char *const *tags, size_t tag_count) {
    (void)nvtx, (void)operation, (void)tags, (void)tag_count;
}

void tms_nvtx_push(tms_nvtx_t *nvtx, tms_event_phase_t phase, uint64_t bytes) { (void)nvtx, (void)phase, (void)bytes; }

void tms_nvtx_pop(tms_nvtx_t *nvtx) { (void)nvtx; }

void tms_nvtx_mark(tms_nvtx_t *nvtx, tms_status_t status, uint64_t bytes) { (void)nvtx, (void)status, (void)bytes; }

#endif
