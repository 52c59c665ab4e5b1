#include "interpreter.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/library_path.h"
#include "base/thread.h"

/* The functions of Python's stable ABI that are used. X(result, name, parameters). Objects are opaque here. */
#define PYTHON_FUNCTIONS(X)                                                                                                 \
    X(int, Py_IsInitialized, (void))                                                                                        \
    X(int, Py_AddPendingCall, (int (*call)(void *), void *argument))                                                        \
    X(int, PyGILState_Ensure, (void))                                                                                       \
    X(void, PyGILState_Release, (int before))                                                                               \
    X(void *, PyImport_ImportModule, (const char *name))                                                                    \
    X(void *, PyObject_CallMethod, (void *object, const char *name, const char *format, ...))                               \
    X(void, PyErr_WriteUnraisable, (void *object))                                                                          \
    X(void, Py_DecRef, (void *object))

typedef struct python {
#define PYTHON_MEMBER(result, name, parameters) result(*name) parameters;
    PYTHON_FUNCTIONS(PYTHON_MEMBER)
#undef PYTHON_MEMBER
} python_t;

/* Runs the file `path` (bytes), which handles its own exceptions. The file may be gone since it was looked for. */
static const char run_file[] = "try:\n"
                               "    with open(path, 'rb') as file: source = file.read()\n"
                               "except OSError: pass\n"
                               "else: exec(compile(source, path, 'exec'), {'__file__': path})\n";

static bool find_function(const char *name, void *function, size_t bytes) {
    void *address = dlsym(RTLD_DEFAULT, name);
    if (!address) (void)dlerror(); /* clears the error, so that the program's next dlerror does not return it */
    memcpy(function, &address, bytes);
    return address != NULL;
}

static bool find_python(python_t *python) {
    bool found = true;
#define FIND_FUNCTION(result, name, parameters)                                                                             \
    found = found && find_function(#name, (void *)&python->name, sizeof python->name);
    PYTHON_FUNCTIONS(FIND_FUNCTION)
#undef FIND_FUNCTION
    return found && python->Py_IsInitialized();
}

/* Finds the absolute path of the file in the package beside this library. */
static bool find_file(char path[PATH_MAX]) {
    static const char anchor = 0;
    char library[PATH_MAX];
    if (!tms_library_path(&anchor, library)) return false;
    int folder = (int)(strrchr(library, '/') - library);
    int length = snprintf(path, PATH_MAX, "%.*s/torch_memory_saver/_engine/preloaded.py", folder, library);
    return length > 0 && length < PATH_MAX && access(path, R_OK) == 0;
}

/* Runs the file; the caller holds the GIL. Returns false with an exception set that does not come from the file, such as a
 * KeyboardInterrupt. */
static bool run(const python_t *python) {
    char path[PATH_MAX];
    if (!find_file(path)) return true;
    void *builtins = python->PyImport_ImportModule("builtins");
    void *done = builtins ? python->PyObject_CallMethod(builtins, "exec", "s{s:y}", run_file, "path", path) : NULL;
    if (done) python->Py_DecRef(done);
    if (builtins) python->Py_DecRef(builtins);
    return done != NULL;
}

tms_interpreter_thread_t tms_interpreter_leave(void) {
    tms_interpreter_thread_t thread = {.state = NULL};
    int (*holds)(void) = NULL;
    void *(*save)(void) = NULL;
    python_t python;
    if (!find_python(&python) || !find_function("PyGILState_Check", (void *)&holds, sizeof holds) ||
        !find_function("PyEval_SaveThread", (void *)&save, sizeof save) ||
        !find_function("PyEval_RestoreThread", (void *)&thread.restore, sizeof thread.restore))
        return thread;
    if (holds()) thread.state = save();
    return thread;
}

void tms_interpreter_return(tms_interpreter_thread_t thread) {
    if (thread.state) thread.restore(thread.state);
}

/* A forked child copies a call that is pending in its parent, and makes it while Python's and our locks are still those of
 * threads of the parent. So a process makes its own calls only. */
static int run_pending(void *process) {
    python_t python;
    return (pid_t)(intptr_t)process != getpid() || !find_python(&python) || run(&python) ? 0 : -1;
}

static void *run_on_thread(void *argument) {
    (void)argument;
    python_t python;
    if (!find_python(&python)) return NULL;
    int before = python.PyGILState_Ensure();
    if (!run(&python)) python.PyErr_WriteUnraisable(NULL);
    python.PyGILState_Release(before);
    return NULL;
}

void tms_interpreter_prepare_sharing(tms_state_t *state) {
    python_t python;
    char path[PATH_MAX];
    pthread_t thread;
    if (atomic_load_explicit(&state->interpreter_notified, memory_order_relaxed)) return;
    if (atomic_exchange(&state->interpreter_notified, true)) return;
    if (!state->config.init_enable || !find_python(&python) || !find_file(path)) return;
    /* Fails if many are waiting: the thread remains. */
    (void)python.Py_AddPendingCall(run_pending, (void *)(intptr_t)getpid());
    if (tms_thread_start(&thread, run_on_thread, NULL) == 0) pthread_detach(thread);
}
