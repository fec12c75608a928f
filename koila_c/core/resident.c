/* SPDX-License-Identifier: Apache-2.0 */
/* resident.c - measure resident private memory; return free memory when a bound is near.
 *
 * glibc keeps freed memory for later blocks, which saves the time for new pages. Its heap fragments, so it can be several
 * times as large as the blocks in use. It is returned only when the process would exceed the bound. The thread needs no
 * lock of Python's: a step that holds that lock for long allocates meanwhile. One serves many steps: starting it is slow. */
#define _GNU_SOURCE

#include "resident.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Free memory is returned this many bytes below the bound, and again once this many more bytes are resident than it left:
 * those that it left are in use. */
static const int64_t NEAR = 1 << 21, MORE = 1 << 21;
/* A process takes new pages at this rate at most, in bytes per nanosecond. The next sample comes before it can have
 * reached the bound, but not sooner or later than this many nanoseconds. */
static const int64_t FASTEST = 4, SOONEST = 250000, LATEST = 2500000;
/* After so many nanoseconds without a watch, the thread ends: Python warns of threads when a process forks. */
static const int64_t IDLE = 50000000, SECOND = 1000000000;
/* The bytes of the thread's stack: the usual 8 MiB would count against a limit of the process. */
static const size_t STACK = 1 << 18;

static struct {
    pid_t process; /* a fork of it has no thread, and the watches are its parent's */
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t begun; /* there is a new watch, and it is near its bound */
    int32_t n_watches;
    int64_t bound, most, n_returns; /* of all of these */
    int64_t left;                   /* what was resident after the last return, or less */
} sampler;

int64_t
kl_resident_bytes(void)
{
    char text[128], *end = text;
    int statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    ssize_t n_read = read(statm, text, sizeof text - 1);
    (void)close(statm);
    if (n_read <= 0) {
        return -1;
    }
    text[n_read] = '\0';
    /* The size of all mappings, then resident pages, and of these those of files. */
    (void)strtoll(text, &end, 10);
    int64_t n_resident = strtoll(end, &end, 10);
    return (n_resident - strtoll(end, &end, 10)) * sysconf(_SC_PAGESIZE);
}

/* Sample; return in how many nanoseconds to do so again. */
static int64_t
sample(void)
{
    int64_t now = kl_resident_bytes(), near = sampler.bound - NEAR;
    sampler.most = now > sampler.most ? now : sampler.most;
    sampler.left = now < sampler.left ? now : sampler.left;
    if (now > near && now > sampler.left + MORE) {
        kl_resident_return_free();
        now = sampler.left = kl_resident_bytes();
        sampler.n_returns++;
    }
    int64_t more = sampler.left + MORE;
    int64_t nanoseconds = ((near > more ? near : more) - now) / FASTEST;
    nanoseconds = nanoseconds < SOONEST ? SOONEST : nanoseconds;
    return nanoseconds < LATEST ? nanoseconds : LATEST;
}

/* The thread: sample while there is a watch, and end when there has been none for long. */
static void *
serve(void *ignored)
{
    (void)pthread_mutex_lock(&sampler.lock);
    for (int64_t idle = 0; sampler.n_watches > 0 || idle < IDLE;) {
        int64_t wait = sampler.n_watches > 0 ? sample() : LATEST;
        struct timespec until = {0};
        (void)clock_gettime(CLOCK_MONOTONIC, &until);
        wait += until.tv_nsec;
        until = (struct timespec){until.tv_sec + wait / SECOND, wait % SECOND};
        int failed = pthread_cond_timedwait(&sampler.begun, &sampler.lock, &until);
        idle = failed != 0 && sampler.n_watches == 0 ? idle + LATEST : 0;
    }
    sampler.has_thread = false;
    (void)pthread_mutex_unlock(&sampler.lock);
    return ignored;
}

/* Wait for the thread. The caller holds Python's lock, so that no two threads begin this. */
static void
lock_sampler(void)
{
    if (sampler.process != getpid()) { /* in a fork, a thread that is not there may have the lock */
        pthread_condattr_t attributes;
        memset(&sampler, 0, sizeof sampler);
        sampler.process = getpid();
        (void)pthread_mutex_init(&sampler.lock, NULL);
        (void)pthread_condattr_init(&attributes);
        (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        (void)pthread_cond_init(&sampler.begun, &attributes);
        (void)pthread_condattr_destroy(&attributes);
    }
    (void)pthread_mutex_lock(&sampler.lock);
}

/* Start the thread, which no signal interrupts: Python's main thread handles them. */
static bool
start(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    (void)pthread_attr_setstacksize(&attributes, STACK);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &attributes, serve, NULL);
    if (failed == 0) { /* it waits for the caller's lock */
        (void)pthread_setname_np(thread, "koila");
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return failed == 0;
}

void
kl_resident_return_free(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

bool
kl_resident_watch(int64_t bound)
{
    int64_t now = kl_resident_bytes();
    if (now < 0) {
        return false;
    }
    lock_sampler();
    if (sampler.n_watches++ == 0) {
        sampler.bound = bound;
        sampler.most = now;
        sampler.n_returns = sampler.left = 0;
    }
    sampler.bound = bound < sampler.bound ? bound : sampler.bound;
    if (bound - NEAR - now < FASTEST * LATEST) { /* waking the thread takes long */
        (void)pthread_cond_signal(&sampler.begun);
    }
    sampler.has_thread = sampler.has_thread || start();
    (void)pthread_mutex_unlock(&sampler.lock);
    return true;
}

int64_t
kl_resident_stop(int64_t *n_returns)
{
    int64_t now = kl_resident_bytes();
    lock_sampler();
    int64_t most = now > sampler.most ? now : sampler.most;
    *n_returns = sampler.n_returns;
    sampler.n_watches -= sampler.n_watches > 0; /* a fork may stop its parent's */
    (void)pthread_mutex_unlock(&sampler.lock);
    return most;
}
