#include "base/status.h"

#include <cuda.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>

/* Results that are missing in the oldest supported cuda.h. */
enum { RESULT_CONTAINED = 226, RESULT_TENSOR_MEMORY_LEAK = 721 };

/* The advice that is appended to an error's message. Statuses without a row have no advice that fits every case.
 * X(enumerator suffix, advice, whether it is also appended to a detail). If the last column is false, a detail contains its
 * own advice. */
#define STATUS_ADVICE(X)                                                                                                    \
    X(OUT_OF_DEVICE_MEMORY,                                                                                                 \
      "Pause other tags, delete tensors and empty the framework's cache, or let the other processes on the device give "    \
      "memory back, and make the call again.",                                                                              \
      true)                                                                                                                 \
    X(OUT_OF_HOST_MEMORY, "Free host memory, back up fewer tags, or keep backups on disk (backup=\"disk\").", false)        \
    X(DRIVER_UNAVAILABLE,                                                                                                   \
      "Check that nvidia-smi works in this environment and that CUDA_VISIBLE_DEVICES names a device; TMS_CUDA_DRIVER can "  \
      "name another driver library.",                                                                                       \
      true)                                                                                                                 \
    X(DEVICE_LOST,                                                                                                          \
      "Restart the process: no call on this device can succeed in it any more. The fault happened in an earlier kernel or " \
      "copy, which CUDA_LAUNCH_BLOCKING=1 helps to find.",                                                                  \
      true)                                                                                                                 \
    X(CAPTURE_IN_PROGRESS, "End the capture first, then make the call again.", false)                                       \
    X(INVALID_STATE, "CUDA does not permit this call here. Do not make it in a CUDA host callback.", false)                 \
    X(FORKED, "Start processes that use the GPU with the spawn or forkserver method instead of fork.", false)

const char *tms_status_name(tms_status_t status) {
    switch (status) {
#define NAME(name, number, text)                                                                                            \
    case TMS_##name: return #name;
        TMS_STATUS_CODES(NAME)
#undef NAME
    }
    return "UNKNOWN";
}

const char *tms_status_text(tms_status_t status) {
    switch (status) {
#define TEXT(name, number, text)                                                                                            \
    case TMS_##name: return text;
        TMS_STATUS_CODES(TEXT)
#undef TEXT
    }
    return "unknown status";
}

/* Returns the advice for a status, or NULL. */
static const char *status_advice(tms_status_t status, bool has_detail) {
    switch (status) {
#define ADVICE(name, advice, with_detail)                                                                                   \
    case TMS_##name: return !has_detail || (with_detail) ? advice : NULL;
        STATUS_ADVICE(ADVICE)
#undef ADVICE
    default: return NULL;
    }
}

tms_status_t tms_status_from_driver(int result) {
    switch (result) {
    case CUDA_SUCCESS: return TMS_OK;

    case CUDA_ERROR_OUT_OF_MEMORY: return TMS_OUT_OF_DEVICE_MEMORY;

    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
    case CUDA_ERROR_MPS_MAX_CLIENTS_REACHED:
    case CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED: return TMS_DRIVER_UNAVAILABLE;

    /* The results after which the process must be relaunched, according to cuda.h. CUDA_ERROR_CONTEXT_IS_DESTROYED is not
     * one of them: it concerns one context, and another can be used. */
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case RESULT_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case RESULT_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED: return TMS_DEVICE_LOST;

    case CUDA_ERROR_NOT_PERMITTED: return TMS_INVALID_STATE;

    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_MERGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: return TMS_CAPTURE_IN_PROGRESS;

    default: return TMS_DRIVER;
    }
}

void tms_error_clear(tms_error_t *error) {
    if (!error) return;
    memset(error, 0, sizeof(*error));
    error->device = TMS_NO_DEVICE;
}

/* Returns the length without an incomplete UTF-8 sequence at the end. Tags and paths are UTF-8, and a text truncated inside
 * a character cannot be decoded. */
static size_t whole_characters(const char *text, size_t length) {
    enum { CONTINUATION_MASK = 0xC0, CONTINUATION = 0x80, LONGEST = 4 };
    size_t lead = length;
    do {
        if (lead == 0 || length - lead >= LONGEST) return length;
        lead--;
    } while (((unsigned char)text[lead] & CONTINUATION_MASK) == CONTINUATION);
    unsigned char byte = (unsigned char)text[lead];
    size_t expected = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length - lead < expected ? lead : length;
}

static void copy_text(char destination[TMS_ERROR_NAME_BYTES], const char *source) {
    size_t length = source ? strlen(source) : 0;
    if (length >= TMS_ERROR_NAME_BYTES) length = whole_characters(source, TMS_ERROR_NAME_BYTES - 1);
    if (length) memcpy(destination, source, length);
    destination[length] = '\0';
}

__attribute__((format(printf, 2, 0))) static void append_list(tms_error_t *error, const char *format, va_list arguments) {
    size_t used = strlen(error->message), room = sizeof(error->message) - used;
    int wanted = vsnprintf(error->message + used, room, format, arguments);
    if (wanted < 0) error->message[used] = '\0';
    if (wanted > 0 && (size_t)wanted >= room) {
        error->message[whole_characters(error->message, sizeof(error->message) - 1)] = '\0';
    }
}

void tms_error_append(tms_error_t *error, const char *format, ...) {
    if (!error) return;
    va_list arguments;
    va_start(arguments, format);
    append_list(error, format, arguments);
    va_end(arguments);
}

void tms_error_append_bytes(tms_error_t *error, uint64_t bytes) {
    if (!error) return;
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    const double step = 1024.0;
    double amount = (double)bytes / step;
    if (amount < 1.0) {
        tms_error_append(error, "%" PRIu64 " bytes", bytes);
        return;
    }
    size_t unit = 0;
    while (amount >= step && unit + 1 < sizeof(units) / sizeof(units[0])) {
        amount /= step;
        unit++;
    }
    tms_error_append(error, "%.1f %s", amount, units[unit]);
}

void tms_error_append_free_space(tms_error_t *error, const char *path) {
    struct statvfs space;
    if (!path || statvfs(path, &space) != 0) return;
    tms_error_append(error, " The file system has ");
    tms_error_append_bytes(error, (uint64_t)space.f_bavail * space.f_frsize);
    tms_error_append(error, " of free space.");
}

static const char *name_of(const tms_error_t *error) {
    return error->result_name[0] ? error->result_name : "an unnamed error";
}

void tms_error_append_undoing(tms_error_t *error, const tms_error_t *undoing) {
    tms_error_append(error, " Undoing it failed, too: %s failed with %s (%d).", undoing->call, name_of(undoing),
                     (int)undoing->driver_result);
}

/* Fills the fields, and "<operation>: <what>" of the message. */
static void begin(tms_error_t *error, tms_status_t status, const tms_error_context_t *context) {
    tms_error_clear(error);
    error->status = status;
    if (context) {
        error->device = context->device;
        error->bytes = context->bytes;
        error->address = context->address;
        copy_text(error->operation, context->operation);
        copy_text(error->tag, context->tag);
    }
    tms_error_append(error, "%s%s%s", error->operation, error->operation[0] ? ": " : "", tms_status_text(status));
}

/* Appends ": <size>, device <d>, ..." for the known fields; returns the separator before a detail. */
static const char *append_facts(tms_error_t *error) {
    const char *separator = ": ", *end = ": ";
    if (error->bytes) {
        tms_error_append(error, "%s", separator);
        tms_error_append_bytes(error, error->bytes);
        separator = ", ", end = "; ";
    }
    if (error->device != TMS_NO_DEVICE) {
        tms_error_append(error, "%sdevice %d", separator, (int)error->device);
        separator = ", ", end = "; ";
    }
    if (error->address) {
        tms_error_append(error, "%saddress 0x%" PRIx64, separator, error->address);
        separator = ", ", end = "; ";
    }
    if (error->tag[0]) {
        tms_error_append(error, "%stag '%s'", separator, error->tag);
        end = "; ";
    }
    return end;
}

/* Ends the sentence and appends the advice. */
static void finish(tms_error_t *error, bool has_detail) {
    size_t length = strlen(error->message);
    if (length == 0 || !strchr(".?!", error->message[length - 1])) tms_error_append(error, ".");
    const char *advice = status_advice(error->status, has_detail);
    if (advice) tms_error_append(error, " %s", advice);
}

tms_status_t tms_error_set(tms_error_t *error, tms_status_t status, const tms_error_context_t *context, const char *format,
                           ...) {
    if (!error) return status;
    begin(error, status, context);
    const char *separator = append_facts(error);
    bool has_detail = format && format[0];
    if (has_detail) {
        va_list arguments;
        tms_error_append(error, "%s", separator);
        va_start(arguments, format);
        append_list(error, format, arguments);
        va_end(arguments);
    }
    finish(error, has_detail);
    return status;
}

tms_status_t tms_error_set_driver(tms_error_t *error, const tms_error_context_t *context, const char *call, int result,
                                  const char *name) {
    tms_status_t status = tms_status_from_driver(result);
    if (!error) return status;
    begin(error, status, context);
    error->driver_result = result;
    copy_text(error->call, call);
    copy_text(error->result_name, name);
    tms_error_append(error, "; %s failed with %s (%d)", error->call, name_of(error), result);
    append_facts(error);
    finish(error, false);
    return status;
}

tms_status_t tms_error_set_os(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                              const char *path) {
    return tms_error_set_system(error, os_error == ENOMEM ? TMS_OUT_OF_HOST_MEMORY : TMS_BACKUP_IO, context, call, os_error,
                                path);
}

tms_status_t tms_error_set_system(tms_error_t *error, tms_status_t status, const tms_error_context_t *context,
                                  const char *call, int os_error, const char *path) {
    if (!error) return status;
    begin(error, status, context);
    error->os_error = os_error;
    copy_text(error->call, call);
    tms_error_append(error, "; %s failed with errno %d (%s)", error->call, os_error, TMS_OS_TEXT(os_error));
    if (path) tms_error_append(error, " for '%s'", path);
    append_facts(error);
    finish(error, false);
    return status;
}
