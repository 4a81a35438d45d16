/* Scans the nodes of a PyTorch execution trace from JSON text straight into rows of numbers, without Python objects.
 *
 * scan(text, at): `at` is the place after the bracket that opens the list of nodes. Returns
 * (end, broken, nodes, arguments, tensors, extras, spans): `end` the place after the list or -1 if the text ends within
 * it; `broken` the places of nodes that are no valid JSON (int64); the rest rows, as bytes:
 *   nodes      int64[14]: id, ctrl_deps (parent), rf_id, fw_parent, seq_id, scope, tid, fw_tid, then ids of texts:
 *              op_schema, kernel_backend, kernel_file, tensor_range, integer_statistics, name
 *   arguments  int32[7]: node, is output, position, then ids of type, shape, strides, value (-1 where it is a tensor)
 *   tensors    int64[11]: argument, element of a list or -1, tensor id, storage id, offset, elements, bytes an element,
 *              then ids of device, dtype, shape, strides
 *   extras     int32[3]: node, ids of an attribute's name and value
 *   spans      int64[3]: begin and end in the text of each id, and 1 if it is the inside of a JSON string
 * Absent numbers are 0 (id, parent, seq_id: -1), absent texts -1. `slow_scanner.py` does the same in Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { NUMBERS = 8, TEXTS = 6, NODE_WIDTH = NUMBERS + TEXTS, NAME = NODE_WIDTH - 1 };
enum { ARGUMENT_WIDTH = 7, TENSOR_WIDTH = 11, EXTRA_WIDTH = 3, LISTS = 8, MAX_DEPTH = 64 };
enum { RAW = 0, INSIDE = 1 };

typedef struct {
    const char *text;
    size_t length;
} Key;

#define KEY(text) {text, sizeof text - 1}

static const Key MEMBERS[NODE_WIDTH] = {
    KEY("id"),    KEY("ctrl_deps"), KEY("rf_id"),     KEY("fw_parent"),      KEY("seq_id"),
    KEY("scope"), KEY("tid"),       KEY("fw_tid"),    KEY("op_schema"),      KEY("kernel_backend"),
    KEY("kernel_file"), KEY("tensor_range"), KEY("integer_statistics"), KEY("name"),
};
static const Key OLD_LISTS[LISTS] = {
    KEY("inputs"),  KEY("input_shapes"),  KEY("input_types"),  KEY("input_strides"),
    KEY("outputs"), KEY("output_shapes"), KEY("output_types"), KEY("output_strides"),
};
static const Key NEW_LISTS[LISTS / 2] = {KEY("values"), KEY("shapes"), KEY("types"), KEY("strides")};
static const Key ATTRS = KEY("attrs"), PARENT = KEY("parent"), ID = KEY("id"), THE_NAME = KEY("name"), VALUE = KEY("value");

typedef struct {
    char *data;
    size_t length, capacity;
} Rows;

typedef struct {
    int64_t begin, end, form;
} Span;

typedef const unsigned char *Place; /* NULL: there is nothing */

typedef struct {
    Place begin, end;
} Item;

typedef struct {
    const unsigned char *text, *end;
    Rows nodes, arguments, tensors, extras, spans, hashes, broken;
    Rows items[LISTS]; /* begin and end of each item of the lists of the current node */
    int32_t *slots;
    size_t num_slots;
    int failed; /* out of memory */
} Scan;

static void *add(Scan *scan, Rows *rows, size_t bytes)
{
    if (rows->length + bytes > rows->capacity) {
        size_t capacity = rows->capacity ? rows->capacity * 2 : 1 << 12;
        char *data = realloc(rows->data, capacity);
        if (!data) {
            scan->failed = 1;
            return NULL;
        }
        rows->data = data;
        rows->capacity = capacity;
    }
    rows->length += bytes;
    return rows->data + rows->length - bytes;
}

static inline Place space(Place at, Place end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at;
}

/* The quote that closes the string whose opening quote is at `at`. */
static inline Place string_end(Place at, Place end)
{
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    at++;
    while (at < end) {
        while (at + 8 <= end) {
            uint64_t word, quotes, escapes;
            memcpy(&word, at, 8);
            quotes = word ^ (ones * '"');
            escapes = word ^ (ones * '\\');
            if ((((quotes - ones) & ~quotes) | ((escapes - ones) & ~escapes)) & tops) break;
            at += 8;
        }
        Place stop = end - at > 8 ? at + 8 : end;
        while (at < stop) {
            if (*at == '"') return at;
            at += *at == '\\' ? 2 : 1;
        }
    }
    return NULL;
}

static inline int ends_scalar(unsigned char c)
{
    return c <= '"' || c == ',' || c == ':' || c == '[' || c == ']' || c == '{' || c == '}';
}

/* The place after the JSON value at `at`; NULL if it is not complete. */
static Place value_end(Place at, Place end)
{
    int depth = 0;
    while (at < end) {
        unsigned char c = *at;
        if (c == '"') {
            at = string_end(at, end);
            if (!at) return NULL;
            at++;
        } else if (c == '[' || c == '{') {
            depth++;
            at++;
            continue;
        } else if (c == ']' || c == '}') {
            if (--depth < 0) return NULL;
            at++;
        } else if (c == ',' || c == ':' || c <= ' ') {
            if (depth == 0) return NULL;
            at++;
            continue;
        } else {
            do at++;
            while (at < end && !ends_scalar(*at));
        }
        if (depth == 0) return at;
    }
    return NULL;
}

/* A whole number; one above 2**63 keeps its lowest 64 bits. */
static int integer(Place at, Place end, int64_t *number)
{
    int negative = at < end && *at == '-';
    if (negative) at++;
    Place first = at;
    uint64_t value = 0;
    while (at < end && *at >= '0' && *at <= '9') value = value * 10 + (*at++ - '0');
    if (at == first || at - first > 20 || (at < end && (*at == '.' || *at == 'e' || *at == 'E'))) return 0;
    *number = (int64_t)(negative ? 0 - value : value);
    return 1;
}

static inline int is_key(Place at, Place end, const Key *key)
{
    return (size_t)(end - at) == key->length && *at == (unsigned char)*key->text && !memcmp(at, key->text, key->length);
}

static int key_of(Place at, Place end, const Key *keys, int count, int guess)
{
    if (guess >= 0 && guess < count && is_key(at, end, &keys[guess])) return guess;
    for (int key = 0; key < count; key++)
        if (is_key(at, end, &keys[key])) return key;
    return -1;
}

static int grow_slots(Scan *scan)
{
    size_t count = scan->num_slots ? scan->num_slots * 2 : 1 << 13;
    int32_t *slots = malloc(count * sizeof *slots);
    if (!slots) return -1;
    memset(slots, 0xff, count * sizeof *slots);
    const uint64_t *hashes = (const uint64_t *)scan->hashes.data;
    for (size_t id = 0; id < scan->hashes.length / sizeof *hashes; id++) {
        size_t slot = hashes[id] & (count - 1);
        while (slots[slot] >= 0) slot = (slot + 1) & (count - 1);
        slots[slot] = (int32_t)id;
    }
    free(scan->slots);
    scan->slots = slots;
    scan->num_slots = count;
    return 0;
}

/* The id of a piece of the text; equal pieces of one form have one id. */
static int32_t intern(Scan *scan, Place begin, Place end, int form)
{
    size_t length = (size_t)(end - begin), known = scan->hashes.length / sizeof(uint64_t);
    if (2 * known + 2 > scan->num_slots && grow_slots(scan) < 0) {
        scan->failed = 1;
        return -1;
    }
    uint64_t hash = 1469598103934665603u + (uint64_t)form + length;
    Place at = begin;
    for (; at + 8 <= end; at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    for (; at < end; at++) hash = (hash ^ *at) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
    size_t slot = hash & (scan->num_slots - 1);
    const uint64_t *hashes = (const uint64_t *)scan->hashes.data;
    const Span *spans = (const Span *)scan->spans.data;
    for (; scan->slots[slot] >= 0; slot = (slot + 1) & (scan->num_slots - 1)) {
        int32_t id = scan->slots[slot];
        const Span *span = spans + id;
        if (hashes[id] == hash && (size_t)(span->end - span->begin) == length && span->form == form &&
            !memcmp(scan->text + span->begin, begin, length))
            return id;
    }
    uint64_t *new_hash = add(scan, &scan->hashes, sizeof *new_hash);
    Span *new_span = add(scan, &scan->spans, sizeof *new_span);
    if (!new_hash || !new_span || known >= INT32_MAX) {
        scan->failed = 1;
        return -1;
    }
    *new_hash = hash;
    *new_span = (Span){begin - scan->text, end - scan->text, form};
    return scan->slots[slot] = (int32_t)known;
}

/* The first item of the list at `at`; NULL where there is no list or no item. */
static Place into(Place at, Place end)
{
    if (!at || at >= end || *at != '[') return NULL;
    at = space(at + 1, end);
    return at >= end || *at == ']' ? NULL : at;
}

/* The item after the one that ends at `stop`; NULL where there is none. */
static Place after(Place stop, Place end)
{
    if (!stop) return NULL;
    stop = space(stop, end);
    return stop < end && *stop == ',' ? space(stop + 1, end) : NULL;
}

static Place over(Place at, Place end) { return at ? after(value_end(at, end), end) : NULL; }

static int32_t raw(Scan *scan, Place at, Place stop) { return at && stop ? intern(scan, at, stop, RAW) : -1; }

/* The end of one type in a list of types: a comma or square bracket outside of other brackets. */
static Place type_end(Place at, Place end)
{
    int depth = 0;
    for (; at < end; at++) {
        if (*at == '(' || *at == '<') depth++;
        else if (*at == ')' || *at == '>') depth--;
        else if (depth <= 0 && (*at == ',' || *at == ']' || *at == '[')) break;
    }
    return at;
}

static int is_tensor(Place at, Place end) { return end - at > 8 && !memcmp(at, "Tensor(", 7); }

/* A row for `[id, storage, offset, elements, bytes, "device"]` at `at`; 0 if there is no such thing. */
static int add_tensor(Scan *scan, Place at, Place end, int32_t shape, int32_t strides, Place type, Place stop, int64_t element)
{
    int64_t numbers[5];
    Place item = into(at, end);
    for (int i = 0; i < 5; i++) {
        if (!item || !integer(item, end, &numbers[i])) return 0;
        item = over(item, end);
    }
    if (!item || *item != '"') return 0;
    Place close = string_end(item, end);
    if (!close) return 0;
    int64_t *row = add(scan, &scan->tensors, TENSOR_WIDTH * sizeof *row);
    if (!row) return 0;
    row[0] = (int64_t)(scan->arguments.length / (ARGUMENT_WIDTH * sizeof(int32_t)));
    row[1] = element;
    memcpy(row + 2, numbers, sizeof numbers);
    row[7] = intern(scan, item + 1, close, INSIDE);
    row[8] = intern(scan, type + 7, stop - 1, INSIDE);
    row[9] = shape;
    row[10] = strides;
    return 1;
}

static int32_t raw_at(Scan *scan, Place at, Place end) { return at ? raw(scan, at, value_end(at, end)) : -1; }

/* Rows for all tensors in one argument that is a list; returns their number. The value, its shape and its strides
 * are lists of the same nesting, and so is the type, as in GenericList[Tensor(float),Tensor(float)]; the four are walked
 * side by side. */
static int add_tensors(Scan *scan, Place value, Place end, Place shape, Place strides, Place type, Place types_end)
{
    Place outer_shape[MAX_DEPTH], outer_strides[MAX_DEPTH];
    int depth = 0, found = 0;
    int64_t element = 0;
    while (value) {
        Place stop = type_end(type, types_end);
        if (stop < types_end && *stop == '[' && *value == '[' && depth < MAX_DEPTH) {
            Place inner = into(value, end);
            type = stop + 1;
            if (inner) {
                outer_shape[depth] = shape;
                outer_strides[depth++] = strides;
                value = inner;
                shape = into(shape, end);
                strides = into(strides, end);
                continue;
            }
            stop = type < types_end && *type == ']' ? type + 1 : type; /* an empty list */
        } else {
            if (is_tensor(type, types_end))
                found += add_tensor(scan, value, end, raw_at(scan, shape, end), raw_at(scan, strides, end), type, stop,
                                    element);
            element++;
        }
        /* On to the next item, out of as many lists as end here. */
        type = stop;
        Place next = value_end(value, end);
        for (;;) {
            if (!next || depth == 0) return found;
            next = space(next, end);
            if (next >= end) return found;
            if (*next == ',') break;
            if (*next != ']') return found;
            depth--;
            shape = outer_shape[depth];
            strides = outer_strides[depth];
            if (type < types_end && *type == ']') type++;
            next++;
        }
        value = space(next + 1, end);
        shape = over(shape, end);
        strides = over(strides, end);
        if (type < types_end && *type == ',') type++;
    }
    return found;
}

/* Where the items of the list at `at` begin and end; the place after it, NULL if it is no whole list. */
static Place list_items(Scan *scan, Rows *items, Place at, Place end)
{
    items->length = 0;
    at = space(at + 1, end);
    while (at < end && *at != ']') {
        Item *item = add(scan, items, sizeof *item);
        Place stop = value_end(at, end);
        if (!stop || !item) return NULL;
        *item = (Item){at, stop};
        at = space(stop, end);
        if (at < end && *at == ',') at = space(at + 1, end);
        else if (at >= end || *at != ']') return NULL;
    }
    return at < end ? at + 1 : NULL;
}

static Item item_at(const Rows *items, size_t at)
{
    return at < items->length / sizeof(Item) ? ((const Item *)items->data)[at] : (Item){NULL, NULL};
}

/* Rows for the inputs or the outputs of a node. */
static void add_arguments(Scan *scan, Place end, const Rows *lists, int is_output)
{
    int32_t node = (int32_t)(scan->nodes.length / (NODE_WIDTH * sizeof(int64_t))) - 1;
    size_t count = lists[0].length / sizeof(Item);
    for (size_t position = 0; position < count && !scan->failed; position++) {
        int32_t row[ARGUMENT_WIDTH] = {node, is_output, (int32_t)position, -1, -1, -1, -1};
        Item value = item_at(&lists[0], position), shape = item_at(&lists[1], position);
        Item type = item_at(&lists[2], position), strides = item_at(&lists[3], position);
        int tensors = 0;
        row[4] = raw(scan, shape.begin, shape.end);
        row[5] = raw(scan, strides.begin, strides.end);
        if (type.begin && *type.begin == '"') {
            Place kind = type.begin + 1, stop = type.end - 1;
            row[3] = intern(scan, kind, stop, INSIDE);
            if (is_tensor(kind, stop))
                tensors = add_tensor(scan, value.begin, end, row[4], row[5], kind, type_end(kind, stop), -1);
            else if (value.begin && *value.begin == '[')
                tensors = add_tensors(scan, value.begin, end, shape.begin, strides.begin, kind, stop);
        }
        if (!tensors) row[6] = raw(scan, value.begin, value.end);
        int32_t *kept = add(scan, &scan->arguments, sizeof row);
        if (kept) memcpy(kept, row, sizeof row);
    }
}

/* The key at `*at` and its value: 0 if there is no further member, -1 if it is broken. */
static int member(Place *at, Place end, Place *key, Place *key_end, Place *value)
{
    if (*at >= end || **at != '"') return 0;
    Place close = string_end(*at, end);
    if (!close) return -1;
    Place colon = space(close + 1, end);
    if (colon >= end || *colon != ':') return -1;
    *key = *at + 1;
    *key_end = close;
    *value = space(colon + 1, end);
    return *value < end ? 1 : -1;
}

/* What follows a member or item that ends at `stop`: the next one, or the bracket that closes; NULL for anything else. */
static Place next_member(Place stop, Place end)
{
    stop = space(stop, end);
    if (stop < end && *stop == ',') return space(stop + 1, end);
    return stop < end && (*stop == '}' || *stop == ']') ? stop : NULL;
}

static Place closed(Place at, Place end, char bracket)
{
    return at < end && *at == (unsigned char)bracket ? at + 1 : NULL;
}

/* Store a number or text, one of another kind stays unset; the place after it, NULL if it is not whole. */
static Place set_member(Scan *scan, int64_t *node, int key, Place at, Place end)
{
    if (*at == '"') {
        Place close = string_end(at, end);
        if (!close) return NULL;
        if (key >= NUMBERS) node[key] = intern(scan, at + 1, close, INSIDE);
        return close + 1;
    }
    Place stop = value_end(at, end);
    if (!stop || key >= NUMBERS) return stop;
    if (*at == '[') at = into(at, end); /* a list of parents: the first */
    if (at) integer(at, end, &node[key]);
    return stop;
}

/* One {"name": ..., "type": ..., "value": ...}. */
static Place attribute(Scan *scan, int64_t *node, Place at, Place end, int *key)
{
    Place name = NULL, name_end = NULL, value = NULL, value_stop = NULL, word, word_end, found;
    int state;
    at = space(at + 1, end);
    while ((state = member(&at, end, &word, &word_end, &found)) > 0) {
        Place stop = value_end(found, end);
        if (!stop) return NULL;
        if (is_key(word, word_end, &THE_NAME) && *found == '"') {
            name = found + 1;
            name_end = stop - 1;
        } else if (is_key(word, word_end, &VALUE)) {
            value = found;
            value_stop = stop;
        }
        if (!(at = next_member(stop, end))) return NULL;
    }
    if (state < 0 || !(at = closed(at, end, '}'))) return NULL;
    if (!name || !value) return at;
    *key = key_of(name, name_end, MEMBERS, NODE_WIDTH, *key + 1);
    if (*key > 0 && *key < NAME) {
        set_member(scan, node, *key, value, value_stop);
        return at;
    }
    int32_t row[EXTRA_WIDTH];
    row[0] = (int32_t)(scan->nodes.length / (NODE_WIDTH * sizeof(int64_t)));
    row[1] = intern(scan, name, name_end, INSIDE);
    row[2] = intern(scan, value, value_stop, RAW);
    int32_t *kept = add(scan, &scan->extras, sizeof row);
    if (kept) memcpy(kept, row, sizeof row);
    return at;
}

static Place attributes(Scan *scan, int64_t *node, Place at, Place end)
{
    int key = 1;
    at = space(at + 1, end);
    while (at < end && *at == '{') {
        at = attribute(scan, node, at, end, &key);
        if (!at || !(at = next_member(at, end))) return NULL;
    }
    return closed(at, end, ']');
}

/* The lists in an object of inputs or outputs. */
static Place argument_lists(Scan *scan, Place at, Place end, Rows *lists)
{
    Place word, word_end, value;
    int state, key = -1;
    at = space(at + 1, end);
    while ((state = member(&at, end, &word, &word_end, &value)) > 0) {
        key = key_of(word, word_end, NEW_LISTS, LISTS / 2, key + 1);
        at = key >= 0 && *value == '[' ? list_items(scan, lists + key, value, end) : value_end(value, end);
        if (!at || !(at = next_member(at, end))) return NULL;
    }
    return state < 0 ? NULL : closed(at, end, '}');
}

/* One node; the place after it, NULL if it is broken. */
static Place scan_node(Scan *scan, Place at, Place end)
{
    int64_t node[NODE_WIDTH] = {-1, -1, 0, 0, -1, 0, 0, 0, -1, -1, -1, -1, -1, -1};
    Place word, word_end, value, stop;
    int state, key = -1;
    for (int list = 0; list < LISTS; list++) scan->items[list].length = 0;
    at = space(at + 1, end);
    while ((state = member(&at, end, &word, &word_end, &value)) > 0) {
        key = key_of(word, word_end, MEMBERS, NODE_WIDTH, key + 1);
        if (key < 0 && is_key(word, word_end, &PARENT)) key = 1;
        int list = key < 0 ? key_of(word, word_end, OLD_LISTS, LISTS, -1) : -1;
        if (key >= 0) stop = set_member(scan, node, key, value, end);
        else if ((list == 0 || list == LISTS / 2) && *value == '{') stop = argument_lists(scan, value, end, scan->items + list);
        else if (*value == '[' && is_key(word, word_end, &ATTRS)) stop = attributes(scan, node, value, end);
        else if (list >= 0 && *value == '[') stop = list_items(scan, scan->items + list, value, end);
        else stop = value_end(value, end);
        if (!stop || !(at = next_member(stop, end))) return NULL;
    }
    if (state < 0 || !(stop = closed(at, end, '}')) || node[0] < 0 || node[NAME] < 0) return NULL;
    int64_t *kept = add(scan, &scan->nodes, sizeof node);
    if (!kept) return NULL;
    memcpy(kept, node, sizeof node);
    add_arguments(scan, stop, scan->items, 0);
    add_arguments(scan, stop, scan->items + LISTS / 2, 1);
    return stop;
}

/* The next place from `at` on where a node seems to begin, in the newer or the older order of members. */
static Place next_node(Place at, Place end)
{
    for (; (at = memchr(at, '{', (size_t)(end - at))); at++) {
        Place quote = space(at + 1, end), word, word_end, value;
        if (member(&quote, end, &word, &word_end, &value) <= 0) continue;
        if (is_key(word, word_end, &ID)) return at;
        if (!is_key(word, word_end, &THE_NAME) || *value != '"') continue;
        Place close = string_end(value, end);
        quote = close ? after(close + 1, end) : NULL;
        if (quote && member(&quote, end, &word, &word_end, &value) > 0 && is_key(word, word_end, &ID)) return at;
    }
    return NULL;
}

/* All nodes from `at` on; the place after the list, NULL if the text ends within it. */
static Place scan_nodes(Scan *scan, Place at)
{
    Place end = scan->end;
    while (!scan->failed) {
        at = space(at, end);
        if (at < end && *at == ',') at = space(at + 1, end);
        if (at >= end) return NULL;
        if (*at == ']') return at + 1;
        size_t extras = scan->extras.length;
        Place stop = *at == '{' ? scan_node(scan, at, end) : NULL;
        if (!stop) {
            scan->extras.length = extras;
            int64_t *place = add(scan, &scan->broken, sizeof *place);
            if (place) *place = at - scan->text;
            stop = at + 1 < end ? next_node(at + 1, end) : NULL;
            if (!stop) return NULL;
        }
        at = stop;
    }
    return NULL;
}

static PyObject *bytes_of(const Rows *rows)
{
    return PyBytes_FromStringAndSize(rows->data, (Py_ssize_t)rows->length);
}

static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer text;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "y*n", &text, &at)) return NULL;
    if (at < 0 || at > text.len) {
        PyBuffer_Release(&text);
        PyErr_SetString(PyExc_ValueError, "the place is not in the text");
        return NULL;
    }
    Scan state = {.text = text.buf};
    state.end = state.text + text.len;
    Place end;
    Py_BEGIN_ALLOW_THREADS
    end = scan_nodes(&state, state.text + at);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    Rows *rows[] = {&state.broken, &state.nodes, &state.arguments, &state.tensors, &state.extras, &state.spans};
    if (state.failed) PyErr_NoMemory();
    else
        result = Py_BuildValue("nNNNNNN", end ? (Py_ssize_t)(end - state.text) : -1, bytes_of(rows[0]), bytes_of(rows[1]),
                               bytes_of(rows[2]), bytes_of(rows[3]), bytes_of(rows[4]), bytes_of(rows[5]));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) free(rows[i]->data);
    for (int list = 0; list < LISTS; list++) free(state.items[list].data);
    free(state.hashes.data);
    free(state.slots);
    PyBuffer_Release(&text);
    return result;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS, "scan(text, at): the nodes of an execution trace as rows; see the head of _scanner.c."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scanner", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scanner(void) { return PyModule_Create(&module); }
