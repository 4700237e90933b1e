/* The compiled half of transport/symmetric: signals between processes, and collectives through memory that all members map.
 *
 * Every member of a group has a region, which it alone allocates and all others map:
 *
 *     doorbell        rung by whoever changes a signal that this member may wait for
 *     filled[peer]    how many chunks this member has put into its slots for a peer
 *     taken[peer]     how many of these the peer has taken
 *     shown           how many chunks this member has put into its board, for all peers
 *     seen[peer]      how many of these the peer has taken
 *     slots           NUM_SLOTS for each peer, then NUM_SLOTS of the board
 *
 * Numbers only grow, so nothing is ever reset, and 2^32 chunks later they begin anew. A signal is published with release and
 * read with acquire; so what lies in a slot is there when its number is, and a slot is free when the number says so. Each
 * number has one writer and lies on a cache line of its own.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LINE 64
#define MOST_MEMBERS 64
#define NUM_SLOTS 2
#define SPINS 200          /* looks before a sleep: some microseconds, in which most answers on an idle core come */
#define MOST_READ ((size_t)1 << 30) /* by one call of the system, which reads less than 2 GiB */
#define SLICE_NS 50000000L /* between two looks whether peers still live */
#if defined(__x86_64__)
#define PAUSE __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE __asm__ volatile("yield")
#else
#define PAUSE (void)0
#endif
#define CHUNK_HEAD LINE    /* of a slot: how many bytes the whole message has */

typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    char line[LINE - 8];
} Signal;

typedef struct {
    int size, rank;
    size_t slot_bytes, board_bytes; /* without their heads */
    char *base[MOST_MEMBERS];
    int alive[MOST_MEMBERS]; /* a descriptor that becomes readable when the process ends */
    uint32_t sent[MOST_MEMBERS], got[MOST_MEMBERS], shown, seen[MOST_MEMBERS];
} Members;

/* How a call ended; with a peer for all but the first two. */
enum { DONE, LATE, GONE, CLOSED, DIFFERENT, UNREAD, INTERRUPTED };

typedef struct {
    int how, peer;
} End;

/* Lines of a region before those of peers. OPEN is 0 until its owner makes no more calls: 1, or BECAUSE_OF and the member that it found
 * ended, so that others hear of the first one to end and not of whoever followed. */
enum { DOORBELL, OPEN, SHOWN, NUM_OWN };
#define BECAUSE_OF 2

static Signal *own_signal(const Members *all, int owner, int which) { return (Signal *)(all->base[owner] + (size_t)which * LINE); }
static Signal *peer_signal(const Members *all, int owner, int which, int peer) {
    return (Signal *)(all->base[owner] + (size_t)(NUM_OWN + which * all->size + peer) * LINE);
}
#define FILLED 0
#define TAKEN 1
#define SEEN 2
#define NUM_OF_PEER 3

static char *slot(const Members *all, int owner, int peer, uint32_t chunk) {
    size_t head = (size_t)(NUM_OWN + NUM_OF_PEER * all->size) * LINE, each = all->slot_bytes + CHUNK_HEAD;
    return all->base[owner] + head + ((size_t)peer * NUM_SLOTS + chunk % NUM_SLOTS) * each;
}
static char *board(const Members *all, int owner, uint32_t chunk) {
    return slot(all, owner, all->size, 0) + (size_t)(chunk % NUM_SLOTS) * (all->board_bytes + CHUNK_HEAD);
}
static size_t region_bytes(int size, size_t slot_bytes, size_t board_bytes) {
    return (size_t)(NUM_OWN + NUM_OF_PEER * size) * LINE + NUM_SLOTS * ((size_t)size * (slot_bytes + CHUNK_HEAD) + board_bytes + CHUNK_HEAD);
}

static void wake(Signal *signal) {
    if (atomic_load_explicit(&signal->sleepers, memory_order_seq_cst)) syscall(SYS_futex, &signal->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
static void ring(Signal *doorbell) {
    atomic_fetch_add_explicit(&doorbell->value, 1, memory_order_seq_cst);
    wake(doorbell);
}
static uint32_t number_of(Signal *signal) { return atomic_load_explicit(&signal->value, memory_order_acquire); }
static void publish(Signal *signal, uint32_t number) { atomic_store_explicit(&signal->value, number, memory_order_release); }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int has_ended(int alive) {
    struct pollfd asked = {alive, POLLIN, 0};
    return alive >= 0 && poll(&asked, 1, 0) == 1;
}

/* Sleeps until `signal` is not `seen` any more, a slice at most; 0 when it slept a whole slice. */
static int sleep_on(Signal *signal, uint32_t seen) {
    struct timespec slice = {0, SLICE_NS};
    long woken = 0;
    atomic_fetch_add_explicit(&signal->sleepers, 1, memory_order_seq_cst);
    if (number_of(signal) == seen) woken = syscall(SYS_futex, &signal->value, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub_explicit(&signal->sleepers, 1, memory_order_seq_cst);
    return !(woken == -1 && errno == ETIMEDOUT);
}

/* Python's own handlers of signals, which run nowhere else while a call waits. */
static int is_interrupted(PyThreadState **thread) {
    PyEval_RestoreThread(*thread);
    int raised = PyErr_CheckSignals();
    *thread = PyEval_SaveThread();
    return raised;
}

/* What one call does with one peer, or with the board: bytes to send and to receive, and how far it is. */
typedef struct {
    const char *source;
    char *target;
    size_t to_send, sent, to_receive, received;
} Part;

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* Results of so many bytes are written past the caches: who reads them comes later than they would stay there, and a line that is written
 * whole need not be read first. That is a third of the memory traffic of a copy. */
#define STREAMED_BYTES ((size_t)4 << 20)

#if defined(__x86_64__)
/* Whole lines, to a target that begins one: with one store of a line where the processor has such, which is a fifth faster. */
static void stream_lines_16(char *target, const char *source, size_t count) {
    for (size_t at = 0; at < count; at += 16) _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(source + at)));
}
__attribute__((target("avx512f"))) static void stream_lines_64(char *target, const char *source, size_t count) {
    for (size_t at = 0; at < count; at += LINE) _mm512_stream_si512((void *)(target + at), _mm512_loadu_si512(source + at));
}
#endif

static void copy_result(char *target, const char *source, size_t count, int is_streamed) {
#if defined(__x86_64__)
    if (is_streamed) {
        size_t head = least((size_t)(-(uintptr_t)target & (LINE - 1)), count), lines = (count - head) / LINE * LINE;
        memcpy(target, source, head);
        (__builtin_cpu_supports("avx512f") ? stream_lines_64 : stream_lines_16)(target + head, source + head, lines);
        target += head + lines, source += head + lines, count -= head + lines;
    }
#else
    (void)is_streamed;
#endif
    memcpy(target, source, count);
}

static int put_chunk(Members *all, int peer, Part *part) {
    if (part->sent == part->to_send) return 0;
    if (all->sent[peer] - number_of(peer_signal(all, all->rank, TAKEN, peer)) >= NUM_SLOTS) return 0;
    char *place = slot(all, all->rank, peer, all->sent[peer]);
    size_t count = least(part->to_send - part->sent, all->slot_bytes);
    memcpy(place, &part->to_send, sizeof part->to_send);
    memcpy(place + CHUNK_HEAD, part->source + part->sent, count);
    part->sent += count;
    publish(peer_signal(all, all->rank, FILLED, peer), ++all->sent[peer]);
    ring(own_signal(all, peer, DOORBELL));
    return 1;
}

/* 1 when a chunk was taken, -1 where the peer sends another number of bytes than is expected. */
static int take_chunk(Members *all, int peer, Part *part) {
    if (part->received == part->to_receive || number_of(peer_signal(all, peer, FILLED, all->rank)) == all->got[peer]) return 0;
    const char *place = slot(all, peer, all->rank, all->got[peer]);
    size_t whole, count = least(part->to_receive - part->received, all->slot_bytes);
    memcpy(&whole, place, sizeof whole);
    if (whole != part->to_receive) return -1;
    copy_result(part->target + part->received, place + CHUNK_HEAD, count, whole >= STREAMED_BYTES);
    part->received += count;
    publish(peer_signal(all, peer, TAKEN, all->rank), ++all->got[peer]);
    ring(own_signal(all, peer, DOORBELL));
    return 1;
}

static int put_board(Members *all, Part *own) {
    if (own->sent == own->to_send) return 0;
    for (int peer = 0; peer < all->size; peer++)
        if (peer != all->rank && all->shown - number_of(peer_signal(all, all->rank, SEEN, peer)) >= NUM_SLOTS) return 0;
    char *place = board(all, all->rank, all->shown);
    size_t count = least(own->to_send - own->sent, all->board_bytes);
    memcpy(place, &own->to_send, sizeof own->to_send);
    memcpy(place + CHUNK_HEAD, own->source + own->sent, count);
    publish(own_signal(all, all->rank, SHOWN), ++all->shown);
    for (int peer = 0; peer < all->size; peer++)
        if (peer != all->rank) ring(own_signal(all, peer, DOORBELL));
    /* the own copy is made while the chunk is in the cache */
    copy_result(own->target + own->sent, own->source + own->sent, count, own->to_send >= STREAMED_BYTES);
    own->sent += count;
    return 1;
}

static int take_board(Members *all, int peer, Part *part) {
    if (part->received == part->to_receive || number_of(own_signal(all, peer, SHOWN)) == all->seen[peer]) return 0;
    const char *place = board(all, peer, all->seen[peer]);
    size_t whole, count = least(part->to_receive - part->received, all->board_bytes);
    memcpy(&whole, place, sizeof whole);
    if (whole != part->to_receive) return -1;
    copy_result(part->target + part->received, place + CHUNK_HEAD, count, whole >= STREAMED_BYTES);
    part->received += count;
    publish(peer_signal(all, peer, SEEN, all->rank), ++all->seen[peer]);
    ring(own_signal(all, peer, DOORBELL));
    return 1;
}

static int is_left(const Part *part) { return part->sent < part->to_send || part->received < part->to_receive; }

/* Where a call waits for one who cannot come any more: a member that has ended, or else the first that has closed. */
static End whom_in_vain(Members *all, const Part *parts, int on_board) {
    const Part *own = &parts[all->rank];
    End found = {DONE, 0};
    for (int peer = 0; peer < all->size; peer++) {
        uint32_t because = peer == all->rank ? 0 : number_of(own_signal(all, peer, OPEN));
        if (because >= BECAUSE_OF && (int)(because - BECAUSE_OF) < all->size) return (End){GONE, (int)(because - BECAUSE_OF)};
    }
    for (int peer = 0; peer < all->size; peer++) {
        if (peer == all->rank) continue;
        int awaited = is_left(&parts[peer]) || (on_board && own->sent < own->to_send), ended = has_ended(all->alive[peer]);
        if (awaited && found.how == DONE && (ended || number_of(own_signal(all, peer, OPEN)))) found = (End){ended ? GONE : CLOSED, peer};
        if (found.how == CLOSED && ended) found = (End){GONE, peer};
    }
    return found;
}

/* All parts of one call. With `on_board` the own part goes to everybody through the board, else each peer has its own. */
static End exchange_parts(Members *all, Part *parts, int on_board, int64_t timeout_ns, PyThreadState **thread) {
    Signal *doorbell = own_signal(all, all->rank, DOORBELL);
    int64_t deadline = now_ns() + timeout_ns;
    for (int idle = 0;;) {
        uint32_t rung = number_of(doorbell);
        int moved = on_board ? put_board(all, &parts[all->rank]) : 0, left = 0;
        /* beginning behind oneself, so that members do not all come to the same one first */
        for (int step = 1; step < all->size; step++) {
            int to = (all->rank + step) % all->size, from = (all->rank + all->size - step) % all->size;
            if (!on_board) moved |= put_chunk(all, to, &parts[to]);
            int taken = on_board ? take_board(all, from, &parts[from]) : take_chunk(all, from, &parts[from]);
            if (taken < 0) return (End){DIFFERENT, from};
            moved |= taken;
        }
        for (int peer = 0; peer < all->size; peer++) left |= (on_board || peer != all->rank) && is_left(&parts[peer]);
        if (!left) return (End){DONE, 0};
        if (moved) {
            idle = 0;
            continue;
        }
        if (++idle <= SPINS) {
            PAUSE;
            continue;
        }
        if (sleep_on(doorbell, rung)) continue;
        if (is_interrupted(thread)) return (End){INTERRUPTED, 0};
        End vain = whom_in_vain(all, parts, on_board);
        /* what came between the last look and the peer's end is still taken */
        if (vain.how != DONE && number_of(doorbell) == rung) return vain;
        if (now_ns() > deadline) {
            for (int peer = 0; peer < all->size; peer++)
                if (peer != all->rank && (is_left(&parts[peer]) || on_board)) return (End){LATE, peer};
        }
    }
}

/* ---- The canonical tree, out of the slots of the members ---- */

#define MOST_HELD 64     /* partial sums at once: the logarithm of the leaves, and as many rows as a member ships */
#define STRIPE 1024      /* numbers that are added at a time: they stay in the first cache */

/* What one call of a tree sum does. Rows of a part are `stride` numbers apart where they come from, and lie one after the other in a slot,
 * `block` numbers of each. */
typedef struct {
    const float *source[MOST_MEMBERS];
    size_t stride[MOST_MEMBERS], width[MOST_MEMBERS]; /* of the parts that this member sends, its own too */
    int rows[MOST_MEMBERS];                           /* that each member has for each part */
    const int *merges;
    size_t block;
    float *target;
    int is_shared;               /* every member gets the sums of all: the own ones go to the board as they are made */
    size_t offset[MOST_MEMBERS]; /* of each member's sums in the target then, in numbers; 0 else */
} Tree;

static int put_rows(Members *all, int peer, const Tree *tree, size_t *at) {
    size_t width = tree->width[peer];
    int rows = tree->rows[all->rank];
    if (*at >= width || !rows) return 0;
    if (all->sent[peer] - number_of(peer_signal(all, all->rank, TAKEN, peer)) >= NUM_SLOTS) return 0;
    char *place = slot(all, all->rank, peer, all->sent[peer]);
    size_t count = least(width - *at, tree->block), whole = width * (size_t)rows * sizeof(float);
    memcpy(place, &whole, sizeof whole);
    for (int row = 0; row < rows; row++)
        memcpy(place + CHUNK_HEAD + (size_t)row * count * sizeof(float), tree->source[peer] + (size_t)row * tree->stride[peer] + *at, count * sizeof(float));
    *at += count;
    publish(peer_signal(all, all->rank, FILLED, peer), ++all->sent[peer]);
    ring(own_signal(all, peer, DOORBELL));
    return 1;
}

/* One stripe of all rows on a stack; after each the two last are added as often as `merges` says. */
static void add_stripe(const float *const *rows, int num_rows, const int *merges, float *target, size_t count, int is_streamed) {
    float sums[MOST_HELD][STRIPE];
    const float *held[MOST_HELD];
    int depth = 0;
    for (int row = 0; row < num_rows; row++) {
        held[depth++] = rows[row];
        for (int merge = 0; merge < merges[row]; merge++) {
            depth--;
            const float *left = held[depth - 1], *right = held[depth];
            float *sum = row == num_rows - 1 && depth == 1 && !is_streamed ? target : sums[depth - 1];
            for (size_t i = 0; i < count; i++) sum[i] = left[i] + right[i];
            held[depth - 1] = sum;
        }
    }
    if (held[0] != target) copy_result((char *)target, (const char *)held[0], count * sizeof(float), is_streamed);
}

/* Adds a block, at `shown` first where it is given, so that peers get it from there. 1 when it was added, 0 while a member's rows are
 * missing, -1 - member where one sends another number of bytes. */
static int add_block(Members *all, const Tree *tree, size_t at, float *shown) {
    const float *rows[MOST_MEMBERS * MOST_HELD], *stripes[MOST_MEMBERS * MOST_HELD];
    size_t width = tree->width[all->rank], count = least(width - at, tree->block);
    int num_rows = 0, is_streamed = width * sizeof(float) >= STREAMED_BYTES;
    for (int peer = 0; peer < all->size; peer++)
        if (peer != all->rank && tree->rows[peer] && number_of(peer_signal(all, peer, FILLED, all->rank)) == all->got[peer]) return 0;
    for (int peer = 0; peer < all->size; peer++) {
        const char *place = slot(all, peer, all->rank, all->got[peer]);
        size_t whole;
        if (peer != all->rank && tree->rows[peer]) {
            memcpy(&whole, place, sizeof whole);
            if (whole != width * (size_t)tree->rows[peer] * sizeof(float)) return -1 - peer;
        }
        for (int row = 0; row < tree->rows[peer]; row++)
            rows[num_rows++] = peer == all->rank ? tree->source[peer] + (size_t)row * tree->stride[peer] + at
                                                 : (const float *)(place + CHUNK_HEAD) + (size_t)row * count;
    }
    float *target = tree->target + tree->offset[all->rank] + at;
    for (size_t from = 0; from < count; from += STRIPE) {
        for (int row = 0; row < num_rows; row++) stripes[row] = rows[row] + from;
        add_stripe(stripes, num_rows, tree->merges, shown ? shown + from : target + from, least(count - from, STRIPE), !shown && is_streamed);
        if (shown) copy_result((char *)(target + from), (const char *)(shown + from), least(count - from, STRIPE) * sizeof(float), is_streamed);
    }
    for (int peer = 0; peer < all->size; peer++) {
        if (peer == all->rank || !tree->rows[peer]) continue;
        publish(peer_signal(all, peer, TAKEN, all->rank), ++all->got[peer]);
        ring(own_signal(all, peer, DOORBELL));
    }
    return 1;
}

/* The same, for all members. */
static int show_block(Members *all, const Tree *tree, size_t at) {
    for (int peer = 0; peer < all->size; peer++)
        if (peer != all->rank && all->shown - number_of(peer_signal(all, all->rank, SEEN, peer)) >= NUM_SLOTS) return 0;
    char *place = board(all, all->rank, all->shown);
    size_t whole = tree->width[all->rank] * sizeof(float);
    int added = add_block(all, tree, at, (float *)(place + CHUNK_HEAD));
    if (added <= 0) return added;
    memcpy(place, &whole, sizeof whole);
    publish(own_signal(all, all->rank, SHOWN), ++all->shown);
    for (int peer = 0; peer < all->size; peer++)
        if (peer != all->rank) ring(own_signal(all, peer, DOORBELL));
    return 1;
}

/* 1 when sums of a peer were taken, 0 where there are none, -1 where it has another number of bytes. */
static int take_sums(Members *all, int peer, const Tree *tree, size_t *at) {
    size_t width = tree->width[peer], count = least(width - *at, tree->block), whole;
    if (*at == width || number_of(own_signal(all, peer, SHOWN)) == all->seen[peer]) return 0;
    const char *place = board(all, peer, all->seen[peer]);
    memcpy(&whole, place, sizeof whole);
    if (whole != width * sizeof(float)) return -1;
    copy_result((char *)(tree->target + tree->offset[peer] + *at), place + CHUNK_HEAD, count * sizeof(float), whole >= STREAMED_BYTES);
    *at += count;
    publish(peer_signal(all, peer, SEEN, all->rank), ++all->seen[peer]);
    ring(own_signal(all, peer, DOORBELL));
    return 1;
}

static End tree_parts(Members *all, const Tree *tree, int64_t timeout_ns, PyThreadState **thread) {
    Signal *doorbell = own_signal(all, all->rank, DOORBELL);
    int64_t deadline = now_ns() + timeout_ns;
    size_t sent[MOST_MEMBERS] = {0}, taken[MOST_MEMBERS] = {0}, added = 0;
    for (int idle = 0;;) {
        uint32_t rung = number_of(doorbell);
        int moved = 0, left = 0;
        for (int step = 1; step < all->size; step++) moved |= put_rows(all, (all->rank + step) % all->size, tree, &sent[(all->rank + step) % all->size]);
        if (added < tree->width[all->rank]) {
            int added_one = tree->is_shared ? show_block(all, tree, added) : add_block(all, tree, added, NULL);
            if (added_one < 0) return (End){DIFFERENT, -1 - added_one};
            if (added_one) added += least(tree->width[all->rank] - added, tree->block);
            moved |= added_one;
        }
        for (int step = 1; tree->is_shared && step < all->size; step++) {
            int from = (all->rank + all->size - step) % all->size, taken_one = take_sums(all, from, tree, &taken[from]);
            if (taken_one < 0) return (End){DIFFERENT, from};
            moved |= taken_one;
        }
        for (int peer = 0; peer < all->size; peer++) {
            if (peer == all->rank) continue;
            left |= (tree->rows[all->rank] && sent[peer] < tree->width[peer]) || (tree->is_shared && taken[peer] < tree->width[peer]);
        }
        if (!left && added >= tree->width[all->rank]) return (End){DONE, 0};
        if (moved) {
            idle = 0;
            continue;
        }
        if (++idle <= SPINS) {
            PAUSE;
            continue;
        }
        if (sleep_on(doorbell, rung)) continue;
        if (is_interrupted(thread)) return (End){INTERRUPTED, 0};
        Part parts[MOST_MEMBERS];
        for (int peer = 0; peer < all->size; peer++) {
            int waits = added < tree->width[all->rank] && tree->rows[peer] && number_of(peer_signal(all, peer, FILLED, all->rank)) == all->got[peer];
            waits |= tree->is_shared && taken[peer] < tree->width[peer];
            parts[peer] = (Part){NULL, NULL, tree->rows[all->rank] ? tree->width[peer] : 0, sent[peer], (size_t)waits, 0};
        }
        parts[all->rank] = (Part){NULL, NULL, tree->width[all->rank], tree->is_shared ? added : tree->width[all->rank], 0, 0};
        End vain = whom_in_vain(all, parts, tree->is_shared);
        if (vain.how != DONE && number_of(doorbell) == rung) return vain;
        if (now_ns() > deadline)
            for (int peer = 0; peer < all->size; peer++)
                if (is_left(&parts[peer])) return (End){LATE, peer};
    }
}

/* Until a number of a peer's has come so far. */
static End wait_for(Members *all, int peer, Signal *signal, uint32_t number, int64_t timeout_ns, PyThreadState **thread) {
    Signal *doorbell = own_signal(all, all->rank, DOORBELL);
    int64_t deadline = now_ns() + timeout_ns;
    for (int idle = 0;;) {
        uint32_t rung = number_of(doorbell);
        if ((int32_t)(number_of(signal) - number) >= 0) return (End){DONE, peer};
        if (++idle <= SPINS) {
            PAUSE;
            continue;
        }
        if (sleep_on(doorbell, rung)) continue;
        if (is_interrupted(thread)) return (End){INTERRUPTED, peer};
        int ended = has_ended(all->alive[peer]), closed = number_of(own_signal(all, peer, OPEN)) != 0;
        if (number_of(doorbell) != rung) continue; /* what came before the peer's end counts */
        if (ended) return (End){GONE, peer};
        if (closed) return (End){CLOSED, peer};
        if (now_ns() > deadline) return (End){LATE, peer};
    }
}

/* Copies what another process has at an address; 0 where the system does not allow it, or the memory is not there. */
static int has_read(pid_t process, uintptr_t source, char *target, size_t num_bytes) {
    for (size_t at = 0; at < num_bytes; at += MOST_READ) {
        size_t count = least(num_bytes - at, MOST_READ);
        struct iovec here = {target + at, count}, there = {(void *)(source + at), count};
        if (process_vm_readv(process, &here, 1, &there, 1, 0) != (ssize_t)count) return 0;
    }
    return 1;
}

/* ---- Python ---- */

#define CAPSULE "shardproof.members"

static void forget(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, CAPSULE)); }

static PyObject *region_size(PyObject *module, PyObject *args) {
    int size;
    Py_ssize_t slot_bytes, board_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "inn", &size, &slot_bytes, &board_bytes)) return NULL;
    return PyLong_FromSize_t(region_bytes(size, (size_t)slot_bytes, (size_t)board_bytes));
}

static int read_numbers(PyObject *sequence, Py_ssize_t expected, unsigned long long *numbers) {
    if (!PyTuple_Check(sequence) || PyTuple_Size(sequence) != expected) {
        PyErr_Format(PyExc_ValueError, "a tuple of %zd numbers is expected", expected);
        return -1;
    }
    for (Py_ssize_t i = 0; i < expected; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(sequence, i));
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static PyObject *join(PyObject *module, PyObject *args) {
    int rank;
    PyObject *bases, *alive;
    Py_ssize_t slot_bytes, board_bytes;
    unsigned long long numbers[MOST_MEMBERS];
    (void)module;
    if (!PyArg_ParseTuple(args, "iOOnn", &rank, &bases, &alive, &slot_bytes, &board_bytes)) return NULL;
    Py_ssize_t size = PyTuple_Check(bases) ? PyTuple_Size(bases) : 0;
    if (size < 2 || size > MOST_MEMBERS || rank < 0 || rank >= size || slot_bytes < LINE || board_bytes < LINE) {
        PyErr_SetString(PyExc_ValueError, "2 to 64 members, one of them this one, and slots of at least 64 bytes are expected");
        return NULL;
    }
    Members *all = PyMem_Calloc(1, sizeof *all);
    if (!all) return PyErr_NoMemory();
    all->size = (int)size, all->rank = rank, all->slot_bytes = (size_t)slot_bytes, all->board_bytes = (size_t)board_bytes;
    if (read_numbers(bases, size, numbers)) goto wrong;
    for (int i = 0; i < all->size; i++) all->base[i] = (char *)(uintptr_t)numbers[i];
    if (read_numbers(alive, size, numbers)) goto wrong;
    for (int i = 0; i < all->size; i++) all->alive[i] = i == rank ? -1 : (int)numbers[i];
    PyObject *capsule = PyCapsule_New(all, CAPSULE, forget);
    if (capsule) return capsule;
wrong:
    PyMem_Free(all);
    return NULL;
}

/* Makes no more calls: those who wait for this member hear why. */
static void leave(Members *all, uint32_t why) {
    Signal *open = own_signal(all, all->rank, OPEN);
    if (!number_of(open)) publish(open, why);
    for (int peer = 0; peer < all->size; peer++)
        if (peer != all->rank) ring(own_signal(all, peer, DOORBELL));
}

static PyObject *run(Members *all, Part *parts, int on_board, double timeout_s) {
    PyThreadState *thread = PyEval_SaveThread();
    End end = exchange_parts(all, parts, on_board, (int64_t)(timeout_s * 1e9), &thread);
    if (end.how == GONE) leave(all, BECAUSE_OF + (uint32_t)end.peer);
    PyEval_RestoreThread(thread);
    return end.how == INTERRUPTED ? NULL : Py_BuildValue("ii", end.how, end.peer);
}

/* The members of a capsule and the parts that tuples of addresses and bytes describe. */
static Members *read_parts(PyObject *capsule, PyObject *sources, PyObject *sent, PyObject *targets, PyObject *received, Part *parts) {
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    unsigned long long numbers[4][MOST_MEMBERS];
    if (!all || read_numbers(sources, all->size, numbers[0]) || read_numbers(sent, all->size, numbers[1]) ||
        read_numbers(targets, all->size, numbers[2]) || read_numbers(received, all->size, numbers[3]))
        return NULL;
    for (int i = 0; i < all->size; i++)
        parts[i] = (Part){(const char *)(uintptr_t)numbers[0][i], (char *)(uintptr_t)numbers[2][i], (size_t)numbers[1][i], 0, (size_t)numbers[3][i], 0};
    return all;
}

static PyObject *exchange(PyObject *module, PyObject *args) {
    PyObject *capsule, *sources, *sent, *targets, *received;
    double timeout_s;
    Part parts[MOST_MEMBERS];
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOd", &capsule, &sources, &sent, &targets, &received, &timeout_s)) return NULL;
    Members *all = read_parts(capsule, sources, sent, targets, received, parts);
    if (!all) return NULL;
    Part *own = &parts[all->rank];
    if (own->to_send != own->to_receive) {
        PyErr_SetString(PyExc_ValueError, "a member receives what it sends itself");
        return NULL;
    }
    memcpy(own->target, own->source, own->to_send);
    own->sent = own->received = own->to_send;
    return run(all, parts, 0, timeout_s);
}

static PyObject *gather(PyObject *module, PyObject *args) {
    PyObject *capsule, *targets, *received;
    unsigned long long source;
    double timeout_s;
    Part parts[MOST_MEMBERS];
    unsigned long long numbers[2][MOST_MEMBERS];
    (void)module;
    if (!PyArg_ParseTuple(args, "OKOOd", &capsule, &source, &targets, &received, &timeout_s)) return NULL;
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!all || read_numbers(targets, all->size, numbers[0]) || read_numbers(received, all->size, numbers[1])) return NULL;
    for (int i = 0; i < all->size; i++) parts[i] = (Part){NULL, (char *)(uintptr_t)numbers[0][i], 0, 0, (size_t)numbers[1][i], 0};
    Part *own = &parts[all->rank];
    own->source = (const char *)(uintptr_t)source, own->to_send = own->received = own->to_receive;
    return run(all, parts, 1, timeout_s);
}

static PyObject *tree_sum(PyObject *module, PyObject *args) {
    PyObject *capsule, *sources, *strides, *widths, *rows, *merges, *result = NULL;
    unsigned long long target, numbers[4][MOST_MEMBERS];
    double timeout_s;
    Tree tree = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOKpd", &capsule, &sources, &strides, &widths, &rows, &merges, &target, &tree.is_shared, &timeout_s)) return NULL;
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!all || read_numbers(sources, all->size, numbers[0]) || read_numbers(strides, all->size, numbers[1]) ||
        read_numbers(widths, all->size, numbers[2]) || read_numbers(rows, all->size, numbers[3]))
        return NULL;
    Py_ssize_t num_rows = 0;
    unsigned long long most = 1;
    for (int i = 0; i < all->size; i++) {
        tree.source[i] = (const float *)(uintptr_t)numbers[0][i], tree.stride[i] = (size_t)numbers[1][i], tree.width[i] = (size_t)numbers[2][i];
        if (numbers[3][i] > MOST_HELD) return PyErr_Format(PyExc_ValueError, "a member has %llu rows, and at most %d are added", numbers[3][i], MOST_HELD);
        tree.rows[i] = (int)numbers[3][i], num_rows += tree.rows[i];
        most = numbers[3][i] > most ? numbers[3][i] : most;
        if (tree.is_shared && i) tree.offset[i] = tree.offset[i - 1] + tree.width[i - 1];
    }
    tree.target = (float *)(uintptr_t)target;
    tree.block = least(all->slot_bytes / most, all->board_bytes) / sizeof(float);
    unsigned long long *counts = PyMem_Calloc((size_t)num_rows + 1, sizeof *counts);
    int *merged = PyMem_Calloc((size_t)num_rows + 1, sizeof *merged);
    if (!counts || !merged) {
        PyErr_NoMemory();
        goto end;
    }
    if (read_numbers(merges, num_rows, counts)) goto end;
    /* the stack never runs empty or over, and one value is left */
    long long depth = 0;
    int is_legal = num_rows > 0 && tree.block > 0;
    for (Py_ssize_t row = 0; row < num_rows && is_legal; row++) {
        is_legal = ++depth <= MOST_HELD && counts[row] < (unsigned long long)depth;
        merged[row] = (int)counts[row], depth -= merged[row];
    }
    if (!is_legal || depth != 1) {
        PyErr_SetString(PyExc_ValueError, "rows and merges are expected that leave one value of a stack");
        goto end;
    }
    tree.merges = merged;
    PyThreadState *thread = PyEval_SaveThread();
    End found = tree_parts(all, &tree, (int64_t)(timeout_s * 1e9), &thread);
    if (found.how == GONE) leave(all, BECAUSE_OF + (uint32_t)found.peer);
    PyEval_RestoreThread(thread);
    if (found.how != INTERRUPTED) result = Py_BuildValue("ii", found.how, found.peer);
end:
    PyMem_Free(counts);
    PyMem_Free(merged);
    return result;
}

/* Whether this process may read memory of another. */
static PyObject *can_read(PyObject *module, PyObject *args) {
    int process;
    unsigned long long address;
    char found[LINE];
    (void)module;
    if (!PyArg_ParseTuple(args, "iK", &process, &address)) return NULL;
    return PyBool_FromLong(has_read(process, (uintptr_t)address, found, sizeof found));
}

/* Bytes of a peer's own memory. */
static PyObject *pull(PyObject *module, PyObject *args) {
    PyObject *capsule;
    int peer, process, was_read;
    unsigned long long source, target;
    Py_ssize_t num_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "OiiKKn", &capsule, &peer, &process, &source, &target, &num_bytes)) return NULL;
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!all) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    was_read = has_read(process, (uintptr_t)source, (char *)(uintptr_t)target, (size_t)num_bytes);
    /* a process that waits for its reader lives; one that has ended may have left its number to another */
    int ended = has_ended(all->alive[peer]);
    PyEval_RestoreThread(thread);
    return Py_BuildValue("ii", ended ? GONE : was_read ? DONE : UNREAD, peer);
}

/* Messages whose bytes lie elsewhere: `post` says that the next one is there, `take` that it was read. */
static PyObject *post(PyObject *module, PyObject *args) {
    PyObject *capsule;
    int peer;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &peer)) return NULL;
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!all) return NULL;
    publish(peer_signal(all, all->rank, FILLED, peer), ++all->sent[peer]);
    ring(own_signal(all, peer, DOORBELL));
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *module, PyObject *args) {
    PyObject *capsule;
    int peer;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &peer)) return NULL;
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!all) return NULL;
    publish(peer_signal(all, peer, TAKEN, all->rank), ++all->got[peer]);
    ring(own_signal(all, peer, DOORBELL));
    Py_RETURN_NONE;
}

static PyObject *wait_until(PyObject *args, int which) {
    PyObject *capsule;
    int peer;
    unsigned int number;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "OiId", &capsule, &peer, &number, &timeout_s)) return NULL;
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!all) return NULL;
    Signal *signal = which == FILLED ? peer_signal(all, peer, FILLED, all->rank) : peer_signal(all, all->rank, TAKEN, peer);
    PyThreadState *thread = PyEval_SaveThread();
    End end = wait_for(all, peer, signal, number, (int64_t)(timeout_s * 1e9), &thread);
    PyEval_RestoreThread(thread);
    return end.how == INTERRUPTED ? NULL : Py_BuildValue("ii", end.how, end.peer);
}
static PyObject *wait_posted(PyObject *module, PyObject *args) { (void)module; return wait_until(args, FILLED); }
static PyObject *wait_taken(PyObject *module, PyObject *args) { (void)module; return wait_until(args, TAKEN); }

/* No call of any member waits for this one any more. */
static PyObject *close_members(PyObject *module, PyObject *capsule) {
    Members *all = PyCapsule_GetPointer(capsule, CAPSULE);
    (void)module;
    if (!all) return NULL;
    leave(all, 1);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"region_size", region_size, METH_VARARGS, "Bytes of the region of one member."},
    {"join", join, METH_VARARGS, "A handle of this member of a group, whose regions are all mapped and were all zero."},
    {"exchange", exchange, METH_VARARGS, "A part from each member to each."},
    {"gather", gather, METH_VARARGS, "One part from each member to all."},
    {"tree_sum", tree_sum, METH_VARARGS, "The sum in one order of what all members have for this one."},
    {"can_read", can_read, METH_VARARGS, "Whether memory of another process can be read at an address."},
    {"pull", pull, METH_VARARGS, "Bytes of a peer's own memory."},
    {"post", post, METH_VARARGS, "The next message for a peer is there."},
    {"take", take, METH_VARARGS, "The next message of a peer was read."},
    {"wait_posted", wait_posted, METH_VARARGS, "Until a peer has posted so many messages."},
    {"wait_taken", wait_taken, METH_VARARGS, "Until a peer has taken so many messages."},
    {"close", close_members, METH_O, "Tells all peers that this member makes no more calls."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shared_memory", "Collectives through shared memory; see transport/symmetric.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shared_memory(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "MOST_MEMBERS", MOST_MEMBERS) || PyModule_AddIntConstant(made, "MOST_ROWS", MOST_HELD))) return NULL;
    return made;
}
