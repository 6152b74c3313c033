/* Store buffering: a reader stores its pin and then loads seq, a writer stores seq and then loads the pins. If both
 * loads overtake the stores before them, each side misses the other: "forbidden" below, and a span reused under a view.
 *
 *   litmus MODE ROUNDS SECONDS
 *                           MODE: none        no fence on either side
 *                                 membarrier  nothing on the reader's side, membarrier(GLOBAL_EXPEDITED) on the
 *                                             writer's, which is another process; the reader's has registered
 *
 * Prints "forbidden rounds". It stops after ROUNDS or SECONDS, and early once it has seen ENOUGH forbidden ones.
 */
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ENOUGH 20

struct shared {
    _Alignas(128) atomic_ulong pin;
    _Alignas(128) atomic_ulong seq;
    _Alignas(128) atomic_ulong reader_round;
    _Alignas(128) atomic_ulong writer_round;
    _Alignas(128) atomic_ulong reader_done;
    _Alignas(128) unsigned long reader_saw;
};

static struct shared *s;

static long membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

static void on_core(int wanted) {
    cpu_set_t usable, one;
    CPU_ZERO(&one);
    sched_getaffinity(0, sizeof usable, &usable);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &usable) && wanted-- == 0) CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static void spin(unsigned n) {
    for (volatile unsigned i = 0; i < n; i++) {}
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Spins, and gives the core away when the other side seems to have lost its own. */
static void await(atomic_ulong *word, unsigned long wanted) {
    for (unsigned turns = 1; atomic_load_explicit(word, memory_order_acquire) < wanted; turns++)
        if (!(turns & 0xffff)) sched_yield();
}

static void reader(unsigned long rounds) {
    on_core(1);
    for (unsigned long round = 1; round <= rounds; round++) {
        (void)atomic_load_explicit(&s->seq, memory_order_relaxed);
        /* Both leave at nearly the same time, now one earlier, now the other. */
        atomic_store_explicit(&s->reader_round, round, memory_order_release);
        await(&s->writer_round, round);
        spin(round * 7 & 127);
        atomic_store_explicit(&s->pin, round, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
        s->reader_saw = atomic_load_explicit(&s->seq, memory_order_relaxed);
        atomic_store_explicit(&s->reader_done, round, memory_order_release);
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int fenced = !strcmp(argv[1], "membarrier");
    unsigned long rounds = strtoul(argv[2], NULL, 10), forbidden = 0, round;
    double until = now() + atof(argv[3]);

    s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return 3;
    /* The writer's own process must not be one that a fence has to reach. */
    pid_t child = fork();
    if (child < 0) return 3;
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        /* The reader's process is the one that must have registered. */
        if (fenced) membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
        reader(rounds);
        _exit(0);
    }
    on_core(0);
    for (round = 1; round <= rounds; round++) {
        if (!(round & 255) && now() > until) break;
        await(&s->reader_round, round);
        atomic_store_explicit(&s->writer_round, round, memory_order_release);
        spin(round & 127);
        atomic_store_explicit(&s->seq, round, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
        if (fenced && membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)) return 4;
        unsigned long saw = atomic_load_explicit(&s->pin, memory_order_relaxed);
        await(&s->reader_done, round);
        if (saw != round && s->reader_saw != round) forbidden++;
        if (forbidden >= ENOUGH) break;
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    printf("%lu %lu\n", forbidden, round > rounds ? rounds : round);
    return 0;
}
