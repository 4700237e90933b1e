/* The compiled half of numerics/exact_sum.py: sums of fp32 numbers, or of their squares, as integers.
 *
 * Numbers are cut into parts of PART_BITS bits by adding and subtracting a large constant (the error-free extraction of Rump, Ogita and
 * Oishi 2008, algorithm 3.1). CHUNK parts of one size add up exactly in a double, in any order, so vectors may add them as they like.
 */
#include "token_sums.h"
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "doubles must be rounded to doubles"
#endif

#define CHUNK 4096            /* numbers that are cut alike: 16 KB, which stay in the first cache */
#define PART_BITS 41          /* 53 of a double less 12 of CHUNK */
#define NUM_PARTS 3           /* parts taken before looking whether anything is left */
#define WIDE 8                /* numbers that are cut together */
#define LOWEST_EXPONENT (-320) /* totals are multiples of 2^-320, which is below the smallest square */
#define NUM_LIMBS 24          /* of 32 bits: 2^448, above the largest square times 2^160 numbers and what carries */
#define INFINITE 0x7F800000u
#define POSITIVE 1            /* flags of +inf, -inf and nan */
#define NEGATIVE 2
#define NO_NUMBER 4

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef double Doubles __attribute__((vector_size(8 * WIDE)));
typedef uint64_t Words __attribute__((vector_size(8 * WIDE)));

/* The largest magnitude as bits, which sort like magnitudes; infinities and NaN are INFINITE at least. */
FOR_EACH_PROCESSOR static uint32_t largest_of(const uint32_t *words) {
    uint32_t largest = 0;
    for (int i = 0; i < CHUNK; i++) {
        uint32_t magnitude = words[i] & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Zeros in place of what is no finite number, of which flags tell. */
static int set_apart(uint32_t *words, int squares) {
    int flags = 0;
    for (int i = 0; i < CHUNK; i++) {
        uint32_t magnitude = words[i] & 0x7FFFFFFFu;
        if (magnitude < INFINITE) continue;
        if (magnitude > INFINITE) flags |= NO_NUMBER;
        else flags |= words[i] == magnitude || squares ? POSITIVE : NEGATIVE;
        words[i] = 0;
    }
    return flags;
}

/* Takes NUM_PARTS parts, the first of multiples of 2^units[0], from what numbers are less `taken`; the sums of the parts, and whether
 * anything is left. What was taken from a number before follows from the constants in turn, so nothing is kept of it. */
FOR_EACH_PROCESSOR static int take_parts(const float *numbers, int squares, const double *constants, int rounds, double *sums) {
    Doubles totals[NUM_PARTS] = {{0}};
    Words left = {0};
    for (int i = 0; i < CHUNK; i += WIDE) {
        Floats narrow;
        __builtin_prefetch(numbers + i + CHUNK);
        memcpy(&narrow, numbers + i, sizeof narrow);
        Doubles rest = __builtin_convertvector(narrow, Doubles);
        if (squares) rest *= rest; /* of 24 bits each: exact */
        for (int before = 0; before < (rounds - 1) * NUM_PARTS; before++) rest -= (rest + constants[before]) - constants[before];
        for (int part = 0; part < NUM_PARTS; part++) {
            double constant = constants[(rounds - 1) * NUM_PARTS + part];
            Doubles taken = (rest + constant) - constant; /* the multiples of the unit nearest to the rest */
            totals[part] += taken;
            rest -= taken;
        }
        left |= (Words)rest << 1; /* without the sign of a zero */
    }
    uint64_t any = 0;
    for (int lane = 0; lane < WIDE; lane++) any |= left[lane];
    for (int part = 0; part < NUM_PARTS; part++) {
        sums[part] = 0;
        for (int lane = 0; lane < WIDE; lane++) sums[part] += totals[part][lane];
    }
    return any != 0;
}

/* Adds number * 2^position to limbs, none of which carries before 2^31 such additions. */
static void add_to_limbs(int64_t number, int position, int64_t *limbs) {
    uint64_t magnitude = number < 0 ? -(uint64_t)number : (uint64_t)number;
    int shift = position % 32, sign = number < 0 ? -1 : 1;
    uint64_t low = (magnitude & 0xFFFFFFFFu) << shift, high = (magnitude >> 32) << shift;
    limbs += position / 32;
    limbs[0] += sign * (int64_t)(low & 0xFFFFFFFFu);
    limbs[1] += sign * (int64_t)((low >> 32) + (high & 0xFFFFFFFFu));
    limbs[2] += sign * (int64_t)(high >> 32);
}

#define MOST_ROUNDS 6 /* 6 * 3 * 41 bits: from the largest square down to LOWEST_EXPONENT */

/* Adds a chunk; returns its flags. */
static int add_chunk(const float *numbers, int squares, int64_t *limbs) {
    uint32_t finite[CHUNK], largest = largest_of((const uint32_t *)numbers);
    int flags = 0, exponent, units[MOST_ROUNDS * NUM_PARTS];
    double constants[MOST_ROUNDS * NUM_PARTS], sums[NUM_PARTS];
    float magnitude;
    if (largest >= INFINITE) {
        memcpy(finite, numbers, sizeof finite);
        flags = set_apart(finite, squares);
        numbers = (const float *)finite;
        largest = largest_of(finite);
    }
    if (!largest) return flags;
    memcpy(&magnitude, &largest, sizeof magnitude);
    frexp(squares ? (double)magnitude * magnitude : magnitude, &exponent);
    for (int part = 0; part < MOST_ROUNDS * NUM_PARTS; part++) {
        exponent = exponent - PART_BITS > LOWEST_EXPONENT ? exponent - PART_BITS : LOWEST_EXPONENT;
        units[part] = exponent;
        constants[part] = ldexp(1.5, exponent + 52);
    }
    for (int rounds = 1, more = 1; more; rounds++) {
        more = take_parts(numbers, squares, constants, rounds, sums);
        for (int part = 0; part < NUM_PARTS; part++) {
            int unit = units[(rounds - 1) * NUM_PARTS + part];
            add_to_limbs((int64_t)ldexp(sums[part], -unit), unit - LOWEST_EXPONENT, limbs);
        }
    }
    return flags;
}

static int add_all(const float *numbers, Py_ssize_t count, int squares, int64_t *limbs) {
    int flags = 0;
    float last[CHUNK] = {0};
    for (; count >= CHUNK; count -= CHUNK, numbers += CHUNK) flags |= add_chunk(numbers, squares, limbs);
    if (count) {
        memcpy(last, numbers, (size_t)count * sizeof *last);
        flags |= add_chunk(last, squares, limbs);
    }
    return flags;
}

static PyObject *as_integer(const int64_t *limbs) {
    PyObject *total = PyLong_FromLong(0), *bits = PyLong_FromLong(32);
    for (int i = NUM_LIMBS; i-- && total && bits;) {
        PyObject *limb = PyLong_FromLongLong(limbs[i]), *shifted = PyNumber_Lshift(total, bits);
        Py_DECREF(total);
        total = limb && shifted ? PyNumber_Add(shifted, limb) : NULL;
        Py_XDECREF(limb);
        Py_XDECREF(shifted);
    }
    Py_XDECREF(bits);
    return total;
}

static PyObject *exact_sum(PyObject *module, PyObject *args) {
    Py_buffer numbers;
    int squares, flags;
    int64_t limbs[NUM_LIMBS + 1] = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*p", &numbers, &squares)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    flags = add_all(numbers.buf, numbers.len / (Py_ssize_t)sizeof(float), squares, limbs);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&numbers);
    return Py_BuildValue("Ni", as_integer(limbs), flags);
}

static PyMethodDef methods[] = {
    {"exact_sum", exact_sum, METH_VARARGS, "The sum of float32 numbers, or of their squares, in units of 2^-320, and flags of +inf, -inf and nan."},
    {"token_sums", token_sums, METH_VARARGS, TOKEN_SUMS_DOC},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_exact", "Compiled loops of exact numerics; see numerics/exact_sum.py and tree.py.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__exact(void) { return PyModuleDef_Init(&module); }
