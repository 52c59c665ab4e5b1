#include "convert.h"

#include <string.h>

/* Returns the position of the parameter that a keyword names, or -1. */
static int parameter_index(const tms_py_signature_t *signature, PyObject *keyword) {
    for (int index = 0; index < signature->count; index++)
        if (PyUnicode_CompareWithASCIIString(keyword, signature->names[index]) == 0) return index;
    return -1;
}

static bool bind_keyword(tms_py_call_t *call, PyObject *keyword, PyObject *value) {
    const tms_py_signature_t *signature = call->signature;
    int index = parameter_index(signature, keyword);

    if (index < 0) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", signature->function, keyword);
        return false;
    }
    if (call->values[index]) {
        PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", signature->function, keyword);
        return false;
    }
    call->values[index] = value;
    return true;
}

bool tms_py_bind(tms_py_call_t *call, const tms_py_signature_t *signature, PyObject *const *arguments, Py_ssize_t positional,
                 PyObject *keywords) {
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;

    if (positional > signature->count) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments (%zd given)", signature->function, signature->count,
                     positional);
        return false;
    }
    call->signature = signature;
    for (int index = 0; index < TMS_PY_MAX_PARAMETERS; index++)
        call->values[index] = index < positional ? arguments[index] : NULL;
    for (Py_ssize_t index = 0; index < named; index++)
        if (!bind_keyword(call, PyTuple_GetItem(keywords, index), arguments[positional + index])) return false;
    for (int index = 0; index < signature->required; index++) {
        if (call->values[index]) continue;
        PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", signature->function, signature->names[index]);
        return false;
    }
    return true;
}

/* Sets a TypeError about a value of the wrong type, and returns false. */
static bool wrong_type(const tms_py_call_t *call, int index, const char *expected, PyObject *value) {
    PyErr_Format(PyExc_TypeError, "%s(): %s must be %s, not %R", call->signature->function, call->signature->names[index],
                 expected, (PyObject *)Py_TYPE(value));
    return false;
}

/* Returns a new reference to an int, made from an int or an object with __index__ (numpy's integers). */
static PyObject *get_index(const tms_py_call_t *call, int index, const char *expected) {
    PyObject *value = call->values[index];

    if (!PyIndex_Check(value)) {
        wrong_type(call, index, expected, value);
        return NULL;
    }
    return PyNumber_Index(value);
}

static bool to_u64(const tms_py_call_t *call, int index, const char *expected, uint64_t *value) {
    unsigned long long number;
    PyObject *integer = get_index(call, index, expected);

    if (!integer) return false;
    number = PyLong_AsUnsignedLongLong(integer);
    if (number == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%s(): %s must be from 0 to 2**64 - 1, not %R", call->signature->function,
                         call->signature->names[index], integer);
        Py_DECREF(integer);
        return false;
    }
    Py_DECREF(integer);
    *value = number;
    return true;
}

bool tms_py_get_u64(const tms_py_call_t *call, int index, uint64_t *value) {
    return !call->values[index] || to_u64(call, index, "an int", value);
}

bool tms_py_get_i32(const tms_py_call_t *call, int index, int32_t *value) {
    int overflow = 0;
    long long number;
    PyObject *integer;

    if (!call->values[index]) return true;
    integer = get_index(call, index, "an int");
    if (!integer) return false;
    number = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow || number < INT32_MIN || number > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s(): %s must fit 32 bits, not be %R", call->signature->function,
                     call->signature->names[index], integer);
        Py_DECREF(integer);
        return false;
    }
    Py_DECREF(integer);
    *value = (int32_t)number;
    return true;
}

bool tms_py_get_bool(const tms_py_call_t *call, int index, bool *value) {
    PyObject *argument = call->values[index];

    if (!argument) return true;
    if (argument != Py_True && argument != Py_False) return wrong_type(call, index, "a bool", argument);
    *value = argument == Py_True;
    return true;
}

bool tms_py_get_flag(const tms_py_call_t *call, int index, int32_t *value) {
    bool flag = *value != 0;

    if (!tms_py_get_bool(call, index, &flag)) return false;
    *value = flag;
    return true;
}

bool tms_py_get_seconds(const tms_py_call_t *call, int index, double *seconds) {
    PyObject *argument = call->values[index];
    double value;

    if (!argument) return true;
    if (!PyFloat_Check(argument) && !PyLong_Check(argument)) return wrong_type(call, index, "a number", argument);
    value = PyFloat_AsDouble(argument);
    if (value == -1.0 && PyErr_Occurred()) return false;
    if (!(value >= 0)) {
        PyErr_Format(PyExc_ValueError, "%s(): %s must be a number of seconds that is not negative, not %R",
                     call->signature->function, call->signature->names[index], argument);
        return false;
    }
    *seconds = value;
    return true;
}

static bool to_tag(const tms_py_call_t *call, int index, const char *expected, PyObject *argument, const char **tag) {
    Py_ssize_t bytes;
    const char *text;

    if (!PyUnicode_Check(argument)) return wrong_type(call, index, expected, argument);
    text = PyUnicode_AsUTF8AndSize(argument, &bytes);
    if (!text) return false;
    if (bytes == 0 || strlen(text) != (size_t)bytes) {
        PyErr_Format(PyExc_ValueError, "%s(): a tag must be a str that is not empty and has no NUL character, not %R",
                     call->signature->function, argument);
        return false;
    }
    *tag = text;
    return true;
}

bool tms_py_get_tag(const tms_py_call_t *call, int index, const char **tag) {
    return to_tag(call, index, "a str", call->values[index], tag);
}

bool tms_py_get_stream(const tms_py_call_t *call, int index, tms_selection_t *selection) {
    uint64_t handle = 0;
    bool given = call->values[index] != Py_None;

    if (given && !to_u64(call, index, "an int or None", &handle)) return false;
    selection->stream = (void *)(uintptr_t)handle;
    selection->has_stream = given;
    return true;
}

bool tms_py_get_tags(const tms_py_call_t *call, int index, tms_selection_t *selection) {
    PyObject *tuple = call->values[index];
    const char **tags;
    Py_ssize_t count;

    selection->tags = NULL;
    selection->tag_count = 0;
    if (tuple == Py_None) return true;
    if (!PyTuple_Check(tuple)) return wrong_type(call, index, "a tuple of str or None", tuple);
    count = PyTuple_Size(tuple);
    /* Not NULL even without tags: NULL means every tag. */
    tags = PyMem_Malloc((size_t)count * sizeof(*tags));
    if (!tags) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t item = 0; item < count; item++) {
        if (to_tag(call, index, "a tuple of str or None", PyTuple_GetItem(tuple, item), &tags[item])) continue;
        PyMem_Free(tags);
        return false;
    }
    selection->tags = tags;
    selection->tag_count = (size_t)count;
    return true;
}

bool tms_py_get_backup(const tms_py_call_t *call, int index, tms_selection_t *selection) {
    if (!call->values[index] || call->values[index] == Py_None) return true;
    selection->has_backup = 1;
    return tms_py_get_i32(call, index, &selection->backup);
}

bool tms_py_get_callable(const tms_py_call_t *call, int index, PyObject **callable) {
    PyObject *argument = call->values[index];

    if (!argument || argument == Py_None) return true;
    if (!PyCallable_Check(argument)) return wrong_type(call, index, "callable or None", argument);
    *callable = argument;
    return true;
}

bool tms_py_get_list(const tms_py_call_t *call, int index, PyObject **list) {
    PyObject *argument = call->values[index];

    if (!PyList_Check(argument)) return wrong_type(call, index, "a list", argument);
    *list = argument;
    return true;
}

PyObject *tms_py_text(const char *text) { return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"); }

const uint64_t *tms_py_numbers(PyObject *object, size_t at_a_time, const char *rule, size_t *count) {
    const size_t bytes = at_a_time * sizeof(uint64_t);
    Py_ssize_t size;
    char *data;

    if (PyBytes_AsStringAndSize(object, &data, &size) < 0) return NULL;
    if ((size_t)size % bytes) {
        PyErr_Format(PyExc_ValueError, "%s bytes in groups of %zu, not %zd", rule, bytes, size);
        return NULL;
    }
    *count = (size_t)size / bytes;
    return (const uint64_t *)(const void *)data; /* the contents of a bytes object are aligned like the result of malloc */
}
