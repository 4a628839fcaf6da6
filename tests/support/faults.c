/* Loaded before libc (LD_PRELOAD) into snapmgr by tests: delays the storage's snapshot call, or makes another boot of this
 * one. The delay is in C, as a hung ioctl would be: Python's global lock stays held. What kills at a call: tracer.c.
 *
 *   FAULT_DELAY_MS=N       sleep before BTRFS_IOC_SNAP_CREATE_V2 and FICLONE; FAULT_DELAY_MARK=FILE is made then
 *   FAULT_DELAY_SKIP=N     not before the first N of them (reflink tries one while arming)
 *   FAULT_BOOT_ID=FILE     is read instead of /proc/sys/kernel/random/boot_id
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SNAP_CREATE_V2 0x50009417UL
#define FICLONE_ 0x40049409UL

static void delay(void) {
    const char *ms = getenv("FAULT_DELAY_MS"), *mark = getenv("FAULT_DELAY_MARK"), *skip = getenv("FAULT_DELAY_SKIP");
    static long calls = 0;
    if (!ms || calls++ < (skip ? atol(skip) : 0)) return;
    if (mark) close(open(mark, O_WRONLY | O_CREAT, 0600));
    struct timespec left = {atol(ms) / 1000, atol(ms) % 1000 * 1000000};
    while (nanosleep(&left, &left)) {}
}

int ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int (*real)(int, unsigned long, ...) = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    if (request == SNAP_CREATE_V2 || request == FICLONE_) delay();
    return real(fd, request, argument);
}

static const char *as_booted(const char *path) {
    const char *instead = getenv("FAULT_BOOT_ID");
    return instead && path && !strcmp(path, "/proc/sys/kernel/random/boot_id") ? instead : path;
}

static mode_t mode_of(int flags, va_list list) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(list, mode_t) : 0;
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode_t mode = mode_of(flags, list);                                                                            \
        va_end(list);                                                                                                  \
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);                \
        return real(as_booted(path), flags, mode);                                                                     \
    }
#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode_t mode = mode_of(flags, list);                                                                            \
        va_end(list);                                                                                                  \
        int (*real)(int, const char *, int, ...) = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name);      \
        return real(folder, as_booted(path), flags, mode);                                                             \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
