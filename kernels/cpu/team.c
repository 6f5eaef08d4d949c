/* Runs lists of ops on a team of threads: the caller is one of them.
 *
 * Work is taken in chunks by a ticket (op number, chunk number), so a thread that the system has
 * descheduled holds up only the chunk it was in, and one that wakes late joins. The last chunk of
 * an op to end opens the next op. Between runs the other threads wait: AWAKE_NS in a loop, then
 * asleep.
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
#include "pack.c"
#include "attention.c"
#include "ban.c"
#include "best.c"
#include "blocks.c"
#include "copy.c"
#include "draw.c"
#include "embedding.c"
#include "fit.c"
#include "norm.c"
#include "rope.c"

#define THREADS_MAX 256
#define PATIENCE 1000      /* reads of the ticket before yielding to other threads */
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
    {pack_chunks, pack_run},           {pack_chunks, pack_quantized_run},
    {unpack_chunks, unpack_run},       {fit_chunks, fit_run},
    {fit_chunks, round_run},           {ban_chunks, ban_run},
};

/* A ticket is op << 52 | chunks of that op << 26 | next chunk, so that a thread that takes
 * one can check that the chunk exists without reading anything that a later run may replace. */
#define DONE ((uint64_t)0xfff << 52)

typedef struct Team {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) const Op *ops;
    const Step *step;
    int64_t num_ops;
    int threads;
    _Atomic int asleep;
    _Atomic int is_closing;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Alignas(64) _Atomic int32_t ended; /* chunks of the open op */
    Worker workers[THREADS_MAX];
    pthread_t handles[THREADS_MAX];
} Team;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void open_op(Team *team, int64_t number) {
    const Op *op = team->ops + number;
    if (number == team->num_ops) {
        atomic_store(&team->ticket, DONE);
        return;
    }
    uint64_t chunks = (uint64_t)kinds[op->kind].chunks(op, team->step, team->threads);
    atomic_store(&team->ended, 0);
    atomic_store(&team->ticket, (uint64_t)number << 52 | chunks << 26);
}

/* Run chunks until every op of the list is done. */
static void take_part(Team *team, Worker *me) {
    for (;;) {
        uint64_t ticket = atomic_fetch_add(&team->ticket, 1);
        if (ticket >= DONE) return;
        int64_t number = (int64_t)(ticket >> 52), chunk = (int64_t)(ticket & 0x3ffffff);
        int64_t chunks = (int64_t)(ticket >> 26 & 0x3ffffff);
        if (chunk < chunks) {
            const Op *op = team->ops + number;
            kinds[op->kind].run(op, team->step, chunk, me);
            if (atomic_fetch_add(&team->ended, 1) + 1 == chunks) open_op(team, number + 1);
            continue;
        }
        for (int i = 0; (int64_t)(atomic_load(&team->ticket) >> 52) == number; i++)
            if (i < PATIENCE) pause_briefly();
            else sched_yield();
    }
}

static int has_work(Team *team) { return atomic_load(&team->ticket) < DONE; }

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
        while (!has_work(team) && now_ns() < until)
            for (int i = 0; i < 32; i++) pause_briefly();
        if (has_work(team)) continue;
        pthread_mutex_lock(&team->lock);
        atomic_fetch_add(&team->asleep, 1);
        while (!has_work(team) && !atomic_load(&team->is_closing))
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
    atomic_store(&team->ticket, DONE);
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

/* Run all ops in order; returns when they are done. From one thread at a time. */
void team_run(Team *team, const Op *ops, int64_t num_ops, const Step *step) {
    team->ops = ops;
    team->num_ops = num_ops;
    team->step = step;
    open_op(team, 0);
    if (team->threads > 1 && atomic_load(&team->asleep)) wake_all(team);
    take_part(team, &team->workers[0]);
}
