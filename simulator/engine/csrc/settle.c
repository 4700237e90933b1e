/* The longest path: start and end of every action (engine.py, plain_run). */
#include "turns.h"

/* Before what an action with a lead waits for has started, it cannot start either. */
static inline double begun(const Settler *s, int64_t i)
{
    const int32_t *waits = s->waits[i];
    double first = waits[1] >= 0 ? s->start[waits[1]] : 0.0;
    return s->kind[i] == REDUCE_GRAD && waits[3] >= 0 ? later(first, s->start[waits[3]]) : first;
}

/* Settles an action that may have a lead or a tail; nonzero when a wait has no end yet. */
static int settle_led(const Settler *s, int64_t i)
{
    const int32_t *waits = s->waits[i];
    const double *end = s->end;
    double start = later(end[waits[0]], end[waits[2]]), fed = end[waits[1]];
    if (s->kind[i] == REDUCE_GRAD)
        fed = later(fed, end[waits[3]]);
    else
        start = later(start, end[waits[3]]);
    if (start == UNKNOWN || fed == UNKNOWN)
        return 1;
    start = s->lead[i] != 0.0 ? later(later(start, fed - s->lead[i]), begun(s, i)) : later(start, fed);
    s->start[i] = start;
    s->end[i] = later(start + s->duration[i], fed + s->tail[i]);
    return 0;
}

/* Walks a rank from `i` until it ends or must wait; returns the place reached. */
static int64_t walk(const Settler *s, int64_t i, int64_t stop)
{
    const double *end = s->end;
    for (; i < stop; i++) {
        if (IS_RECEIVE(s->kind[i]))
            continue;
        if (s->lead && CAN_LEAD(s->kind[i])) {
            if (settle_led(s, i))
                break;
            continue;
        }
        const int32_t *waits = s->waits[i];
        double start = later(later(end[waits[0]], end[waits[1]]), later(end[waits[2]], end[waits[3]]));
        if (start == UNKNOWN)
            break;
        s->start[i] = start;
        s->end[i] = start + s->duration[i];
    }
    return i;
}

void settle_receives(Settler *s)
{
    for (int64_t i = 0; i < s->size; i++) {
        if (!IS_RECEIVE(s->kind[i]))
            continue;
        double posted = s->posted_after[i] >= 0 ? s->end[s->posted_after[i]] : 0.0;
        s->start[i] = later(s->start[s->partner[i]], posted);
        s->end[i] = later(s->end[s->partner[i]], posted);
    }
}

static int settle_all(Settler *s)
{
    Turns turns;
    int64_t *cursor = malloc(at_least_one(s->num_ranks) * sizeof(int64_t)), settled = 0;
    if (turns_open(&turns, s->num_ranks) || !cursor) {
        free(cursor);
        turns_close(&turns);
        return 1;
    }
    memcpy(cursor, s->offsets, s->num_ranks * sizeof(int64_t));
    for (int64_t i = 0; i < s->size; i++)
        s->end[i] = UNKNOWN;
    while (turns.queued) {
        int32_t rank = turns_next(&turns);
        int64_t from = cursor[rank], stop = s->offsets[rank + 1];
        int64_t reached = walk(s, from, stop);
        cursor[rank] = reached;
        settled += reached - from;
        if (reached < stop) {
            int32_t awaited = unknown_wait(s->waits[reached], s->end, 1);
            turns_wait(&turns, rank, awaited, s->rank[awaited]);
        }
        if (reached > from)
            turns_wake(&turns, rank, s->end, 1);
    }
    turns_close(&turns);
    free(cursor);
    if (settled < s->size)
        return 1;
    settle_receives(s);
    return 0;
}

/* 0 when start and end of every action were written, else 1: actions wait for each other in a circle. */
PyObject *kernel_settle(PyObject *self, PyObject *args)
{
    Py_buffer kind, rank, partner, posted_after, waits, offsets, duration, start, end, lead = {0}, tail = {0};
    PyObject *lead_or_none, *tail_or_none;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*OOw*w*", &kind, &rank, &partner, &posted_after, &waits, &offsets, &duration, &lead_or_none,
                          &tail_or_none, &start, &end))
        return NULL;
    Py_buffer *buffers[] = {&kind, &rank, &partner, &posted_after, &waits, &offsets, &duration, &start, &end, &lead, &tail};
    int failed = 0, is_led = lead_or_none != Py_None;
    if (is_led && (PyObject_GetBuffer(lead_or_none, &lead, PyBUF_SIMPLE) || PyObject_GetBuffer(tail_or_none, &tail, PyBUF_SIMPLE)))
        failed = -1;
    if (!failed) {
        Settler s = {
            .size = kind.len, .num_ranks = offsets.len / 8 - 1, .kind = kind.buf, .rank = rank.buf, .partner = partner.buf,
            .posted_after = posted_after.buf, .waits = waits.buf, .offsets = offsets.buf, .duration = duration.buf,
            .lead = lead.buf, .tail = tail.buf, .start = start.buf, .end = (double *)end.buf + 1,
        };
        Py_BEGIN_ALLOW_THREADS
        failed = settle_all(&s);
        Py_END_ALLOW_THREADS
    }
    for (size_t b = 0; b < sizeof(buffers) / sizeof(buffers[0]); b++)
        PyBuffer_Release(buffers[b]);
    return failed < 0 ? NULL : PyLong_FromLong(failed);
}
