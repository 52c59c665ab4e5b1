/* HostBuffer: a Python object that keeps a host backup's memory valid. It may outlive the module, because the last reference
 * can be dropped while the interpreter shuts down. So each object has its own pointer to the function table. */
#include "base/status.h"
#include "convert.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"

typedef struct host_buffer {
    PyObject_HEAD const tms_api_t *api;
    tms_host_buffer_t *buffer; /* our reference */
    void *memory;              /* address of the requested range */
} host_buffer_t;

/* Releases the GIL, because dropping the last reference may release pinned memory, which is slow. */
static void release(const tms_api_t *api, tms_host_buffer_t *buffer) {
    Py_BEGIN_ALLOW_THREADS;
    api->host_buffer_release(buffer);
    Py_END_ALLOW_THREADS;
}

static void deallocate(PyObject *self) {
    host_buffer_t *object = (host_buffer_t *)self;
    PyTypeObject *type = Py_TYPE(self);

    release(object->api, object->buffer);
    PyObject_Free(self);
    Py_DECREF(type); /* an object of a heap type holds a reference to it */
}

static PyObject *get_address(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(((host_buffer_t *)self)->memory);
}

PyObject *tms_py_host_buffer_type(PyObject *module) {
    static PyGetSetDef attributes[] = {{"address", get_address, NULL, "Address of the range in host memory.", NULL},
                                       {NULL, NULL, NULL, NULL, NULL}};
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, deallocate},
        {Py_tp_getset, attributes},
        {Py_tp_doc, "Keeps a host backup's memory valid while it lives. Made by host_backup() only."},
        {0, NULL}};
    static PyType_Spec spec = {.name = "torch_memory_saver._core.HostBuffer",
                               .basicsize = sizeof(host_buffer_t),
                               .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               .slots = slots};

    return PyType_FromModuleAndSpec(module, &spec, NULL);
}

static PyObject *wrap(PyObject *module, tms_host_buffer_t *buffer, void *memory) {
    tms_py_state_t *state = PyModule_GetState(module);
    PyTypeObject *type = (PyTypeObject *)state->host_buffer_type;
    host_buffer_t *object = PyObject_New(host_buffer_t, type);

    if (!object) {
        release(state->api, buffer);
        return NULL;
    }
    object->api = state->api;
    object->buffer = buffer;
    object->memory = memory;
    return (PyObject *)object;
}

typedef tms_status_t (*find_t)(uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer, void **host,
                               tms_error_t *error);

static PyObject *find(PyObject *module, const tms_py_signature_t *signature, find_t find_backup, PyObject *const *arguments,
                      Py_ssize_t positional, PyObject *keywords) {
    tms_host_buffer_t *buffer = NULL;
    void *memory = NULL;
    uint64_t address, bytes;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;

    if (!tms_py_bind(&call, signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &address) ||
        !tms_py_get_u64(&call, 1, &bytes))
        return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = find_backup(address, bytes, &buffer, &memory, &error);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) return tms_py_raise(&error);
    if (!buffer) Py_RETURN_NONE;
    return wrap(module, buffer, memory);
}

PyObject *tms_py_host_backup(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"host_backup", 2, 2, {"address", "size"}};
    return find(module, &signature, tms_py_api(module)->host_backup, arguments, positional, keywords);
}

PyObject *tms_py_read_only_backup(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"read_only_backup", 2, 2, {"address", "size"}};
    return find(module, &signature, tms_py_api(module)->read_only_backup, arguments, positional, keywords);
}
