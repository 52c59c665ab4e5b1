/* Changes that a signal handler cannot separate from their record: Python runs handlers between bytecodes, and in a call of
 * C code there are none (_torch/base/steps.py). */
#include <stdbool.h>

#include "convert.h"
#include "functions.h"

PyObject *tms_py_record_each(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    enum { RESULTS, FUNCTION, CALLS };
    static const tms_py_signature_t signature = {"record_each", 3, 3, {"results", "function", "calls"}};
    PyObject *results, *calls, *each;
    bool is_recorded = true;
    tms_py_call_t call;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords)) return NULL;
    if (!tms_py_get_list(&call, RESULTS, &results)) return NULL;
    calls = PyObject_GetIter(call.values[CALLS]);
    if (!calls) return NULL;
    while (is_recorded && (each = PyIter_Next(calls))) {
        PyObject *result = NULL;

        if (PyTuple_Check(each))
            result = PyObject_Call(call.values[FUNCTION], each, NULL);
        else
            PyErr_Format(PyExc_TypeError, "record_each(): each of calls must be a tuple, not %R", Py_TYPE(each));
        is_recorded = result && PyList_Append(results, result) == 0;
        Py_XDECREF(result);
        Py_DECREF(each);
    }
    Py_DECREF(calls);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); /* PyIter_Next fails as well */
}

PyObject *tms_py_move(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    enum { SOURCE, TARGET, INDEX };
    static const tms_py_signature_t signature = {"move", 2, 3, {"source", "target", "index"}};
    PyObject *source, *target, *item;
    int32_t index = -1;
    tms_py_call_t call;
    int status;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords)) return NULL;
    if (!tms_py_get_list(&call, SOURCE, &source) || !tms_py_get_list(&call, TARGET, &target)) return NULL;
    if (!tms_py_get_i32(&call, INDEX, &index)) return NULL;
    item = PySequence_GetItem(source, index);
    if (!item) return NULL;
    status = PyList_Append(target, item);
    if (!status) status = PySequence_DelItem(source, index);
    Py_DECREF(item);
    return status ? NULL : Py_NewRef(Py_None);
}
