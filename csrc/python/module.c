/* The extension module torch_memory_saver._core: its definition and initialisation. The functions are in *_functions.c.
 *
 * Multi-phase initialisation and per-interpreter state, within the limited API of Python 3.10, so one build serves every
 * later Python. The slots of later versions (Py_mod_multiple_interpreters, Py_mod_gil) are errors in 3.10 and 3.11, so they
 * are absent. Their defaults are correct: sub-interpreters that share the GIL are supported. */
#include "abi/interface.h"
#include "base/config.h"
#include "base/nvtx.h"
#include "functions.h"
#include "include/tms_shared_page.h"
#include "library.h"
#include "module_state.h"
#include "rows.h"
#include "selection.h"

static PyMethodDef methods[] = {
#define TAKES(name) (PyCFunction)(void (*)(void)) tms_py_##name, METH_FASTCALL | METH_KEYWORDS
#define BARE(name)  tms_py_##name, METH_NOARGS
#define TMS_PYTHON_FUNCTION(name, calling, signature, documentation)                                                        \
    {#name, calling(name), #name signature "\n\n" documentation},
#include "include/tms_api.def"
#undef TAKES
#undef BARE
    {NULL, NULL, 0, NULL}};

static const struct constant {
    const char *name;
    long value;
} constants[] = {{"STATE_ACTIVE", TMS_SEGMENT_ACTIVE},
                 {"STATE_PAUSING", TMS_SEGMENT_PAUSING},
                 {"STATE_PAUSED", TMS_SEGMENT_PAUSED},
                 {"STATE_RESUMING", TMS_SEGMENT_RESUMING},
                 {"STATE_DAMAGED", TMS_SEGMENT_DAMAGED},
                 {"STATE_REPAIRING", TMS_SEGMENT_REPAIRING},
                 {"HOST_DEFAULT", TMS_HOST_DEFAULT},
                 {"HOST_RELEASE", TMS_HOST_RELEASE},
                 {"HOST_POOL", TMS_HOST_POOL},
                 {"HOST_RETAIN", TMS_HOST_RETAIN},
                 {"CONTENTS_OWN", TMS_CONTENTS_OWN},
                 {"CONTENTS_RESTORED", TMS_CONTENTS_RESTORED},
                 {"CONTENTS_ZEROED", TMS_CONTENTS_ZEROED},
                 {"CONTENTS_GUARD", TMS_CONTENTS_GUARD},
                 {"CONTENTS_UNDEFINED", TMS_CONTENTS_UNDEFINED},
                 {"GUARD_BYTE", TMS_GUARD_BYTE},
                 {"NVTX", TMS_NVTX_IS_BUILT}};

static int add_constants(PyObject *module) {
    for (size_t index = 0; index < sizeof(constants) / sizeof(constants[0]); index++)
        if (PyModule_AddIntConstant(module, constants[index].name, constants[index].value) < 0) return -1;
    return PyModule_AddIntConstant(module, "INTERFACE", tms_interface());
}

static const struct backup_kind {
    const char *constant, *name;
    long number;
} backup_kinds[] = {
#define KIND(kind, number, name) {"BACKUP_" #kind, (name), (number)},
    TMS_BACKUP_KINDS(KIND)
#undef KIND
};

/* Adds BACKUP_<kind> for each kind, and BACKUP_KINDS, which maps names to numbers. */
static int add_backup_kinds(PyObject *module) {
    PyObject *numbers = PyDict_New(), *view = NULL;
    int result = numbers ? 0 : -1;

    for (size_t index = 0; result == 0 && index < sizeof(backup_kinds) / sizeof(backup_kinds[0]); index++) {
        const struct backup_kind *kind = &backup_kinds[index];
        PyObject *number = PyLong_FromLong(kind->number);
        result = number ? PyDict_SetItemString(numbers, kind->name, number) : -1;
        if (result == 0) result = PyModule_AddObjectRef(module, kind->constant, number);
        Py_XDECREF(number);
    }
    if (result == 0) view = PyDictProxy_New(numbers);
    result = view ? PyModule_AddObjectRef(module, "BACKUP_KINDS", view) : -1;
    Py_XDECREF(view);
    Py_XDECREF(numbers);
    return result;
}

/* Adds STATE_NAMES: the names of the states by their numbers. */
static int add_state_names(PyObject *module) {
#define NAME(kind, number, name) [number] = (name),
    static const char *const states[] = {TMS_SEGMENT_STATES(NAME)};
#undef NAME
    enum { COUNT = sizeof states / sizeof *states };
    PyObject *names = PyTuple_New(COUNT);
    int result;

    for (Py_ssize_t i = 0; names && i < COUNT; i++) {
        PyObject *text = PyUnicode_InternFromString(states[i]);
        if (!text || PyTuple_SetItem(names, i, text) < 0) Py_CLEAR(names);
    }
    result = names ? PyModule_AddObjectRef(module, "STATE_NAMES", names) : -1;
    Py_XDECREF(names);
    return result;
}

/* The id that the main interpreter has in every version of Python. */
enum { MAIN_INTERPRETER = 0 };

/* Adds SETTINGS: the names of the core's environment variables. */
static int add_settings(PyObject *module) {
    size_t count = 0;
    int result = -1;
    PyObject *names;

    while (tms_config_name(count)) count++;
    names = PyTuple_New((Py_ssize_t)count);
    for (size_t index = 0; names && index < count; index++) {
        PyObject *name = PyUnicode_FromString(tms_config_name(index));
        if (!name || PyTuple_SetItem(names, (Py_ssize_t)index, name) < 0) Py_CLEAR(names);
    }
    if (names) result = PyModule_AddObjectRef(module, "SETTINGS", names);
    Py_XDECREF(names);
    return result;
}

/* Adds PAGE_REQUESTS: the names of the requests to a shared page, by number. */
static int add_page_requests(PyObject *module) {
#define NAME(kind, number, name) (name),
    static const char *const names[] = {TMS_SHARED_PAGE_REQUESTS(NAME)};
#undef NAME
    PyObject *tuple = PyTuple_New(TMS_SHARED_PAGE_KINDS);
    int result = -1;

    for (Py_ssize_t index = 0; tuple && index < TMS_SHARED_PAGE_KINDS; index++) {
        PyObject *name = PyUnicode_FromString(names[index]);
        if (!name || PyTuple_SetItem(tuple, index, name) < 0) Py_CLEAR(tuple);
    }
    if (tuple) result = PyModule_AddObjectRef(module, "PAGE_REQUESTS", tuple);
    Py_XDECREF(tuple);
    return result;
}

/* Adds Scope, and the names of methods that C code calls. */
static int add_scope(PyObject *module, tms_py_state_t *state) {
    static const char *const names[TMS_PY_NAMES] = {
        [TMS_PY_OPEN] = "_open",           [TMS_PY_ENTER] = "_enter", [TMS_PY_CHOOSE] = "_choose",
        [TMS_PY_LEAVE] = "_leave",         [TMS_PY_LEFT] = "_left",   [TMS_PY_DUNDER_ENTER] = "__enter__",
        [TMS_PY_DUNDER_EXIT] = "__exit__",
    };
    PyObject *type;
    int result;

    for (int name = 0; name < TMS_PY_NAMES; name++) {
        state->names[name] = PyUnicode_InternFromString(names[name]);
        if (!state->names[name]) return -1;
    }
    type = tms_py_scope_type(module);
    if (!type) return -1;
    result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

static int execute(PyObject *module) {
    tms_py_state_t *state = PyModule_GetState(module);
    tms_py_library_t library;
    int result;

    if (!tms_py_library_find(&library)) return -1;
    bool is_main = PyInterpreterState_GetID(PyInterpreterState_Get()) == MAIN_INTERPRETER;
    state->api = library.api;
    result = PyModule_AddObjectRef(module, "library_path", library.path);
    Py_DECREF(library.path);
    if (result < 0 || PyModule_AddObjectRef(module, "preloaded", library.preloaded ? Py_True : Py_False) < 0) return -1;
    if (PyModule_AddObjectRef(module, "main_interpreter", is_main ? Py_True : Py_False) < 0) return -1;
    PyObject *secure = tms_config_in_secure_execution() ? Py_True : Py_False;
    if (PyModule_AddObjectRef(module, "secure_execution", secure) < 0) return -1;
    state->host_buffer_type = tms_py_host_buffer_type(module);
    if (!state->host_buffer_type || PyModule_AddType(module, (PyTypeObject *)state->host_buffer_type) < 0) return -1;
    state->pending_type = tms_py_pending_type(module);
    if (!state->pending_type || PyModule_AddType(module, (PyTypeObject *)state->pending_type) < 0) return -1;
    if (add_scope(module, state) < 0) return -1;
    if (!tms_py_rows_create(module, state->rows)) return -1;
    if (add_constants(module) < 0 || add_backup_kinds(module) < 0 || tms_py_add_options(module) < 0) return -1;
    if (add_state_names(module) < 0 || add_page_requests(module) < 0) return -1;
    return add_settings(module);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    tms_py_state_t *state = PyModule_GetState(module);

    Py_VISIT(state->host_buffer_type);
    Py_VISIT(state->pending_type);
    for (int row = 0; row < TMS_PY_ROWS; row++) Py_VISIT(state->rows[row]);
    return 0;
}

static int clear(PyObject *module) {
    tms_py_state_t *state = PyModule_GetState(module);

    Py_CLEAR(state->host_buffer_type);
    Py_CLEAR(state->pending_type);
    for (int name = 0; name < TMS_PY_NAMES; name++) Py_CLEAR(state->names[name]);
    for (int row = 0; row < TMS_PY_ROWS; row++) Py_CLEAR(state->rows[row]);
    return 0;
}

static void release(void *module) { clear(module); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                 .m_name = "torch_memory_saver._core",
                                 .m_doc = "The native core's function table, one Python function for each entry.",
                                 .m_size = sizeof(tms_py_state_t),
                                 .m_methods = methods,
                                 .m_slots = slots,
                                 .m_traverse = traverse,
                                 .m_clear = clear,
                                 .m_free = release};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
