#include "selection.h"

/* ---- the arguments of the native functions ---- */

/* The first arguments, which are no options. */
enum { TAGS, STREAM, FIRST_OPTION };

#define NOT(kind, name, standard)
#define NAME(kind, name, standard) #name,
#define ONE(kind, name, standard)  +1
static const tms_py_signature_t pause_signature = {NULL,
                                                   FIRST_OPTION,
                                                   FIRST_OPTION TMS_PAUSE_OPTIONS(NOT, ONE, ONE),
                                                   {"tags", "stream", TMS_PAUSE_OPTIONS(NOT, NAME, NAME)}};
static const tms_py_signature_t resume_signature = {NULL,
                                                    FIRST_OPTION,
                                                    FIRST_OPTION TMS_RESUME_OPTIONS(NOT, ONE, ONE),
                                                    {"tags", "stream", TMS_RESUME_OPTIONS(NOT, NAME, NAME)}};

/* Fetches the next option of a call, by its kind. */
#define GET_INTERRUPTIBLE(name)   tms_py_get_bool(&call, index++, &callers->signals)
#define GET_BACKUP(name)          tms_py_get_backup(&call, index++, selection)
#define GET_FIND_LIVE(name)       tms_py_get_callable(&call, index++, &callers->find_live)
#define GET_PROGRESS(name)        tms_py_get_callable(&call, index++, &callers->progress)
#define GET_FLAG(name)            tms_py_get_flag(&call, index++, &selection->name)
#define GET_SECONDS(name)         tms_py_get_seconds(&call, index++, &selection->name##_seconds)
#define GET_HOST_MEMORY(name)     tms_py_get_i32(&call, index++, &selection->host_policy)
#define GET(kind, name, standard) GET_##kind(name) &&

bool tms_py_get_pause(const char *function, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords,
                      tms_selection_t *selection, tms_py_callers_t *callers) {
    tms_py_signature_t signature = pause_signature;
    int index = FIRST_OPTION;
    tms_py_call_t call;

    signature.function = function;
    return tms_py_bind(&call, &signature, arguments, positional, keywords) && tms_py_get_stream(&call, STREAM, selection) &&
           TMS_PAUSE_OPTIONS(NOT, GET, GET) tms_py_get_tags(&call, TAGS, selection);
}

bool tms_py_get_resume(const char *function, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords,
                       tms_selection_t *selection, tms_py_callers_t *callers) {
    tms_py_signature_t signature = resume_signature;
    int index = FIRST_OPTION;
    tms_py_call_t call;

    signature.function = function;
    return tms_py_bind(&call, &signature, arguments, positional, keywords) && tms_py_get_stream(&call, STREAM, selection) &&
           TMS_RESUME_OPTIONS(NOT, GET, GET) tms_py_get_tags(&call, TAGS, selection);
}

/* ---- the options of the public methods ---- */

typedef struct option {
    const char *name, *kind, *standard;
    bool is_shared;
} option_t;

#define PUBLIC(kind, name, standard) {#name, #kind, standard, false},
#define SHARED(kind, name, standard) {#name, #kind, standard, true},
static const option_t pause_options[] = {TMS_PAUSE_OPTIONS(PUBLIC, SHARED, NOT)};
static const option_t resume_options[] = {TMS_RESUME_OPTIONS(PUBLIC, SHARED, NOT)};

static int add_rows(PyObject *module, const char *constant, const option_t *options, size_t count) {
    PyObject *rows = PyTuple_New((Py_ssize_t)count);
    int result;

    for (size_t index = 0; rows && index < count; index++) {
        const option_t *option = &options[index];
        PyObject *row =
            Py_BuildValue("(sssO)", option->name, option->kind, option->standard, option->is_shared ? Py_True : Py_False);
        if (!row || PyTuple_SetItem(rows, (Py_ssize_t)index, row) < 0) Py_CLEAR(rows);
    }
    result = rows ? PyModule_AddObjectRef(module, constant, rows) : -1;
    Py_XDECREF(rows);
    return result;
}

int tms_py_add_options(PyObject *module) {
    if (add_rows(module, "PAUSE_OPTIONS", pause_options, sizeof pause_options / sizeof *pause_options) < 0) return -1;
    return add_rows(module, "RESUME_OPTIONS", resume_options, sizeof resume_options / sizeof *resume_options);
}
