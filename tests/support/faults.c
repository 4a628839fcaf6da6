/* Loaded before libc (LD_PRELOAD) into snapmgr by tests: kills the process before or after its Nth call that changes
 * something, or delays the storage's snapshot call. The delay is in C, as a hung ioctl would be: Python's global lock
 * stays held.
 *
 *   FAULT_KILL_AT=N        SIGKILL ourselves at the Nth call (counted in the process that was started, not in children)
 *   FAULT_KILL_WHEN=after  after the call instead of before it
 *   FAULT_LOG=FILE         append a line for each call counted
 *   FAULT_DELAY_MS=N       sleep before BTRFS_IOC_SNAP_CREATE_V2 and FICLONE; FAULT_DELAY_MARK=FILE is made then
 *   FAULT_DELAY_SKIP=N     not before the first N of them (reflink tries one while arming)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SNAP_CREATE_V2 0x50009417UL
#define SNAP_DESTROY 0x5000940fUL
#define SNAP_DESTROY_V2 0x5000943fUL
#define SUBVOL_SETFLAGS 0x4008941aUL
#define FICLONE_ 0x40049409UL

static long kill_at = -1, count = 0;
static int kill_after = 0, log_fd = -1;
static pid_t self = 0;

__attribute__((constructor)) static void setup(void) {
    const char *at = getenv("FAULT_KILL_AT"), *when = getenv("FAULT_KILL_WHEN"), *log = getenv("FAULT_LOG");
    self = getpid();
    if (at) kill_at = atol(at);
    if (when) kill_after = !strcmp(when, "after");
    /* High, so that it is not among the descriptors that the program thinks it owns. */
    if (log) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
        close(fd);
    }
}

static int counted(const char *name) {
    if (getpid() != self) return 0;
    count++;
    if (log_fd >= 0) dprintf(log_fd, "%ld %s\n", count, name);
    return count == kill_at;
}

/* A child that was just forked goes on: only the process that was started is to die. */
static void die(void) { if (getpid() == self) { kill(self, SIGKILL); pause(); } }

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define AROUND(label, call)                                                                                            \
    int hit = counted(label);                                                                                          \
    if (hit && !kill_after) die();                                                                                     \
    __typeof__(call) result = call;                                                                                    \
    if (hit) die();                                                                                                    \
    return result;

int fsync(int fd) { REAL(fsync); AROUND("fsync", real(fd)) }
int rename(const char *a, const char *b) { REAL(rename); AROUND("rename", real(a, b)) }
int renameat(int x, const char *a, int y, const char *b) { REAL(renameat); AROUND("renameat", real(x, a, y, b)) }
int mkdir(const char *p, mode_t m) { REAL(mkdir); AROUND("mkdir", real(p, m)) }
int mkdirat(int d, const char *p, mode_t m) { REAL(mkdirat); AROUND("mkdirat", real(d, p, m)) }
int rmdir(const char *p) { REAL(rmdir); AROUND("rmdir", real(p)) }
int unlink(const char *p) { REAL(unlink); AROUND("unlink", real(p)) }
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); AROUND("unlinkat", real(d, p, f)) }
pid_t fork(void) { REAL(fork); AROUND("fork", real()) }
/* Statements to the database server go out by send. */
ssize_t send(int fd, const void *b, size_t n, int f) { REAL(send); AROUND("send", real(fd, b, n, f)) }

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
    const char *label = request == SNAP_CREATE_V2                                     ? "ioctl snapshot"
                        : request == SNAP_DESTROY || request == SNAP_DESTROY_V2      ? "ioctl destroy"
                        : request == SUBVOL_SETFLAGS                                  ? "ioctl setflags"
                        : request == FICLONE_                                         ? "ioctl clone"
                                                                                      : NULL;
    if (!label) return real(fd, request, argument);
    AROUND(label, real(fd, request, argument))
}

/* The mount calls, which have no wrapper in libc: open_tree to fsmount, mount_setattr, umount2 by number. */
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (!((number >= 428 && number <= 432) || number == 442)) return real(number, a, b, c, d, e, f);
    char label[32];
    snprintf(label, sizeof label, "syscall %ld", number);
    AROUND(label, real(number, a, b, c, d, e, f))
}
