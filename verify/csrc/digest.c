/* The compiled half of digest.py and summary.py: elements of a tensor mixed with their places and added up, modulo 2^64, in two lanes;
 * the same without their places; and sums of elements with signs that their places draw.
 *
 * Digests are those of the numpy paths, to the last bit, sums to rounding; tests hold them together. The loops are compiled for several
 * generations of x86-64, of which the newest that runs is taken when the module is loaded: 64-bit products of vectors came with AVX-512.
 * Only the stable ABI of Python 3.11 is used, so one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define GOLDEN 0x9E3779B97F4A7C15ull
#define FIRST_SEED 0x243F6A8885A308D3ull
#define SECOND_SEED 0x13198A2E03707344ull
#define ALIKE_SEED 0xA4093822299F31D0ull
#define SIGN_SEED 0x082EFA98EC4E6C89ull

#define NUM_SUMS 8 /* signed sums of a summary */
#define WIDE 8     /* elements at a time; each has sums of its own, which are added at the end */
#define CHUNK 512

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

typedef struct {
    uint64_t lanes[2], alike;
    double sums[NUM_SUMS][WIDE];
    float largest;
    uint32_t largest_bits; /* of magnitudes, which sort like their bits; NaN is above infinity */
} Summary;

/* Adds a run of words to a summary, CHUNK at a time: one plain loop per thing that is found out, which compilers turn into vectors. */
FOR_EACH_PROCESSOR static void summarize_run(const uint32_t *words, Py_ssize_t count, uint64_t index, Summary *all) {
    uint64_t bits[CHUNK], signs[CHUNK];
    for (Py_ssize_t from = 0; from < count; from += CHUNK) {
        Py_ssize_t size = count - from < CHUNK ? count - from : CHUNK;
        const uint32_t *word = words + from;
        uint64_t first = 0, second = 0, alike = 0, place = (index + (uint64_t)from) * GOLDEN;
        uint32_t largest = all->largest_bits;
        for (Py_ssize_t i = 0; i < size; i++) {
            uint64_t placed = word[i] + (place + (uint64_t)i * GOLDEN);
            first += mix(placed + FIRST_SEED);
            second += mix(placed + SECOND_SEED);
            alike += mix(word[i] + ALIKE_SEED);
        }
        for (Py_ssize_t i = 0; i < size; i++) {
            uint32_t magnitude = word[i] & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        for (Py_ssize_t i = 0; i < size; i++) {
            float narrow;
            double value;
            memcpy(&narrow, word + i, sizeof narrow);
            value = narrow;
            memcpy(bits + i, &value, sizeof value);
            signs[i] = mix(place + (uint64_t)i * GOLDEN + SIGN_SEED);
        }
        for (Py_ssize_t i = size; i % WIDE; i++) bits[i] = signs[i] = 0; /* zeros change no sum */
        for (int sum = 0; sum < NUM_SUMS; sum++) {
            double total[WIDE];
            memcpy(total, all->sums[sum], sizeof total);
            for (Py_ssize_t i = 0; i < size; i += WIDE)
                for (int j = 0; j < WIDE; j++) {
                    uint64_t turned = bits[i + j] ^ (signs[i + j] >> sum << 63);
                    double value;
                    memcpy(&value, &turned, sizeof value);
                    total[j] += value;
                }
            memcpy(all->sums[sum], total, sizeof total);
        }
        all->lanes[0] += first;
        all->lanes[1] += second;
        all->alike += alike;
        all->largest_bits = largest;
    }
}

static PyObject *summarize(PyObject *module, PyObject *args) {
    Py_buffer words, starts;
    Py_ssize_t length;
    Summary all;
    double sums[NUM_SUMS] = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ny*", &words, &length, &starts)) return NULL;
    memset(&all, 0, sizeof all);
    Py_ssize_t num_runs = starts.len / (Py_ssize_t)sizeof(uint64_t);
    int fits = length >= 0 && words.len == num_runs * length * 4;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t run = 0; run < num_runs; run++)
            summarize_run((const uint32_t *)words.buf + run * length, length, ((const uint64_t *)starts.buf)[run], &all);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&starts);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the words do not fill the runs");
        return NULL;
    }
    for (int sum = 0; sum < NUM_SUMS; sum++)
        for (int i = 0; i < WIDE; i++) sums[sum] += all.sums[sum][i];
    memcpy(&all.largest, &all.largest_bits, sizeof all.largest);
    return Py_BuildValue("(KK)Kd(dddddddd)", (unsigned long long)all.lanes[0], (unsigned long long)all.lanes[1],
                         (unsigned long long)all.alike, (double)all.largest, sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]);
}

static PyMethodDef methods[] = {
    {"runs", runs, METH_VARARGS, "Both lanes of words of a width in bytes, which are runs of a length that begin at these elements (uint64)."},
    {"summarize", summarize, METH_VARARGS, "Both lanes, the digest without places, the largest magnitude and the signed sums of float32 words."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_digest", "Compiled loops of digests; see digest.py.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__digest(void) { return PyModuleDef_Init(&module); }
