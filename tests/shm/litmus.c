/* Store buffering: a reader stores its pin and then loads seq, a writer stores seq and then loads the pins. If both
 * loads overtake the stores before them, each side misses the other: "forbidden" below, and a span reused under a view.
 *
 *   litmus MODE COLD ROUNDS SECONDS
 *                           MODE: none        no fence on either side
 *                                 mfence      a full fence on both sides
 *                                 membarrier  nothing on the reader's side, membarrier(GLOBAL_EXPEDITED) on the
 *                                             writer's, which is another process; the reader's has registered
 *                                 unregistered  the same, but the reader's process has not registered
 *
 * Prints "forbidden rounds". It stops after ROUNDS or SECONDS, and early once it has seen ENOUGH forbidden ones.
 *
 * Before its pin the reader stores to COLD lines that are in no cache: stores leave a core in order, so that the pin
 * waits behind them for longer than a system call takes, while the load of seq goes ahead at once.
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
#include <x86intrin.h>

#define ENOUGH 20
#define COLD_MAX 64

struct shared {
    _Alignas(128) atomic_ulong pin;
    _Alignas(128) atomic_ulong seq;
    _Alignas(128) atomic_ulong reader_round;
    _Alignas(128) atomic_ulong writer_round;
    _Alignas(128) atomic_ulong reader_done;
    _Alignas(128) unsigned long reader_saw;
    struct { _Alignas(128) volatile unsigned long word; } cold[COLD_MAX];
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

static void reader(unsigned long rounds, int fenced, int cold_lines) {
    on_core(1);
    for (unsigned long round = 1; round <= rounds; round++) {
        for (int i = 0; i < cold_lines; i++) _mm_clflush((void *)&s->cold[i]);
        _mm_mfence();
        (void)atomic_load_explicit(&s->seq, memory_order_relaxed);
        /* Both leave at nearly the same time, now one earlier, now the other. */
        atomic_store_explicit(&s->reader_round, round, memory_order_release);
        await(&s->writer_round, round);
        spin(round * 7 & 127);
        for (int i = 0; i < cold_lines; i++) s->cold[i].word = round;
        atomic_store_explicit(&s->pin, round, memory_order_relaxed);
        if (fenced) atomic_thread_fence(memory_order_seq_cst);
        else atomic_signal_fence(memory_order_seq_cst);
        s->reader_saw = atomic_load_explicit(&s->seq, memory_order_relaxed);
        atomic_store_explicit(&s->reader_done, round, memory_order_release);
    }
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const char *mode = argv[1];
    unsigned long rounds = strtoul(argv[3], NULL, 10), forbidden = 0, round;
    double until = now() + atof(argv[4]);
    int cold_lines = atoi(argv[2]);
    if (cold_lines < 0 || cold_lines > COLD_MAX) return 2;
    int mfence = !strcmp(mode, "mfence"), none = !strcmp(mode, "none");
    int registers = !strcmp(mode, "membarrier");

    s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return 3;
    /* The writer's own process must not be one that a fence has to reach. */
    pid_t child = fork();
    if (child < 0) return 3;
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        /* The reader's process is the one that must have registered. */
        if (registers) membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
        reader(rounds, mfence, cold_lines);
        _exit(0);
    }
    on_core(0);
    for (round = 1; round <= rounds; round++) {
        if (!(round & 255) && now() > until) break;
        await(&s->reader_round, round);
        atomic_store_explicit(&s->writer_round, round, memory_order_release);
        spin(round & (cold_lines ? 511 : 127));
        atomic_store_explicit(&s->seq, round, memory_order_relaxed);
        if (mfence) atomic_thread_fence(memory_order_seq_cst);
        else if (none) atomic_signal_fence(memory_order_seq_cst);
        else if (membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)) return 4;
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
