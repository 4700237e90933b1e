/* The compiled half of numerics/tree.py: sums over tokens in one pass over them, some columns at a time.
 *
 * A block of tokens is folded: the upper half is added to the lower one until one row is left, and a middle row waits. Blocks are added by
 * the canonical tree: neighbours pair up, a last odd one waits. Only single additions are made, so the bits are those of any other way.
 */
#include "token_sums.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define COLUMNS 64 /* 256 bytes of a row */
#define MOST_LEVELS 64

typedef struct {
    const float *numbers;
    Py_ssize_t samples, tokens, width, sample_stride, token_stride, block;
    int whole; /* one sum for each sample, and not for each block */
    float *target;
} Sums;

/* The sum of rows into room[0]; room has (rows + 1) / 2 rows of COLUMNS numbers, and one at least. */
static inline void fold(const float *rows, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t columns, float *room) {
    Py_ssize_t half = count / 2, rest = count - half;
    for (Py_ssize_t row = 0; row < half; row++)
        for (Py_ssize_t i = 0; i < columns; i++) room[row * COLUMNS + i] = rows[row * stride + i] + rows[(rest + row) * stride + i];
    if (rest > half) memcpy(room + half * COLUMNS, rows + half * stride, (size_t)columns * sizeof *room);
    for (count = rest; count > 1; count = rest) {
        half = count / 2, rest = count - half;
        for (Py_ssize_t row = 0; row < half; row++)
            for (Py_ssize_t i = 0; i < columns; i++) room[row * COLUMNS + i] += room[(rest + row) * COLUMNS + i];
    }
}

/* Some columns of one sample. `held` has the sums of nodes of 2^k blocks, the largest first. */
static inline void add_columns(const Sums *s, const float *numbers, float *target, Py_ssize_t columns, float *room, float (*held)[COLUMNS]) {
    Py_ssize_t blocks = 0;
    int count = 0;
    for (Py_ssize_t first = 0; first < s->tokens; first += s->block, blocks++) {
        Py_ssize_t rows = s->tokens - first < s->block ? s->tokens - first : s->block;
        fold(numbers + first * s->token_stride, s->token_stride, rows, columns, room);
        if (!s->whole) {
            memcpy(target + blocks * s->width, room, (size_t)columns * sizeof *room);
            continue;
        }
        memcpy(held[count++], room, (size_t)columns * sizeof *room);
        for (Py_ssize_t done = blocks + 1; !(done & 1); done >>= 1, count--)
            for (Py_ssize_t i = 0; i < columns; i++) held[count - 2][i] += held[count - 1][i];
    }
    for (; count > 1; count--)
        for (Py_ssize_t i = 0; i < columns; i++) held[count - 2][i] += held[count - 1][i];
    if (s->whole) memcpy(target, held[0], (size_t)columns * sizeof *room);
}

FOR_EACH_PROCESSOR static void add_all(const Sums *s, float *room) {
    float held[MOST_LEVELS][COLUMNS];
    Py_ssize_t sums = s->whole ? 1 : (s->tokens + s->block - 1) / s->block;
    for (Py_ssize_t sample = 0; sample < s->samples; sample++)
        for (Py_ssize_t first = 0; first < s->width; first += COLUMNS) {
            const float *numbers = s->numbers + sample * s->sample_stride + first;
            float *target = s->target + sample * sums * s->width + first;
            if (s->width - first >= COLUMNS) add_columns(s, numbers, target, COLUMNS, room, held);
            else add_columns(s, numbers, target, s->width - first, room, held);
        }
}

PyObject *token_sums(PyObject *module, PyObject *args) {
    Sums s;
    unsigned long long numbers, target;
    float *room;
    (void)module;
    if (!PyArg_ParseTuple(args, "KnnnnnnpK", &numbers, &s.samples, &s.tokens, &s.width, &s.sample_stride, &s.token_stride, &s.block, &s.whole, &target)) return NULL;
    if (s.tokens < 1 || s.block < 1) {
        PyErr_SetString(PyExc_ValueError, "token_sums needs a token and a block of one at least");
        return NULL;
    }
    s.numbers = (const float *)(uintptr_t)numbers, s.target = (float *)(uintptr_t)target;
    if (s.block > s.tokens) s.block = s.tokens;
    room = malloc((size_t)((s.block + 1) / 2) * COLUMNS * sizeof *room);
    if (!room) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    add_all(&s, room);
    Py_END_ALLOW_THREADS
    free(room);
    Py_RETURN_NONE;
}
