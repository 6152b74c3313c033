/* GPUs that stand in a file: $STANDIN_CARDS, read anew at every call, so that a test changes them while they are read.
 *
 * The first word is the driver's generation: who opened a library under another one gets nothing from it any more. Then a
 * line for each card: ERROR USED TOTAL DOMAIN BUS DEVICE FUNCTION GTT_USED GTT_TOTAL MIG SLICE_OF. An ERROR other than 0 is
 * what readings of it answer. MIG 1: the card is in MIG mode. SLICE_OF: the card that this line is a MIG slice of; -1: none.
 * Slices come behind all cards.
 *
 * A call hangs while a line of the file $STANDIN_HANG names it ("open", "count", "read 1"). Once it hangs, the file beside it,
 * with .at behind its name, says so. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CARDS_MAX 32

struct card {
    int error;
    unsigned long long used, total;
    unsigned domain, bus, device, function;
    unsigned long long gtt_used, gtt_total;
    int mig, slice_of;
};

static struct card cards[CARDS_MAX];
static int generation;
static void *handles[CARDS_MAX];

static int named(const char *call) {
    const char *path = getenv("STANDIN_HANG");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[64];
    int found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        found = !strcmp(line, call);
    }
    fclose(file);
    return found;
}

static void hang_if_told(const char *call) {
    if (!named(call)) return;
    char at[4096];
    snprintf(at, sizeof at, "%s.at", getenv("STANDIN_HANG"));
    FILE *file = fopen(at, "w");
    if (file) fclose(file);
    while (named(call)) usleep(2000);
}

static void hang_if_told_of(const char *call, int index) {
    char text[64];
    snprintf(text, sizeof text, "%s %d", call, index);
    hang_if_told(text);
}

/* How many cards there are; -1: no driver. */
static int look(void) {
    const char *path = getenv("STANDIN_CARDS");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return -1;
    int count = 0;
    if (fscanf(file, "%d", &generation) != 1) generation = -1;
    while (count < CARDS_MAX) {
        struct card *c = &cards[count];
        if (fscanf(file, "%d %llu %llu %x %x %x %x %llu %llu %d %d", &c->error, &c->used, &c->total, &c->domain, &c->bus,
                   &c->device, &c->function, &c->gtt_used, &c->gtt_total, &c->mig, &c->slice_of) != 11)
            break;
        count++;
    }
    fclose(file);
    return count;
}

/* A pointer as the real libraries have them: it does not fit into 32 bits. */
static void *handle_of(int index) {
    if (!handles[index]) handles[index] = malloc(1 << 20);
    if ((uintptr_t)handles[index] >> 32 == 0) abort();
    return handles[index];
}

static int index_of(const void *handle) {
    for (int i = 0; i < CARDS_MAX; i++)
        if (handle && handles[i] == handle) return i;
    return -1;
}
