/* Scans the JSON text of many trace events straight into columns, without one Python object per event.
 *
 * Scanner(event_fields, args_fields) takes two lists of (name, kind) and numbers the fields in that order, first
 * the members of an event, then the members of its "args". Kinds:
 *   0 TOKEN    any JSON value, interned: an int32 id of its text as written (strings with their quotes)
 *   1 INTEGER  int64
 *   2 NUMBER   float64
 *   3 TIME     microseconds with up to three decimals -> int64 nanoseconds, exactly
 * scan(data) reads `{...},{...},...` and returns (number of events, columns, odd, new_tokens). `columns` holds for each
 * field the int32 rows in which it occurs and its values there, both as bytes: most members occur in few events, and
 * fresh memory costs more than scanning. `odd` lists (row, field, offset, length) of values that are no plain number,
 * which the caller converts; `new_tokens` are the texts of ids not handed out before. scan returns None if the text
 * is not a list of whole, valid objects, or holds one that only a slower reader understands. The GIL is released
 * while scanning.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { TOKEN = 0, INTEGER = 1, NUMBER = 2, TIME = 3 };
enum { MAX_FIELDS = 96, SLOTS = 512, MAX_DEPTH = 64 };

typedef struct {
    uint64_t hash;
    int64_t offset; /* into the arena; -1 marks a free slot */
    int32_t length, id;
} Slot;

typedef struct {
    char *data;
    size_t size, capacity;
} Bytes;

typedef struct {
    char name[48];
    int length, kind;
    Bytes rows, values; /* of the current scan; their memory is kept for the next one */
} Field;

typedef struct {
    PyObject_HEAD
    Field fields[MAX_FIELDS];
    int num_fields;
    int16_t index[2][SLOTS];    /* open hash of field names: of the event, of its args */
    Slot *slots;
    size_t num_slots, num_tokens, num_reported;
    Bytes arena, ends; /* texts of all tokens, and int64 end of each */
    Bytes odd;
    int scanning;
} Scanner;

typedef struct {
    Scanner *scanner;
    const char *start, *end;
    int32_t num_rows;
    int out_of_memory;
} Scan;

static int reserve(Bytes *bytes, size_t more)
{
    if (bytes->size + more <= bytes->capacity) return 1;
    size_t capacity = bytes->capacity ? bytes->capacity : 1 << 12;
    while (capacity < bytes->size + more) capacity *= 2;
    char *data = realloc(bytes->data, capacity);
    if (!data) return 0;
    bytes->data = data;
    bytes->capacity = capacity;
    return 1;
}

static int append(Bytes *bytes, const void *data, size_t size)
{
    if (!reserve(bytes, size)) return 0;
    memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
    return 1;
}

/* -- names of fields ----------------------------------------------------------------------------------------- */

/* Four characters and the length tell our field names apart well enough, and cost no loop. */
static inline unsigned name_hash(const char *name, int length)
{
    if (!length) return 0;
    const unsigned char *text = (const unsigned char *)name;
    unsigned hash = (unsigned)length * 0x9E3779B1u ^ text[0] * 0x85EBCA6Bu;
    hash ^= text[length - 1] * 0xC2B2AE35u ^ text[length / 2] * 0x27D4EB2Fu ^ text[length / 4] * 0x165667B1u;
    return (hash ^ hash >> 13) & (SLOTS - 1);
}

static Field *find_field(Scanner *self, int in_args, const char *name, int length)
{
    for (unsigned at = name_hash(name, length);; at = (at + 1) & (SLOTS - 1)) {
        int index = self->index[in_args][at];
        if (index < 0) return NULL;
        Field *field = &self->fields[index];
        if (field->length == length && !memcmp(field->name, name, (size_t)length)) return field;
    }
}

/* -- interned tokens ------------------------------------------------------------------------------------------ */

static uint64_t text_hash(const char *text, size_t length)
{
    const uint64_t prime = 0x9E3779B97F4A7C15ull;
    uint64_t hash = length * prime, word;
    while (length >= 8) {
        memcpy(&word, text, 8);
        hash = (hash ^ word) * prime;
        hash ^= hash >> 32;
        text += 8;
        length -= 8;
    }
    word = 0;
    memcpy(&word, text, length);
    hash = (hash ^ word) * prime;
    return hash ^ (hash >> 29);
}

static int grow_slots(Scanner *self)
{
    size_t count = self->num_slots ? self->num_slots * 2 : 4096;
    Slot *slots = malloc(count * sizeof(Slot));
    if (!slots) return 0;
    for (size_t i = 0; i < count; i++) slots[i].offset = -1;
    for (size_t i = 0; i < self->num_slots; i++) {
        if (self->slots[i].offset < 0) continue;
        size_t at = self->slots[i].hash & (count - 1);
        while (slots[at].offset >= 0) at = (at + 1) & (count - 1);
        slots[at] = self->slots[i];
    }
    free(self->slots);
    self->slots = slots;
    self->num_slots = count;
    return 1;
}

/* The id of a text; -1 if memory runs out. */
static int32_t intern(Scanner *self, const char *text, size_t length)
{
    if (self->num_tokens * 2 >= self->num_slots && !grow_slots(self)) return -1;
    if (length > INT32_MAX || self->num_tokens >= INT32_MAX) return -1;
    uint64_t hash = text_hash(text, length);
    size_t at = hash & (self->num_slots - 1);
    for (; self->slots[at].offset >= 0; at = (at + 1) & (self->num_slots - 1)) {
        Slot *slot = &self->slots[at];
        if (slot->hash == hash && slot->length == (int32_t)length &&
            !memcmp(self->arena.data + slot->offset, text, length))
            return slot->id;
    }
    Slot slot = {hash, (int64_t)self->arena.size, (int32_t)length, (int32_t)self->num_tokens};
    if (!append(&self->arena, text, length)) return -1;
    int64_t end = (int64_t)self->arena.size;
    if (!append(&self->ends, &end, sizeof end)) return -1;
    self->slots[at] = slot;
    self->num_tokens++;
    return slot.id;
}

/* -- JSON: every function returns the position behind what it read, or NULL if the text is not valid ------------ */

static inline const char *skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) at++;
    return at;
}

static inline int is_digit(char c) { return c >= '0' && c <= '9'; }

/* Position of the next quote, backslash or control character, 8 or 16 bytes at a time. */
static inline const char *next_special(const char *at, const char *end)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), space = _mm_set1_epi8(0x1f);
    for (; end - at >= 16; at += 16) {
        __m128i text = _mm_loadu_si128((const __m128i *)(const void *)at);
        __m128i found = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(text, quote), _mm_cmpeq_epi8(text, backslash)),
                                     _mm_cmpeq_epi8(_mm_max_epu8(text, space), space));
        int mask = _mm_movemask_epi8(found);
        if (mask) return at + __builtin_ctz((unsigned)mask);
    }
#endif
    while (at < end && *at != '"' && *at != '\\' && (unsigned char)*at >= 0x20) at++;
    return at;
}

static const char *read_string(const char *at, const char *end) /* at the opening quote */
{
    for (at = next_special(at + 1, end); at < end; at = next_special(at + 1, end)) {
        unsigned char c = (unsigned char)*at;
        if (c == '"') return at + 1;
        if (c < 0x20) return NULL;
        if (c != '\\') continue;
        if (++at >= end) return NULL;
        if (*at == 'u') {
            if (end - at < 5) return NULL;
            for (int i = 1; i < 5; i++)
                if (!Py_ISXDIGIT(at[i])) return NULL;
            /* halves of surrogate pairs need the care of the slower reader when they are alone */
            at += 4;
        } else if (!strchr("\"\\/bfnrt", *at) || !*at) {
            return NULL;
        }
    }
    return NULL;
}

static const char *read_number(const char *at, const char *end, int *is_integer)
{
    *is_integer = 1;
    if (at < end && *at == '-') at++;
    if (at >= end || !is_digit(*at)) return NULL;
    if (*at == '0') at++;
    else while (at < end && is_digit(*at)) at++;
    if (at < end && *at == '.') {
        *is_integer = 0;
        if (++at >= end || !is_digit(*at)) return NULL;
        while (at < end && is_digit(*at)) at++;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        *is_integer = 0;
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        if (at >= end || !is_digit(*at)) return NULL;
        while (at < end && is_digit(*at)) at++;
    }
    return at;
}

static const char *read_word(const char *at, const char *end, const char *word)
{
    size_t length = strlen(word);
    return (size_t)(end - at) >= length && !memcmp(at, word, length) ? at + length : NULL;
}

static const char *skip_value(const char *at, const char *end, int depth);

static const char *skip_container(const char *at, const char *end, int depth)
{
    char close = *at == '{' ? '}' : ']';
    if (depth >= MAX_DEPTH) return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == close) return at + 1;
    for (;;) {
        if (close == '}') {
            at = skip_space(at, end);
            if (at >= end || *at != '"' || !(at = read_string(at, end))) return NULL;
            at = skip_space(at, end);
            if (at >= end || *at++ != ':') return NULL;
        }
        if (!(at = skip_value(skip_space(at, end), end, depth + 1))) return NULL;
        at = skip_space(at, end);
        if (at >= end) return NULL;
        if (*at == close) return at + 1;
        if (*at++ != ',') return NULL;
    }
}

static const char *skip_value(const char *at, const char *end, int depth)
{
    int is_integer;
    if (at >= end) return NULL;
    switch (*at) {
    case '"': return read_string(at, end);
    case '{':
    case '[': return skip_container(at, end, depth);
    case 't': return read_word(at, end, "true");
    case 'f': return read_word(at, end, "false");
    case 'n': return read_word(at, end, "null");
    default: return read_number(at, end, &is_integer);
    }
}

/* -- values into columns ------------------------------------------------------------------------------------------ */

static int plain_integer(const char *at, const char *end, int64_t *value)
{
    int negative = *at == '-';
    at += negative;
    if (end - at > 18) return 0;
    int64_t number = 0;
    for (; at < end; at++) {
        if (!is_digit(*at)) return 0;
        number = number * 10 + (*at - '0');
    }
    *value = negative ? -number : number;
    return 1;
}

/* A decimal without exponent: its digits as an integer, and how many of them follow the point. */
static int plain_decimal(const char *at, const char *end, int64_t *digits, int *decimals)
{
    int negative = *at == '-', seen_point = 0, count = 0;
    uint64_t number = 0; /* 19 digits fit */
    *decimals = 0;
    for (at += negative; at < end; at++) {
        if (*at == '.') {
            seen_point = 1;
            continue;
        }
        if (!is_digit(*at) || ++count > 19) return 0;
        number = number * 10 + (uint64_t)(*at - '0');
        *decimals += seen_point;
    }
    if (number >> 62) return 0;
    *digits = negative ? -(int64_t)number : (int64_t)number;
    return 1;
}

static int plain_time(const char *at, const char *end, int64_t *nanoseconds)
{
    int decimals;
    int64_t digits;
    if (!plain_decimal(at, end, &digits, &decimals) || decimals > 3) return 0;
    const int64_t limit = (int64_t)1 << 62;
    for (; decimals < 3; decimals++) {
        if (digits > limit / 10 || digits < -limit / 10) return 0;
        digits *= 10;
    }
    if (digits >= limit || digits <= -limit) return 0;
    *nanoseconds = digits;
    return 1;
}

static int plain_double(const char *at, const char *end, double *value)
{
    static const double powers[] = {1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8, 1e9,
                                    1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18};
    int decimals;
    int64_t digits;
    if (!plain_decimal(at, end, &digits, &decimals)) return 0;
    if (digits > (int64_t)1 << 53 || digits < -((int64_t)1 << 53)) return 0;
    *value = (double)digits / powers[decimals]; /* both exact, so the quotient is the nearest double */
    return 1;
}

static int add_value(Scan *scan, Field *field, const void *value, size_t size)
{
    int ok = append(&field->rows, &scan->num_rows, sizeof scan->num_rows) && append(&field->values, value, size);
    scan->out_of_memory |= !ok;
    return ok;
}

static int add_odd(Scan *scan, Field *field, const char *begin, const char *end)
{
    int64_t odd[4] = {scan->num_rows, field - scan->scanner->fields, begin - scan->start, end - begin};
    int ok = append(&scan->scanner->odd, odd, sizeof odd);
    scan->out_of_memory |= !ok;
    return ok;
}

static const char *read_field(Scan *scan, Field *field, const char *begin)
{
    const char *end = skip_value(begin, scan->end, 0);
    if (!end) return NULL;
    int ok, is_number = *begin == '-' || is_digit(*begin);
    int64_t integer;
    double number;
    if (field->kind == TOKEN) {
        int32_t id = intern(scan->scanner, begin, (size_t)(end - begin));
        scan->out_of_memory |= id < 0;
        ok = id >= 0 && add_value(scan, field, &id, sizeof id);
    } else if (field->kind == INTEGER && is_number && plain_integer(begin, end, &integer)) {
        ok = add_value(scan, field, &integer, sizeof integer);
    } else if (field->kind == TIME && is_number && plain_time(begin, end, &integer)) {
        ok = add_value(scan, field, &integer, sizeof integer);
    } else if (field->kind == NUMBER && is_number && plain_double(begin, end, &number)) {
        ok = add_value(scan, field, &number, sizeof number);
    } else {
        ok = add_odd(scan, field, begin, end);
    }
    return ok ? end : NULL;
}

static const char *read_object(Scan *scan, const char *at, int in_args)
{
    const char *end = scan->end;
    at = skip_space(at + 1, end);
    if (at < end && *at == '}') return at + 1;
    for (;;) {
        at = skip_space(at, end);
        if (at >= end || *at != '"') return NULL;
        const char *key = at + 1;
        if (!(at = read_string(at, end))) return NULL;
        int length = at - key - 1 < 1000 ? (int)(at - key - 1) : 1000;
        if (memchr(key, '\\', (size_t)length)) return NULL;
        at = skip_space(at, end);
        if (at >= end || *at++ != ':') return NULL;
        at = skip_space(at, end);
        if (at >= end) return NULL;
        Field *field = find_field(scan->scanner, in_args, key, length);
        if (field) at = read_field(scan, field, at);
        else if (!in_args && length == 4 && !memcmp(key, "args", 4)) {
            if (*at != '{') return NULL;
            at = read_object(scan, at, 1);
        } else at = skip_value(at, end, 0);
        if (!at) return NULL;
        at = skip_space(at, end);
        if (at >= end) return NULL;
        if (*at == '}') return at + 1;
        if (*at++ != ',') return NULL;
    }
}

static int scan_events(Scan *scan)
{
    const char *at = skip_space(scan->start, scan->end);
    if (at >= scan->end) return 1;
    for (;;) {
        if (at >= scan->end || *at != '{') return 0;
        if (scan->num_rows == INT32_MAX) return 0;
        if (!(at = read_object(scan, at, 0))) return 0;
        scan->num_rows++;
        at = skip_space(at, scan->end);
        if (at >= scan->end) return 1;
        if (*at++ != ',') return 0;
        at = skip_space(at, scan->end);
    }
}

/* -- Python -------------------------------------------------------------------------------------------------------- */

static PyObject *bytes_of(const Bytes *bytes)
{
    return PyBytes_FromStringAndSize(bytes->size ? bytes->data : "", (Py_ssize_t)bytes->size);
}

static PyObject *new_tokens(Scanner *self)
{
    PyObject *list = PyList_New(0);
    const int64_t *ends = (const int64_t *)self->ends.data;
    while (list && self->num_reported < self->num_tokens) {
        int64_t begin = self->num_reported ? ends[self->num_reported - 1] : 0;
        PyObject *text = PyBytes_FromStringAndSize(self->arena.data + begin, ends[self->num_reported] - begin);
        if (!text || PyList_Append(list, text) < 0) Py_CLEAR(list);
        Py_XDECREF(text);
        self->num_reported++;
    }
    return list;
}

static PyObject *columns_of(Scanner *self)
{
    PyObject *columns = PyList_New(self->num_fields);
    for (int i = 0; columns && i < self->num_fields; i++) {
        PyObject *rows = bytes_of(&self->fields[i].rows), *values = bytes_of(&self->fields[i].values);
        PyObject *pair = rows && values ? PyTuple_Pack(2, rows, values) : NULL;
        Py_XDECREF(rows);
        Py_XDECREF(values);
        if (pair) PyList_SET_ITEM(columns, i, pair);
        else Py_CLEAR(columns);
    }
    return columns;
}

static PyObject *scanner_scan(Scanner *self, PyObject *argument)
{
    Py_buffer view;
    if (self->scanning) {
        PyErr_SetString(PyExc_RuntimeError, "one Scanner scans one text at a time");
        return NULL;
    }
    if (PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE) < 0) return NULL;
    Scan scan = {.scanner = self, .start = view.buf, .end = (const char *)view.buf + view.len};
    int ok;
    self->scanning = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < self->num_fields; i++) self->fields[i].rows.size = self->fields[i].values.size = 0;
    self->odd.size = 0;
    ok = scan_events(&scan);
    Py_END_ALLOW_THREADS
    self->scanning = 0;
    PyBuffer_Release(&view);
    if (scan.out_of_memory) return PyErr_NoMemory();
    if (!ok) Py_RETURN_NONE;
    PyObject *columns = columns_of(self), *odd = bytes_of(&self->odd), *tokens = new_tokens(self), *result = NULL;
    if (columns && odd && tokens) result = Py_BuildValue("iOOO", (int)scan.num_rows, columns, odd, tokens);
    Py_XDECREF(columns);
    Py_XDECREF(odd);
    Py_XDECREF(tokens);
    return result;
}

static int add_fields(Scanner *self, PyObject *list, int in_args)
{
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        const char *name;
        Py_ssize_t length;
        int kind;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "s#i", &name, &length, &kind)) return -1;
        if (self->num_fields == MAX_FIELDS || length >= 48 || kind < TOKEN || kind > TIME) {
            PyErr_SetString(PyExc_ValueError, "too many fields, a name of 48 bytes or more, or an unknown kind");
            return -1;
        }
        Field *field = &self->fields[self->num_fields];
        memcpy(field->name, name, (size_t)length);
        field->length = (int)length;
        field->kind = kind;
        unsigned at = name_hash(name, (int)length);
        while (self->index[in_args][at] >= 0) at = (at + 1) & (SLOTS - 1);
        self->index[in_args][at] = (int16_t)self->num_fields++;
    }
    return 0;
}

static int scanner_init(Scanner *self, PyObject *args, PyObject *keywords)
{
    PyObject *event_fields, *args_fields;
    if (self->num_fields || (keywords && PyDict_Size(keywords))) {
        PyErr_SetString(PyExc_TypeError, "Scanner(event_fields, args_fields) is initialized once, without keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &event_fields, &PyList_Type, &args_fields)) return -1;
    memset(self->index, 0xff, sizeof self->index);
    return add_fields(self, event_fields, 0) < 0 || add_fields(self, args_fields, 1) < 0 ? -1 : 0;
}

static void scanner_dealloc(Scanner *self)
{
    free(self->slots);
    free(self->arena.data);
    free(self->ends.data);
    free(self->odd.data);
    for (int i = 0; i < self->num_fields; i++) {
        free(self->fields[i].rows.data);
        free(self->fields[i].values.data);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef scanner_methods[] = {
    {"scan", (PyCFunction)scanner_scan, METH_O, "Scan the text of whole events into columns, or return None."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ScannerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "foretrace.formats._scanner.Scanner",
    .tp_basicsize = sizeof(Scanner),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Scans the JSON text of trace events into columns; see the head of _scanner.c.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)scanner_init,
    .tp_dealloc = (destructor)scanner_dealloc,
    .tp_methods = scanner_methods,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scanner", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scanner(void)
{
    if (PyType_Ready(&ScannerType) < 0) return NULL;
    PyObject *created = PyModule_Create(&module);
    if (created && PyModule_AddObjectRef(created, "Scanner", (PyObject *)&ScannerType) < 0) Py_CLEAR(created);
    return created;
}
