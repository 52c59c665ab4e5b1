/* Arguments from Python and results to Python.
 *
 * A function names its parameters in a signature, binds what it was called with, and fetches each argument by its index.
 * Every fetch returns false with TypeError, ValueError or OverflowError set; the message names the function and the
 * parameter. Fetched strings and lists point into the arguments, which live as long as the call. Everything needs the GIL.
 */
#ifndef TMS_PYTHON_CONVERT_H
#define TMS_PYTHON_CONVERT_H

#include <Python.h>
#include <stdbool.h>

#include "include/tms.h"

enum { TMS_PY_MAX_PARAMETERS = 8 };

typedef struct tms_py_signature {
    const char *function;
    int required; /* of the names, the first ones */
    int count;
    const char *names[TMS_PY_MAX_PARAMETERS];
} tms_py_signature_t;

typedef struct tms_py_call {
    const tms_py_signature_t *signature;
    PyObject *values[TMS_PY_MAX_PARAMETERS]; /* borrowed; NULL where not given */
} tms_py_call_t;

/* Sorts positional and keyword arguments (the METH_FASTCALL | METH_KEYWORDS convention) into the parameters. */
bool tms_py_bind(tms_py_call_t *call, const tms_py_signature_t *signature, PyObject *const *arguments, Py_ssize_t positional,
                 PyObject *keywords);

/* An address or a number of bytes: an int from 0 to 2**64 - 1. */
bool tms_py_get_u64(const tms_py_call_t *call, int index, uint64_t *value);
/* A device or a depth: an int that fits 32 bits. Leaves *value alone where the argument is not given. */
bool tms_py_get_i32(const tms_py_call_t *call, int index, int32_t *value);
/* Leaves *value alone where the argument is not given. */
bool tms_py_get_bool(const tms_py_call_t *call, int index, bool *value);
/* A duration: a number that is not negative, infinity included. Leaves *seconds alone where the argument is not given. */
bool tms_py_get_seconds(const tms_py_call_t *call, int index, double *seconds);
/* A tag: a str that is not empty and has no NUL. */
bool tms_py_get_tag(const tms_py_call_t *call, int index, const char **tag);
/* None or a stream handle: sets the selection's stream. */
bool tms_py_get_stream(const tms_py_call_t *call, int index, tms_selection_t *selection);
/* None or a tuple of tags: sets the selection's tags, an array for the caller to give to PyMem_Free (NULL for None). */
bool tms_py_get_tags(const tms_py_call_t *call, int index, tms_selection_t *selection);

/* None or a tms_backup_kind_t: sets the selection's backup. Leaves it alone where the argument is not given. */
bool tms_py_get_backup(const tms_py_call_t *call, int index, tms_selection_t *selection);
/* None or something to call: NULL for None. Leaves *callable alone where the argument is not given. */
bool tms_py_get_callable(const tms_py_call_t *call, int index, PyObject **callable);

/* Text from the native side: UTF-8, but perhaps cut off in the middle of a character. NULL with an exception set. */
PyObject *tms_py_text(const char *text);

#endif
