/* Lists that grow, and the queue of events: a binary heap in the order of (time, what, action, version). */
#ifndef SHARDPROOF_QUEUE_H
#define SHARDPROOF_QUEUE_H

#include "kernel.h"

typedef struct {
    int32_t *items;
    int64_t count, room;
} List;

/* Nonzero when there is no memory. */
static inline int list_push(List *list, int32_t item)
{
    if (list->count == list->room) {
        int64_t room = list->room ? 2 * list->room : 8;
        int32_t *items = realloc(list->items, room * sizeof(int32_t));
        if (!items)
            return 1;
        list->items = items;
        list->room = room;
    }
    list->items[list->count++] = item;
    return 0;
}

/* Removes an item that is there; the others keep their order. */
static inline void list_remove(List *list, int32_t item)
{
    int64_t place = 0;
    while (list->items[place] != item)
        place++;
    memmove(list->items + place, list->items + place + 1, (list->count - place - 1) * sizeof(int32_t));
    list->count--;
}

/* Order of events at one time: what ends makes room for what starts. */
enum { ENDS, STARTS };

typedef struct {
    double time;
    int32_t what, action, version;
} Event;

typedef struct {
    Event *events;
    int64_t count, room;
} Queue;

static inline int comes_before(const Event *a, const Event *b)
{
    if (a->time != b->time)
        return a->time < b->time;
    if (a->what != b->what)
        return a->what < b->what;
    return a->action != b->action ? a->action < b->action : a->version < b->version;
}

/* Nonzero when there is no memory. */
static inline int queue_push(Queue *queue, Event event)
{
    if (queue->count == queue->room) {
        int64_t room = queue->room ? 2 * queue->room : 64;
        Event *events = realloc(queue->events, room * sizeof(Event));
        if (!events)
            return 1;
        queue->events = events;
        queue->room = room;
    }
    int64_t place = queue->count++;
    while (place && comes_before(&event, &queue->events[(place - 1) / 2])) {
        queue->events[place] = queue->events[(place - 1) / 2];
        place = (place - 1) / 2;
    }
    queue->events[place] = event;
    return 0;
}

/* The first of at least one event. */
static inline Event queue_pop(Queue *queue)
{
    Event *events = queue->events, first = events[0], last = events[--queue->count];
    int64_t place = 0;
    for (;;) {
        int64_t child = 2 * place + 1;
        if (child >= queue->count)
            break;
        if (child + 1 < queue->count && comes_before(&events[child + 1], &events[child]))
            child++;
        if (!comes_before(&events[child], &last))
            break;
        events[place] = events[child];
        place = child;
    }
    events[place] = last;
    return first;
}

#endif
