/* SPDX-License-Identifier: Apache-2.0 */
/* resident.c - measure resident private memory; return free memory when a bound is near.
 *
 * glibc keeps freed memory for later blocks, which saves the time for new pages. Its heap fragments, so it can be several
 * times as large as the blocks in use. It is returned only when the process would exceed the bound. The thread needs no
 * lock of Python's: a step that holds that lock for long allocates meanwhile. */
#define _GNU_SOURCE

#include "resident.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "alloc.h"

/* Free memory is returned this many bytes below the bound, and again once this many more bytes are resident than it left:
 * those that it left are in use. */
static const int64_t NEAR = 1 << 21, MORE = 1 << 21;
/* A process takes new pages at this rate at most, in bytes per nanosecond. The next sample comes before it can have
 * reached the bound, but not sooner or later than this many nanoseconds. */
static const int64_t FASTEST = 4, SOONEST = 250000, LATEST = 4000000;
/* The bytes of the thread's stack: the usual 8 MiB would count against a limit of the process. */
static const size_t STACK = 1 << 18;

struct KlResident {
    int statm;   /* /proc/self/statm, open */
    int is_over; /* an eventfd that is readable once the thread has to end; -1: there is no thread */
    pthread_t thread;
    pid_t process; /* a fork of it has no thread, but shares the eventfd */
    int64_t bound, most, n_returns;
};

/* Return all resident pages but file-backed and shared ones, in bytes; -1 if `statm` cannot be read. */
static int64_t
private_bytes(int statm)
{
    char text[128], *end = text;
    ssize_t n_read = pread(statm, text, sizeof text - 1, 0);
    if (n_read <= 0) {
        return -1;
    }
    text[n_read] = '\0';
    (void)strtoll(text, &end, 10); /* the size of all mappings */
    int64_t n_resident = strtoll(end, &end, 10);
    return (n_resident - strtoll(end, &end, 10)) * sysconf(_SC_PAGESIZE);
}

static void *
sample(void *given)
{
    KlResident *watch = given;
    int64_t left = 0; /* what was resident after the last return, or less */
    struct pollfd over = {.fd = watch->is_over, .events = POLLIN};
    struct timespec wait = {0};
    do {
        int64_t now = private_bytes(watch->statm);
        watch->most = now > watch->most ? now : watch->most;
        left = now < left ? now : left;
        if (now > watch->bound - NEAR && now > left + MORE) {
            kl_resident_return_free();
            now = left = private_bytes(watch->statm);
            watch->n_returns++;
        }
        int64_t at = watch->bound - NEAR > left + MORE ? watch->bound - NEAR : left + MORE;
        int64_t nanoseconds = (at - now) / FASTEST;
        nanoseconds = nanoseconds < SOONEST ? SOONEST : nanoseconds;
        wait.tv_nsec = nanoseconds < LATEST ? nanoseconds : LATEST;
    } while (ppoll(&over, 1, &wait, NULL) == 0);
    return NULL;
}

/* Start the thread of `watch`, which no signal interrupts: Python's main thread handles them. */
static bool
start(KlResident *watch)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    watch->is_over = eventfd(0, EFD_CLOEXEC);
    if (watch->is_over < 0 || pthread_attr_init(&attributes) != 0) {
        return false;
    }
    (void)pthread_attr_setstacksize(&attributes, STACK);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&watch->thread, &attributes, sample, watch);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return failed == 0;
}

int64_t
kl_resident_bytes(void)
{
    int statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    int64_t n_bytes = private_bytes(statm);
    (void)close(statm);
    return n_bytes;
}

void
kl_resident_return_free(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

KlResident *
kl_resident_watch(int64_t bound)
{
    KlResident *watch = kl_alloc_zeroed(1, sizeof *watch);
    if (watch == NULL) {
        return NULL;
    }
    watch->bound = bound;
    watch->process = getpid();
    watch->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    watch->most = private_bytes(watch->statm);
    if (watch->most < 0) {
        (void)close(watch->statm);
        kl_alloc_free(watch);
        return NULL;
    }
    if (!start(watch)) {
        (void)close(watch->is_over);
        watch->is_over = -1;
    }
    return watch;
}

int64_t
kl_resident_stop(KlResident *watch, int64_t *n_returns)
{
    if (watch->is_over >= 0 && watch->process == getpid()) {
        (void)eventfd_write(watch->is_over, 1);
        (void)pthread_join(watch->thread, NULL);
    }
    (void)close(watch->is_over);
    int64_t now = private_bytes(watch->statm), most = now > watch->most ? now : watch->most;
    *n_returns = watch->n_returns;
    (void)close(watch->statm);
    kl_alloc_free(watch);
    return most;
}
