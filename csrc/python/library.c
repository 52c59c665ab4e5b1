#include "library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

typedef const tms_api_t *(*get_api_t)(uint32_t version);

/* The absolute path of a loaded library. The loader's name of it may be relative (from LD_PRELOAD). */
static PyObject *absolute_path(const char *name) {
    char resolved[PATH_MAX];
    return PyUnicode_DecodeFSDefault(realpath(name, resolved) ? resolved : name);
}

/* The `tms_get_api` of another library in the global scope, or NULL. The search includes the scope of the caller, so without
 * a preload library it finds this extension. */
static get_api_t find_foreign(const Dl_info *own, Dl_info *foreign) {
    get_api_t get_api = (get_api_t)dlsym(RTLD_DEFAULT, "tms_get_api");

    if (!get_api || !dladdr((void *)get_api, foreign) || foreign->dli_fbase == own->dli_fbase) return NULL;
    return get_api;
}

static void fail_foreign(const Dl_info *foreign, const Dl_info *own, const tms_api_t *api) {
    char offer[128] = "no version that this package knows";

    if (api) PyOS_snprintf(offer, sizeof(offer), "version %u with %u bytes", (unsigned)api->version, (unsigned)api->size);
    PyErr_Format(PyExc_ImportError,
                 "the library %s, loaded into this process (LD_PRELOAD?), belongs to another release of torch_memory_saver: "
                 "its function table has %s, and %s needs version %u with at least %u bytes. Set LD_PRELOAD to the library "
                 "of this installation, or remove it from LD_PRELOAD.",
                 foreign->dli_fname, offer, own->dli_fname, (unsigned)TMS_API_VERSION, (unsigned)sizeof(tms_api_t));
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
    api = get_api ? get_api(TMS_API_VERSION) : tms_get_api(TMS_API_VERSION);
    if (get_api && (!api || api->version != TMS_API_VERSION || api->size < sizeof(tms_api_t))) {
        fail_foreign(&foreign, &own, api);
        return false;
    }
    library->path = absolute_path(get_api ? foreign.dli_fname : own.dli_fname);
    if (!library->path) return false;
    library->api = api;
    library->preloaded = get_api != NULL;
    return true;
}
