/* Which rank to walk next. */
#ifndef SHARDPROOF_TURNS_H
#define SHARDPROOF_TURNS_H

#include "kernel.h"

/* Each rank waits for one action of another rank and is woken when that one has ended. */
typedef struct {
    int64_t num_ranks, head, queued;
    int32_t *queue;                         /* a ring of ranks to walk */
    int32_t *waiting_for;                   /* [ranks] -> the action it waits for */
    int32_t *first_waiter, *next_waiter;    /* lists of the ranks that wait for a rank's actions */
} Turns;

static inline int turns_open(Turns *t, int64_t num_ranks)
{
    t->num_ranks = num_ranks;
    t->head = 0;
    t->queued = num_ranks;
    t->queue = int_table(num_ranks);
    t->waiting_for = int_table(num_ranks);
    t->first_waiter = int_table(num_ranks);
    t->next_waiter = int_table(num_ranks);
    if (!t->queue || !t->waiting_for || !t->first_waiter || !t->next_waiter)
        return 1;
    for (int64_t rank = 0; rank < num_ranks; rank++)
        t->queue[rank] = (int32_t)rank;
    return 0;
}

static inline void turns_close(Turns *t)
{
    free(t->queue);
    free(t->waiting_for);
    free(t->first_waiter);
    free(t->next_waiter);
}

static inline int32_t turns_next(Turns *t)
{
    int32_t rank = t->queue[t->head];
    t->head = t->head + 1 == t->num_ranks ? 0 : t->head + 1;
    t->queued--;
    return rank;
}

static inline void turns_wait(Turns *t, int32_t rank, int32_t action, int32_t owner)
{
    t->waiting_for[rank] = action;
    t->next_waiter[rank] = t->first_waiter[owner];
    t->first_waiter[owner] = rank;
}

/* Queues the ranks whose awaited action of `owner` has an end now; `ends` has `width` numbers per action. */
static inline void turns_wake(Turns *t, int32_t owner, const double *ends, int64_t width)
{
    int32_t *link = &t->first_waiter[owner];
    while (*link >= 0) {
        int32_t rank = *link;
        if (ends[t->waiting_for[rank] * width] == UNKNOWN) {
            link = &t->next_waiter[rank];
            continue;
        }
        *link = t->next_waiter[rank];
        int64_t place = t->head + t->queued++;
        t->queue[place >= t->num_ranks ? place - t->num_ranks : place] = rank;
    }
}

/* The first wait of an action that has no end yet. */
static inline int32_t unknown_wait(const int32_t *waits, const double *end, int64_t width)
{
    for (int w = 0; w < 3; w++)
        if (end[waits[w] * width] == UNKNOWN)
            return waits[w];
    return waits[3];
}

#endif
