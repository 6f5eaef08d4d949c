/* Runs lists of ops on a team of threads: the caller is one of them.
 *
 * The chunks of an op are divided into one range a thread, which takes them in order, so that it
 * reads weights front to back across chunks; one whose range is empty takes the last chunk of
 * another's. So a thread that the system has descheduled holds up only the chunk it was in, and one
 * that wakes late joins. Who ends the last chunk opens the next op, and runs ops of a single chunk
 * itself. Between runs the other threads wait: AWAKE_NS in a loop, then asleep. A run may begin without
 * the caller, which joins it later or stops it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include "common.h"
#include "linear.c"
#include "quantize.c"
#include "quantized_linear.c"
#include "attention.c"
#include "ban.c"
#include "best.c"
#include "blocks.c"
#include "pack.c"
#include "copy.c"
#include "draw.c"
#include "embedding.c"
#include "fit.c"
#include "norm.c"
#include "rope.c"
#include "top.c"

#define THREADS_MAX 256
#define PATIENCE 1000      /* reads of a range before yielding to other threads */
#define AWAKE_NS 20000     /* how long an idle thread looks for work before it sleeps */

typedef struct {
    int64_t (*chunks)(const Op *, const Step *, int);
    void (*run)(const Op *, const Step *, int64_t, Worker *);
} Kind;

/* In the order of program.py's Kind. */
static const Kind kinds[] = {
    {linear_chunks, linear_run},       {attention_chunks, attention_run},
    {embedding_chunks, embedding_run}, {norm_chunks, norm_run},
    {rope_chunks, rope_run},           {store_chunks, store_run},
    {copy_chunks, copy_run},           {best_chunks, best_run},
    {draw_chunks, draw_run},           {quantize_chunks, quantize_run},
    {linear_chunks, quantized_run},    {embedding_chunks, dense_rows_run},
    {embedding_chunks, quantized_rows_run},
    {pack_chunks, pack_run},           {pack_quantized_chunks, pack_quantized_run},
    {unpack_chunks, unpack_run},       {fit_chunks, fit_run},
    {fit_chunks, round_run},           {ban_chunks, ban_run},
    {top_chunks, top_run},
};

/* A range is op << 52 | first chunk << 26 | end, so that taking a chunk checks that the op is still
 * the one that was seen: what is replaced when the next op opens is read only with a chunk taken. */
#define CHUNK_BITS 26
#define DONE ((uint64_t)0xfff << 52)

typedef struct {
    _Alignas(64) _Atomic uint64_t chunks;
} Range;

typedef struct Team {
    const Op *ops;
    const Step *step;
    int64_t num_ops;
    int64_t chunks; /* of the open op */
    int threads;
    _Atomic int asleep;
    _Atomic int is_closing;
    _Atomic int is_stopping; /* what is left of the run is not to be computed */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Alignas(64) _Atomic int64_t ended; /* chunks of the open op */
    Range ranges[THREADS_MAX];
    Worker workers[THREADS_MAX];
    pthread_t handles[THREADS_MAX];
} Team;

INLINE int64_t op_of(uint64_t range) { return (int64_t)(range >> 2 * CHUNK_BITS); }
INLINE int64_t end_of(uint64_t range) { return (int64_t)(range & ((1 << CHUNK_BITS) - 1)); }
INLINE int64_t first_of(uint64_t range) { return end_of(range >> CHUNK_BITS); }

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run the ops from `number` on that are a single chunk, and open the next. In the ranges' order: the
 * last one always has a chunk, so the op can't end, nor another be opened, before all are written.
 * The caller's own comes last when a run ends, since then it may begin another. */
static void open_op(Team *team, int64_t number, Worker *me) {
    for (; number < team->num_ops && !atomic_load(&team->is_stopping); number++) {
        const Op *op = team->ops + number;
        int64_t chunks = kinds[op->kind].chunks(op, team->step, team->threads);
        if (chunks == 1) kinds[op->kind].run(op, team->step, 0, me);
        if (chunks <= 1) continue;
        team->chunks = chunks;
        atomic_store_explicit(&team->ended, 0, memory_order_relaxed);
        for (int64_t i = 0; i < team->threads; i++) {
            uint64_t first = (uint64_t)(chunks * i / team->threads);
            uint64_t end = (uint64_t)(chunks * (i + 1) / team->threads);
            uint64_t range = (uint64_t)number << 2 * CHUNK_BITS | first << CHUNK_BITS | end;
            atomic_store_explicit(&team->ranges[i].chunks, range, memory_order_release);
        }
        return;
    }
    for (int i = team->threads - 1; i >= 0; i--)
        atomic_store_explicit(&team->ranges[i].chunks, DONE, memory_order_release);
}

/* A chunk of the op: the next of the worker's own range, or the last of another's; -1 if none. */
static int64_t take_chunk(Team *team, const Worker *me, int64_t number) {
    int64_t mine = me - team->workers;
    for (int i = 0; i < team->threads; i++) {
        _Atomic uint64_t *from = &team->ranges[(mine + i) % team->threads].chunks;
        uint64_t range = atomic_load(from);
        while (op_of(range) == number && first_of(range) < end_of(range)) {
            uint64_t left = i ? range - 1 : range + (1 << CHUNK_BITS);
            if (atomic_compare_exchange_weak(from, &range, left))
                return i ? end_of(left) : first_of(range);
        }
    }
    return -1;
}

/* Run chunks until every op of the list is done. */
static void take_part(Team *team, Worker *me) {
    _Atomic uint64_t *mine = &team->ranges[me - team->workers].chunks;
    for (;;) {
        uint64_t range = atomic_load(mine);
        if (range >= DONE) return;
        int64_t number = op_of(range), chunk, done = 0;
        for (; (chunk = take_chunk(team, me, number)) >= 0; done++) {
            const Op *op = team->ops + number;
            if (!atomic_load(&team->is_stopping)) kinds[op->kind].run(op, team->step, chunk, me);
        }
        if (done) {
            int64_t chunks = team->chunks; /* before these count: then the next op may open */
            if (atomic_fetch_add(&team->ended, done) + done == chunks) {
                open_op(team, number + 1, me);
                continue;
            }
        }
        for (int i = 0;; i++) {
            range = atomic_load(mine);
            if (op_of(range) != number || first_of(range) < end_of(range)) break;
            if (i < PATIENCE) pause_briefly();
            else sched_yield();
        }
    }
}

static int has_work(Team *team, const Worker *me) {
    return atomic_load(&team->ranges[me - team->workers].chunks) < DONE;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void *serve(void *argument) {
    Worker *me = argument;
    Team *team = me->team;
    while (!atomic_load(&team->is_closing)) {
        take_part(team, me);
        int64_t until = now_ns() + AWAKE_NS;
        while (!has_work(team, me) && now_ns() < until)
            for (int i = 0; i < 32; i++) pause_briefly();
        if (has_work(team, me)) continue;
        pthread_mutex_lock(&team->lock);
        atomic_fetch_add(&team->asleep, 1);
        while (!has_work(team, me) && !atomic_load(&team->is_closing))
            pthread_cond_wait(&team->wake, &team->lock);
        atomic_fetch_sub(&team->asleep, 1);
        pthread_mutex_unlock(&team->lock);
    }
    return 0;
}

static void wake_all(Team *team) {
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

/* End the threads and free the team; no run may be in progress. */
void team_close(Team *team) {
    atomic_store(&team->is_closing, 1);
    wake_all(team);
    for (int i = 1; i < team->threads; i++) pthread_join(team->handles[i], 0);
    for (int i = 0; i < team->threads; i++) free(team->workers[i].scratch);
    free(team);
}

/* A team of at most `threads`, the caller of `team_run` included; 0 where there is no memory. */
Team *team_open(int threads) {
    Team *team;
    if (posix_memalign((void **)&team, 64, sizeof(Team))) return 0;
    memset(team, 0, sizeof(Team));
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->wake, 0);
    for (int i = 0; i < THREADS_MAX; i++) atomic_init(&team->ranges[i].chunks, DONE);
    for (int i = 0; i < min_int(threads, THREADS_MAX); i++) {
        Worker *worker = &team->workers[i];
        *worker = (Worker){team, threads, 0};
        if (posix_memalign((void **)&worker->scratch, 64, SCRATCH_BYTES)) break;
        if (i && pthread_create(&team->handles[i], 0, serve, worker)) {
            free(worker->scratch);
            break;
        }
        team->threads = i + 1;
    }
    for (int i = 0; i < team->threads; i++) team->workers[i].threads = team->threads;
    if (team->threads) return team;
    free(team);
    return 0;
}

/* Let the other threads run all ops in order. The caller runs those of a single chunk before the
 * first with more; team_join or team_stop has to come next. This and those from one thread at a time. */
void team_begin(Team *team, const Op *ops, int64_t num_ops, const Step *step) {
    team->ops = ops;
    team->num_ops = num_ops;
    team->step = step;
    open_op(team, 0, &team->workers[0]);
    atomic_thread_fence(memory_order_seq_cst);
    if (has_work(team, &team->workers[0]) && atomic_load(&team->asleep)) wake_all(team);
}

/* Take part in the run; returns when it is done. */
void team_join(Team *team) { take_part(team, &team->workers[0]); }

/* End the run: returns when the chunks that threads are in are done. */
void team_stop(Team *team) {
    atomic_store(&team->is_stopping, 1);
    team_join(team);
    atomic_store(&team->is_stopping, 0);
}

/* Run all ops in order; returns when they are done. */
void team_run(Team *team, const Op *ops, int64_t num_ops, const Step *step) {
    team_begin(team, ops, num_ops, step);
    team_join(team);
}
