/* The compiled half of digest.py and summary.py: elements of a tensor times keys that their places draw, added up modulo 2^64, in two lanes;
 * a sum of them without their places; and sums of elements with signs that their places draw.
 *
 * Digests are those of the numpy paths, to the last bit, sums to rounding; tests hold them together. The loops are compiled for several
 * generations of x86-64, of which the newest that runs is taken when the module is loaded: 64-bit products of vectors came with AVX-512.
 * Sums are written with the vectors of GCC and Clang. Only the stable ABI of Python 3.11 is used, so one build serves every later Python.
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
#define ALIKE_FACTOR 0xBF58476D1CE4E5B9ull
#define SIGN_SEED 0xA458FEA3F4933D7Eull
#define WORD_MASK 0x9E3779B9ull

#define BLOCK 1024 /* elements that have keys of their own; those of the next block are these times its factor */
#define WIDE 8     /* elements that draw their signs together, and signed sums of a summary */

static uint64_t first_keys[BLOCK], second_keys[BLOCK];

static inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline uint64_t key(uint64_t place, uint64_t seed) { return mix(place * GOLDEN + seed) | 1; }

static void make_keys(void) {
    for (uint64_t i = 0; i < BLOCK; i++) {
        first_keys[i] = key(i, FIRST_SEED);
        second_keys[i] = key(i, SECOND_SEED);
    }
}

/* How many of `count` elements from `index` on are in its block. */
static inline Py_ssize_t in_block(uint64_t index, Py_ssize_t count) {
    Py_ssize_t left = BLOCK - (Py_ssize_t)(index % BLOCK);
    return count < left ? count : left;
}

static inline void add_block(uint64_t index, uint64_t first, uint64_t second, uint64_t *lanes) {
    lanes[0] += first * key(index / BLOCK, ~FIRST_SEED);
    lanes[1] += second * key(index / BLOCK, ~SECOND_SEED);
}

/* Adds the digest of `count` words, the first of which is element `index` of its tensor, to `lanes`. */
#define DEFINE_RUN(NAME, WORD, NUMBER)                                                                                                     \
    FOR_EACH_PROCESSOR static void NAME(const WORD *words, Py_ssize_t count, uint64_t index, uint64_t *lanes) {                           \
        for (Py_ssize_t size; count; count -= size, words += size, index += (uint64_t)size) {                                             \
            const uint64_t *keys = first_keys + index % BLOCK, *others = second_keys + index % BLOCK;                                     \
            uint64_t first = 0, second = 0;                                                                                               \
            size = in_block(index, count);                                                                                                \
            for (Py_ssize_t i = 0; i < size; i++) {                                                                                       \
                uint64_t number = NUMBER(words[i]);                                                                                       \
                first += number * keys[i];                                                                                                \
                second += number * others[i];                                                                                             \
            }                                                                                                                             \
            add_block(index, first, second, lanes);                                                                                       \
        }                                                                                                                                 \
    }

#define NARROW(word) ((uint64_t)(word) ^ WORD_MASK) /* so that words of zeros count, too */
#define FOLDED(word) ((word) ^ ((word) >> 32) ^ GOLDEN) /* the highest bit alone would be lost in every other sum */

DEFINE_RUN(run_of_1, uint8_t, NARROW)
DEFINE_RUN(run_of_2, uint16_t, NARROW)
DEFINE_RUN(run_of_4, uint32_t, NARROW)
DEFINE_RUN(run_of_8, uint64_t, FOLDED)

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

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef double Doubles __attribute__((vector_size(8 * WIDE)));
typedef uint64_t Words __attribute__((vector_size(8 * WIDE)));

typedef struct {
    uint64_t lanes[2], alike;
    double sums[WIDE][WIDE]; /* by how far the places are turned, and by the place among WIDE elements */
    uint32_t largest_bits; /* of magnitudes, which sort like their bits; NaN is above infinity */
} Summary;

/* The signs of WIDE elements in its lowest bits, and in its highest three how far their places are turned. */
static inline uint64_t signs_of(uint64_t eight) { return mix(eight * GOLDEN + SIGN_SEED); }

/* Adds single elements with their signs. */
static void add_few(const uint32_t *words, Py_ssize_t count, uint64_t index, Summary *all) {
    for (Py_ssize_t i = 0; i < count; i++, index++) {
        uint64_t signs = signs_of(index / WIDE), place = index % WIDE;
        float value;
        memcpy(&value, words + i, sizeof value);
        all->sums[signs >> 61][place] += signs >> place & 1 ? -(double)value : (double)value;
    }
}

/* Adds elements with their signs, WIDE at a time; the first of all is the first of its WIDE. */
FOR_EACH_PROCESSOR static void add_many(const uint32_t *words, Py_ssize_t count, uint64_t index, Summary *all) {
    const Words to_top = {63, 62, 61, 60, 59, 58, 57, 56}, top = (Words){0} + (1ull << 63);
    uint64_t signs[BLOCK / WIDE];
    Doubles sums[WIDE];
    memcpy(sums, all->sums, sizeof sums);
    for (Py_ssize_t i = 0; i < count / WIDE; i++) signs[i] = signs_of(index / WIDE + (uint64_t)i);
    for (Py_ssize_t i = 0; i < count / WIDE; i++) {
        Floats narrow;
        memcpy(&narrow, words + i * WIDE, sizeof narrow);
        Doubles value = __builtin_convertvector(narrow, Doubles);
        sums[signs[i] >> 61] += (Doubles)((Words)value ^ (((Words){0} + signs[i]) << to_top & top));
    }
    memcpy(all->sums, sums, sizeof sums);
}

/* Adds a run of words to a summary, a block of keys at a time. */
FOR_EACH_PROCESSOR static void summarize_run(const uint32_t *words, Py_ssize_t count, uint64_t index, Summary *all) {
    for (Py_ssize_t size; count; count -= size, words += size, index += (uint64_t)size) {
        const uint64_t *keys = first_keys + index % BLOCK, *others = second_keys + index % BLOCK;
        uint64_t first = 0, second = 0, alike = 0;
        uint32_t largest = all->largest_bits;
        size = in_block(index, count);
        for (Py_ssize_t i = 0; i < size; i++) {
            uint64_t number = NARROW(words[i]), mixed = (words[i] + ALIKE_SEED) * ALIKE_FACTOR;
            first += number * keys[i];
            second += number * others[i];
            alike += mixed ^ (mixed >> 32);
        }
        for (Py_ssize_t i = 0; i < size; i++) {
            uint32_t magnitude = words[i] & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        add_block(index, first, second, all->lanes);
        all->alike += alike;
        all->largest_bits = largest;
        Py_ssize_t before = (Py_ssize_t)(-index % WIDE), many;
        before = before < size ? before : size;
        many = (size - before) / WIDE * WIDE;
        add_few(words, before, index, all);
        add_many(words + before, many, index + (uint64_t)before, all);
        add_few(words + before + many, size - before - many, index + (uint64_t)(before + many), all);
    }
}

/* The WIDE signed sums: each adds all places, with the signs of its row of Hadamard's matrix. */
static void fold(const Summary *all, double *sums) {
    for (int turned = 0; turned < WIDE; turned++)
        for (int place = 0; place < WIDE; place++)
            for (int sum = 0; sum < WIDE; sum++) {
                int both = sum & (place + turned) % WIDE, odd = (both ^ both >> 1 ^ both >> 2) & 1;
                sums[sum] += odd ? -all->sums[turned][place] : all->sums[turned][place];
            }
}

static PyObject *summary_of(const Summary *all) {
    double sums[WIDE] = {0};
    float largest;
    fold(all, sums);
    memcpy(&largest, &all->largest_bits, sizeof largest);
    return Py_BuildValue("(KK)Kd(dddddddd)", (unsigned long long)all->lanes[0], (unsigned long long)all->lanes[1],
                         (unsigned long long)all->alike, (double)largest, sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]);
}

static void summarize_runs(const uint32_t *words, Py_ssize_t length, const uint64_t *starts, Py_ssize_t num_runs, Summary *all) {
    for (Py_ssize_t run = 0; run < num_runs; run++) summarize_run(words + run * length, length, starts[run], all);
}

#define LINE 16   /* words of a line of the cache */
#define HIGH 32   /* rows of a tile */
#define WIDTH 512 /* words of a row: a tile is 66 KB */

typedef uint32_t Four __attribute__((vector_size(16)));

/* Writes four words of each of four columns, which are `stride` apart, as four rows of the tile. */
static inline void turn_four(const uint32_t *from, Py_ssize_t stride, uint32_t (*tile)[WIDTH + LINE], Py_ssize_t column) {
    Four a, b, c, d, ab, ab_high, cd, cd_high;
    memcpy(&a, from, sizeof a);
    memcpy(&b, from + stride, sizeof b);
    memcpy(&c, from + 2 * stride, sizeof c);
    memcpy(&d, from + 3 * stride, sizeof d);
    ab = __builtin_shuffle(a, b, (Four){0, 4, 1, 5}), ab_high = __builtin_shuffle(a, b, (Four){2, 6, 3, 7});
    cd = __builtin_shuffle(c, d, (Four){0, 4, 1, 5}), cd_high = __builtin_shuffle(c, d, (Four){2, 6, 3, 7});
    a = __builtin_shuffle(ab, cd, (Four){0, 1, 4, 5}), b = __builtin_shuffle(ab, cd, (Four){2, 3, 6, 7});
    c = __builtin_shuffle(ab_high, cd_high, (Four){0, 1, 4, 5}), d = __builtin_shuffle(ab_high, cd_high, (Four){2, 3, 6, 7});
    memcpy(tile[0] + column, &a, sizeof a);
    memcpy(tile[1] + column, &b, sizeof b);
    memcpy(tile[2] + column, &c, sizeof c);
    memcpy(tile[3] + column, &d, sizeof d);
}

/* Columns [wide][high] of words, `stride` apart, as rows of the tile. */
static void turn(const uint32_t *from, Py_ssize_t stride, Py_ssize_t high, Py_ssize_t wide, uint32_t (*tile)[WIDTH + LINE]) {
    Py_ssize_t column = 0, rows = high / 4 * 4;
    for (; column + 4 <= wide; column += 4, from += 4 * stride) {
        for (Py_ssize_t row = 0; row < rows; row += 4) turn_four(from + row, stride, tile + row, column);
        for (Py_ssize_t row = rows; row < high; row++)
            for (int i = 0; i < 4; i++) tile[row][column + i] = from[i * stride + row];
    }
    for (; column < wide; column++, from += stride)
        for (Py_ssize_t row = 0; row < high; row++) tile[row][column] = from[row];
}

/* The runs lie in columns: word i of each, for all runs, before word i + 1. They are turned in the cache, a tile at a time. */
static void summarize_columns(const uint32_t *words, Py_ssize_t length, const uint64_t *starts, Py_ssize_t num_runs, Summary *all) {
    uint32_t tile[HIGH][WIDTH + LINE]; /* rows do not compete for one place of the cache */
    for (Py_ssize_t first = 0; first < num_runs; first += HIGH) {
        Py_ssize_t high = num_runs - first < HIGH ? num_runs - first : HIGH;
        for (Py_ssize_t done = 0; done < length; done += WIDTH) {
            Py_ssize_t wide = length - done < WIDTH ? length - done : WIDTH;
            turn(words + done * num_runs + first, num_runs, high, wide, tile);
            for (Py_ssize_t run = 0; run < high; run++) summarize_run(tile[run], wide, starts[first + run] + (uint64_t)done, all);
        }
    }
}

static PyObject *summarize(PyObject *module, PyObject *args) {
    Py_buffer words, starts;
    Py_ssize_t length;
    int in_columns;
    Summary all;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ny*p", &words, &length, &starts, &in_columns)) return NULL;
    memset(&all, 0, sizeof all);
    Py_ssize_t num_runs = starts.len / (Py_ssize_t)sizeof(uint64_t);
    int fits = length >= 0 && words.len == num_runs * length * 4;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        (in_columns ? summarize_columns : summarize_runs)(words.buf, length, starts.buf, num_runs, &all);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&starts);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the words do not fill the runs");
        return NULL;
    }
    return summary_of(&all);
}

static PyMethodDef methods[] = {
    {"runs", runs, METH_VARARGS, "Both lanes of words of a width in bytes, which are runs of a length that begin at these elements (uint64)."},
    {"summarize", summarize, METH_VARARGS, "Both lanes, the digest without places, the largest magnitude and the signed sums of float32 words; the runs may lie in columns."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_digest", "Compiled loops of digests; see digest.py.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__digest(void) {
    make_keys();
    return PyModuleDef_Init(&module);
}
