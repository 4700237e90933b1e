/* The compiled half of digest.py: elements of a tensor mixed with their places and added up, modulo 2^64, in two lanes.
 *
 * It gives what the numpy path of digest.py gives, to the last bit; a test holds them together. The loops are compiled for several
 * generations of x86-64, of which the newest that runs is taken when the module is loaded: 64-bit products of vectors came with AVX-512.
 * Only the stable ABI of Python 3.11 is used, so one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define GOLDEN 0x9E3779B97F4A7C15ull
#define FIRST_SEED 0x243F6A8885A308D3ull
#define SECOND_SEED 0x13198A2E03707344ull

static inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Adds the digest of `count` words, the first of which is element `index` of its tensor, to `lanes`. */
#define DEFINE_RUN(NAME, WORD)                                                                                                             \
    FOR_EACH_PROCESSOR static void NAME(const WORD *words, Py_ssize_t count, uint64_t index, uint64_t *lanes) {                           \
        uint64_t first = 0, second = 0, place = index * GOLDEN;                                                                            \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                                           \
            uint64_t placed = (uint64_t)words[i] + (place + (uint64_t)i * GOLDEN);                                                         \
            first += mix(placed + FIRST_SEED);                                                                                             \
            second += mix(placed + SECOND_SEED);                                                                                           \
        }                                                                                                                                  \
        lanes[0] += first;                                                                                                                 \
        lanes[1] += second;                                                                                                                \
    }

DEFINE_RUN(run_of_1, uint8_t)
DEFINE_RUN(run_of_2, uint16_t)
DEFINE_RUN(run_of_4, uint32_t)
DEFINE_RUN(run_of_8, uint64_t)

static void digest_runs(const char *words, int width, Py_ssize_t length, const uint64_t *starts, Py_ssize_t num_runs, uint64_t *lanes) {
    for (Py_ssize_t run = 0; run < num_runs; run++, words += length * width) switch (width) {
            case 1: run_of_1((const uint8_t *)words, length, starts[run], lanes); break;
            case 2: run_of_2((const uint16_t *)words, length, starts[run], lanes); break;
            case 4: run_of_4((const uint32_t *)words, length, starts[run], lanes); break;
            default: run_of_8((const uint64_t *)words, length, starts[run], lanes);
        }
}

static PyObject *runs(PyObject *module, PyObject *args) {
    Py_buffer words, starts;
    int width;
    Py_ssize_t length;
    uint64_t lanes[2] = {0, 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*iny*", &words, &width, &length, &starts)) return NULL;
    Py_ssize_t num_runs = starts.len / (Py_ssize_t)sizeof(uint64_t);
    int fits = (width == 1 || width == 2 || width == 4 || width == 8) && length >= 0 && words.len == num_runs * length * width;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        digest_runs(words.buf, width, length, starts.buf, num_runs, lanes);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&starts);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the words do not fill the runs");
        return NULL;
    }
    return Py_BuildValue("KK", (unsigned long long)lanes[0], (unsigned long long)lanes[1]);
}

static PyMethodDef methods[] = {
    {"runs", runs, METH_VARARGS, "Both lanes of words of a width in bytes, which are runs of a length that begin at these elements (uint64)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_digest", "Compiled loops of digests; see digest.py.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__digest(void) { return PyModuleDef_Init(&module); }
