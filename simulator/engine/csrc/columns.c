/* The longest path of many replicas at once (replicas.py, plain_replicas). */
#include "turns.h"

/* A Settler whose times are rows of `width` columns, one per replica; `lead` and `tail` stay one number per action. */
typedef struct {
    Settler plain;
    int64_t width;
    const int32_t *group; /* [kinds] -> how many neighbouring columns start and end such an action together; 1: each for itself */
} Columns;

/* Starts of an action in every column, and when its inputs were there. */
static inline void ready_columns(const Columns *c, int64_t i, double *restrict start, double *restrict fed)
{
    const int32_t *waits = c->plain.waits[i];
    int64_t width = c->width;
    const double *e0 = c->plain.end + waits[0] * width, *e1 = c->plain.end + waits[1] * width;
    const double *e2 = c->plain.end + waits[2] * width, *e3 = c->plain.end + waits[3] * width;
    if (!c->plain.lead || !CAN_LEAD(c->plain.kind[i])) {
        for (int64_t j = 0; j < width; j++)
            start[j] = later(later(e0[j], e1[j]), later(e2[j], e3[j]));
        return;
    }
    double lead = c->plain.lead[i];
    int is_reduction = c->plain.kind[i] == REDUCE_GRAD;
    const double *b1 = lead != 0.0 && waits[1] >= 0 ? c->plain.start + waits[1] * width : NULL;
    const double *b3 = lead != 0.0 && waits[3] >= 0 && is_reduction ? c->plain.start + waits[3] * width : NULL;
    for (int64_t j = 0; j < width; j++) {
        double other = later(e0[j], e2[j]);
        fed[j] = is_reduction ? later(e1[j], e3[j]) : e1[j];
        if (!is_reduction)
            other = later(other, e3[j]);
        start[j] = later(other, fed[j] - lead);
        if (b1)
            start[j] = later(start[j], b1[j]);
        if (b3)
            start[j] = later(start[j], b3[j]);
    }
}

static inline double latest_in(const double *values, int64_t count)
{
    double latest = values[0];
    for (int64_t j = 1; j < count; j++)
        latest = later(latest, values[j]);
    return latest;
}

static void settle_row(const Columns *c, int64_t i, double *fed)
{
    int64_t width = c->width, group = c->group[c->plain.kind[i]];
    const double *duration = c->plain.duration + i * width;
    double *start = c->plain.start + i * width, *end = c->plain.end + i * width;
    int is_led = c->plain.tail && CAN_LEAD(c->plain.kind[i]);
    double tail = is_led ? c->plain.tail[i] : 0.0;
    ready_columns(c, i, start, fed);
    if (group <= 1) {
        for (int64_t j = 0; j < width; j++)
            end[j] = start[j] + duration[j];
        if (is_led)
            for (int64_t j = 0; j < width; j++)
                end[j] = later(end[j], fed[j] + tail);
        return;
    }
    for (int64_t first = 0; first < width; first += group) {
        double begin = latest_in(start + first, group), stop = begin + latest_in(duration + first, group);
        if (is_led)
            stop = later(stop, latest_in(fed + first, group) + tail);
        for (int64_t j = first; j < first + group; j++) {
            start[j] = begin;
            end[j] = stop;
        }
    }
}

static int64_t walk_columns(const Columns *c, int64_t i, int64_t stop, double *fed)
{
    const double *end = c->plain.end;
    int64_t width = c->width;
    for (; i < stop; i++) {
        if (IS_RECEIVE(c->plain.kind[i]))
            continue;
        const int32_t *waits = c->plain.waits[i];
        double known = later(later(end[waits[0] * width], end[waits[1] * width]), later(end[waits[2] * width], end[waits[3] * width]));
        if (known == UNKNOWN)
            break;
        settle_row(c, i, fed);
    }
    return i;
}

static void settle_column_receives(const Columns *c)
{
    const Settler *s = &c->plain;
    for (int64_t i = 0; i < s->size; i++) {
        if (!IS_RECEIVE(s->kind[i]))
            continue;
        const double *posted = s->end + s->posted_after[i] * c->width;
        int64_t from = s->partner[i] * c->width, to = i * c->width;
        for (int64_t j = 0; j < c->width; j++) {
            s->start[to + j] = later(s->start[from + j], posted[j]);
            s->end[to + j] = later(s->end[from + j], posted[j]);
        }
    }
}

static int settle_all_columns(Columns *c)
{
    Settler *s = &c->plain;
    Turns turns;
    int64_t *cursor = malloc(at_least_one(s->num_ranks) * sizeof(int64_t)), settled = 0;
    double *fed = malloc(at_least_one(c->width) * sizeof(double));
    if (turns_open(&turns, s->num_ranks) || !cursor || !fed) {
        free(cursor);
        free(fed);
        turns_close(&turns);
        return 1;
    }
    memcpy(cursor, s->offsets, s->num_ranks * sizeof(int64_t));
    for (int64_t i = 0; i < s->size; i++)
        s->end[i * c->width] = UNKNOWN; /* the first column stands for its row */
    while (turns.queued) {
        int32_t rank = turns_next(&turns);
        int64_t from = cursor[rank], stop = s->offsets[rank + 1];
        int64_t reached = walk_columns(c, from, stop, fed);
        cursor[rank] = reached;
        settled += reached - from;
        if (reached < stop) {
            int32_t awaited = unknown_wait(s->waits[reached], s->end, c->width);
            turns_wait(&turns, rank, awaited, s->rank[awaited]);
        }
        if (reached > from)
            turns_wake(&turns, rank, s->end, c->width);
    }
    turns_close(&turns);
    free(cursor);
    free(fed);
    if (settled < s->size)
        return 1;
    settle_column_receives(c);
    return 0;
}

/* settle with a row of times per action, one per replica; coupled kinds start and end together in a group. */
PyObject *kernel_settle_columns(PyObject *self, PyObject *args)
{
    Py_buffer kind, rank, partner, posted_after, waits, offsets, duration, group, start, end, lead = {0}, tail = {0};
    PyObject *lead_or_none, *tail_or_none;
    Py_ssize_t width;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*OOy*nw*w*", &kind, &rank, &partner, &posted_after, &waits, &offsets, &duration,
                          &lead_or_none, &tail_or_none, &group, &width, &start, &end))
        return NULL;
    Py_buffer *buffers[] = {&kind, &rank, &partner, &posted_after, &waits, &offsets, &duration, &group, &start, &end, &lead, &tail};
    int failed = 0, is_led = lead_or_none != Py_None;
    if (is_led && (PyObject_GetBuffer(lead_or_none, &lead, PyBUF_SIMPLE) || PyObject_GetBuffer(tail_or_none, &tail, PyBUF_SIMPLE)))
        failed = -1;
    if (!failed) {
        Columns c = {
            .plain = {
                .size = kind.len, .num_ranks = offsets.len / 8 - 1, .kind = kind.buf, .rank = rank.buf, .partner = partner.buf,
                .posted_after = posted_after.buf, .waits = waits.buf, .offsets = offsets.buf, .duration = duration.buf,
                .lead = lead.buf, .tail = tail.buf, .start = start.buf, .end = (double *)end.buf + width,
            },
            .width = width, .group = group.buf,
        };
        Py_BEGIN_ALLOW_THREADS
        failed = settle_all_columns(&c);
        Py_END_ALLOW_THREADS
    }
    for (size_t b = 0; b < sizeof(buffers) / sizeof(buffers[0]); b++)
        PyBuffer_Release(buffers[b]);
    return failed < 0 ? NULL : PyLong_FromLong(failed);
}
