/* Functions for the settings of the calling thread, and for captures. Regions may be entered and left around single
 * allocations, so these calls keep the GIL: they use thread-local storage and the tag table's own lock, and never block.
 * Beginning and ending a capture takes the saver's lock and may free memory, so the GIL is released there. */
#include "base/status.h"
#include "convert.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"
#include "rows.h"

#define SETTINGS "tag", "backup", "managed", "host_policy", "runs"

/* Converts arguments 0 to 4, which SETTINGS names, to settings. */
static bool get_settings(const tms_py_call_t *call, tms_region_settings_t *settings) {
    bool managed, runs = true;

    *settings = (tms_region_settings_t){.host_policy = TMS_HOST_DEFAULT};

    if (!tms_py_get_tag(call, 0, &settings->tag) || !tms_py_get_i32(call, 1, &settings->backup) ||
        !tms_py_get_bool(call, 2, &managed) || !tms_py_get_i32(call, 3, &settings->host_policy) ||
        !tms_py_get_bool(call, 4, &runs))
        return false;
    settings->managed = managed;
    settings->own_handles = !runs;
    return true;
}

PyObject *tms_py_region_enter(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    enum { FOLLOWS = 5 };
    static const tms_py_signature_t signature = {"region_enter", 3, 6, {SETTINGS, "follows"}};
    tms_region_settings_t settings;
    bool follows = false;
    tms_py_call_t call;
    tms_error_t error;
    uint64_t region;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !get_settings(&call, &settings) ||
        !tms_py_get_bool(&call, FOLLOWS, &follows))
        return NULL;
    tms_error_clear(&error);
    if (tms_py_api(module)->region_enter(&settings, follows, &region, &error) != TMS_OK) return tms_py_raise(&error);
    return PyLong_FromUnsignedLongLong(region);
}

PyObject *tms_py_region_leave(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"region_leave", 1, 1, {"region"}};
    tms_py_call_t call;
    uint64_t region;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &region)) return NULL;
    return PyLong_FromLong(tms_py_api(module)->region_leave(region));
}

PyObject *tms_py_region_end_following(PyObject *module, PyObject *const *arguments, Py_ssize_t positional,
                                      PyObject *keywords) {
    static const tms_py_signature_t signature = {"region_end_following", 1, 1, {"tag"}};
    tms_py_call_t call;
    const char *tag;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_tag(&call, 0, &tag)) return NULL;
    tms_py_api(module)->region_end_following(tag);
    Py_RETURN_NONE;
}

PyObject *tms_py_region_current(PyObject *module, PyObject *unused) {
    tms_region_settings_t settings;
    int32_t depth;

    (void)unused;
    tms_py_api(module)->region_current(&settings, &depth);
    return tms_py_region_settings(module, &settings, depth);
}

PyObject *tms_py_region_set(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"region_set", 3, 5, {SETTINGS}};
    tms_region_settings_t settings;
    tms_py_call_t call;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !get_settings(&call, &settings)) return NULL;
    tms_error_clear(&error);
    if (tms_py_api(module)->region_set(&settings, &error) != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}

PyObject *tms_py_capture_begin(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"capture_begin", 2, 4, {"tag", "backup", "host_policy", "runs"}};
    const tms_api_t *api = tms_py_api(module);
    tms_region_settings_t settings = {.managed = 1};
    bool has_settings, runs = true;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;
    uint64_t identity;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords)) return NULL;
    has_settings = call.values[0] != Py_None;
    if ((has_settings && !tms_py_get_tag(&call, 0, &settings.tag)) || !tms_py_get_i32(&call, 1, &settings.backup) ||
        !tms_py_get_i32(&call, 2, &settings.host_policy) || !tms_py_get_bool(&call, 3, &runs))
        return NULL;
    settings.own_handles = !runs;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->capture_begin(has_settings ? &settings : NULL, &identity, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? PyLong_FromUnsignedLongLong(identity) : tms_py_raise(&error);
}

PyObject *tms_py_capture_begin_on(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"capture_begin_on", 1, 1, {"stream"}};
    const tms_api_t *api = tms_py_api(module);
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;
    uint64_t stream, identity;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &stream)) return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->capture_begin_on((void *)(uintptr_t)stream, &identity, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? PyLong_FromUnsignedLongLong(identity) : tms_py_raise(&error);
}

PyObject *tms_py_capture_begun(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"capture_begun", 1, 1, {"identity"}};
    const tms_api_t *api = tms_py_api(module);
    tms_py_call_t call;
    uint64_t identity;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &identity))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    api->capture_begun(identity);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *tms_py_capture_end(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"capture_end", 0, 2, {"identity", "unless_it_goes_on"}};
    const tms_api_t *api = tms_py_api(module);
    tms_py_call_t call;
    uint64_t identity = 0;
    bool unless = false, ended;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) ||
        (call.values[0] && !tms_py_get_u64(&call, 0, &identity)) || !tms_py_get_bool(&call, 1, &unless))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    ended = api->capture_end(identity, unless) || !identity;
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(ended);
}
