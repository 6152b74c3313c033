/* As much of NVML (libnvidia-ml.so.1) as the gauges ask for, of the cards in cards.h. */
#include "cards.h"

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };

struct memory {
    unsigned long long total, free, used;
};

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

static int opened, opened_under;

static int usable(int *count) {
    *count = look();
    if (!opened) return UNINITIALIZED;
    return *count < 0 || generation != opened_under ? UNKNOWN : OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    hang_if_told("open");
    if (look() < 0) return DRIVER_NOT_LOADED;
    opened++;
    opened_under = generation;
    return OK;
}

/* As libraries do that end threads of their own when the process exits. */
__attribute__((destructor)) static void ended(void) { hang_if_told("exit"); }

int nvmlShutdown(void) {
    hang_if_told("shut");
    if (!opened) return UNINITIALIZED;
    opened--;
    return OK;
}

const char *nvmlErrorString(int error) {
    return error == GPU_IS_LOST ? "GPU is lost" : "the stand-in says no";
}

int nvmlDeviceGetCount_v2(unsigned *found) {
    hang_if_told("count");
    int count, error = usable(&count);
    *found = 0;
    for (int i = 0; !error && i < count; i++) *found += cards[i].slice_of < 0;
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    int count, error = usable(&count);
    if (error) return error;
    if ((int)index >= count) return INVALID_ARGUMENT;
    if (cards[index].error == GPU_IS_LOST) return GPU_IS_LOST;
    *handle = handle_of(index);
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    if (index < 0) return INVALID_ARGUMENT;
    if (cards[index].mig < 0) return NOT_SUPPORTED;
    *current = *pending = cards[index].mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *most) {
    (void)handle;
    *most = 7;
    return OK;
}

/* The first place of every card is empty, as after an instance was destroyed. */
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned place, void **found) {
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    for (int i = 0, at = 1; i < count; i++)
        if (cards[i].slice_of == index && (unsigned)at++ == place) {
            *found = handle_of(i);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned room) {
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    if (index < 0) return INVALID_ARGUMENT;
    snprintf(uuid, room, "%s-00000000-0000-0000-0000-%012x", cards[index].slice_of < 0 ? "GPU" : "MIG", cards[index].bus);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    hang_if_told_of("address", index_of(handle));
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    if (index < 0) return INVALID_ARGUMENT;
    pci->domain = cards[index].domain;
    pci->bus = cards[index].bus;
    pci->device = cards[index].device;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    hang_if_told_of("read", index_of(handle));
    int count, error = usable(&count), index = index_of(handle);
    if (error) return error;
    if (index < 0) return INVALID_ARGUMENT;
    if (cards[index].error) return cards[index].error;
    memory->total = cards[index].total;
    memory->used = cards[index].used;
    memory->free = memory->total - memory->used;
    return OK;
}

