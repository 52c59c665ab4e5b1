#include "library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

#include "abi/interface.h"
#include "base/library_path.h"

typedef const tms_api_t *(*get_api_t)(uint32_t interface);

/* The absolute path of the library that contains `address`. PyTorch loads its allocator from this path. */
static PyObject *absolute_path(const void *address, const char *name) {
    char path[PATH_MAX], resolved[PATH_MAX];
    if (tms_library_path(address, path)) return PyUnicode_DecodeFSDefault(realpath(path, resolved) ? resolved : path);
    return PyErr_Format(PyExc_ImportError,
                        "the file of the loaded library %s is not found: it was removed, or /proc cannot be read. Set "
                        "LD_PRELOAD to the absolute path of the library.",
                        name);
}

/* Returns the `tms_get_api` of another library in the global scope, or NULL. The search includes the scope of the caller, so
 * without a preload library it finds this extension. */
static get_api_t find_foreign(const Dl_info *own, Dl_info *foreign) {
    get_api_t get_api = (get_api_t)dlsym(RTLD_DEFAULT, "tms_get_api");

    if (!get_api || !dladdr((void *)get_api, foreign) || foreign->dli_fbase == own->dli_fbase) return NULL;
    return get_api;
}

bool tms_py_library_find(tms_py_library_t *library) {
    Dl_info own, foreign;
    get_api_t get_api;
    const tms_api_t *api;

    if (!dladdr((void *)find_foreign, &own)) {
        PyErr_SetString(PyExc_ImportError, "dladdr does not find the library that _core was loaded from");
        return false;
    }
    get_api = find_foreign(&own, &foreign);
    api = get_api ? get_api(tms_interface()) : tms_get_api(tms_interface());
    if (get_api && !api) {
        PyErr_Format(
            PyExc_ImportError,
            "the library %s, loaded into this process (LD_PRELOAD?), belongs to another build of torch_memory_saver "
            "than %s. Set LD_PRELOAD to the library of this installation, or remove it from LD_PRELOAD.",
            foreign.dli_fname, own.dli_fname);
        return false;
    }
    library->path =
        get_api ? absolute_path((void *)get_api, foreign.dli_fname) : absolute_path((void *)find_foreign, own.dli_fname);
    if (!library->path) return false;
    library->api = api;
    library->preloaded = get_api != NULL;
    return true;
}
