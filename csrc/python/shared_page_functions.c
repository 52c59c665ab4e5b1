/* The shared page of this process, and those of other processes, which need no state. No function waits, except for the
 * file system where that of another process is mapped. */
#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/shared_page_file.h"
#include "convert.h"
#include "functions.h"
#include "module_state.h"

PyObject *tms_py_set_page_role(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_page_role", 3, 3, {"name", "rank", "serves"}};
    const tms_api_t *api = tms_py_api(module);
    const char *name;
    int32_t rank;
    bool serves;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_tag(&call, 0, &name) ||
        !tms_py_get_i32(&call, 1, &rank) || !tms_py_get_bool(&call, 2, &serves))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    api->set_page_role(name, rank >= 0, rank, serves);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *tms_py_page_requests(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(tms_py_api(module)->page_requests());
}

PyObject *tms_py_page_serve(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"page_serve", 2, 3, {"kind", "served", "os_error"}};
    int32_t kind, os_error = 0;
    bool served;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &kind) ||
        !tms_py_get_bool(&call, 1, &served) || !tms_py_get_i32(&call, 2, &os_error))
        return NULL;
    if (kind >= 0) tms_py_api(module)->page_serve((uint32_t)kind, served, os_error);
    Py_RETURN_NONE;
}

PyObject *tms_py_page_path(PyObject *module, PyObject *unused) {
    const char *path = tms_py_api(module)->page_path();

    (void)unused;
    if (!*path) Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(path);
}

PyObject *tms_py_page_directory(PyObject *module, PyObject *unused) {
    char path[PATH_MAX];

    (void)unused;
    if (!tms_py_api(module)->page_directory(path, sizeof(path))) {
        errno = ENAMETOOLONG;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyUnicode_DecodeFSDefault(path);
}

/* ---- a shared page as a dictionary ---- */

/* Adds a value to the dictionary and takes the reference to it. The value is NULL if an exception is set. */
static bool set(PyObject *dictionary, const char *name, PyObject *value) {
    bool done = value && PyDict_SetItemString(dictionary, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *text_of(const uint64_t words[TMS_SHARED_PAGE_TEXT_WORDS]) {
    char text[TMS_SHARED_PAGE_TEXT_WORDS * sizeof(uint64_t) + 1] = {0};
    memcpy(text, words, sizeof(text) - 1);
    return tms_py_text(text);
}

static PyObject *bytes_of(const uint64_t words[TMS_SHARED_PAGE_UUID_WORDS]) {
    return PyBytes_FromStringAndSize((const char *)words, TMS_SHARED_PAGE_UUID_WORDS * sizeof(uint64_t));
}

#define SET_NUMBER(name) &&set(dictionary, #name, PyLong_FromUnsignedLongLong(from->name))

static PyObject *row_of(const tms_shared_page_row_t *from) {
    PyObject *dictionary = PyDict_New();
    if (!dictionary) return NULL;
    bool complete = set(dictionary, "tag", text_of(from->tag)) SET_NUMBER(device) TMS_SHARED_PAGE_ROW_NUMBERS(SET_NUMBER);
    if (!complete) Py_CLEAR(dictionary);
    return dictionary;
}

static PyObject *process_of(const tms_shared_page_process_t *from) {
    PyObject *dictionary = PyDict_New();
    if (!dictionary) return NULL;
    bool complete = set(dictionary, "boot_id", bytes_of(from->boot_id)) && set(dictionary, "name", text_of(from->name))
                                                                               TMS_SHARED_PAGE_NUMBERS(SET_NUMBER);
    if (!complete) Py_CLEAR(dictionary);
    return dictionary;
}

static PyObject *counts_of(const uint64_t counts[TMS_SHARED_PAGE_KINDS]) {
    PyObject *list = PyList_New(0);
    for (int kind = 0; list && kind < TMS_SHARED_PAGE_KINDS; kind++) {
        PyObject *count = PyLong_FromUnsignedLongLong(counts[kind]);
        if (!count || PyList_Append(list, count) < 0) Py_CLEAR(list);
        Py_XDECREF(count);
    }
    return list;
}

static PyObject *devices_of(const tms_shared_page_contents_t *page) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < page->process.device_count && i < TMS_SHARED_PAGE_DEVICES; i++) {
        PyObject *row =
            Py_BuildValue("(NK)", bytes_of(page->devices[i].uuid), (unsigned long long)page->devices[i].total_bytes);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *rows_of(const tms_shared_page_contents_t *page) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < page->process.row_count && i < TMS_SHARED_PAGE_ROWS; i++) {
        PyObject *row = row_of(&page->rows[i]);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *dictionary_of(const tms_shared_page_contents_t *page) {
    PyObject *dictionary = PyDict_New();
    if (!dictionary) return NULL;
    if (!set(dictionary, "process", process_of(&page->process)) || !set(dictionary, "devices", devices_of(page)) ||
        !set(dictionary, "rows", rows_of(page)) || !set(dictionary, "others", row_of(&page->others)) ||
        !set(dictionary, "requests", counts_of(page->requests)) ||
        !set(dictionary, "served_total", counts_of(page->served_total)) ||
        !set(dictionary, "unserved_total", counts_of(page->unserved_total)) ||
        !set(dictionary, "serve_error", counts_of(page->serve_error)))
        Py_CLEAR(dictionary);
    return dictionary;
}

/* Raises ValueError for a file that is not a page of this format, and BlockingIOError for a page that is written to at every
 * attempt. */
static PyObject *raise_unreadable(tms_shared_page_reading_t reading, const tms_shared_page_contents_t *page) {
    if (reading == TMS_SHARED_PAGE_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    if (reading == TMS_SHARED_PAGE_BUSY) {
        errno = EAGAIN;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (page->magic != TMS_SHARED_PAGE_MAGIC)
        return PyErr_Format(PyExc_ValueError, "it is not a shared page of torch_memory_saver");
    return PyErr_Format(
        PyExc_ValueError,
        "it has format %llu, and this release of torch_memory_saver reads format %d: use the commands of the "
        "release that its process runs",
        (unsigned long long)page->format, TMS_SHARED_PAGE_FORMAT);
}

PyObject *tms_py_read_page(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"read_page", 1, 1, {"descriptor"}};
    tms_shared_page_reading_t reading;
    tms_shared_page_contents_t *page;
    PyObject *result;
    int32_t fd;
    tms_py_call_t call;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &fd)) return NULL;
    page = malloc(sizeof(*page));
    if (!page) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    reading = tms_shared_page_file_read(fd, page);
    Py_END_ALLOW_THREADS;
    result = reading == TMS_SHARED_PAGE_READ ? dictionary_of(page) : raise_unreadable(reading, page);
    free(page);
    return result;
}

PyObject *tms_py_request_page(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"request_page", 2, 3, {"descriptor", "kind", "withdraw"}};
    int32_t fd, kind;
    bool withdraw = false;
    tms_py_call_t call;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &fd) ||
        !tms_py_get_i32(&call, 1, &kind) || !tms_py_get_bool(&call, 2, &withdraw))
        return NULL;
    if (kind < 0 || kind >= TMS_SHARED_PAGE_KINDS)
        return PyErr_Format(PyExc_ValueError, "there is no request %d", (int)kind);
    if (!tms_shared_page_file_request(fd, (unsigned)kind, withdraw)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}
