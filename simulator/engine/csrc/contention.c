/* When links may first be too full in a run in which nothing is shared (contention.py, execute_shared). */
#include "kernel.h"

#define MOST_BINS 4096
#define MOST_CELLS 4194304 /* bins of all links */

typedef struct {
    int64_t num_bins;
    double width_s;
    double *load; /* [links][bins] -> the sum of the rates of all transfers that touch the bin */
} Bins;

static inline int64_t bin_of(const Bins *bins, double time)
{
    int64_t bin = (int64_t)(time / bins->width_s);
    return bin < bins->num_bins ? bin : bins->num_bins - 1;
}

static void add_transfers(Bins *bins, const Settler *s, const Traffic *t)
{
    for (int64_t i = 0; i < s->size; i++) {
        int32_t route = t->route[i];
        if (route < 0 || IS_RECEIVE(s->kind[i]) || !(s->end[i] > s->start[i]))
            continue;
        int64_t first = bin_of(bins, s->start[i]), last = bin_of(bins, s->end[i]);
        for (int32_t k = t->bounds[route]; k < t->bounds[route + 1]; k++) {
            double load = t->share[k] * t->rate[route], *of_link = bins->load + t->link[k] * bins->num_bins;
            for (int64_t bin = first; bin <= last; bin++)
                of_link[bin] += load;
        }
    }
}

/* The first bin in which any link may be too full; `num_bins` when there is none. */
static int64_t first_full_bin(const Bins *bins, const Traffic *t)
{
    int64_t first = bins->num_bins;
    for (int64_t link = 0; link < t->num_links; link++) {
        const double *load = bins->load + link * bins->num_bins;
        double limit = t->capacity[link] * (1.0 + 0.5 * t->slack); /* half: these sums are rounded in another order */
        for (int64_t bin = 0; bin < first; bin++)
            if (load[bin] > limit)
                first = bin;
    }
    return first;
}

/* No link is too full before the answer; negative when there is no memory. Time is cut into bins, and what touches a bin counts in all
 * of it, so the answer may be too early, never too late. */
static double uncontended_until(const Settler *s, const Traffic *t)
{
    double makespan = 0.0;
    for (int64_t i = 0; i < s->size; i++)
        makespan = later(makespan, s->end[i]);
    if (!t->num_links || !(makespan > 0.0))
        return INFINITY;
    Bins bins = {.num_bins = s->size / 4 + 16 < MOST_BINS ? s->size / 4 + 16 : MOST_BINS};
    if (bins.num_bins * t->num_links > MOST_CELLS)
        bins.num_bins = MOST_CELLS / t->num_links + 1;
    bins.width_s = makespan / bins.num_bins;
    if (!(bins.width_s > 0.0) || !isfinite(makespan))
        return 0.0;
    if (!(bins.load = calloc(t->num_links * bins.num_bins, sizeof(double))))
        return -1.0;
    add_transfers(&bins, s, t);
    int64_t first = first_full_bin(&bins, t);
    free(bins.load);
    if (first == bins.num_bins)
        return INFINITY;
    return first > 0 ? (first - 1) * bins.width_s : 0.0; /* one bin earlier: bounds of bins are rounded */
}

PyObject *kernel_uncontended_until(PyObject *self, PyObject *args)
{
    Py_buffer kind, start, end, route, rate, bounds, link, share, capacity;
    double slack;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*y*y*d", &kind, &start, &end, &route, &rate, &bounds, &link, &share, &capacity, &slack))
        return NULL;
    Settler s = {.size = kind.len, .kind = kind.buf, .start = start.buf, .end = end.buf};
    Traffic t = {
        .num_links = capacity.len / 8, .route = route.buf, .rate = rate.buf, .bounds = bounds.buf, .link = link.buf,
        .share = share.buf, .capacity = capacity.buf, .slack = slack,
    };
    double until_s;
    Py_BEGIN_ALLOW_THREADS
    until_s = uncontended_until(&s, &t);
    Py_END_ALLOW_THREADS
    Py_buffer *buffers[] = {&kind, &start, &end, &route, &rate, &bounds, &link, &share, &capacity};
    for (size_t b = 0; b < sizeof(buffers) / sizeof(buffers[0]); b++)
        PyBuffer_Release(buffers[b]);
    return PyFloat_FromDouble(until_s);
}
