/* As much of libamd_smi.so as the gauges ask for, of the cards in cards.h. -DWITHOUT_BY_TYPE: an older one. */
#include "cards.h"

enum { OK = 0, INVAL = 1, NOT_INIT = 32, DRIVER_NOT_LOADED = 34, API_FAILED = 7 };

static int opened, opened_under;
static void *sockets[CARDS_MAX];

static int usable(int *count) {
    *count = look();
    if (!opened) return NOT_INIT;
    return *count < 0 || generation != opened_under ? API_FAILED : OK;
}

int amdsmi_init(uint64_t flags) {
    (void)flags;
    hang_if_told("open");
    if (look() < 0) return DRIVER_NOT_LOADED;
    opened++;
    opened_under = generation;
    /* As libdrm does, of which amdsmi is made. */
    fprintf(stderr, "amdgpu.ids: No such file or directory\n");
    return OK;
}

int amdsmi_shut_down(void) {
    if (!opened) return NOT_INIT;
    opened--;
    return OK;
}

int amdsmi_status_code_to_string(int status, const char **text) {
    *text = status == INVAL ? "INVAL: a handle that is none" : status == 19 ? "the card is gone" : "the stand-in says no";
    return OK;
}

#ifndef WITHOUT_BY_TYPE
int amdsmi_get_processor_handles_by_type(int type, void **found, uint32_t *room) {
    int count, error = usable(&count);
    if (error) return error;
    if (type != 1) return INVAL;
    for (int i = 0; found && i < count; i++) found[i] = handle_of(i);
    *room = count;
    return OK;
}
#endif

int amdsmi_get_socket_handles(uint32_t *room, void **found) {
    int count, error = usable(&count);
    if (error) return error;
    for (int i = 0; i < count; i++) {
        if (!sockets[i]) sockets[i] = malloc(1 << 20);
        if (found) found[i] = sockets[i];
    }
    *room = count;
    return OK;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *room, void **found) {
    for (int i = 0; i < CARDS_MAX; i++)
        if (socket && sockets[i] == socket) {
            if (found) found[0] = handle_of(i);
            *room = 1;
            return OK;
        }
    return INVAL;
}

static int memory(void *handle, int type, uint64_t *bytes, int total) {
    hang_if_told_of("read", index_of(handle));
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    if (index < 0 || (type != 0 && type != 2)) return INVAL;
    if (cards[index].error) return cards[index].error;
    const struct card *c = &cards[index];
    *bytes = type == 2 ? (total ? c->gtt_total : c->gtt_used) : (total ? c->total : c->used);
    return OK;
}

int amdsmi_get_gpu_memory_usage(void *handle, int type, uint64_t *bytes) { return memory(handle, type, bytes, 0); }
int amdsmi_get_gpu_memory_total(void *handle, int type, uint64_t *bytes) { return memory(handle, type, bytes, 1); }

int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *bdf) {
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    if (index < 0) return INVAL;
    const struct card *c = &cards[index];
    *bdf = (uint64_t)c->domain << 16 | c->bus << 8 | c->device << 3 | c->function;
    return OK;
}
