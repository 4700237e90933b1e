/* What the files of the kernel share. See module.c for what the kernel is. */
#ifndef SHARDPROOF_KERNEL_H
#define SHARDPROOF_KERNEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* core/schedule/action.py, Kind */
enum { F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, STEP, OVERLAP_F_B, NUM_KINDS };

#define IS_RECEIVE(kind) ((kind) == RECV_F || (kind) == RECV_B)

/* The kinds whose leads and tails are read: what data parallelism does, and STEP. */
#define CAN_LEAD(kind) ((kind) >= UNSHARD && (kind) <= STEP)

/* The end of an action that has none yet. */
#define UNKNOWN INFINITY

/* Columns of a graph (graph.py) and of its times. */
typedef struct {
    int64_t size, num_ranks;
    const int8_t *kind;
    const int32_t *rank, *partner, *posted_after;
    const int32_t (*waits)[4];
    const int64_t *offsets;
    const double *duration, *lead, *tail; /* lead and tail may be NULL */
    double *start, *end;                  /* end[-1] is 0: nothing to wait for */
} Settler;

/* Columns of contention.py, Traffic. */
typedef struct {
    int64_t num_links;
    const int32_t *route;         /* [actions] -> its route, -1 for none */
    const double *rate;           /* [routes] bytes/s of a transfer alone */
    const int32_t *bounds, *link; /* route r crosses link[bounds[r]:bounds[r + 1]], */
    const double *share;          /* each with so many bytes per byte of the transfer */
    const double *capacity;       /* [links] bytes/s */
    double slack;
} Traffic;

static inline double later(double a, double b) { return a > b ? a : b; }

static inline size_t at_least_one(size_t count) { return count ? count : 1; }

/* `count` numbers, -1 everywhere; NULL when there is no memory. */
static inline int32_t *int_table(size_t count)
{
    int32_t *table = malloc(at_least_one(count) * sizeof(int32_t));
    if (table)
        memset(table, 0xff, count * sizeof(int32_t));
    return table;
}

/* Receives last as long as their sends, or until they are posted. */
void settle_receives(Settler *s);

PyObject *kernel_resolve(PyObject *self, PyObject *args);
PyObject *kernel_settle(PyObject *self, PyObject *args);
PyObject *kernel_settle_columns(PyObject *self, PyObject *args);
PyObject *kernel_settle_shared(PyObject *self, PyObject *args);
PyObject *kernel_uncontended_until(PyObject *self, PyObject *args);

#endif
