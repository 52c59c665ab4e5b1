#include "simulator/base/runtime_types.h"

#include <dlfcn.h>

bool sim_runtime_is_12(void) {
    void *old = dlopen("libcudart.so.12", RTLD_LAZY | RTLD_NOLOAD),
         *new = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
    if (old) dlclose(old);
    if (new) dlclose(new);
    return old && !new;
}
