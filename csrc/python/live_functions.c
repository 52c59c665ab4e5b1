/* kept_allocations, knows_blocks and live_ranges: the live bytes of a pause, out of torch's snapshot.
 *
 * The snapshot has a dict for every block, often thousands of them, and a pause waits until they are read. So C code reads
 * them. */
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "copies.h"
#include "functions.h"
#include "module_state.h"

/* ---- kept_allocations ---- */

/* A managed allocation that a pause may keep. */
typedef struct kept {
    uint64_t address, bytes, reserved_bytes;
} kept_t;
enum { KEPT_NUMBERS = 3 };
_Static_assert(sizeof(kept_t) == KEPT_NUMBERS * sizeof(uint64_t), "an array of them is an array of numbers");

static int by_address(const void *left, const void *right) {
    uint64_t one = ((const kept_t *)left)->address, other = ((const kept_t *)right)->address;
    return (one > other) - (one < other);
}

static int by_tag(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

/* Whether a selection, whose tags are sorted, contains the tag. */
static bool is_selected(const tms_selection_t *selection, const char *tag) {
    return !selection->tags || bsearch(&tag, selection->tags, selection->tag_count, sizeof tag, by_tag);
}

/* Writes to `kept` the allocations that a pause may keep, in order of their addresses. Returns their number. */
static size_t keep(kept_t *kept, const tms_segment_info_t *rows, size_t count, const tms_selection_t *selection,
                   bool every_backup) {
    size_t found = 0;

    for (const tms_segment_info_t *row = rows; row < rows + count; row++) {
        if (!every_backup && row->backup == TMS_BACKUP_NONE) continue;
        if (is_selected(selection, row->tag)) kept[found++] = (kept_t){row->address, row->bytes, row->reserved_bytes};
    }
    qsort(kept, found, sizeof *kept, by_address);
    return found;
}

PyObject *tms_py_kept_allocations(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"kept_allocations", 2, 2, {"tags", "every_backup"}};
    const tms_api_t *api = tms_py_api(module);
    tms_selection_t selection = {0};
    tms_segment_info_t *rows;
    kept_t *kept = NULL;
    PyObject *result = NULL;
    bool every_backup = false;
    size_t count = 0;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_bool(&call, 1, &every_backup) ||
        !tms_py_get_tags(&call, 0, &selection))
        return NULL;
    if (selection.tags) qsort((void *)selection.tags, selection.tag_count, sizeof *selection.tags, by_tag);
    rows = tms_py_copy_segments(api, &count);
    if (rows) kept = PyMem_Calloc(count + 1, sizeof *kept);
    if (kept) {
        count = keep(kept, rows, count, &selection, every_backup);
        result = PyBytes_FromStringAndSize((const char *)kept, (Py_ssize_t)(count * sizeof *kept));
    } else if (rows) {
        PyErr_NoMemory();
    }
    PyMem_Free(kept);
    free(rows);
    PyMem_Free((void *)selection.tags);
    return result;
}

/* ---- torch's snapshot ---- */

/* Keys of a segment and of a block, and the state of a block without a tensor. In every other state a block may be in use:
 * by a tensor, or by a stream. */
typedef enum word { ADDRESS, TOTAL_SIZE, POOL, STREAM, BLOCKS, SIZE, REQUESTED, STATE, FREE, WORDS } word_t;

/* The objects that a call of this file uses for its look-ups. */
typedef struct reader {
    PyObject *words[WORDS]; /* references */
    PyObject *pools;        /* the set of pools of which torch reports the blocks correctly */
    bool default_stream_only;
} reader_t;

static void close_reader(reader_t *reader) {
    for (int word = 0; word < WORDS; word++) Py_CLEAR(reader->words[word]);
}

/* Returns false with an exception set; there is then nothing to close. */
static bool open_reader(reader_t *reader, PyObject *pools) {
    static const char *const words[WORDS] = {"address", "total_size",     "segment_pool_id", "stream",  "blocks",
                                             "size",    "requested_size", "state",           "inactive"};

    if (!PyAnySet_Check(pools)) {
        PyErr_Format(PyExc_TypeError, "pools must be a set, not %R", (PyObject *)Py_TYPE(pools));
        return false;
    }
    reader->pools = pools;
    for (int word = 0; word < WORDS; word++) reader->words[word] = PyUnicode_InternFromString(words[word]);
    if (!PyErr_Occurred()) return true;
    close_reader(reader);
    return false;
}

/* Returns a borrowed reference, or NULL if there is no such item or an exception is set. */
static PyObject *find_item(const reader_t *reader, PyObject *dict, word_t word) {
    if (PyDict_Check(dict)) return PyDict_GetItemWithError(dict, reader->words[word]);
    PyErr_Format(PyExc_TypeError, "a segment or block of the snapshot must be a dict, not %R", (PyObject *)Py_TYPE(dict));
    return NULL;
}

/* Returns a borrowed reference, or NULL with an exception set. */
static PyObject *get_item(const reader_t *reader, PyObject *dict, word_t word) {
    PyObject *item = find_item(reader, dict, word);

    if (!item && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, reader->words[word]);
    return item;
}

static bool get_number(const reader_t *reader, PyObject *dict, word_t word, uint64_t *number) {
    PyObject *item = get_item(reader, dict, word);

    if (!item) return false;
    *number = PyLong_AsUnsignedLongLong(item);
    return *number != (uint64_t)-1 || !PyErr_Occurred();
}

/* 1 or 0, or -1 with an exception set. */
static int is_on_default_stream(const reader_t *reader, PyObject *segment) {
    PyObject *stream = find_item(reader, segment, STREAM);
    int overflow = 0;

    if (!stream) return PyErr_Occurred() ? -1 : 0;
    /* The legacy default stream, which cannot be captured, has number 0. */
    long long number = PyLong_AsLongLongAndOverflow(stream, &overflow);
    return PyErr_Occurred() ? -1 : number == 0;
}

/* 1 or 0, or -1 with an exception set. */
static int knows_blocks(const reader_t *reader, PyObject *segment) {
    PyObject *pool = find_item(reader, segment, POOL);

    if (!pool) return PyErr_Occurred() ? -1 : 0;
    int listed = PySet_Contains(reader->pools, pool);
    return listed == 1 && reader->default_stream_only ? is_on_default_stream(reader, segment) : listed;
}

PyObject *tms_py_knows_blocks(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"knows_blocks", 3, 3, {"segment", "pools", "default_stream_only"}};
    reader_t reader = {0};
    tms_py_call_t call;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) ||
        !tms_py_get_bool(&call, 2, &reader.default_stream_only) || !open_reader(&reader, call.values[1]))
        return NULL;
    int known = knows_blocks(&reader, call.values[0]);
    close_reader(&reader);
    return known < 0 ? NULL : PyBool_FromLong(known);
}

/* ---- live_ranges ---- */

/* A growing array of numbers. */
typedef struct numbers {
    uint64_t *values;
    size_t count, capacity;
} numbers_t;

/* Returns false with an exception set if memory is short. */
static bool push(numbers_t *numbers, uint64_t value) {
    enum { FIRST_CAPACITY = 1024 };

    if (numbers->count == numbers->capacity) {
        size_t capacity = numbers->capacity ? 2 * numbers->capacity : FIRST_CAPACITY;
        uint64_t *values = PyMem_Realloc(numbers->values, capacity * sizeof *values);
        if (!values) {
            PyErr_NoMemory();
            return false;
        }
        numbers->values = values;
        numbers->capacity = capacity;
    }
    numbers->values[numbers->count++] = value;
    return true;
}

static PyObject *bytes_of(const numbers_t *numbers) {
    return PyBytes_FromStringAndSize((const char *)numbers->values, (Py_ssize_t)(numbers->count * sizeof *numbers->values));
}

/* The live blocks of the kept allocations, in the form of tms_live_t. */
typedef struct blocks {
    numbers_t addresses, ranges, used;
} blocks_t;

/* Appends a live block of `size` bytes. The program has requested all of it if this torch does not say how much. */
static bool add_block(const reader_t *reader, PyObject *block, uint64_t address, uint64_t size, blocks_t *live) {
    PyObject *item = find_item(reader, block, REQUESTED);
    const uint64_t requested = item ? PyLong_AsUnsignedLongLong(item) : size;

    if (PyErr_Occurred()) return false;
    return push(&live->ranges, address) && push(&live->ranges, address + size) &&
           push(&live->used, address + (requested > 0 && requested < size ? requested : size));
}

/* Appends the live blocks of a segment. Its blocks lie in order and without gaps. */
static bool add_blocks(const reader_t *reader, PyObject *segment, uint64_t address, blocks_t *live) {
    PyObject *blocks = get_item(reader, segment, BLOCKS);

    if (!blocks) return false;
    if (!PyList_Check(blocks)) {
        PyErr_Format(PyExc_TypeError, "the blocks of a segment must be a list, not %R", (PyObject *)Py_TYPE(blocks));
        return false;
    }
    for (Py_ssize_t index = 0; index < PyList_Size(blocks); index++) {
        PyObject *block = PyList_GetItem(blocks, index);
        PyObject *state = get_item(reader, block, STATE);
        uint64_t size;
        if (!state || !get_number(reader, block, SIZE, &size)) return false;
        int is_free = PyObject_RichCompareBool(state, reader->words[FREE], Py_EQ);
        if (is_free < 0 || (!is_free && !add_block(reader, block, address, size, live))) return false;
        address += size;
    }
    return true;
}

/* Sets `segments[i]` to the segment of kept[i], if torch lists one and knows which of its blocks are live. The references
 * are borrowed. */
static bool match(const reader_t *reader, PyObject *list, const kept_t *kept, size_t count, PyObject **segments) {
    for (Py_ssize_t index = 0; index < PyList_Size(list); index++) {
        PyObject *segment = PyList_GetItem(list, index);
        kept_t place = {0};
        uint64_t size;
        if (!get_number(reader, segment, ADDRESS, &place.address) || !get_number(reader, segment, TOTAL_SIZE, &size))
            return false;
        const kept_t *allocation = bsearch(&place, kept, count, sizeof *kept, by_address);
        /* A segment is one managed allocation. If the sizes differ, the allocation at this address is not torch's. */
        if (!allocation || size < allocation->bytes || size > allocation->reserved_bytes) continue;
        int known = knows_blocks(reader, segment);
        if (known < 0) return false;
        if (known) segments[allocation - kept] = segment;
    }
    return true;
}

static PyObject *live_of(const kept_t *kept, size_t count, PyObject *const *segments, const reader_t *reader) {
    blocks_t live = {{0}, {0}, {0}};
    PyObject *result = NULL;
    bool complete = true;

    for (size_t index = 0; complete && index < count; index++) {
        if (!segments[index]) continue;
        complete =
            push(&live.addresses, kept[index].address) && add_blocks(reader, segments[index], kept[index].address, &live);
    }
    if (complete) result = Py_BuildValue("(NNN)", bytes_of(&live.addresses), bytes_of(&live.ranges), bytes_of(&live.used));
    PyMem_Free(live.addresses.values);
    PyMem_Free(live.ranges.values);
    PyMem_Free(live.used.values);
    return result;
}

PyObject *tms_py_live_ranges(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"live_ranges", 4, 4, {"segments", "kept", "pools", "default_stream_only"}};
    reader_t reader = {0};
    PyObject **segments, *listed, *result = NULL;
    const kept_t *kept;
    size_t count = 0;
    tms_py_call_t call;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords)) return NULL;
    if (!tms_py_get_list(&call, 0, &listed)) return NULL;
    kept = (const kept_t *)(const void *)tms_py_numbers(call.values[1], KEPT_NUMBERS, "live_ranges(): kept must be", &count);
    if (!kept || !tms_py_get_bool(&call, 3, &reader.default_stream_only) || !open_reader(&reader, call.values[2]))
        return NULL;
    segments = PyMem_Calloc(count + 1, sizeof(PyObject *));
    if (!segments)
        PyErr_NoMemory();
    else if (match(&reader, listed, kept, count, segments))
        result = live_of(kept, count, segments, &reader);
    PyMem_Free(segments);
    close_reader(&reader);
    return result;
}
