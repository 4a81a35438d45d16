/* The cluster simulator's engine: programs of many ranks on a network, message by message or phase by phase.

   It computes what ASTRA-sim's analytical back ends compute, to the cycle; docs/cluster.md states the rules. The plain
   twin in plain.py follows the same rules message by message, and serves where no C compiler was found.

   Layout: pools, events and timers, messages, phases at once, patterns message by message, queues of streams, and last
   the programs of the ranks. Everything is addressed by index, because pools move when they grow. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
typedef int32_t i32;

enum { HOST, COMPUTE, COMMUNICATION, UNBOUND };
enum { WAIT, NOTHING, COLLECTIVE, SEND, RECEIVE, MEMORY, ENCLOSE };
enum { ALL_REDUCE = 0, ALL_GATHER = 2, ALL_TO_ALL = 6, REDUCE_SCATTER = 7 };
enum { RING, DIRECT, HALVING_DOUBLING, TREE };
enum { WIRED_RING, WIRED_ALL, WIRED_SWITCH };
enum { LEAF, INNER, ROOT };
/* Events of the global queue, and actions of a rank's timer. */
enum { TIMER, HOP, LINK_FREE, ARRIVE, LATE_RECEIVE, START_ALONE };
enum { READY, REDUCE, NODE_END, PHASE_END, MEMORY_NEXT };
/* Who is told of a message. */
enum { NOBODY, NODE, STREAM, MAY_SEND, MAY_RECEIVE };
enum { DONE, OUT_OF_MEMORY, FOLD_BROKEN, INTERRUPTED, TOO_LONG };

#define TAGS 500000000LL
#define CONTROL_TAG 1000000000LL
#define CONTROL_BYTES 8192
#define NONE (-1)
#define MOST_NS ((i64)1 << 62) /* MOST_NS of foretrace/machine/limits.py: the sum of two such times fits 64 bits */

/* ---- pools: arrays that grow, with a list of free entries ---- */

typedef struct { char *data; i64 used, room; i32 free; size_t width; } Pool;

#define AT(pool, type, index) (((type *)(pool).data) + (index))

typedef struct { i64 time, order; i32 what, index; } Event;
typedef struct { i32 next, head, tail; i64 time; } Slot;            /* timers of a rank that end together */
typedef struct { i32 next, what; i32 index; i64 value; } Action;
typedef struct { i32 who; i32 rank, index; } Handler;
typedef struct { i32 next; i32 source, target, at, stage; i64 tag, size; Handler sender; } Message;
typedef struct { i32 next; Handler handler; } Posted;
typedef struct { i32 next, first, last; i32 source, target, arrived; i64 tag, size; } Channel;
typedef struct { i32 next, rank, target, is_send; i64 tag, size; Handler handler; } Request;  /* of a rendezvous */
typedef struct { i32 next, total, finished, node; } Job;             /* a collective of one rank */
typedef struct { i32 dimension, kind, pattern, window, queue; i32 clockwise, variant; i64 size; } Phase;
typedef struct {
    i32 next, previous, queue, rank, job, group, phase, phases, is_started, priority;
    i64 number;
    /* of the phase under way */
    i32 members, position, window, mixing, credits, role, parent, left, right, step;
    i64 prepared, sent, received, sends_left, posted_from;
} Stream;
typedef struct { i32 next, member_list, dimension, kind, pattern, clockwise, members, arrived; i64 number, size; i32 phase;
                 i64 *start; i32 *streams; } Meeting;
typedef struct { i32 head, tail, length, running; } Queue;

typedef struct {
    i64 first_state; /* where its nodes begin in arrays of all nodes of all ranks */
    i32 slots[3];
    i32 in_flight, first_free, free_receives, scan, collectives;
    i32 timers;
    i64 streams;
} Rank;

typedef struct Engine {
    /* the plan */
    i64 ranks, groups, dimensions;
    const int8_t *node_resource, *node_action, *node_counts, *node_kind;
    const i64 *node_time, *node_size, *node_tag, *node_dimensions;
    const i32 *node_within, *first_within, *num_within;
    const i32 *node_priority, *node_slot, *node_missing, *child, *program_of, *peer, *group_of, *member;
    const i64 *first_child, *first_node, *first_peer, *first_group, *first_member, *group_number, *size;
    const int8_t *topology, *flat;
    const double *bandwidth, *latency;
    const i32 *algorithm, *algorithms;
    const i32 *represent; /* the rank that stands for each rank, or none */
    const i32 *ring_of;   /* shape (ranks, dimensions + 1): the ring that stands for a rank's ring; last: flat */
    const i32 *group_class;
    i64 most_dimensions, endpoint_delay, local_delay, splits, active_chunks, queues, priority, local_aware;
    double memory_bandwidth;
    i64 memory_pool, rendezvous, congestion, at_once, closed_form;
    /* results */
    i64 *finish, *computed, *start, *end, *link_bytes, *link_busy;
    i64 messages;
    /* state */
    i64 now, order;
    Event *heap;
    i64 waiting, heap_room;
    Pool slots, actions, sent, posts, channels, requests, jobs, streams, meetings;
    i32 *buckets, *meeting_buckets;
    i64 bucket_mask, num_channels, meeting_mask;
    Rank *rank;
    i32 *missing, *next_free, *stamp, *group_streams, *position;
    i32 *any, *first, *last, *trees;
    Queue *queue;
    i64 most_phases;
    Phase *phases; i64 phases_room;
    i64 *stride, *coordinate, *first_link;
    char *link_is_busy; i32 *link_head, *link_tail;
    i32 *memory_queue; i64 memory_head, memory_tail, memory_room; i32 memory_is_busy;
    i64 *scratch; i64 scratch_room;
    struct Engine *alone; /* for one phase that the formulas do not cover */
    i64 *alone_end;
    int failed;
    i32 late; /* the rank whose time does not fit 64 bits, or none */
} Engine;

static i32 pool_take(Engine *e, Pool *pool, size_t width) {
    if (pool->free != NONE) {
        i32 index = pool->free;
        pool->free = *(i32 *)(pool->data + index * width);
        return index;
    }
    if (pool->used == pool->room) {
        i64 room = pool->room ? 2 * pool->room : 64;
        char *data = realloc(pool->data, room * width);
        if (!data) { e->failed = OUT_OF_MEMORY; return 0; }
        pool->data = data;
        pool->room = room;
    }
    return (i32)pool->used++;
}

static void pool_give(Pool *pool, size_t width, i32 index) {
    *(i32 *)(pool->data + index * width) = pool->free;
    pool->free = index;
}

#define TAKE(pool, type) pool_take(e, &e->pool, sizeof(type))
#define GIVE(pool, type, index) pool_give(&e->pool, sizeof(type), index)
#define ONE(pool, type, index) AT(e->pool, type, index)

static i32 represented(const Engine *e, i32 rank) { return e->represent ? e->represent[rank] : rank; }

/* ---- events: by time, and among equals in the order in which they were queued ---- */

static int is_before(const Event *one, const Event *other) {
    return one->time < other->time || (one->time == other->time && one->order < other->order);
}

static void too_long(Engine *e, i32 rank) {
    if (!e->failed) e->late = rank;
    e->failed = TOO_LONG;
}

/* A time in whole ns. */
static i64 whole(Engine *e, i32 rank, double time) {
    if (time < (double)MOST_NS) return (i64)time;
    too_long(e, rank);
    return 0;
}

/* `rank` is named if the time does not fit. */
static void push(Engine *e, i32 rank, i64 time, i32 what, i32 index) {
    if (time < 0 || time >= MOST_NS) { too_long(e, rank); return; }
    if (e->waiting == e->heap_room) {
        i64 room = e->heap_room ? 2 * e->heap_room : 1024;
        Event *heap = realloc(e->heap, room * sizeof(Event));
        if (!heap) { e->failed = OUT_OF_MEMORY; return; }
        e->heap = heap;
        e->heap_room = room;
    }
    Event event = {time, e->order++, what, index};
    i64 at = e->waiting++;
    while (at > 0) {
        i64 above = (at - 1) >> 1;
        if (is_before(&e->heap[above], &event)) break;
        e->heap[at] = e->heap[above];
        at = above;
    }
    e->heap[at] = event;
}

static Event pop(Engine *e) {
    Event first = e->heap[0], last = e->heap[--e->waiting];
    i64 at = 0, below;
    while ((below = 2 * at + 1) < e->waiting) {
        if (below + 1 < e->waiting && is_before(&e->heap[below + 1], &e->heap[below])) below++;
        if (!is_before(&e->heap[below], &last)) break;
        e->heap[at] = e->heap[below];
        at = below;
    }
    if (e->waiting) e->heap[at] = last;
    return first;
}

/* After `delay` on the rank's own timer. Timers of a rank that end together run together. */
static void timer(Engine *e, i32 rank, i64 delay, i32 what, i32 index, i64 value) {
    i64 time = e->now + delay;
    i32 action = TAKE(actions, Action);
    if (e->failed) return;
    *ONE(actions, Action, action) = (Action){NONE, what, index, value};
    i32 slot = e->rank[rank].timers;
    while (slot != NONE && ONE(slots, Slot, slot)->time != time) slot = ONE(slots, Slot, slot)->next;
    if (slot == NONE) {
        slot = TAKE(slots, Slot);
        if (e->failed) return;
        *ONE(slots, Slot, slot) = (Slot){e->rank[rank].timers, action, action, time};
        e->rank[rank].timers = slot;
        push(e, rank, time, TIMER, rank);
        return;
    }
    Slot *found = ONE(slots, Slot, slot);
    if (found->tail == NONE) found->head = action;
    else ONE(actions, Action, found->tail)->next = action;
    found->tail = action;
}

/* ---- the network ---- */

static int first_difference(const Engine *e, i32 source, i32 target) {
    const i64 *one = e->coordinate + source * e->dimensions, *other = e->coordinate + target * e->dimensions;
    int dimension = 0;
    while (dimension < e->dimensions && one[dimension] == other[dimension]) dimension++;
    return dimension;
}

/* Without congestion: only the lowest dimension in which the two differ is charged. */
static i64 flight(Engine *e, i32 source, i32 target, i64 size) {
    int dimension = first_difference(e, source, target);
    if (dimension == e->dimensions) return 0;
    double hops = 1;
    if (e->topology[dimension] == WIRED_SWITCH) hops = 2;
    if (e->topology[dimension] == WIRED_RING) {
        i64 way = e->coordinate[target * e->dimensions + dimension] - e->coordinate[source * e->dimensions + dimension];
        i64 n = e->size[dimension];
        way = (way + n) % n;
        hops = (double)(way < n - way ? way : n - way);
    }
    return whole(e, source, hops * e->latency[dimension] + (double)size / e->bandwidth[dimension]);
}

static void handle(Engine *e, Handler handler);

static i32 *bucket_of(Engine *e, i64 tag, i32 source, i32 target, i64 size) {
    uint64_t hash = (uint64_t)tag * 0x9E3779B97F4A7C15ull;
    hash = (hash ^ (hash >> 29) ^ (uint64_t)source) * 0xBF58476D1CE4E5B9ull;
    hash = (hash ^ (hash >> 31) ^ (uint64_t)target) * 0x94D049BB133111EBull;
    hash = (hash ^ (hash >> 30) ^ (uint64_t)size) * 0x9E3779B97F4A7C15ull;
    return &e->buckets[(hash >> 20) & e->bucket_mask];
}

static void grow_buckets(Engine *e) {
    i64 count = 2 * (e->bucket_mask + 1);
    i32 *old = e->buckets, *buckets = malloc(count * sizeof(i32));
    i64 before = e->bucket_mask + 1;
    if (!buckets) { e->failed = OUT_OF_MEMORY; return; }
    for (i64 i = 0; i < count; i++) buckets[i] = NONE;
    e->buckets = buckets;
    e->bucket_mask = count - 1;
    for (i64 i = 0; i < before; i++)
        for (i32 at = old[i]; at != NONE;) {
            Channel *channel = ONE(channels, Channel, at);
            i32 next = channel->next, *bucket = bucket_of(e, channel->tag, channel->source, channel->target, channel->size);
            channel->next = *bucket;
            *bucket = at;
            at = next;
        }
    free(old);
}

/* The place that points to the channel of these messages, which is made where there is none. */
static i32 *channel_of(Engine *e, i64 tag, i32 source, i32 target, i64 size) {
    if (e->num_channels > e->bucket_mask) grow_buckets(e);
    i32 *bucket = bucket_of(e, tag, source, target, size), *place = bucket;
    while (*place != NONE) {
        Channel *channel = ONE(channels, Channel, *place);
        if (channel->tag == tag && channel->source == source && channel->target == target && channel->size == size)
            return place;
        place = &channel->next;
    }
    i32 made = TAKE(channels, Channel);
    *ONE(channels, Channel, made) = (Channel){*bucket, NONE, NONE, source, target, 0, tag, size};
    *bucket = made;
    e->num_channels++;
    return bucket;
}

static void drop_if_empty(Engine *e, i32 *place) {
    i32 index = *place;
    Channel *channel = ONE(channels, Channel, index);
    if (channel->arrived || channel->first != NONE) return;
    *place = channel->next;
    GIVE(channels, Channel, index);
    e->num_channels--;
}

/* The next link of a message and where it leads: dimension by dimension, each by its own way. */
static i64 next_link(const Engine *e, const Message *message, i32 *to, i32 *stage) {
    i32 at = message->at;
    int dimension = first_difference(e, at, message->target);
    i64 n = e->size[dimension], stride = e->stride[dimension];
    i64 here = e->coordinate[at * e->dimensions + dimension];
    i64 there = e->coordinate[message->target * e->dimensions + dimension];
    *stage = 0;
    if (e->topology[dimension] == WIRED_ALL) {
        *to = (i32)(at + (there - here) * stride);
        return e->first_link[dimension] + at * n + there;
    }
    if (e->topology[dimension] == WIRED_RING) {
        i64 way = (there - here + n) % n, clockwise = way <= n - way;
        i64 next = clockwise ? (here + 1) % n : (here + n - 1) % n;
        *to = (i32)(at + (next - here) * stride);
        return e->first_link[dimension] + 2 * (i64)at + !clockwise;
    }
    if (!message->stage) {
        *to = at;
        *stage = 1;
        return e->first_link[dimension] + 2 * (i64)at;
    }
    *to = (i32)(at + (there - here) * stride);
    return e->first_link[dimension] + 2 * (i64)*to + 1;
}

static int dimension_of_link(const Engine *e, i64 link) {
    int dimension = 0;
    while (link >= e->first_link[dimension + 1]) dimension++;
    return dimension;
}

static void transmit(Engine *e, i64 link, i32 index) {
    Message *message = ONE(sent, Message, index);
    int dimension = dimension_of_link(e, link);
    double time = (double)message->size / e->bandwidth[dimension];
    i32 rank = message->source;
    if (message->size > INT64_MAX - e->link_bytes[link]) { too_long(e, rank); return; }
    e->link_is_busy[link] = 1;
    e->link_bytes[link] += message->size;
    e->link_busy[link] += whole(e, rank, time);
    push(e, rank, e->now + whole(e, rank, e->latency[dimension] + time), HOP, index);
    push(e, rank, e->now + whole(e, rank, time), LINK_FREE, (i32)link);
}

static void put_on_link(Engine *e, i32 index) {
    Message *message = ONE(sent, Message, index);
    i32 to, stage;
    i64 link = next_link(e, message, &to, &stage);
    if (!e->link_is_busy[link]) { transmit(e, link, index); return; }
    message->next = NONE;
    if (e->link_head[link] == NONE) e->link_head[link] = index;
    else ONE(sent, Message, e->link_tail[link])->next = index;
    e->link_tail[link] = index;
}

static void link_free(Engine *e, i64 link) {
    i32 index = e->link_head[link];
    e->link_is_busy[link] = 0;
    if (index == NONE) return;
    e->link_head[link] = ONE(sent, Message, index)->next;
    transmit(e, link, index);
}

static void arrive(Engine *e, i32 index) {
    Message message = *ONE(sent, Message, index);
    GIVE(sent, Message, index);
    i32 *place = channel_of(e, message.tag, message.source, message.target, message.size);
    Channel *channel = ONE(channels, Channel, *place);
    i32 post = channel->first;
    if (post == NONE) {
        channel->arrived++;
        if (message.sender.who) handle(e, message.sender);
        return;
    }
    Posted posted = *ONE(posts, Posted, post);
    channel->first = posted.next;
    drop_if_empty(e, place);
    GIVE(posts, Posted, post);
    if (message.sender.who) handle(e, message.sender);
    handle(e, posted.handler);
}

static void hop(Engine *e, i32 index) {
    Message *message = ONE(sent, Message, index);
    i32 to, stage;
    next_link(e, message, &to, &stage);
    message->at = to;
    message->stage = stage;
    if (to == message->target && !stage) arrive(e, index);
    else put_on_link(e, index);
}

/* Send at once: `source` and `target` as they are in the job. A folded run keeps messages by who stands for whom. */
static void launch(Engine *e, i32 source, i32 target, i64 size, i64 tag, Handler sender) {
    i32 index = TAKE(sent, Message);
    if (e->failed) return;
    e->messages++;
    *ONE(sent, Message, index) =
        (Message){NONE, represented(e, source), represented(e, target), source, 0, tag, size, sender};
    if (e->congestion && source != target) put_on_link(e, index);
    else push(e, source, e->now + flight(e, source, target, size), ARRIVE, index);
}

static void post(Engine *e, i32 source, i32 target, i64 size, i64 tag, Handler handler) {
    i32 *place = channel_of(e, tag, represented(e, source), represented(e, target), size);
    if (e->failed) return;
    i32 index = *place;
    i32 posted = TAKE(posts, Posted);
    if (e->failed) return;
    *ONE(posts, Posted, posted) = (Posted){NONE, handler};
    Channel *channel = ONE(channels, Channel, index);
    if (channel->arrived) {
        channel->arrived--;
        drop_if_empty(e, place);
        push(e, target, e->now, LATE_RECEIVE, posted);
        return;
    }
    if (channel->first == NONE) channel->first = posted;
    else ONE(posts, Posted, channel->last)->next = posted;
    channel->last = posted;
}

static i32 request(Engine *e, i32 rank, i32 other, i32 is_send, i64 size, i64 tag, Handler handler) {
    i32 index = TAKE(requests, Request);
    if (!e->failed) *ONE(requests, Request, index) = (Request){NONE, rank, other, is_send, tag, size, handler};
    return index;
}

static void send_message(Engine *e, i32 source, i32 target, i64 size, i64 tag, Handler sender) {
    if (!e->rendezvous) { launch(e, source, target, size, tag, sender); return; }
    i32 index = request(e, source, target, 1, size, tag, sender);
    if (!e->failed) post(e, target, source, CONTROL_BYTES, tag + CONTROL_TAG, (Handler){MAY_SEND, source, index});
}

static void receive_message(Engine *e, i32 source, i32 target, i64 size, i64 tag, Handler handler) {
    if (!e->rendezvous) { post(e, source, target, size, tag, handler); return; }
    i32 index = request(e, target, source, 0, size, tag, handler);
    if (!e->failed) launch(e, target, source, CONTROL_BYTES, tag + CONTROL_TAG, (Handler){MAY_RECEIVE, target, index});
}

static void granted(Engine *e, i32 index) {
    Request found = *ONE(requests, Request, index);
    GIVE(requests, Request, index);
    if (found.is_send) launch(e, found.rank, found.target, found.size, found.tag, found.handler);
    else post(e, found.target, found.rank, found.size, found.tag, found.handler);
}

/* ---- members of a phase ---- */

static Phase *phase_of(Engine *e, i32 stream) {
    return &e->phases[stream * e->most_phases + ONE(streams, Stream, stream)->phase];
}

static int kind_index(int kind) { return kind == ALL_REDUCE ? 0 : kind == ALL_GATHER ? 1 : kind == ALL_TO_ALL ? 2 : 3; }

static i64 group_size(const Engine *e, i32 group) { return e->first_member[group + 1] - e->first_member[group]; }

/* Whether a stream runs on the ring of a group that is not the whole world. */
static int is_local(const Engine *e, i32 group) { return group >= 0 && group_size(e, group) != e->ranks; }

/* The rank at a position of the ring that `rank` is in; `dimension` -1 is the flat ring of all. */
static i32 member_at(const Engine *e, i32 rank, i32 group, i32 dimension, i64 position) {
    if (is_local(e, group)) return e->member[e->first_member[group] + position];
    if (dimension < 0) return (i32)position;
    i64 here = e->coordinate[rank * e->dimensions + dimension];
    return (i32)(rank + (position - here) * e->stride[dimension]);
}

static i64 reduce_time(Engine *e, i64 size) {
    double once = (double)size / e->memory_bandwidth * 1e9;
    if (3 * once >= (double)MOST_NS) { too_long(e, NONE); return 0; }
    return 3 * (i64)once;
}

static int log2_floor(i64 n) { int bits = 0; while (n > 1) { n >>= 1; bits++; } return bits; }

/* trunc(factor x log2 n + shift) with a real logarithm, for any n */
static i64 log2_scaled(i64 n, int factor, int shift) {
    int whole = log2_floor(n);
    if ((n & (n - 1)) == 0) return (i64)factor * whole + shift;
    double log2n = log2((double)n);
    return (i64)(factor * log2n + shift);
}

/* Packet `step` of halving-doubling: distance of the partner and bytes. */
static void halving_packet(i64 n, int kind, i64 size, i64 step, i64 *distance, i64 *bytes) {
    i64 o = 1, m = size / 2;
    int grows = kind != ALL_GATHER;
    if (!grows) { o = n / 2; m = size; }
    for (i64 i = 0; i < step; i++) {
        if (grows) { o *= 2; m /= 2; }
        else { o /= 2; m *= 2; }
        if (o == n && kind == ALL_REDUCE && grows) { grows = 0; o /= 2; m *= 2; }
    }
    *distance = o;
    *bytes = m;
}

static i64 halving_partner(i64 n, i64 position, i64 distance) {
    if (distance == 0) return position;
    i64 partner = (position / distance) % 2 == 0 ? position + distance : position - distance;
    return ((partner % n) + n) % n;
}

static i64 sends_of(int kind, int pattern, i64 n) {
    if (pattern == HALVING_DOUBLING) return kind == ALL_REDUCE ? log2_scaled(n, 2, 0) : log2_scaled(n, 1, 0);
    if (kind == ALL_REDUCE) return 2 * (n - 1);
    return kind == ALL_TO_ALL && pattern == RING ? n * (n - 1) / 2 : n - 1;
}

static i64 message_bytes(int kind, i64 size, i64 n) { return kind == ALL_GATHER ? size : size / n; }

/* Where a rank stands in the tree: positions are in-order numbers, the root hangs above the complete tree of the rest. */
static int tree_links(i64 n, int variant, i64 position, i64 *parent, i64 *left, i64 *right) {
    i64 root = variant ? 0 : n - 1, shift = variant ? 0 : 1; /* place in the complete tree, from 1: position + shift */
    *parent = *left = *right = NONE;
    if (position == root) { *left = n / 2 - shift; return ROOT; }
    i64 place = position + shift, low = place & -place;
    *parent = place == n / 2 ? root : ((place ^ low) | (low << 1)) - shift;
    if (low == 1) return LEAF;
    *left = place - low / 2 - shift;
    *right = place + low / 2 - shift;
    return INNER;
}

/* ---- phases at once: the formulas; start and end in ns of every member ---- */

typedef struct { Engine *e; i32 rank, group, dimension; i64 n, delay, size; int kind, clockwise; const i64 *start; i64 *end; } Ring;

static i64 between(const Ring *ring, i64 from, i64 to, i64 size) {
    i32 source = member_at(ring->e, ring->rank, ring->group, ring->dimension, from);
    i32 target = member_at(ring->e, ring->rank, ring->group, ring->dimension, to);
    return flight(ring->e, source, target, size);
}

static int all_equal(const i64 *values, i64 n) {
    for (i64 i = 1; i < n; i++) if (values[i] != values[0]) return 0;
    return 1;
}

static i64 *scratch(Engine *e, i64 count) {
    if (count > e->scratch_room) {
        free(e->scratch);
        e->scratch = malloc(count * sizeof(i64));
        e->scratch_room = e->scratch ? count : 0;
        if (!e->scratch) e->failed = OUT_OF_MEMORY;
    }
    return e->scratch;
}

static void ring_at_once(const Ring *ring) {
    Engine *e = ring->e;
    i64 n = ring->n, size = message_bytes(ring->kind, ring->size, n), sends = sends_of(ring->kind, RING, n);
    int reduces = ring->kind == ALL_REDUCE || ring->kind == REDUCE_SCATTER;
    i64 reduction = reduces ? reduce_time(e, size) : 0;
    i64 *room = scratch(e, 3 * n + 2);
    if (e->failed) return;
    i64 *hop = room, *one = room + n + 1, *other = room + 2 * n + 2, *end = ring->end;
    /* Turn the ring so that messages always come from the position before. */
    for (i64 i = 0; i < n; i++) {
        i64 at = ring->clockwise ? i : n - 1 - i, from = ring->clockwise ? (at + n - 1) % n : (at + 1) % n;
        hop[i] = between(ring, from, at, size);
        one[i] = ring->start[at] + ring->delay;
    }
    int is_even = e->closed_form && all_equal(hop, n);
    i64 k = 1;
    for (; k <= sends; k++) {
        if (is_even && (k & 63) == 1 && all_equal(one, n)) break;
        i64 cost = ring->delay + (reduces && k <= n - 1 ? reduction : 0);
        i64 before = one[n - 1];
        one[-1] = before;
        for (i64 i = 0; i < n; i++) {
            i64 come = one[i - 1] + hop[i];
            other[i] = (one[i] > come ? one[i] : come) + cost;
        }
        i64 *swap = one; one = other; other = swap;
    }
    if (k <= sends) { /* from here on all go in step */
        i64 reductions = reduces && k <= n - 1 ? n - k : 0, total = one[0] + (sends - k + 1) * (hop[0] + ring->delay);
        for (i64 i = 0; i < n; i++) one[i] = total + reductions * reduction;
    }
    for (i64 i = 0; i < n; i++) end[ring->clockwise ? i : n - 1 - i] = one[i];
}

static void halving_at_once(const Ring *ring) {
    Engine *e = ring->e;
    i64 n = ring->n, sends = sends_of(ring->kind, HALVING_DOUBLING, n), levels = log2_floor(n);
    int reduces = ring->kind == ALL_REDUCE || ring->kind == REDUCE_SCATTER;
    i64 *room = scratch(e, 2 * n);
    if (e->failed) return;
    i64 *one = room, *other = room + n;
    for (i64 i = 0; i < n; i++) one[i] = ring->start[i] + ring->delay;
    for (i64 k = 1; k <= sends; k++) {
        i64 distance, bytes, next_distance, next_bytes;
        halving_packet(n, ring->kind, ring->size, k - 1, &distance, &bytes);
        halving_packet(n, ring->kind, ring->size, k, &next_distance, &next_bytes);
        i64 cost = ring->delay + (reduces && k <= levels - 1 ? reduce_time(e, next_bytes) : 0);
        for (i64 i = 0; i < n; i++) {
            i64 from = halving_partner(n, i, distance), come = one[from] + between(ring, from, i, bytes);
            other[i] = (one[i] > come ? one[i] : come) + cost;
        }
        i64 *swap = one; one = other; other = swap;
    }
    memcpy(ring->end, one, n * sizeof(i64));
}

static int ascending(const void *one, const void *other) {
    i64 a = *(const i64 *)one, b = *(const i64 *)other;
    return (a > b) - (a < b);
}

/* Second half of a direct all-reduce; 0 where early credits would release later packets and messages must be followed. */
static int direct_second_half(const Ring *ring, const i64 *came, i64 reduction, i64 *room) {
    i64 n = ring->n, d = ring->delay, size = ring->size / n, turn = ring->clockwise ? 1 : n - 1;
    i64 *leaves = room, *ready = room + n * n, *last = ready + n;
    for (i64 i = 0; i < n; i++) {
        i64 all = 0, count = 0, free_at = 0;
        for (i64 j = 0; j < n; j++) {
            if (j == i) continue;
            i64 at = came[i * n + j];
            all = at > all ? at : all;
            ready[count++] = at + d + reduction;
        }
        qsort(ready, n - 1, sizeof(i64), ascending);
        last[i] = ready[n - 2];
        for (i64 k = 0; k < n - 1; k++) if (ready[k] >= all) { free_at = ready[k]; break; }
        for (i64 k = 0; k < n - 1; k++) leaves[i * n + k] = free_at > ready[k] ? free_at : ready[k];
    }
    i64 extra = is_local(ring->e, ring->group) && n > 2 ? reduction : 0;
    for (i64 i = 0; i < n; i++) {
        i64 end = 0;
        for (i64 k = 0; k < n - 1; k++) { /* the k-th source sends me its k-th packet */
            i64 from = (i + n - (k + 1) * turn % n) % n;
            i64 at = leaves[from * n + k] + between(ring, from, i, size), posted = leaves[i * n + k];
            i64 got = at > posted ? at : posted;
            if (got + d < last[i]) return 0;
            end = got + d > end ? got + d : end;
        }
        ring->end[i] = end + extra;
    }
    return 1;
}

static int direct_at_once(const Ring *ring) {
    Engine *e = ring->e;
    i64 n = ring->n, d = ring->delay, size = message_bytes(ring->kind, ring->size, n);
    int reduces = ring->kind == ALL_REDUCE || ring->kind == REDUCE_SCATTER;
    i64 reduction = reduces ? reduce_time(e, size) : 0;
    i64 *room = scratch(e, 2 * n * n + 2 * n);
    if (e->failed) return 1;
    i64 *came = room;
    for (i64 i = 0; i < n; i++) {
        i64 all = 0;
        for (i64 j = 0; j < n; j++) {
            if (j == i) continue;
            i64 at = ring->start[j] + d + between(ring, j, i, size), posted = ring->start[i] + d;
            at = at > posted ? at : posted;
            came[i * n + j] = at;
            all = at > all ? at : all;
        }
        ring->end[i] = all + d + (ring->kind == REDUCE_SCATTER ? reduction : 0);
    }
    return ring->kind != ALL_REDUCE || direct_second_half(ring, came, reduction, room + n * n);
}

static void tree_at_once(const Ring *ring, int variant) {
    Engine *e = ring->e;
    i64 n = ring->n, d = ring->delay, reduction = reduce_time(e, ring->size), size = ring->size;
    i64 *up = scratch(e, n);
    if (e->failed) return;
    i64 parent, left, right, shift = variant ? 0 : 1, root = variant ? 0 : n - 1;
    for (i64 low = 1; low < n; low *= 2) /* from the leaves upwards */
        for (i64 place = low; place < n; place += 2 * low) {
            i64 at = place - shift, begin = ring->start[at];
            if (low == 1) { up[at] = begin + d; continue; }
            tree_links(n, variant, at, &parent, &left, &right);
            i64 one = up[left] + between(ring, left, at, size), other = up[right] + between(ring, right, at, size);
            one = one > begin ? one : begin;
            other = other > begin ? other : begin;
            up[at] = (one > other ? one : other) + d + reduction;
        }
    i64 top = n / 2 - shift, come = up[top] + between(ring, top, root, size);
    ring->end[root] = (come > ring->start[root] ? come : ring->start[root]) + d + reduction;
    for (i64 low = n / 2; low >= 1; low /= 2)
        for (i64 place = low; place < n; place += 2 * low) {
            i64 at = place - shift;
            tree_links(n, variant, at, &parent, &left, &right);
            i64 down = ring->end[parent] + between(ring, parent, at, size);
            ring->end[at] = (down > up[at] ? down : up[at]) + d + (low == 1 ? 0 : reduction);
        }
}

/* ---- patterns, message by message ---- */

static void phase_end(Engine *e, i32 stream);

static i64 tag_of(const Stream *stream) { return stream->number % TAGS + TAGS; }

static void stream_send(Engine *e, i32 stream, i64 to, i64 size) {
    Stream *s = ONE(streams, Stream, stream);
    i32 target = member_at(e, s->rank, s->group, phase_of(e, stream)->dimension, to);
    send_message(e, s->rank, target, size, tag_of(s), (Handler){NOBODY, 0, 0});
}

static void stream_receive(Engine *e, i32 stream, i64 from, i64 size) {
    Stream *s = ONE(streams, Stream, stream);
    i32 source = member_at(e, s->rank, s->group, phase_of(e, stream)->dimension, from);
    s->posted_from = source;
    receive_message(e, source, s->rank, size, tag_of(s), (Handler){STREAM, s->rank, stream});
}

static void endpoint_step(Engine *e, i32 stream, int reduces, i64 size) {
    Stream *s = ONE(streams, Stream, stream);
    i64 delay = is_local(e, s->group) && phase_of(e, stream)->pattern != TREE ? e->local_delay : e->endpoint_delay;
    timer(e, s->rank, delay, reduces ? REDUCE : READY, stream, reduces ? reduce_time(e, size) : 0);
}

static void prepare(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    Phase *phase = phase_of(e, stream);
    i64 step = s->prepared++, cycle = s->window + s->mixing;
    int mixes = step % cycle >= s->window, is_odd = step / cycle % 2 == 0;
    i64 distance, bytes = message_bytes(phase->kind, phase->size, s->members);
    if (phase->pattern == HALVING_DOUBLING)
        halving_packet(s->members, phase->kind, phase->size, step, &distance, &bytes);
    endpoint_step(e, stream, mixes && (phase->kind == REDUCE_SCATTER || (phase->kind == ALL_REDUCE && is_odd)), bytes);
}

static void try_send(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    Phase *phase = phase_of(e, stream);
    if (s->prepared == s->sent || s->sends_left <= 0 || s->credits <= 0) return;
    i64 n = s->members, step = s->sent++, to, from, distance, bytes = message_bytes(phase->kind, phase->size, n);
    s->sends_left--;
    s->credits--;
    if (phase->pattern == HALVING_DOUBLING) {
        halving_packet(n, phase->kind, phase->size, step, &distance, &bytes);
        to = from = halving_partner(n, s->position, distance);
    } else {
        i64 away = phase->pattern == RING ? 1 : 1 + step % (n - 1);
        i64 up = (s->position + away) % n, down = (s->position + n - away) % n;
        to = phase->clockwise ? up : down;
        from = phase->clockwise ? down : up;
    }
    stream_send(e, stream, to, bytes);
    stream_receive(e, stream, from, bytes);
}

static void end_test(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    if (s->sends_left == 0 && s->credits == s->window) phase_end(e, stream);
}

static void tree_ready(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    i64 size = phase_of(e, stream)->size;
    i64 parent = s->parent, left = s->left, right = s->right;
    int step = s->step++, role = s->role;
    if (role == LEAF && step == 0) { stream_send(e, stream, parent, size); stream_receive(e, stream, parent, size); }
    else if (role == LEAF) phase_end(e, stream);
    else if (role == ROOT) { stream_send(e, stream, left, size); phase_end(e, stream); }
    else if (step == 1) { stream_send(e, stream, parent, size); stream_receive(e, stream, parent, size); }
    else if (step == 2) {
        stream_send(e, stream, left, size);
        stream_send(e, stream, right, size);
        phase_end(e, stream);
    }
}

static void stream_ready(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    Phase *phase = phase_of(e, stream);
    if (phase->pattern == TREE) { tree_ready(e, stream); return; }
    s->credits++;
    if (phase->pattern == DIRECT && phase->kind == ALL_REDUCE && s->sends_left <= s->members - 1) {
        if (s->received < s->members - 1) return;
        for (i32 i = 0; i < s->window; i++) { try_send(e, stream); s = ONE(streams, Stream, stream); }
    } else try_send(e, stream);
    end_test(e, stream);
}

static void stream_received(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    s->received++;
    if (phase_of(e, stream)->pattern == TREE)
        endpoint_step(e, stream, s->role != LEAF, phase_of(e, stream)->size);
    else prepare(e, stream);
}

static void start_messages(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    if (phase_of(e, stream)->pattern != TREE) {
        i32 window = s->window;
        for (i32 i = 0; i < window; i++) prepare(e, stream);
    } else if (s->role == LEAF) endpoint_step(e, stream, 0, 0);
    else {
        i64 size = phase_of(e, stream)->size, right = s->right;
        stream_receive(e, stream, s->left, size);
        if (right != NONE) stream_receive(e, stream, right, size);
    }
}

/* ---- a phase of a stream ---- */

static i64 position_of(const Engine *e, const Stream *s, i32 dimension) {
    if (is_local(e, s->group)) {
        for (i64 slot = e->first_group[s->rank];; slot++)
            if (e->group_of[slot] == s->group) return e->position[slot];
    }
    return dimension < 0 ? s->rank : e->coordinate[s->rank * e->dimensions + dimension];
}

static i64 phase_members(const Engine *e, const Stream *s, i32 dimension) {
    if (is_local(e, s->group)) return group_size(e, s->group);
    return dimension < 0 ? e->ranks : e->size[dimension];
}

static void set_up_phase(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    Phase *phase = phase_of(e, stream);
    i64 n = phase_members(e, s, phase->dimension), parent, left, right;
    s->members = (i32)n;
    s->position = (i32)position_of(e, s, phase->dimension);
    s->prepared = s->sent = s->received = 0;
    s->credits = s->step = 0;
    s->posted_from = NONE;
    s->sends_left = sends_of(phase->kind, phase->pattern, n);
    s->window = 1;
    if (phase->pattern == DIRECT) s->window = (i32)(phase->window && phase->window < n - 1 ? phase->window : n - 1);
    s->mixing = (i32)(n - 1);
    if (phase->pattern == DIRECT) s->mixing = (i32)(is_local(e, s->group) ? (n - 1) * s->window : s->window);
    if (phase->pattern == HALVING_DOUBLING) s->mixing = (i32)log2_scaled(n, 1, -1);
    if (phase->pattern == TREE) {
        s->role = tree_links(n, phase->variant, s->position, &parent, &left, &right);
        s->parent = (i32)parent, s->left = (i32)left, s->right = (i32)right;
    }
}

static int is_at_once(const Engine *e, const Stream *s, const Phase *phase) {
    if (!e->at_once) return 0;
    if (phase->pattern == HALVING_DOUBLING) return (s->members & (s->members - 1)) == 0;
    return phase->pattern != DIRECT || s->window == s->members - 1;
}

/* One phase by itself, message by message: its members start at the given times, nobody else is about. */
static void run(Engine *e);
static int set_up(Engine *e);

static void by_messages(Engine *e, const Ring *ring, const Stream *like, const Phase *phase) {
    if (!e->alone) {
        Engine *made = calloc(1, sizeof(Engine));
        if (!made) { e->failed = OUT_OF_MEMORY; return; }
        memcpy(made, e, offsetof(Engine, finish));
        made->represent = NULL;
        made->congestion = made->at_once = 0;
        e->alone = made;
        if (!set_up(made)) { e->failed = OUT_OF_MEMORY; return; }
    }
    Engine *alone = e->alone;
    alone->alone_end = ring->end;
    for (i64 i = 0; i < ring->n && !alone->failed; i++) {
        i32 stream = pool_take(alone, &alone->streams, sizeof(Stream));
        if (alone->failed) break;
        if (stream >= alone->phases_room) {
            i64 room = 2 * (i64)stream + 64;
            Phase *phases = realloc(alone->phases, room * alone->most_phases * sizeof(Phase));
            if (!phases) { alone->failed = OUT_OF_MEMORY; break; }
            alone->phases = phases;
            alone->phases_room = room;
        }
        Stream *s = AT(alone->streams, Stream, stream);
        *s = *like;
        s->rank = member_at(e, ring->rank, ring->group, ring->dimension, i);
        s->group = ring->group;
        s->phase = 0;
        alone->phases[stream * alone->most_phases] = *phase;
        set_up_phase(alone, stream);
        push(alone, s->rank, ring->start[i], START_ALONE, stream);
    }
    if (!alone->failed) run(alone);
    if (alone->failed) e->failed = alone->failed, e->late = alone->late;
    alone->streams.used = 0;
    alone->streams.free = NONE;
    alone->now = 0;
}

/* Whether a phase ends within 64 bits even if every one of its messages goes the longest way. */
static int fits(const Ring *ring, int pattern, i64 sends) {
    Engine *e = ring->e;
    i64 size = pattern == RING || pattern == DIRECT ? message_bytes(ring->kind, ring->size, ring->n) : ring->size;
    double begin = 0, flight = 0, hops = 0;
    for (i64 i = 0; i < ring->n; i++) if ((double)ring->start[i] > begin) begin = (double)ring->start[i];
    for (i64 d = 0; d < e->dimensions; d++) {
        double bytes = (double)size * (pattern == HALVING_DOUBLING && ring->kind == ALL_GATHER ? (double)ring->n : 1);
        double way = e->topology[d] == WIRED_SWITCH ? 2 : e->topology[d] == WIRED_RING ? (double)(e->size[d] / 2) : 1;
        hops = way * e->latency[d] > hops ? way * e->latency[d] : hops;
        flight = bytes / e->bandwidth[d] > flight ? bytes / e->bandwidth[d] : flight;
    }
    double rounds = pattern == TREE ? 2.0 * log2_floor(ring->n) + 2 : pattern == DIRECT ? 2 : (double)sends;
    int reduces = pattern == TREE || ring->kind == ALL_REDUCE || ring->kind == REDUCE_SCATTER;
    double reduction = reduces ? 3 * ((double)size / e->memory_bandwidth * 1e9) : 0;
    if (begin + (rounds + 1) * (hops + flight + (double)ring->delay + reduction) < (double)MOST_NS) return 1;
    too_long(e, member_at(e, ring->rank, ring->group, ring->dimension, 0));
    return 0;
}

static void end_at_once(Engine *e, Meeting *meeting) {
    Stream *s = ONE(streams, Stream, meeting->streams[0]);
    Phase *phase = phase_of(e, meeting->streams[0]);
    i64 n = meeting->members, *end = malloc(n * sizeof(i64));
    if (!end) { e->failed = OUT_OF_MEMORY; return; }
    int local = is_local(e, s->group);
    Ring ring = {e, local ? 0 : meeting->member_list, local ? -2 - meeting->member_list : NONE, phase->dimension, n,
                 local && phase->pattern != TREE ? e->local_delay : e->endpoint_delay, phase->size, phase->kind,
                 phase->clockwise, meeting->start, end};
    if (!fits(&ring, phase->pattern, sends_of(phase->kind, phase->pattern, n))) { free(end); return; }
    if (phase->pattern == RING) ring_at_once(&ring);
    else if (phase->pattern == HALVING_DOUBLING) halving_at_once(&ring);
    else if (phase->pattern == TREE) tree_at_once(&ring, phase->variant);
    else if (!direct_at_once(&ring)) by_messages(e, &ring, s, phase);
    i64 sends = phase->pattern == TREE ? 1 : sends_of(phase->kind, phase->pattern, n);
    e->messages += n * sends + (phase->pattern == TREE ? n - 2 : 0);
    for (i64 i = 0; i < n && !e->failed; i++) {
        Stream *each = ONE(streams, Stream, meeting->streams[i]);
        if (each->position == i) timer(e, each->rank, end[i] - e->now, PHASE_END, meeting->streams[i], 0);
        else if (end[i] != end[each->position]) e->failed = FOLD_BROKEN;
    }
    free(end);
}

static i32 *meeting_place(Engine *e, const Stream *s, const Phase *phase, i32 list) {
    i32 clockwise = phase->pattern == HALVING_DOUBLING || phase->pattern == TREE || s->members == 2 ? 1 : phase->clockwise;
    i32 how = phase->pattern == TREE ? TREE + phase->variant : phase->pattern;
    uint64_t hash = (uint64_t)s->number * 0x9E3779B97F4A7C15ull;
    hash = (hash ^ (hash >> 29) ^ (uint64_t)(uint32_t)list) * 0xBF58476D1CE4E5B9ull;
    hash = (hash ^ (hash >> 31) ^ (uint64_t)s->phase) * 0x94D049BB133111EBull;
    i32 *bucket = &e->meeting_buckets[(hash >> 20) & e->meeting_mask], *place = bucket;
    for (; *place != NONE; place = &ONE(meetings, Meeting, *place)->next) {
        Meeting *m = ONE(meetings, Meeting, *place);
        if (m->number == s->number && m->member_list == list && m->phase == s->phase && m->dimension == phase->dimension
            && m->kind == phase->kind && m->pattern == how && m->clockwise == clockwise && m->size == phase->size)
            return place;
    }
    i32 made = TAKE(meetings, Meeting);
    if (e->failed) return NULL;
    i64 n = s->members;
    Meeting new = {*bucket, list, phase->dimension, phase->kind, how, clockwise, (i32)n, 0, s->number, phase->size, s->phase,
                   malloc(n * sizeof(i64)), malloc(n * sizeof(i32))};
    if (!new.start || !new.streams) { e->failed = OUT_OF_MEMORY; return NULL; }
    memset(new.streams, 0xff, n * sizeof(i32));
    *ONE(meetings, Meeting, made) = new;
    *bucket = made;
    return bucket;
}

/* A member has started the phase; the last one brings the end of all. */
static void meet(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    Phase *phase = phase_of(e, stream);
    i32 list = 0, group = s->group, dimension = phase->dimension;
    int local = is_local(e, group);
    if (local) list = -2 - (e->represent ? e->group_class[group] : group);
    else if (e->represent) list = e->ring_of[s->rank * (e->dimensions + 1) + (dimension < 0 ? e->dimensions : dimension)];
    else if (dimension >= 0) list = (i32)(s->rank - e->coordinate[s->rank * e->dimensions + dimension] * e->stride[dimension]);
    i32 *place = meeting_place(e, s, phase, list);
    if (e->failed) return;
    Meeting *m = ONE(meetings, Meeting, *place);
    i32 taken = 0;
    if (e->represent) { /* all members that this rank stands for */
        for (i32 i = 0; i < m->members; i++)
            if (e->represent[member_at(e, local ? 0 : list, local ? -2 - list : NONE, dimension, i)] == s->rank) {
                if (!taken++) s->position = i;
                m->start[i] = e->now;
                m->streams[i] = stream;
            }
        if (!taken) { e->failed = FOLD_BROKEN; return; }
    } else {
        m->start[s->position] = e->now;
        m->streams[s->position] = stream;
        taken = 1;
    }
    m->arrived += taken;
    if (m->arrived < m->members) return;
    i32 index = *place;
    Meeting done = *m;
    *place = m->next;
    GIVE(meetings, Meeting, index);
    end_at_once(e, &done);
    free(done.start);
    free(done.streams);
}

static void start_phase(Engine *e, i32 stream) {
    set_up_phase(e, stream);
    if (is_at_once(e, ONE(streams, Stream, stream), phase_of(e, stream))) meet(e, stream);
    else if (e->represent) e->failed = FOLD_BROKEN;
    else start_messages(e, stream);
}

/* ---- queues of streams ---- */

static void enter_queue(Engine *e, i32 stream, i32 queue) {
    Stream *s = ONE(streams, Stream, stream);
    Queue *q = &e->queue[queue];
    s->is_started = 0;
    s->queue = queue;
    i32 before = q->tail; /* where it will stand behind; most enter at the end */
    while (before != NONE) {
        Stream *other = ONE(streams, Stream, before);
        if (other->is_started || other->priority >= s->priority) break;
        before = other->previous;
    }
    s->previous = before;
    s->next = before == NONE ? q->head : ONE(streams, Stream, before)->next;
    if (s->next == NONE) q->tail = stream; else ONE(streams, Stream, s->next)->previous = stream;
    if (before == NONE) q->head = stream; else ONE(streams, Stream, before)->next = stream;
    q->length++;
}

static void remove_from_queue(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    Queue *q = &e->queue[s->queue];
    if (s->previous == NONE) q->head = s->next; else ONE(streams, Stream, s->previous)->next = s->next;
    if (s->next == NONE) q->tail = s->previous; else ONE(streams, Stream, s->next)->previous = s->previous;
    q->length--;
}

static void start_queue(Engine *e, i32 queue) {
    Queue *q = &e->queue[queue];
    i64 limit = (e->active_chunks + e->queues - 1) / e->queues;
    if (q->running >= limit || q->running >= q->length) return;
    i32 stream = q->head;
    for (i32 i = 0; i < q->running; i++) stream = ONE(streams, Stream, stream)->next;
    while (stream != NONE && q->running < limit && !e->failed) {
        ONE(streams, Stream, stream)->is_started = 1;
        start_phase(e, stream);
        q->running++;
        stream = ONE(streams, Stream, stream)->next;
    }
}

static void leave_queue(Engine *e, i32 queue) {
    e->queue[queue].running--;
    start_queue(e, queue);
}

static void node_end(Engine *e, i32 rank, i64 node);

static i32 queue_of_phase(const Engine *e, const Stream *s, const Phase *phase) {
    return (i32)(s->rank * e->dimensions * e->queues + phase->queue);
}

/* A phase is over: the next one, or the end of the stream and perhaps of its collective. */
static void phase_end(Engine *e, i32 stream) {
    Stream *s = ONE(streams, Stream, stream);
    if (e->alone_end) { e->alone_end[s->position] = e->now; return; }
    i32 old = s->queue;
    int is_last = s->phase + 1 == s->phases;
    if (is_last) {
        Job *job = ONE(jobs, Job, s->job);
        if (++job->finished == job->total) {
            i32 node = job->node;
            GIVE(jobs, Job, s->job);
            node_end(e, s->rank, node);
        }
    }
    remove_from_queue(e, stream);
    if (is_last) {
        GIVE(streams, Stream, stream);
        leave_queue(e, old);
        return;
    }
    s = ONE(streams, Stream, stream);
    s->phase++;
    i32 next = queue_of_phase(e, s, phase_of(e, stream));
    enter_queue(e, stream, next);
    leave_queue(e, old);
    start_queue(e, next);
}

/* ---- from a collective to streams ---- */

enum { ANY_QUEUE, FIRST_QUEUE, LAST_QUEUE };

static void choose_queue(Engine *e, i32 rank, i32 dimension, int rule, Phase *phase) {
    i64 q = e->queues, half = q / 2, at = rank * e->dimensions + dimension;
    i32 *pointer = rule == ANY_QUEUE ? &e->any[at] : rule == FIRST_QUEUE ? &e->first[at] : &e->last[at];
    i64 index = *pointer;
    phase->queue = (i32)(dimension * q + index);
    if (rule == ANY_QUEUE) {
        *pointer = (i32)((index + 1) % q);
        phase->clockwise = !(q > 1 && index >= half);
    } else if (rule == FIRST_QUEUE) {
        *pointer = (i32)(index + 1 >= half ? 0 : index + 1);
        phase->clockwise = 1;
    } else {
        *pointer = (i32)(index + 1 >= q ? half : index + 1);
        phase->clockwise = 0;
    }
}

static i64 result_size(const Phase *phase, i64 n) {
    if (phase->pattern == TREE || phase->kind == ALL_REDUCE || phase->kind == ALL_TO_ALL) return phase->size;
    return phase->kind == REDUCE_SCATTER ? phase->size / n : phase->size * n;
}

static void add_phase(Engine *e, i32 stream, int list, int kind, i32 logical, int rule, i64 chunk) {
    Stream *s = ONE(streams, Stream, stream);
    Phase *all = &e->phases[stream * e->most_phases], *phase = &all[s->phases];
    int local = is_local(e, s->group), flat = !local && e->flat[list];
    const i32 *algorithm = e->algorithm + (list * e->most_dimensions + logical) * 2;
    phase->dimension = local ? 0 : flat ? -1 : logical;
    phase->kind = kind;
    phase->pattern = local && e->algorithms[list] > 1 ? RING : algorithm[0];
    phase->window = algorithm[1];
    phase->variant = 0;
    if (phase->pattern == TREE) {
        i32 *counter = &e->trees[(s->rank * 4 + list) * e->most_dimensions + logical];
        phase->variant = *counter % 2;
        *counter ^= 1;
    }
    phase->size = chunk;
    if (s->phases) {
        Phase *before = phase - 1;
        phase->size = result_size(before, phase_members(e, s, before->dimension));
    }
    choose_queue(e, s->rank, local || flat ? 0 : logical, rule, phase);
    s->phases++;
}

static void add_phases(Engine *e, i32 stream, i64 node, i64 chunk) {
    i32 group = ONE(streams, Stream, stream)->group, active[64], count = 0;
    int kind = e->node_kind[node], list = kind_index(kind);
    i64 involved = group >= 0 ? -1 : e->node_dimensions[node];
    i32 logical = is_local(e, group) || e->flat[list] ? 1 : e->algorithms[list];
    if (is_local(e, group) && group_size(e, group) < 2) logical = 0; /* nobody to talk to: it never ends */
    for (i32 i = 0; i < logical; i++) if (involved >> i & 1) active[count++] = i;
    if (kind != ALL_REDUCE || !e->local_aware) {
        for (i32 i = 0; i < count; i++)
            add_phase(e, stream, list, kind, active[kind == ALL_GATHER ? count - 1 - i : i], ANY_QUEUE, chunk);
        return;
    }
    for (i32 i = 0; i < count - 1; i++) add_phase(e, stream, list, REDUCE_SCATTER, active[i], FIRST_QUEUE, chunk);
    if (count) add_phase(e, stream, list, ALL_REDUCE, active[count - 1], FIRST_QUEUE, chunk);
    for (i32 i = count - 2; i >= 0; i--) add_phase(e, stream, list, ALL_GATHER, active[i], LAST_QUEUE, chunk);
}

static i32 new_stream(Engine *e, i32 rank, i32 job, i32 slot, i32 priority) {
    i32 stream = TAKE(streams, Stream);
    if (e->failed) return NONE;
    if (stream >= e->phases_room) {
        i64 room = 2 * (i64)stream + 64;
        Phase *phases = realloc(e->phases, room * e->most_phases * sizeof(Phase));
        if (!phases) { e->failed = OUT_OF_MEMORY; return NONE; }
        e->phases = phases;
        e->phases_room = room;
    }
    Stream *s = ONE(streams, Stream, stream);
    memset(s, 0, sizeof(Stream));
    i64 at = e->first_group[rank] + slot;
    s->rank = rank;
    s->job = job;
    s->group = slot < 0 ? NONE : e->group_of[at];
    s->number = e->rank[rank].streams++;
    if (s->group >= 0) s->number = e->group_number[s->group] * 1000000 + e->group_streams[at]++;
    s->priority = priority;
    s->queue = NONE;
    return stream;
}

static void issue_collective(Engine *e, i32 rank, i64 node) {
    i64 size = e->node_size[node], chunk = size / e->splits;
    if (e->node_kind[node] != ALL_GATHER && chunk < e->ranks) {
        chunk = e->ranks;
        size = e->splits * chunk;
    }
    i32 job = TAKE(jobs, Job), made = e->rank[rank].collectives++;
    if (e->failed) return;
    *ONE(jobs, Job, job) = (Job){NONE, (i32)((size + chunk - 1) / chunk), 0, (i32)node};
    i32 priority = e->priority == 0 ? made : e->priority == 1 ? -made : e->node_priority[node];
    for (; size > 0 && !e->failed; size -= chunk) {
        i32 stream = new_stream(e, rank, job, e->node_slot[node], priority);
        if (e->failed) return;
        add_phases(e, stream, node, chunk);
        Stream *s = ONE(streams, Stream, stream);
        if (!s->phases) continue;
        i32 queue = queue_of_phase(e, s, phase_of(e, stream));
        enter_queue(e, stream, queue);
        start_queue(e, queue);
    }
}

/* ---- programs of the ranks ---- */

static i64 state_of(const Engine *e, i32 rank, i64 node) {
    return e->rank[rank].first_state + node - e->first_node[e->program_of[rank]];
}

static void free_node(Engine *e, i32 rank, i64 node) {
    Rank *r = &e->rank[rank];
    i64 offset = state_of(e, rank, 0);
    if (e->node_resource[node] == UNBOUND) r->free_receives++;
    i32 *place = &r->first_free;
    while (*place != NONE && *place < node) place = &e->next_free[offset + *place];
    e->next_free[offset + node] = *place;
    e->stamp[offset + node] = r->scan;
    *place = (i32)node;
}

static void free_children(Engine *e, i32 rank, i64 node) {
    i64 offset = state_of(e, rank, 0);
    for (i64 at = e->first_child[node]; at < e->first_child[node + 1]; at++)
        if (--e->missing[offset + e->child[at]] == 0) free_node(e, rank, e->child[at]);
}

static void serve_memory(Engine *e, i32 rank, i64 node) {
    e->memory_is_busy = 1;
    timer(e, rank, e->node_time[node], NODE_END, (i32)node, 0);
    timer(e, rank, e->node_time[node], MEMORY_NEXT, 0, 0);
}

static void ask_memory(Engine *e, i32 rank, i64 node) {
    if (!e->memory_pool) { timer(e, rank, e->node_time[node], NODE_END, (i32)node, 0); return; }
    if (!e->memory_is_busy) { serve_memory(e, rank, node); return; }
    if (2 * e->memory_tail + 2 > e->memory_room) {
        i64 room = 2 * e->memory_room + 64;
        i32 *queue = realloc(e->memory_queue, room * sizeof(i32));
        if (!queue) { e->failed = OUT_OF_MEMORY; return; }
        e->memory_queue = queue;
        e->memory_room = room;
    }
    e->memory_queue[2 * e->memory_tail] = rank;
    e->memory_queue[2 * e->memory_tail++ + 1] = (i32)node;
}

static void memory_next(Engine *e) {
    e->memory_is_busy = 0;
    if (e->memory_head == e->memory_tail) return;
    i64 at = 2 * e->memory_head++;
    serve_memory(e, e->memory_queue[at], e->memory_queue[at + 1]);
}

static void enter(Engine *e, i32 rank, i64 node);

static void issue(Engine *e, i32 rank, i64 node) {
    Rank *r = &e->rank[rank];
    int resource = e->node_resource[node];
    i64 state = state_of(e, rank, node);
    e->start[state] = e->now;
    if (resource == UNBOUND && e->node_within[node] < 0) r->free_receives--;
    if (e->node_action[node] == NOTHING) {
        e->end[state] = e->now;
        free_children(e, rank, node);
        return;
    }
    if (resource != UNBOUND) r->slots[resource] = 1;
    r->in_flight++;
    i32 peer = e->node_action[node] == SEND || e->node_action[node] == RECEIVE
                   ? e->peer[e->first_peer[rank] + e->node_slot[node]] : NONE;
    Handler handler = {NODE, rank, (i32)node};
    switch (e->node_action[node]) {
        case WAIT: timer(e, rank, e->node_time[node], NODE_END, (i32)node, 0); break;
        case SEND: send_message(e, rank, peer, e->node_size[node], e->node_tag[node], handler); break;
        case RECEIVE: receive_message(e, peer, rank, e->node_size[node], e->node_tag[node], handler); break;
        case COLLECTIVE: issue_collective(e, rank, node); break;
        case MEMORY: ask_memory(e, rank, node); break;
        case ENCLOSE: enter(e, rank, node); break;
    }
}

/* Start the nodes within a collective that wait for none of each other. */
static void enter(Engine *e, i32 rank, i64 node) {
    i64 first = e->first_within[node], end = first + e->num_within[node];
    e->missing[state_of(e, rank, node)] = e->num_within[node];
    for (i64 inner = first; inner < end; inner++)
        if (!e->node_missing[inner]) issue(e, rank, inner);
}

/* A node within a collective is over: those behind it start at once, and the last one ends the collective. */
static void inner_end(Engine *e, i32 rank, i64 node) {
    i64 offset = state_of(e, rank, 0), enclosing = e->node_within[node];
    e->rank[rank].in_flight--;
    e->end[offset + node] = e->now;
    for (i64 at = e->first_child[node]; at < e->first_child[node + 1]; at++)
        if (--e->missing[offset + e->child[at]] == 0) issue(e, rank, e->child[at]);
    if (--e->missing[offset + enclosing] == 0) node_end(e, rank, enclosing);
}

/* Issue what can be issued of the nodes that are free now, in the order of their ids. */
static void scan(Engine *e, i32 rank) {
    Rank *r = &e->rank[rank];
    i64 offset = state_of(e, rank, 0);
    r->scan++;
    i32 *place = &r->first_free;
    while (*place != NONE && !e->failed) {
        if (r->slots[HOST] && r->slots[COMPUTE] && r->slots[COMMUNICATION] && !r->free_receives) return;
        i32 node = *place;
        int resource = e->node_resource[node];
        int is_new = e->stamp[offset + node] == r->scan;
        if (is_new || (resource != UNBOUND && r->slots[resource])) { place = &e->next_free[offset + node]; continue; }
        *place = e->next_free[offset + node];
        issue(e, rank, node);
    }
}

static void test_finished(Engine *e, i32 rank) {
    Rank *r = &e->rank[rank];
    if (r->first_free == NONE && !r->in_flight && e->finish[rank] < 0) e->finish[rank] = e->now;
}

static void node_end(Engine *e, i32 rank, i64 node) {
    if (e->node_within[node] >= 0) { inner_end(e, rank, node); return; }
    Rank *r = &e->rank[rank];
    if (e->node_resource[node] != UNBOUND) r->slots[e->node_resource[node]] = 0;
    r->in_flight--;
    e->end[state_of(e, rank, node)] = e->now;
    if (e->node_counts[node]) e->computed[rank] += e->node_time[node];
    free_children(e, rank, node);
    scan(e, rank);
    test_finished(e, rank);
}

/* ---- the loop ---- */

static void handle(Engine *e, Handler handler) {
    if (handler.who == NODE) node_end(e, handler.rank, handler.index);
    else if (handler.who == STREAM) stream_received(e, handler.index);
    else granted(e, handler.index);
}

static void act(Engine *e, i32 rank, Action action) {
    switch (action.what) {
        case READY: stream_ready(e, action.index); break;
        case REDUCE: timer(e, rank, action.value, READY, action.index, 0); break;
        case NODE_END: node_end(e, rank, action.index); break;
        case PHASE_END: phase_end(e, action.index); break;
        case MEMORY_NEXT: memory_next(e); break;
    }
}

/* All timers of a rank that end now, with those that are set meanwhile for now. */
static void run_timers(Engine *e, i32 rank) {
    i32 *place = &e->rank[rank].timers;
    while (ONE(slots, Slot, *place)->time != e->now) place = &ONE(slots, Slot, *place)->next;
    i32 slot = *place;
    while (ONE(slots, Slot, slot)->head != NONE && !e->failed) {
        Slot *s = ONE(slots, Slot, slot);
        i32 index = s->head;
        Action action = *ONE(actions, Action, index);
        s->head = action.next;
        if (s->head == NONE) s->tail = NONE;
        GIVE(actions, Action, index);
        act(e, rank, action);
    }
    place = &e->rank[rank].timers;
    while (*place != slot) place = &ONE(slots, Slot, *place)->next;
    *place = ONE(slots, Slot, slot)->next;
    GIVE(slots, Slot, slot);
}

static void run(Engine *e) {
    i64 count = 0;
    while (e->waiting && !e->failed) {
        Event event = pop(e);
        e->now = event.time;
        switch (event.what) {
            case TIMER: run_timers(e, event.index); break;
            case HOP: hop(e, event.index); break;
            case LINK_FREE: link_free(e, event.index); break;
            case ARRIVE: arrive(e, event.index); break;
            case LATE_RECEIVE: {
                Handler handler = ONE(posts, Posted, event.index)->handler;
                GIVE(posts, Posted, event.index);
                handle(e, handler);
                break;
            }
            case START_ALONE: start_messages(e, event.index); break;
        }
        if (!(++count & 0xfffff)) {
            PyGILState_STATE state = PyGILState_Ensure();
            if (PyErr_CheckSignals()) e->failed = INTERRUPTED;
            PyGILState_Release(state);
        }
    }
}

/* ---- memory of a run ---- */

static void *ints(i64 count, int fill) {
    i32 *made = malloc((count ? count : 1) * sizeof(i32));
    if (made) memset(made, fill, (count ? count : 1) * sizeof(i32));
    return made;
}

static int set_up_ranks(Engine *e, int has_programs) {
    i64 state = 0;
    e->rank = calloc(e->ranks ? e->ranks : 1, sizeof(Rank));
    if (!e->rank) return 0;
    for (i64 i = 0; i < e->ranks; i++) {
        e->rank[i].first_free = e->rank[i].timers = NONE;
        e->rank[i].first_state = state;
        i32 program = e->program_of[i];
        if (has_programs && program >= 0) state += e->first_node[program + 1] - e->first_node[program];
    }
    e->missing = ints(state, 0), e->next_free = ints(state, 0), e->stamp = ints(state, 0);
    if (!e->missing || !e->next_free || !e->stamp) return 0;
    for (i64 i = 0; i < e->ranks && has_programs; i++) {
        i32 program = e->program_of[i];
        if (program < 0) continue;
        i64 first = e->first_node[program], count = e->first_node[program + 1] - first;
        memcpy(e->missing + e->rank[i].first_state, e->node_missing + first, count * sizeof(i32));
    }
    return 1;
}

static int set_up_network(Engine *e) {
    e->stride = malloc((e->dimensions + 1) * sizeof(i64));
    e->first_link = malloc((e->dimensions + 1) * sizeof(i64));
    e->coordinate = malloc((e->ranks * e->dimensions + 1) * sizeof(i64));
    if (!e->stride || !e->first_link || !e->coordinate) return 0;
    e->stride[0] = 1;
    e->first_link[0] = 0;
    for (i64 d = 0; d < e->dimensions; d++) {
        e->stride[d + 1] = e->stride[d] * e->size[d];
        e->first_link[d + 1] = e->first_link[d] + e->ranks * (e->topology[d] == WIRED_ALL ? e->size[d] : 2);
    }
    for (i64 r = 0; r < e->ranks; r++)
        for (i64 d = 0; d < e->dimensions; d++) e->coordinate[r * e->dimensions + d] = r / e->stride[d] % e->size[d];
    i64 links = e->congestion ? e->first_link[e->dimensions] : 0;
    e->link_is_busy = calloc(links + 1, 1);
    e->link_head = ints(links, 0xff), e->link_tail = ints(links, 0xff);
    return e->link_is_busy && e->link_head && e->link_tail;
}

static int set_up_queues(Engine *e) {
    i64 each = e->ranks * e->dimensions, slots = e->ranks ? e->first_group[e->ranks] : 0;
    e->any = ints(each, 0), e->first = ints(each, 0), e->last = ints(each, 0);
    e->trees = ints(e->ranks * 4 * e->most_dimensions, 0);
    e->queue = malloc((each * e->queues + 1) * sizeof(Queue));
    e->group_streams = ints(slots, 0), e->position = ints(slots, 0);
    if (!e->any || !e->first || !e->last || !e->trees || !e->queue || !e->group_streams || !e->position) return 0;
    for (i64 i = 0; i < each; i++) e->last[i] = (i32)(e->queues / 2);
    for (i64 i = 0; i < each * e->queues; i++) e->queue[i] = (Queue){NONE, NONE, 0, 0};
    for (i64 g = 0; g < e->groups; g++)
        for (i64 at = e->first_member[g]; at < e->first_member[g + 1]; at++) {
            i32 rank = e->member[at];
            for (i64 slot = e->first_group[rank]; slot < e->first_group[rank + 1]; slot++)
                if (e->group_of[slot] == g) e->position[slot] = (i32)(at - e->first_member[g]);
        }
    return 1;
}

static int set_up(Engine *e) {
    Pool *pools[] = {&e->slots, &e->actions, &e->sent, &e->posts, &e->channels, &e->requests, &e->jobs, &e->streams, &e->meetings};
    for (size_t i = 0; i < sizeof pools / sizeof *pools; i++) pools[i]->free = NONE;
    e->most_phases = 2 * e->most_dimensions;
    e->bucket_mask = 1023;
    e->meeting_mask = 65535;
    e->buckets = ints(e->bucket_mask + 1, 0xff);
    e->meeting_buckets = ints(e->meeting_mask + 1, 0xff);
    return e->buckets && e->meeting_buckets && set_up_ranks(e, e->finish != NULL) && set_up_network(e) && set_up_queues(e);
}

static void tear_down(Engine *e) {
    if (e->alone) { tear_down(e->alone); free(e->alone); }
    for (i64 i = 0; e->meeting_buckets && i <= e->meeting_mask; i++)
        for (i32 at = e->meeting_buckets[i]; at != NONE; at = ONE(meetings, Meeting, at)->next) {
            free(ONE(meetings, Meeting, at)->start);
            free(ONE(meetings, Meeting, at)->streams);
        }
    void *all[] = {e->heap, e->slots.data, e->actions.data, e->sent.data, e->posts.data, e->channels.data, e->requests.data,
                   e->jobs.data, e->streams.data, e->meetings.data, e->buckets, e->meeting_buckets, e->rank, e->missing,
                   e->next_free, e->stamp, e->group_streams, e->position, e->any, e->first, e->last, e->trees, e->queue,
                   e->phases, e->stride, e->coordinate, e->first_link, e->link_is_busy, e->link_head, e->link_tail,
                   e->memory_queue, e->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void run_programs(Engine *e) {
    for (i32 rank = 0; rank < e->ranks && !e->failed; rank++) {
        i32 program = e->program_of[rank];
        if (program < 0) continue;
        for (i64 node = e->first_node[program + 1] - 1; node >= e->first_node[program]; node--)
            if (!e->missing[state_of(e, rank, node)] && e->node_within[node] < 0) free_node(e, rank, node);
    }
    for (i32 rank = 0; rank < e->ranks && !e->failed; rank++) {
        if (e->program_of[rank] < 0) continue;
        scan(e, rank);
        test_finished(e, rank);
    }
    if (!e->failed) run(e);
}

/* ---- Python ---- */

#define MOST_BUFFERS 48

typedef struct { Py_buffer held[MOST_BUFFERS]; int count; } Buffers;

/* The memory of an array attribute, or NULL with an exception. */
static void *array(Buffers *buffers, PyObject *object, const char *name, Py_ssize_t width, int is_written, Py_ssize_t *length) {
    PyObject *value = PyObject_GetAttrString(object, name);
    if (!value) return NULL;
    Py_buffer *view = &buffers->held[buffers->count];
    int failed = PyObject_GetBuffer(value, view, is_written ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS);
    Py_DECREF(value);
    if (failed) return NULL;
    buffers->count++;
    if (view->itemsize != width) { PyErr_Format(PyExc_TypeError, "%s must have items of %zd bytes", name, width); return NULL; }
    if (length) *length = view->len / width;
    static char nothing[8];
    return view->buf ? view->buf : nothing;
}

static i64 number(PyObject *object, const char *name) {
    PyObject *value = PyObject_GetAttrString(object, name);
    if (!value) return 0;
    i64 found = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return found;
}

static int read_plan(Engine *e, Buffers *b, PyObject *plan) {
    Py_ssize_t ranks, groups, dimensions, table;
#define ARRAY(field, name, width, length) (e->field = array(b, plan, name, width, 0, length))
    if (!ARRAY(node_resource, "node_resource", 1, NULL) || !ARRAY(node_action, "node_action", 1, NULL)
        || !ARRAY(node_counts, "node_counts", 1, NULL) || !ARRAY(node_kind, "node_kind", 1, NULL)
        || !ARRAY(node_time, "node_time", 8, NULL) || !ARRAY(node_size, "node_size", 8, NULL)
        || !ARRAY(node_tag, "node_tag", 8, NULL) || !ARRAY(node_dimensions, "node_dimensions", 8, NULL)
        || !ARRAY(node_priority, "node_priority", 4, NULL) || !ARRAY(node_slot, "node_slot", 4, NULL)
        || !ARRAY(node_within, "node_within", 4, NULL) || !ARRAY(first_within, "first_within", 4, NULL)
        || !ARRAY(num_within, "num_within", 4, NULL) || !ARRAY(node_missing, "node_missing", 4, NULL) || !ARRAY(child, "child", 4, NULL)
        || !ARRAY(program_of, "program_of", 4, &ranks) || !ARRAY(peer, "peer", 4, NULL)
        || !ARRAY(group_of, "group_of", 4, NULL) || !ARRAY(member, "member", 4, NULL)
        || !ARRAY(first_child, "first_child", 8, NULL) || !ARRAY(first_node, "first_node", 8, NULL)
        || !ARRAY(first_peer, "first_peer", 8, NULL) || !ARRAY(first_group, "first_group", 8, NULL)
        || !ARRAY(first_member, "first_member", 8, &groups) || !ARRAY(group_number, "group_number", 8, NULL)
        || !ARRAY(topology, "topology", 1, &dimensions) || !ARRAY(size, "size", 8, NULL)
        || !ARRAY(bandwidth, "bandwidth", 8, NULL) || !ARRAY(latency, "latency", 8, NULL)
        || !ARRAY(algorithm, "algorithm", 4, &table) || !ARRAY(algorithms, "algorithms", 4, NULL)
        || !ARRAY(flat, "flat", 1, NULL))
        return 0;
    e->ranks = ranks, e->groups = groups - 1, e->dimensions = dimensions;
    e->most_dimensions = table / 8;
    e->endpoint_delay = number(plan, "endpoint_delay"), e->local_delay = number(plan, "local_delay");
    e->splits = number(plan, "splits"), e->active_chunks = number(plan, "active_chunks");
    e->queues = number(plan, "queues"), e->priority = number(plan, "priority");
    e->local_aware = number(plan, "local_bandwidth_aware"), e->memory_pool = number(plan, "memory_pool");
    e->rendezvous = number(plan, "rendezvous"), e->congestion = number(plan, "congestion");
    e->at_once = e->closed_form = number(plan, "phases_at_once");
    e->at_once = e->at_once && !e->congestion && !e->rendezvous;
    PyObject *bandwidth = PyObject_GetAttrString(plan, "memory_bandwidth");
    e->memory_bandwidth = bandwidth ? PyFloat_AsDouble(bandwidth) : 0;
    Py_XDECREF(bandwidth);
    return !PyErr_Occurred();
}

static int read_fold(Engine *e, Buffers *b, PyObject *fold) {
    if (fold == Py_None) return 1;
    return (e->represent = array(b, fold, "represent", 4, 0, NULL)) && (e->ring_of = array(b, fold, "ring_of", 4, 0, NULL))
        && (e->group_class = array(b, fold, "group_class", 4, 0, NULL));
}

static int read_outcome(Engine *e, Buffers *b, PyObject *outcome) {
    return (e->finish = array(b, outcome, "finish", 8, 1, NULL)) && (e->computed = array(b, outcome, "computed", 8, 1, NULL))
        && (e->start = array(b, outcome, "start", 8, 1, NULL)) && (e->end = array(b, outcome, "end", 8, 1, NULL))
        && (e->link_bytes = array(b, outcome, "link_bytes", 8, 1, NULL))
        && (e->link_busy = array(b, outcome, "link_busy", 8, 1, NULL));
}

/* Streams whose phase is under way and never ends, as tuples in the order of Outcome.waiting. */
static PyObject *waiting_streams(Engine *e) {
    PyObject *list = PyList_New(0);
    for (i64 queue = 0; list && queue < e->ranks * e->dimensions * e->queues; queue++)
        for (i32 stream = e->queue[queue].head; stream != NONE; stream = ONE(streams, Stream, stream)->next) {
            Stream *s = ONE(streams, Stream, stream);
            if (!s->is_started) continue;
            i64 node = ONE(jobs, Job, s->job)->node - e->first_node[e->program_of[s->rank]];
            i32 dimension = phase_of(e, stream)->dimension;
            PyObject *row = Py_BuildValue("(iLLiiLL)", s->rank, node, s->number, dimension < 0 ? 0 : dimension, s->phase,
                                          s->received, s->posted_from);
            if (!row || PyList_Append(list, row)) { Py_XDECREF(row); Py_CLEAR(list); break; }
            Py_DECREF(row);
        }
    return list;
}

static PyObject *run_plan(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *plan, *fold, *outcome, *result = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &plan, &fold, &outcome)) return NULL;
    Engine *e = calloc(1, sizeof(Engine));
    Buffers *buffers = calloc(1, sizeof(Buffers));
    if (e && buffers && read_plan(e, buffers, plan) && read_fold(e, buffers, fold) && read_outcome(e, buffers, outcome)) {
        if (!set_up(e)) e->failed = OUT_OF_MEMORY;
        if (!e->failed) {
            Py_BEGIN_ALLOW_THREADS
            run_programs(e);
            Py_END_ALLOW_THREADS
        }
        if (e->failed == OUT_OF_MEMORY) PyErr_NoMemory();
        else if (e->failed == TOO_LONG && e->late >= 0)
            PyErr_Format(PyExc_OverflowError, "rank %d is busy for longer than 64 bits hold in ns (2^62 ns: 146 years)", (int)e->late);
        else if (e->failed == TOO_LONG)
            PyErr_SetString(PyExc_OverflowError, "ranks are busy for longer than 64 bits hold in ns (2^62 ns: 146 years)");
        else if (e->failed == FOLD_BROKEN) result = Py_NewRef(Py_None);
        else if (!PyErr_Occurred()) {
            PyObject *waiting = waiting_streams(e);
            if (waiting) result = Py_BuildValue("(NL)", waiting, e->messages);
        }
    } else if (!PyErr_Occurred()) PyErr_NoMemory();
    if (e) tear_down(e);
    for (int i = 0; buffers && i < buffers->count; i++) PyBuffer_Release(&buffers->held[i]);
    free(buffers);
    free(e);
    return result;
}

static PyMethodDef methods[] = {
    {"run", run_plan, METH_VARARGS, "run(plan, fold, outcome) -> (waiting streams, messages), or None if ranks differ that were folded"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_engine", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__engine(void) { return PyModule_Create(&module); }
