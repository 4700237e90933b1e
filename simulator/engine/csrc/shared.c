/* Transfers that share the bandwidth of links (contention.py, _Fluid; the names of its methods are kept).
 *
 * Start and end come in with the times of a run in which nothing is shared. No link is too full in it before `since_s`, so what has
 * happened by then stays; only the other actions are worked out. They are numbered anew, as items: 0, 1, ... in the order of the actions.
 */
#include "queue.h"

typedef struct {
    Settler s;
    Traffic t;
    double since_s;
    double grid; /* 1 / the unit to which ends of slowed transfers are rounded */
    int failed;  /* out of memory */
    int64_t num_items;
    int32_t *action;  /* [items] */
    int32_t *item_of; /* [actions] -> item, -1 for those that stay */
    int32_t *missing, *follower_bounds, *version, *settled;
    int64_t *followers; /* 4 * item + slot */
    double *ready, *fed, *remaining, *since, *speed, *level_of; /* level_of: rate while speeds are worked out, -1 while it rises */
    int32_t *transfer_mark, *link_mark, mark;                   /* equal to `mark`: seen in this search */
    List *crossing, transfers, links;
    Queue queue;
    int64_t num_settled, num_pending;
} Fluid;

static inline int32_t route_of(const Fluid *f, int32_t i) { return f->t.route[f->action[i]]; }

static inline double duration_of(const Fluid *f, int32_t i) { return f->s.duration[f->action[i]]; }

static inline int is_led(const Fluid *f, int32_t i) { return f->s.lead && CAN_LEAD(f->s.kind[f->action[i]]); }

static inline double lead_of(const Fluid *f, int32_t i) { return is_led(f, i) ? f->s.lead[f->action[i]] : 0.0; }

/* Appends to a list; a lack of memory ends the run. */
static inline void push_item(Fluid *f, List *list, int32_t item) { f->failed |= list_push(list, item); }

static inline void push_event(Fluid *f, double time, int what, int32_t action)
{
    f->failed |= queue_push(&f->queue, (Event){time, what, action, f->version[action]});
}

static inline double full_rate(const Fluid *f, int32_t i) { return f->t.rate[route_of(f, i)]; }

static inline double limit(const Fluid *f, int32_t link) { return f->t.capacity[link] * (1.0 + f->t.slack); }

static double share_of(const Fluid *f, int32_t transfer, int32_t link)
{
    int32_t k = f->t.bounds[route_of(f, transfer)];
    while (f->t.link[k] != link)
        k++;
    return f->t.share[k];
}

static int is_full(const Fluid *f, int32_t link)
{
    const List *crossing = &f->crossing[link];
    double load = 0.0;
    for (int64_t k = 0; k < crossing->count; k++) {
        double one = share_of(f, crossing->items[k], link) * full_rate(f, crossing->items[k]);
        load += one;
    }
    return load > limit(f, link);
}

/* Fills `transfers` and `links` with what is tied to transfer i through full links, i first. */
static void find_tied(Fluid *f, int32_t i)
{
    f->mark++;
    f->transfers.count = f->links.count = 0;
    push_item(f, &f->transfers, i);
    f->transfer_mark[i] = f->mark;
    for (int64_t n = 0; n < f->transfers.count; n++) {
        int32_t route = route_of(f, f->transfers.items[n]);
        for (int32_t k = f->t.bounds[route]; k < f->t.bounds[route + 1]; k++) {
            int32_t link = f->t.link[k];
            if (f->link_mark[link] == f->mark || !is_full(f, link))
                continue;
            f->link_mark[link] = f->mark;
            push_item(f, &f->links, link);
            for (int64_t c = 0; c < f->crossing[link].count; c++) {
                int32_t other = f->crossing[link].items[c];
                if (f->transfer_mark[other] == f->mark)
                    continue;
                f->transfer_mark[other] = f->mark;
                push_item(f, &f->transfers, other);
            }
        }
    }
}

/* The common rate at which the transfers that still rise fill a link. */
static double filling_level(const Fluid *f, int32_t link, double level)
{
    double used = 0.0, weight = 0.0;
    for (int64_t c = 0; c < f->crossing[link].count; c++) {
        int32_t i = f->crossing[link].items[c];
        double share = share_of(f, i, link);
        if (f->level_of[i] < 0) {
            weight += share;
        } else {
            double one = share * f->level_of[i];
            used += one;
        }
    }
    return weight ? later((limit(f, link) - used) / weight, level) : INFINITY;
}

static void change_speed(Fluid *f, int32_t i, double speed, double time)
{
    if (speed == f->speed[i])
        return;
    double done = (time - f->since[i]) * f->speed[i];
    f->remaining[i] = later(0.0, f->remaining[i] - done);
    f->since[i] = time;
    f->speed[i] = speed;
    f->version[i]++;
    double end = time + f->remaining[i] / speed;
    if (speed != 1.0 || f->remaining[i] != duration_of(f, i))
        end = later(time, floor(end * f->grid + 0.5) / f->grid);
    push_event(f, end, ENDS, i);
}

/* New speeds of `transfers` from place `first` on, by progressive filling of `links`. */
static void share_links(Fluid *f, int64_t first, double time)
{
    int64_t num_free = f->transfers.count - first;
    const int32_t *transfers = f->transfers.items;
    double level = 0.0;
    for (int64_t n = first; n < f->transfers.count; n++)
        f->level_of[transfers[n]] = -1.0;
    while (num_free) {
        double slowest = INFINITY, full_at = INFINITY;
        int32_t full = -1;
        for (int64_t n = first; n < f->transfers.count; n++)
            if (f->level_of[transfers[n]] < 0 && full_rate(f, transfers[n]) < slowest)
                slowest = full_rate(f, transfers[n]);
        for (int64_t n = 0; n < f->links.count; n++) {
            double at = filling_level(f, f->links.items[n], level);
            if (at < full_at) {
                full_at = at;
                full = f->links.items[n];
            }
        }
        level = slowest <= full_at ? slowest : full_at;
        if (slowest <= full_at) {
            for (int64_t n = first; n < f->transfers.count; n++)
                if (f->level_of[transfers[n]] < 0 && full_rate(f, transfers[n]) <= level) {
                    f->level_of[transfers[n]] = level;
                    num_free--;
                }
        } else {
            for (int64_t c = 0; c < f->crossing[full].count; c++)
                if (f->level_of[f->crossing[full].items[c]] < 0) {
                    f->level_of[f->crossing[full].items[c]] = level;
                    num_free--;
                }
        }
    }
    for (int64_t n = first; n < f->transfers.count; n++)
        change_speed(f, transfers[n], f->level_of[transfers[n]] / full_rate(f, transfers[n]), time);
}

static void enter(Fluid *f, int32_t i, double time)
{
    int32_t route = route_of(f, i);
    f->remaining[i] = duration_of(f, i);
    f->since[i] = time;
    f->speed[i] = 0.0;
    for (int32_t k = f->t.bounds[route]; k < f->t.bounds[route + 1]; k++)
        push_item(f, &f->crossing[f->t.link[k]], i);
    find_tied(f, i);
    if (!f->failed)
        share_links(f, 0, time);
}

static void settle_one(Fluid *f, int32_t i, double done)
{
    int32_t action = f->action[i];
    f->s.end[action] = is_led(f, i) ? later(done, f->fed[i] + f->s.tail[action]) : done;
    f->num_settled++;
    f->settled[f->num_pending++] = i;
}

static void leave(Fluid *f, int32_t i, double time)
{
    int32_t route = route_of(f, i);
    find_tied(f, i);
    f->version[i]++;
    for (int32_t k = f->t.bounds[route]; k < f->t.bounds[route + 1]; k++)
        list_remove(&f->crossing[f->t.link[k]], i);
    if (f->failed)
        return;
    share_links(f, 1, time);
    settle_one(f, i, time);
}

/* Whether an action goes over links. */
static inline int takes_time(const Fluid *f, int64_t action) { return f->t.route[action] >= 0 && f->s.duration[action] != 0.0; }

static void begin(Fluid *f, int32_t i)
{
    f->s.start[f->action[i]] = f->ready[i];
    if (takes_time(f, f->action[i]))
        push_event(f, f->ready[i], STARTS, i);
    else
        settle_one(f, i, f->ready[i] + duration_of(f, i));
}

/* Tells an item that its wait in a slot, an action, has ended. */
static inline void tell(Fluid *f, int32_t i, int slot, int32_t done)
{
    double ready = f->s.end[done];
    if (slot == 1 || (slot == 3 && f->s.kind[f->action[i]] == REDUCE_GRAD)) {
        f->fed[i] = later(f->fed[i], ready);
        if (lead_of(f, i) != 0.0 && !takes_time(f, done))
            ready = later(ready - lead_of(f, i), f->s.start[done]);
    }
    f->ready[i] = later(f->ready[i], ready);
}

/* Tells what waits for the items that have settled. */
static void spread(Fluid *f)
{
    while (f->num_pending) {
        int32_t done = f->settled[--f->num_pending];
        for (int32_t k = f->follower_bounds[done]; k < f->follower_bounds[done + 1]; k++) {
            int32_t i = (int32_t)(f->followers[k] >> 2);
            tell(f, i, (int)(f->followers[k] & 3), f->action[done]);
            if (!--f->missing[i])
                begin(f, i);
        }
    }
}

/* Whether the times that an action came with stay. */
static inline int stays(const Fluid *f, int64_t action)
{
    return f->s.start[action] < f->since_s && (!takes_time(f, action) || f->s.end[action] <= f->since_s);
}

/* Numbers the items; nonzero when there is no memory. */
static int number_items(Fluid *f)
{
    int64_t count = 0;
    if (!(f->item_of = int_table(f->s.size)))
        return 1;
    for (int64_t action = 0; action < f->s.size; action++)
        if (!IS_RECEIVE(f->s.kind[action]) && !stays(f, action))
            f->item_of[action] = (int32_t)count++;
    if (!(f->action = int_table(count)))
        return 1;
    for (int64_t action = 0; action < f->s.size; action++)
        if (f->item_of[action] >= 0)
            f->action[f->item_of[action]] = (int32_t)action;
    f->num_items = count;
    return 0;
}

/* What each item still waits for, and what it knows from the actions that stay. */
static void count_followers(Fluid *f)
{
    int32_t *bounds = f->follower_bounds;
    memset(bounds, 0, (f->num_items + 1) * sizeof(int32_t));
    for (int32_t i = 0; i < f->num_items; i++) {
        const int32_t *waits = f->s.waits[f->action[i]];
        f->missing[i] = 0;
        f->ready[i] = f->fed[i] = 0.0;
        for (int w = 0; w < 4; w++) {
            if (waits[w] >= 0 && f->item_of[waits[w]] >= 0) {
                bounds[f->item_of[waits[w]] + 1]++;
                f->missing[i]++;
            } else if (waits[w] >= 0) {
                tell(f, i, w, waits[w]);
            }
        }
    }
    for (int64_t i = 0; i < f->num_items; i++)
        bounds[i + 1] += bounds[i];
}

static void list_followers(Fluid *f)
{
    int32_t *next = f->version; /* free until the run starts */
    memcpy(next, f->follower_bounds, f->num_items * sizeof(int32_t));
    for (int64_t i = 0; i < f->num_items; i++)
        for (int w = 0; w < 4; w++) {
            int32_t awaited = f->s.waits[f->action[i]][w];
            if (awaited >= 0 && f->item_of[awaited] >= 0)
                f->followers[next[f->item_of[awaited]]++] = 4 * i + w;
        }
    memset(f->version, 0, f->num_items * sizeof(int32_t));
}

static void run_fluid(Fluid *f)
{
    for (int32_t i = 0; i < f->num_items; i++)
        if (!f->missing[i])
            begin(f, i);
    spread(f);
    while (f->queue.count && !f->failed) {
        Event event = queue_pop(&f->queue);
        if (event.version != f->version[event.action])
            continue;
        if (event.what == STARTS)
            enter(f, event.action, event.time);
        else
            leave(f, event.action, event.time);
        spread(f);
    }
    f->failed |= f->num_settled < f->num_items;
}

static int settle_all_shared(Fluid *f)
{
    f->failed = number_items(f);
    size_t size = f->num_items, num_links = f->t.num_links;
    int32_t **ints[] = {&f->missing, &f->follower_bounds, &f->version, &f->settled, &f->transfer_mark, &f->link_mark};
    size_t int_counts[] = {size, size + 1, size, size, size, num_links};
    double **doubles[] = {&f->ready, &f->fed, &f->remaining, &f->since, &f->speed, &f->level_of};
    for (int k = 0; k < 6; k++) {
        f->failed |= (*ints[k] = int_table(int_counts[k])) == NULL;
        f->failed |= (*doubles[k] = malloc(at_least_one(size) * sizeof(double))) == NULL;
    }
    f->failed |= (f->crossing = calloc(at_least_one(num_links), sizeof(List))) == NULL;
    if (!f->failed) {
        count_followers(f);
        f->followers = malloc((f->follower_bounds[size] + 1) * sizeof(int64_t));
        f->failed |= f->followers == NULL;
    }
    if (!f->failed) {
        list_followers(f);
        run_fluid(f);
    }
    for (size_t link = 0; f->crossing && link < num_links; link++)
        free(f->crossing[link].items);
    for (int k = 0; k < 6; k++) {
        free(*ints[k]);
        free(*doubles[k]);
    }
    free(f->action);
    free(f->item_of);
    free(f->crossing);
    free(f->followers);
    free(f->transfers.items);
    free(f->links.items);
    free(f->queue.events);
    if (!f->failed)
        settle_receives(&f->s);
    return f->failed;
}

/* settle where transfers share the bandwidth of links. */
PyObject *kernel_settle_shared(PyObject *self, PyObject *args)
{
    Py_buffer kind, rank, partner, posted_after, waits, offsets, duration, start, end, lead = {0}, tail = {0};
    Py_buffer route, rate, bounds, link, share, capacity;
    PyObject *lead_or_none, *tail_or_none;
    double slack, grid, since_s;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*OOy*y*y*y*y*y*dddw*w*", &kind, &rank, &partner, &posted_after, &waits, &offsets, &duration,
                          &lead_or_none, &tail_or_none, &route, &rate, &bounds, &link, &share, &capacity, &slack, &grid, &since_s, &start,
                          &end))
        return NULL;
    Py_buffer *buffers[] = {&kind, &rank, &partner, &posted_after, &waits, &offsets, &duration, &start, &end, &lead, &tail,
                            &route, &rate, &bounds, &link, &share, &capacity};
    int failed = 0, is_led = lead_or_none != Py_None;
    if (is_led && (PyObject_GetBuffer(lead_or_none, &lead, PyBUF_SIMPLE) || PyObject_GetBuffer(tail_or_none, &tail, PyBUF_SIMPLE)))
        failed = -1;
    if (!failed) {
        Fluid f = {
            .s = {
                .size = kind.len, .num_ranks = offsets.len / 8 - 1, .kind = kind.buf, .rank = rank.buf, .partner = partner.buf,
                .posted_after = posted_after.buf, .waits = waits.buf, .offsets = offsets.buf, .duration = duration.buf,
                .lead = lead.buf, .tail = tail.buf, .start = start.buf, .end = end.buf,
            },
            .t = {
                .num_links = capacity.len / 8, .route = route.buf, .rate = rate.buf, .bounds = bounds.buf, .link = link.buf,
                .share = share.buf, .capacity = capacity.buf, .slack = slack,
            },
            .since_s = since_s,
            .grid = grid,
        };
        Py_BEGIN_ALLOW_THREADS
        failed = settle_all_shared(&f);
        Py_END_ALLOW_THREADS
    }
    for (size_t b = 0; b < sizeof(buffers) / sizeof(buffers[0]); b++)
        PyBuffer_Release(buffers[b]);
    return failed < 0 ? NULL : PyLong_FromLong(failed);
}
