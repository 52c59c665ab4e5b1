/* Functions by which Python gets the lines of the native log. The lines are collected with the GIL held, after the function
 * has returned or raised; no lock of the library is held then. */
#include <stdlib.h>

#include "convert.h"
#include "functions.h"
#include "module_state.h"

/* Appends a line to the list, or writes it to stderr if that fails. */
static void keep_line(const tms_api_t *api, PyObject *list, const tms_log_line_t *line) {
    PyObject *text = tms_py_text(line->text);
    PyObject *row = text ? Py_BuildValue("(iO)", (int)line->level, text) : NULL;

    if (!row || PyList_Append(list, row) < 0) {
        PyErr_Clear();
        api->write_log(line->level, line->text);
    }
    Py_XDECREF(row);
    Py_XDECREF(text);
}

PyObject *tms_py_collect_log(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"collect_log", 2, 2, {"function", "lines"}};
    const tms_api_t *api = tms_py_api(module);
    PyObject *result, *type, *value, *traceback;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords)) return NULL;
    if (!PyList_Check(call.values[1])) {
        PyErr_Format(PyExc_TypeError, "collect_log(): lines must be a list, not %R", call.values[1]);
        return NULL;
    }
    api->open_log();
    result = PyObject_CallFunctionObjArgs(call.values[0], NULL);
    PyErr_Fetch(&type, &value, &traceback);
    for (tms_log_line_t *next, *line = api->close_log(); line; line = next) {
        next = line->next;
        keep_line(api, call.values[1], line);
        free(line);
    }
    PyErr_Restore(type, value, traceback);
    return result;
}

PyObject *tms_py_write_log(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"write_log", 2, 2, {"level", "text"}};
    int32_t level = 0;
    const char *text;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &level)) return NULL;
    text = PyUnicode_AsUTF8AndSize(call.values[1], NULL);
    if (!text) return NULL;
    tms_py_api(module)->write_log(level, text);
    Py_RETURN_NONE;
}
