/* Scope, the base class of context managers that a signal handler cannot leave half-way, and `within`.
 *
 * Python runs signal handlers between bytecodes, so an exception can arise before the first bytecode of a Python __exit__,
 * or between any two later ones, and the with statement never calls __exit__ again. So __enter__ and __exit__ are C code,
 * which calls the methods of a subclass and calls them again after an exception:
 *
 *   _open()                 returns the entry, an object that describes one use. Has no other effect.
 *   _enter(entry)           takes effect, step by step. Returns the result of __enter__.
 *   _choose()               returns the entry to leave. Has no effect. Repeated until it returns.
 *   _leave(entry)           undoes all that _enter has done by then. Repeated until it returns, so it must be possible to
 *                           interrupt it between any two bytecodes and to call it again.
 *   _left(entry, exception) is called once after that, with the exception of the body or None. It may be interrupted.
 *
 * An exception of _leave is raised in the end. A failing _enter is followed by _leave. Each method is called with the GIL
 * held, on the thread of the with statement. */
#include <stdbool.h>

#include "convert.h"
#include "functions.h"
#include "module_state.h"

/* The maximum number of calls of one method. Each repetition needs another signal, or makes progress. */
enum { MAX_ATTEMPTS = 100 };

/* An exception. All members are NULL if there is none. */
typedef struct kept {
    PyObject *type, *value, *traceback;
} kept_t;

static kept_t fetch(void) {
    kept_t kept;

    PyErr_Fetch(&kept.type, &kept.value, &kept.traceback);
    PyErr_NormalizeException(&kept.type, &kept.value, &kept.traceback);
    if (kept.traceback) PyException_SetTraceback(kept.value, kept.traceback);
    return kept;
}

static void restore(kept_t *kept) { PyErr_Restore(kept->type, kept->value, kept->traceback); }

static bool is_ordinary(const kept_t *kept) { return PyErr_GivenExceptionMatches(kept->value, PyExc_Exception); }

static void drop(kept_t *kept) {
    Py_XDECREF(kept->type);
    Py_XDECREF(kept->value);
    Py_XDECREF(kept->traceback);
}

/* Keeps the current exception beside an earlier one. The first is raised in the end, but one that ends the program takes
 * precedence over an ordinary one. The other becomes its context. */
static void keep(kept_t *first) {
    kept_t later = fetch();

    if (!first->value) {
        *first = later;
        return;
    }
    if (is_ordinary(first) && !is_ordinary(&later)) {
        kept_t earlier = *first;
        *first = later;
        later = earlier;
    }
    PyObject *context = PyException_GetContext(first->value);
    if (!context && later.value != first->value) PyException_SetContext(first->value, Py_NewRef(later.value));
    Py_XDECREF(context);
    drop(&later);
}

/* Calls self.name(argument) until it returns, and keeps the exceptions. NULL if it never does. */
static PyObject *persist(PyObject *self, PyObject *name, PyObject *argument, kept_t *kept) {
    PyObject *result = NULL;

    for (int attempt = 0; !result && attempt < MAX_ATTEMPTS; attempt++) {
        result = PyObject_CallMethodObjArgs(self, name, argument, NULL);
        if (!result) keep(kept);
    }
    return result;
}

static PyObject *enter(PyObject *self, PyTypeObject *type, PyObject *const *arguments, Py_ssize_t count,
                       PyObject *keywords) {
    PyObject *const *names = ((tms_py_state_t *)PyType_GetModuleState(type))->names;
    PyObject *entry, *result;

    (void)arguments;
    (void)count;
    (void)keywords;
    entry = PyObject_CallMethodObjArgs(self, names[TMS_PY_OPEN], NULL);
    if (!entry) return NULL;
    result = PyObject_CallMethodObjArgs(self, names[TMS_PY_ENTER], entry, NULL);
    if (!result) {
        kept_t kept = fetch();
        Py_XDECREF(persist(self, names[TMS_PY_LEAVE], entry, &kept));
        restore(&kept);
    }
    Py_DECREF(entry);
    return result;
}

static PyObject *leave(PyObject *self, PyTypeObject *type, PyObject *const *arguments, Py_ssize_t count,
                       PyObject *keywords) {
    PyObject *const *names = ((tms_py_state_t *)PyType_GetModuleState(type))->names;
    PyObject *exception = count > 1 ? arguments[1] : Py_None;
    PyObject *entry, *result = NULL;
    kept_t kept = {NULL, NULL, NULL};

    (void)keywords;
    entry = persist(self, names[TMS_PY_CHOOSE], NULL, &kept);
    if (entry) {
        Py_XDECREF(persist(self, names[TMS_PY_LEAVE], entry, &kept));
        if (!kept.value) result = PyObject_CallMethodObjArgs(self, names[TMS_PY_LEFT], entry, exception, NULL);
    }
    if (kept.value) restore(&kept);
    Py_XDECREF(entry);
    return result;
}

PyObject *tms_py_scope_type(PyObject *module) {
    static PyMethodDef methods[] = {{"__enter__", (PyCFunction)(void (*)(void))enter,
                                     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, "Calls _open() and _enter()."},
                                    {"__exit__", (PyCFunction)(void (*)(void))leave,
                                     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, "Calls _choose(), _leave() and _left()."},
                                    {NULL, NULL, 0, NULL}};
    static PyType_Slot slots[] = {
        {Py_tp_methods, methods},
        {Py_tp_doc, "The base class of context managers that a signal handler cannot leave half-way."},
        {0, NULL}};
    static PyType_Spec spec = {.name = "torch_memory_saver._core.Scope",
                               .basicsize = sizeof(PyObject),
                               .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                               .slots = slots};

    return PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* Returns a tuple of the arguments from index `first` on. */
static PyObject *tuple_from(PyObject *const *arguments, Py_ssize_t first, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count > first ? count - first : 0);

    for (Py_ssize_t index = first; tuple && index < count; index++)
        PyTuple_SetItem(tuple, index - first, Py_NewRef(arguments[index]));
    return tuple;
}

/* A with statement may be interrupted between its body and the call of __exit__; this function may not. */
PyObject *tms_py_within(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    enum { MANAGER, FUNCTION, COUNT };
    static const tms_py_signature_t signature = {"within", COUNT, COUNT, {"manager", "function"}};
    PyObject *const *names = ((tms_py_state_t *)PyModule_GetState(module))->names;
    PyObject *passed, *done, *result;
    tms_py_call_t call;
    kept_t kept;

    if (!tms_py_bind(&call, &signature, arguments, positional < COUNT ? positional : COUNT, keywords)) return NULL;
    passed = tuple_from(arguments, COUNT, positional);
    if (!passed) return NULL;
    done = PyObject_CallMethodObjArgs(call.values[MANAGER], names[TMS_PY_DUNDER_ENTER], NULL);
    if (!done) {
        Py_DECREF(passed);
        return NULL;
    }
    Py_DECREF(done);
    result = PyObject_CallObject(call.values[FUNCTION], passed);
    kept = fetch();
    Py_DECREF(passed);
    done = PyObject_CallMethodObjArgs(call.values[MANAGER], names[TMS_PY_DUNDER_EXIT], Py_None, Py_None, Py_None, NULL);
    if (done) {
        Py_DECREF(done);
        restore(&kept);
        return result;
    }
    Py_XDECREF(result);
    if (kept.value) {
        keep(&kept);
        restore(&kept);
    }
    return NULL;
}
