/* Writes the arguments of operators as the texts that Chakra's IOInfo holds.
 *
 * texts(first_argument, arguments, first_tensor, tensors, strings, first_string): int64 arrays as buffers.
 *   arguments  rows of 4: is output, ids of type, shape, value (-1: absent; the value of tensors is in `tensors`)
 *   tensors    rows of 7: element of a list or -1, tensor id, storage id, offset, elements, bytes an element, device id
 *   strings    UTF-8 of all texts, one behind the other; `first_string` says where each begins and ends
 * Returns (ids, data, first): int32 ids, rows of 6 a node (values, shapes, types of inputs, then of outputs; -1 where a
 * node has no such arguments) of the distinct texts in `data`, of which `first` (int64) says where each begins and ends.
 * `operator_details.py` does the same in Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { ARGUMENT = 4, TENSOR = 7, PARTS = 3 };

typedef struct {
    char *data;
    size_t length, capacity;
    int failed;
} Text;

typedef struct {
    const int64_t *first_argument, *arguments, *first_tensor, *tensors, *first_string;
    const char *strings;
    int64_t nodes, num_strings;
    Text out, first, hashes;
    int32_t *slots, *ids;
    size_t num_slots;
} Work;

static void put(Text *text, const void *data, size_t length)
{
    if (text->length + length > text->capacity) {
        size_t capacity = text->capacity ? text->capacity * 2 : 1 << 16;
        while (capacity < text->length + length) capacity *= 2;
        char *grown = realloc(text->data, capacity);
        if (!grown) {
            text->failed = 1;
            return;
        }
        text->data = grown;
        text->capacity = capacity;
    }
    memcpy(text->data + text->length, data, length);
    text->length += length;
}

static void put_number(Text *text, int64_t number)
{
    char digits[24], *at = digits + sizeof digits;
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    do *--at = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0) *--at = '-';
    put(text, at, (size_t)(digits + sizeof digits - at));
}

static void put_string(const Work *work, Text *text, int64_t id)
{
    if (id >= 0 && id < work->num_strings)
        put(text, work->strings + work->first_string[id], (size_t)(work->first_string[id + 1] - work->first_string[id]));
}

static void put_value(const Work *work, Text *text, int64_t argument)
{
    int64_t begin = work->first_tensor[argument], end = work->first_tensor[argument + 1];
    if (begin == end) {
        put_string(work, text, work->arguments[argument * ARGUMENT + 3]);
        return;
    }
    int in_list = work->tensors[begin * TENSOR] >= 0;
    if (in_list) put(text, "[", 1);
    for (int64_t row = begin; row < end; row++) {
        const int64_t *tensor = work->tensors + row * TENSOR;
        put(text, row > begin ? ", [" : "[", row > begin ? 3 : 1);
        for (int i = 1; i < 6; i++) {
            put_number(text, tensor[i]);
            put(text, ", ", 2);
        }
        put(text, "'", 1);
        put_string(work, text, tensor[6]);
        put(text, "']", 2);
    }
    if (in_list) put(text, "]", 1);
}

static int grow_slots(Work *work)
{
    size_t count = work->num_slots ? work->num_slots * 2 : 1 << 12;
    int32_t *slots = malloc(count * sizeof *slots);
    if (!slots) return -1;
    memset(slots, 0xff, count * sizeof *slots);
    const uint64_t *hashes = (const uint64_t *)work->hashes.data;
    for (size_t id = 0; id < work->hashes.length / sizeof *hashes; id++) {
        size_t slot = hashes[id] & (count - 1);
        while (slots[slot] >= 0) slot = (slot + 1) & (count - 1);
        slots[slot] = (int32_t)id;
    }
    free(work->slots);
    work->slots = slots;
    work->num_slots = count;
    return 0;
}

/* The id of the text that was written from `begin` on; one that is known is taken away again. */
static int32_t intern(Work *work, size_t begin)
{
    size_t known = work->hashes.length / sizeof(uint64_t), length = work->out.length - begin;
    const char *text = work->out.data + begin;
    if ((2 * known + 2 > work->num_slots && grow_slots(work) < 0) || known >= INT32_MAX) {
        work->out.failed = 1;
        return -1;
    }
    uint64_t hash = 1469598103934665603u + length;
    size_t at = 0;
    for (; at + 8 <= length; at += 8) {
        uint64_t word;
        memcpy(&word, text + at, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    for (; at < length; at++) hash = (hash ^ (unsigned char)text[at]) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
    size_t slot = hash & (work->num_slots - 1);
    const uint64_t *hashes = (const uint64_t *)work->hashes.data;
    const int64_t *first = (const int64_t *)work->first.data;
    for (; work->slots[slot] >= 0; slot = (slot + 1) & (work->num_slots - 1)) {
        int32_t id = work->slots[slot];
        if (hashes[id] == hash && (size_t)(first[id + 1] - first[id]) == length &&
            !memcmp(work->out.data + first[id], text, length)) {
            work->out.length = begin;
            return id;
        }
    }
    int64_t end = (int64_t)work->out.length;
    put(&work->hashes, &hash, sizeof hash);
    put(&work->first, &end, sizeof end);
    return work->slots[slot] = (int32_t)known;
}

static void write_side(Work *work, int64_t begin, int64_t end, int32_t *ids)
{
    for (int part = 0; part < PARTS && begin < end; part++) {
        size_t start = work->out.length;
        put(&work->out, "[", 1);
        for (int64_t argument = begin; argument < end; argument++) {
            if (argument > begin) put(&work->out, ", ", 2);
            if (part == 0) put_value(work, &work->out, argument);
            else if (part == 1) put_string(work, &work->out, work->arguments[argument * ARGUMENT + 2]);
            else {
                put(&work->out, "'", 1);
                put_string(work, &work->out, work->arguments[argument * ARGUMENT + 1]);
                put(&work->out, "'", 1);
            }
        }
        put(&work->out, "]", 1);
        if (work->out.failed) return;
        ids[part] = intern(work, start);
    }
}

static int is_failed(const Work *work) { return work->out.failed || work->first.failed || work->hashes.failed; }

static void write_all(Work *work)
{
    int64_t zero = 0;
    put(&work->first, &zero, sizeof zero);
    memset(work->ids, 0xff, (size_t)work->nodes * 2 * PARTS * sizeof *work->ids);
    for (int64_t node = 0; node < work->nodes && !is_failed(work); node++) {
        int64_t begin = work->first_argument[node], end = work->first_argument[node + 1], middle = begin;
        while (middle < end && !work->arguments[middle * ARGUMENT]) middle++;
        write_side(work, begin, middle, work->ids + node * 2 * PARTS);
        write_side(work, middle, end, work->ids + node * 2 * PARTS + PARTS);
    }
}

/* Whether `first` rises from 0 to `end`, so that it can be followed blindly. */
static int is_rising(const int64_t *first, int64_t count, int64_t end)
{
    for (int64_t i = 0; i < count; i++)
        if (first[i] > first[i + 1]) return 0;
    return first[0] == 0 && first[count] == end;
}

static PyObject *texts(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer in[6];
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*", &in[0], &in[1], &in[2], &in[3], &in[4], &in[5])) return NULL;
    Work work = {.first_argument = in[0].buf, .arguments = in[1].buf, .first_tensor = in[2].buf, .tensors = in[3].buf,
                 .strings = in[4].buf, .first_string = in[5].buf};
    int64_t arguments = in[1].len / (int64_t)(ARGUMENT * sizeof(int64_t));
    work.nodes = in[0].len / (int64_t)sizeof(int64_t) - 1;
    work.num_strings = in[5].len / (int64_t)sizeof(int64_t) - 1;
    PyObject *result = NULL, *ids = NULL;
    if (work.nodes < 0 || work.num_strings < 0 || in[2].len / (int64_t)sizeof(int64_t) - 1 != arguments ||
        !is_rising(work.first_argument, work.nodes, arguments) ||
        !is_rising(work.first_tensor, arguments, in[3].len / (int64_t)(TENSOR * sizeof(int64_t))) ||
        !is_rising(work.first_string, work.num_strings, in[4].len))
        PyErr_SetString(PyExc_ValueError, "tables that do not fit together");
    else if ((ids = PyBytes_FromStringAndSize(NULL, work.nodes * 2 * PARTS * (Py_ssize_t)sizeof(int32_t)))) {
        work.ids = (int32_t *)PyBytes_AS_STRING(ids);
        Py_BEGIN_ALLOW_THREADS
        write_all(&work);
        Py_END_ALLOW_THREADS
        if (is_failed(&work)) PyErr_NoMemory();
        else
            result = Py_BuildValue("Oy#y#", ids, work.out.data ? work.out.data : "", (Py_ssize_t)work.out.length,
                                   work.first.data, (Py_ssize_t)work.first.length);
        Py_DECREF(ids);
    }
    free(work.out.data);
    free(work.first.data);
    free(work.hashes.data);
    free(work.slots);
    for (int i = 0; i < 6; i++) PyBuffer_Release(&in[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"texts", texts, METH_VARARGS, "Arguments of operators as texts; see the head of _arguments.c."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_arguments", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__arguments(void) { return PyModule_Create(&module); }
