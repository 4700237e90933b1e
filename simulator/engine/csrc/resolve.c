/* Graph resolution: what each action of a lowered schedule waits for (graph.py, plain_graph). */
#include "kernel.h"

static inline int is_compute(int kind) { return kind <= W || kind == STEP || kind == OVERLAP_F_B; }

typedef struct {
    int64_t size, num_ranks, num_stages, num_microbatches, ahead;
    int rendezvous, blocking;
    const int8_t *kind;
    const int32_t *stage, *microbatch, *pair_stage, *pair_microbatch;
    const int64_t *offsets;
    const int32_t *owners; /* [stages][2]: the two ranks of a replicated stage, else -1 */
    int32_t *rank, *partner, *posted_after;
    int32_t (*waits)[4];
    /* [stages][microbatches] -> the action there */
    int32_t *forward_at, *backward_at, *recv_f_at, *recv_b_at;
    /* [stages] -> the last such action of the rank being walked; smaller than the rank's first action: none */
    int32_t *compute_of, *unshard_of;
    int32_t *lane_last;     /* [4 kinds of message][ranks] -> the last message on the lane, the same way */
    int32_t *lane_count;    /* [2 kinds of receive][ranks] -> receives on the lane so far */
    int32_t *recent;        /* [2][ranks][ahead] -> the compute action before each of the last `ahead` receives */
    int32_t *reduce_at;     /* [stages][2 replicas] */
} Resolver;

static inline int64_t cell(const Resolver *r, int64_t stage, int64_t microbatch) { return stage * r->num_microbatches + microbatch; }

static void fill_tables(Resolver *r)
{
    for (int64_t rank = 0; rank < r->num_ranks; rank++) {
        for (int64_t i = r->offsets[rank]; i < r->offsets[rank + 1]; i++) {
            int64_t at = cell(r, r->stage[i], r->microbatch[i]);
            r->rank[i] = (int32_t)rank;
            switch (r->kind[i]) {
            case F: r->forward_at[at] = (int32_t)i; break;
            case B:
            case I: r->backward_at[at] = (int32_t)i; break;
            case RECV_F: r->recv_f_at[at] = (int32_t)i; break;
            case RECV_B: r->recv_b_at[at] = (int32_t)i; break;
            case OVERLAP_F_B:
                r->forward_at[at] = (int32_t)i;
                r->backward_at[cell(r, r->pair_stage[i], r->pair_microbatch[i])] = (int32_t)i;
                break;
            }
        }
    }
}

/* Pairs sends with receives; nonzero when one has no partner. */
static int pair_messages(Resolver *r)
{
    int64_t num_receives = 0, num_matched = 0;
    for (int64_t i = 0; i < r->size; i++) {
        int kind = r->kind[i];
        if (kind == SEND_F || kind == SEND_B) {
            int64_t target = r->stage[i] + (kind == SEND_F ? 1 : -1);
            if (target < 0 || target >= r->num_stages)
                return 1;
            int32_t receive = (kind == SEND_F ? r->recv_f_at : r->recv_b_at)[cell(r, target, r->microbatch[i])];
            if (receive < 0)
                return 1;
            num_matched += r->partner[receive] < 0;
            r->partner[i] = receive;
            r->partner[receive] = (int32_t)i;
        }
        num_receives += IS_RECEIVE(kind);
    }
    return num_matched != num_receives;
}

/* The last action of `table` before i on its rank with a stage in common; -1 for none. */
static inline int32_t latest_of(const int32_t *table, const Resolver *r, int64_t i, int64_t lo)
{
    int32_t found = table[r->stage[i]];
    if (r->kind[i] == OVERLAP_F_B && table[r->pair_stage[i]] > found)
        found = table[r->pair_stage[i]];
    return found >= lo ? found : -1;
}

/* What gives action i its input: the send of its message, or its own rank's neighbouring stage; -2 when nothing does. */
static inline int32_t source_of(const Resolver *r, int32_t receive, const int32_t *producer_at, int64_t neighbour, int64_t microbatch,
                                int32_t rank)
{
    if (receive >= 0)
        return r->partner[receive];
    int32_t producer = producer_at[cell(r, neighbour, microbatch)];
    return producer >= 0 && r->rank[producer] == rank ? producer : -2;
}

/* The waits of F, B, I and OVERLAP_F_B; nonzero when an input is missing. */
static inline int flow_waits(const Resolver *r, int64_t i, int32_t rank, int32_t *waits)
{
    int kind = r->kind[i];
    int64_t stage = r->stage[i], microbatch = r->microbatch[i];
    if ((kind == F || kind == OVERLAP_F_B) && stage > 0) {
        waits[1] = source_of(r, r->recv_f_at[cell(r, stage, microbatch)], r->forward_at, stage - 1, microbatch, rank);
        if (waits[1] == -2)
            return 1;
    }
    if (kind == F)
        return 0;
    if (kind == OVERLAP_F_B) {
        stage = r->pair_stage[i];
        microbatch = r->pair_microbatch[i];
    } else if ((waits[1] = r->forward_at[cell(r, stage, microbatch)]) < 0) {
        return 1;
    }
    if (stage < r->num_stages - 1) {
        waits[2] = source_of(r, r->recv_b_at[cell(r, stage, microbatch)], r->backward_at, stage + 1, microbatch, rank);
        if (waits[2] == -2)
            return 1;
    }
    return 0;
}

/* Compute also waits for the sends listed since the compute before it; nonzero when a backward comes before its forward. */
static inline int stand_still(int kind, int32_t *waits, int32_t last_compute, int32_t last_send_f, int32_t last_send_b)
{
    int is_backward = kind == B || kind == I;
    if (last_send_f > last_compute)
        waits[0] = last_send_f;
    if (last_send_b > last_compute) {
        if (is_backward && waits[1] > last_compute)
            return 1;
        waits[is_backward ? 1 : 2] = last_send_b;
    }
    return 0;
}

/* Walks one rank's list with what came before on every lane; nonzero when something is missing. */
static int walk_rank(Resolver *r, int32_t rank)
{
    int64_t lo = r->offsets[rank], hi = r->offsets[rank + 1];
    int32_t last_compute = -1, last_dp = -1, last_send_f = -1, last_send_b = -1;
    for (int64_t i = lo; i < hi; i++) {
        int kind = r->kind[i];
        int64_t stage = r->stage[i], microbatch = r->microbatch[i];
        int32_t *waits = r->waits[i];
        if (kind >= SEND_F && kind <= RECV_B) {
            int64_t lane = (kind - SEND_F) * r->num_ranks + r->rank[r->partner[i]];
            int is_first = r->lane_last[lane] < lo;
            waits[0] = is_first ? -1 : r->lane_last[lane];
            r->lane_last[lane] = (int32_t)i;
            if (IS_RECEIVE(kind)) {
                int64_t receive_lane = (kind == RECV_B) * r->num_ranks + r->rank[r->partner[i]];
                int32_t count = is_first ? 0 : r->lane_count[receive_lane];
                if (r->ahead) {
                    int32_t *recent = r->recent + receive_lane * r->ahead + count % r->ahead;
                    if (count >= r->ahead)
                        r->posted_after[i] = *recent;
                    *recent = last_compute;
                } else {
                    r->posted_after[i] = last_compute;
                }
                r->lane_count[receive_lane] = count + 1;
            } else {
                waits[1] = (kind == SEND_F ? r->forward_at : r->backward_at)[cell(r, stage, microbatch)];
                if (waits[1] < 0 || (r->blocking && waits[1] > last_compute))
                    return 1;
                if (r->blocking)
                    waits[1] = last_compute;
                *(kind == SEND_F ? &last_send_f : &last_send_b) = (int32_t)i;
            }
        } else if (is_compute(kind)) {
            waits[0] = last_compute;
            if (kind == W)
                waits[1] = r->backward_at[cell(r, stage, microbatch)];
            else if (kind == STEP)
                waits[1] = last_dp;
            else if (flow_waits(r, i, rank, waits))
                return 1;
            if (kind != STEP)
                waits[3] = latest_of(r->unshard_of, r, i, lo);
            if (r->blocking && kind != OVERLAP_F_B && stand_still(kind, waits, last_compute, last_send_f, last_send_b))
                return 1;
            r->compute_of[stage] = last_compute = (int32_t)i;
            if (kind == OVERLAP_F_B)
                r->compute_of[r->pair_stage[i]] = (int32_t)i;
        } else {
            waits[0] = last_dp;
            if (kind == UNSHARD) {
                waits[1] = last_compute;
                r->unshard_of[stage] = (int32_t)i;
            } else {
                waits[1] = latest_of(r->compute_of, r, i, lo);
            }
            last_dp = (int32_t)i;
            if (kind == REDUCE_GRAD && r->owners[2 * stage] >= 0) {
                if (rank != r->owners[2 * stage] && rank != r->owners[2 * stage + 1])
                    return 1;
                r->reduce_at[2 * stage + (rank == r->owners[2 * stage + 1])] = (int32_t)i;
            }
        }
    }
    return 0;
}

/* What an action waits for through its partner on another rank; nonzero when a reduction has none. */
static int cross_waits(Resolver *r, int has_replicas)
{
    for (int64_t i = 0; i < r->size; i++) {
        int kind = r->kind[i];
        if (r->rendezvous && (kind == SEND_F || kind == SEND_B)) {
            int32_t receive = r->partner[i], previous = r->waits[receive][0];
            r->waits[i][2] = previous >= 0 ? r->partner[previous] : -1;
            r->waits[i][3] = r->posted_after[receive];
        } else if (has_replicas && kind == REDUCE_GRAD && r->owners[2 * (int64_t)r->stage[i]] >= 0) {
            int64_t stage = r->stage[i];
            int32_t twin = r->reduce_at[2 * stage + (r->rank[i] == r->owners[2 * stage])];
            if (twin < 0)
                return 1;
            r->waits[i][2] = r->waits[twin][0];
            r->waits[i][3] = r->waits[twin][1];
        }
    }
    return 0;
}

static int resolve_all(Resolver *r)
{
    int has_replicas = 0;
    for (int64_t stage = 0; stage < r->num_stages; stage++)
        has_replicas |= r->owners[2 * stage] >= 0;
    memset(r->partner, 0xff, r->size * sizeof(int32_t));
    memset(r->posted_after, 0xff, r->size * sizeof(int32_t));
    memset(r->waits, 0xff, r->size * sizeof(r->waits[0]));
    fill_tables(r);
    if (pair_messages(r))
        return 1;
    for (int32_t rank = 0; rank < r->num_ranks; rank++)
        if (walk_rank(r, rank))
            return 1;
    return (r->rendezvous || has_replicas) ? cross_waits(r, has_replicas) : 0;
}

/* 0 when the waits of every action were written, else 1: the schedule lacks something. */
PyObject *kernel_resolve(PyObject *self, PyObject *args)
{
    Py_buffer kind, stage, microbatch, pair_stage, pair_microbatch, offsets, owners, rank, partner, posted_after, waits;
    Py_ssize_t num_microbatches, ahead;
    int rendezvous, blocking;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*nnppw*w*w*w*", &kind, &stage, &microbatch, &pair_stage, &pair_microbatch, &offsets, &owners,
                          &num_microbatches, &ahead, &rendezvous, &blocking, &rank, &partner, &posted_after, &waits))
        return NULL;
    Resolver r = {
        .size = kind.len, .num_ranks = offsets.len / 8 - 1, .num_stages = owners.len / 8, .num_microbatches = num_microbatches,
        .ahead = ahead, .rendezvous = rendezvous, .blocking = blocking, .kind = kind.buf, .stage = stage.buf, .microbatch = microbatch.buf,
        .pair_stage = pair_stage.buf, .pair_microbatch = pair_microbatch.buf, .offsets = offsets.buf, .owners = owners.buf,
        .rank = rank.buf, .partner = partner.buf, .posted_after = posted_after.buf, .waits = waits.buf,
    };
    size_t cells = (size_t)r.num_stages * (size_t)r.num_microbatches;
    int32_t **tables[] = {&r.forward_at, &r.backward_at, &r.recv_f_at, &r.recv_b_at, &r.compute_of, &r.unshard_of,
                          &r.lane_last, &r.lane_count, &r.recent, &r.reduce_at};
    size_t counts[] = {cells, cells, cells, cells, r.num_stages, r.num_stages,
                       4 * r.num_ranks, 2 * r.num_ranks, 2 * r.num_ranks * (size_t)ahead, 2 * r.num_stages};
    int num_tables = sizeof(counts) / sizeof(counts[0]), failed = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int t = 0; t < num_tables; t++)
        failed |= (*tables[t] = int_table(counts[t])) == NULL;
    if (!failed)
        failed = resolve_all(&r);
    for (int t = 0; t < num_tables; t++)
        free(*tables[t]);
    Py_END_ALLOW_THREADS
    Py_buffer *buffers[] = {&kind, &stage, &microbatch, &pair_stage, &pair_microbatch, &offsets, &owners, &rank,
                            &partner, &posted_after, &waits};
    for (size_t b = 0; b < sizeof(buffers) / sizeof(buffers[0]); b++)
        PyBuffer_Release(buffers[b]);
    return PyLong_FromLong(failed);
}
