/* GPUs that stand in a file: $STANDIN_CARDS, read anew at every call, so that a test changes them while they are read.
 *
 * The first word is the driver's generation: who opened a library under another one gets nothing from it any more. Then a
 * line for each card: ERROR USED TOTAL DOMAIN BUS DEVICE FUNCTION. An ERROR other than 0 is what readings of it answer. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CARDS_MAX 32

struct card {
    int error;
    unsigned long long used, total;
    unsigned domain, bus, device, function;
};

static struct card cards[CARDS_MAX];
static int generation;
static void *handles[CARDS_MAX];

/* How many cards there are; -1: no driver. */
static int look(void) {
    const char *path = getenv("STANDIN_CARDS");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return -1;
    int count = 0;
    if (fscanf(file, "%d", &generation) != 1) generation = -1;
    while (count < CARDS_MAX) {
        struct card *c = &cards[count];
        if (fscanf(file, "%d %llu %llu %x %x %x %x", &c->error, &c->used, &c->total, &c->domain, &c->bus, &c->device,
                   &c->function) != 7)
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
