/* Conversion of arguments from Python and of results to Python.
 *
 * A function names its parameters in a signature, binds its arguments, and fetches each one by its index. A fetch that fails
 * returns false with TypeError, ValueError or OverflowError set; the message names the function and the parameter. Fetched
 * strings point into the arguments, which live as long as the call. Every function needs the GIL.
 */
#ifndef TMS_PYTHON_CONVERT_H
#define TMS_PYTHON_CONVERT_H

#include <Python.h>
#include <stdbool.h>

#include "include/tms.h"

enum { TMS_PY_MAX_PARAMETERS = 12 };

typedef struct tms_py_signature {
    const char *function;
    int required; /* number of required parameters, the first ones */
    int count;
    const char *names[TMS_PY_MAX_PARAMETERS];
} tms_py_signature_t;

typedef struct tms_py_call {
    const tms_py_signature_t *signature;
    PyObject *values[TMS_PY_MAX_PARAMETERS]; /* borrowed; NULL if not given */
} tms_py_call_t;

/* Binds positional and keyword arguments (the METH_FASTCALL | METH_KEYWORDS convention) to the parameters. */
bool tms_py_bind(tms_py_call_t *call, const tms_py_signature_t *signature, PyObject *const *arguments, Py_ssize_t positional,
                 PyObject *keywords);

/* Fetches an address or a number of bytes: an int from 0 to 2**64 - 1. *value is unchanged if the argument is not given. */
bool tms_py_get_u64(const tms_py_call_t *call, int index, uint64_t *value);
/* Fetches a device or a depth: an int that fits 32 bits. *value is unchanged if the argument is not given. */
bool tms_py_get_i32(const tms_py_call_t *call, int index, int32_t *value);
/* Fetches a bool. *value is unchanged if the argument is not given. */
bool tms_py_get_bool(const tms_py_call_t *call, int index, bool *value);
/* Fetches a bool as the number that the ABI has for it. *value is unchanged if the argument is not given. */
bool tms_py_get_flag(const tms_py_call_t *call, int index, int32_t *value);
/* Fetches a duration: a number that is not negative, infinity included. *seconds is unchanged if the argument is not
 * given. */
bool tms_py_get_seconds(const tms_py_call_t *call, int index, double *seconds);
/* Fetches a tag, or another text: a non-empty str without NUL. */
bool tms_py_get_tag(const tms_py_call_t *call, int index, const char **tag);
/* Fetches None or a stream handle, and sets the selection's stream. */
bool tms_py_get_stream(const tms_py_call_t *call, int index, tms_selection_t *selection);
/* Fetches None or a tuple of tags, and sets the selection's tags, an array that the caller frees with PyMem_Free (NULL for
 * None). */
bool tms_py_get_tags(const tms_py_call_t *call, int index, tms_selection_t *selection);

/* Fetches None or a tms_backup_kind_t, and sets the selection's backup, which is unchanged if the argument is not given. */
bool tms_py_get_backup(const tms_py_call_t *call, int index, tms_selection_t *selection);
/* Fetches None or a callable. *callable is unchanged for None or if the argument is not given. */
bool tms_py_get_callable(const tms_py_call_t *call, int index, PyObject **callable);
/* Fetches a list, which must be given. */
bool tms_py_get_list(const tms_py_call_t *call, int index, PyObject **list);

/* Returns the 64-bit numbers in a bytes object; *count is the number of groups of `at_a_time`. On failure returns NULL with
 * an exception set, whose text begins with `rule`. */
const uint64_t *tms_py_numbers(PyObject *object, size_t at_a_time, const char *rule, size_t *count);

/* Returns a str from UTF-8 that may be truncated inside a character. On failure returns NULL with an exception set. */
PyObject *tms_py_text(const char *text);

#endif
