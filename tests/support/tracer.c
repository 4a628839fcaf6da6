/* Runs a program, writes down each system call of its that changes something, and kills it before or after the Nth.
 *
 *   tracer LOG KILL PROGRAM ARG…
 *
 * LOG   a line for each such call: "ROLE NUMBER ERRNO NAME DETAIL". Role 0 is the program, 1 the first process that it
 *       forked, and so on; a number counts within its role; the error number is 0 for a call that succeeded, or that did
 *       not return. A line "ROLE 0 0 exec PATH": from there on it is another program, which is left alone (a server on a
 *       clone, systemctl). "-": no log.
 *       "ROLE 0 0 end": it has ended.
 * KILL  ROLE:NUMBER:before|after:VICTIM:SIGNAL, or "-". VICTIM is the role of who is killed at that call, or "all" that
 *       were not left alone. SIGNAL is SIGKILL's number, or SIGSTOP's: then they are stopped, until somebody continues them.
 *
 * We stand at the kernel's own door (ptrace), so it makes no difference how a call is made: by libc, by its number, from
 * inside libc, by ctypes, from a thread. Killed at the door on the way in the call is not made; on the way out its result
 * is never seen. We end when the program and all that it forked have ended, and then as the program did.
 *
 * Every call counts but those in `harmless`, so that a new one is not forgotten. What is left out on purpose:
 *   - what only reads, or changes only the process itself (memory, descriptors, signal masks, its session): a kill at it
 *     leaves the world as a kill at the next call that counts does;
 *   - flock and close: a lock, a private mount or a connection that ends there ends with the process as well;
 *   - SELECT and SHOW that are sent to the database server; statements that change something count ("send FLUSH TABLES");
 *   - fsopen, fsconfig, fsmount, open_tree: what they make is a descriptor; move_mount, which shows it, counts;
 *   - writes to stdout and stderr, and to memory files; those to other pipes count: they are orders between processes;
 *   - sleeping, waiting, reading: nothing is different afterwards.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define TASKS 4096
#define ROLES 1024
#define FSCONFIG 431
#define OPENAT2 437

static const int harmless[] = {
    SYS_read, SYS_readv, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_lseek, SYS_close, SYS_close_range, SYS_dup, SYS_dup2,
    SYS_dup3, SYS_stat, SYS_fstat, SYS_lstat, SYS_newfstatat, SYS_statx, SYS_statfs, SYS_fstatfs, SYS_access,
    SYS_faccessat, SYS_faccessat2, SYS_readlink, SYS_readlinkat, SYS_getdents64, SYS_getcwd, SYS_chdir, SYS_fchdir,
    SYS_getxattr, SYS_lgetxattr, SYS_fgetxattr, SYS_listxattr, SYS_llistxattr, SYS_flistxattr, SYS_fadvise64,
    SYS_fcntl, SYS_flock, SYS_poll, SYS_ppoll, SYS_select, SYS_pselect6, SYS_epoll_create1, SYS_epoll_ctl,
    SYS_epoll_wait, SYS_epoll_pwait, SYS_pipe, SYS_pipe2, SYS_memfd_create, SYS_eventfd2, SYS_socket, SYS_connect,
    SYS_socketpair, SYS_bind, SYS_getsockopt, SYS_setsockopt, SYS_getsockname, SYS_getpeername, SYS_recvfrom,
    SYS_recvmsg, SYS_shutdown, SYS_mmap, SYS_mprotect, SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk, SYS_futex,
    SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_sigtimedwait, SYS_sigaltstack, SYS_set_robust_list,
    SYS_set_tid_address, SYS_rseq, SYS_arch_prctl, SYS_prctl, SYS_prlimit64, SYS_getrlimit, SYS_getrusage, SYS_times,
    SYS_sysinfo, SYS_uname, SYS_getpid, SYS_getppid, SYS_gettid, SYS_getpgrp, SYS_getpgid, SYS_getsid, SYS_setsid,
    SYS_setpgid, SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_getresuid, SYS_getresgid, SYS_getgroups,
    SYS_umask, SYS_capget, SYS_getrandom, SYS_clock_gettime, SYS_clock_getres, SYS_clock_nanosleep, SYS_nanosleep,
    SYS_gettimeofday, SYS_time, SYS_sched_yield, SYS_sched_getaffinity, SYS_sched_getparam, SYS_sched_getscheduler,
    SYS_wait4, SYS_waitid, SYS_pidfd_open, SYS_exit, SYS_exit_group, SYS_execve, SYS_execveat, SYS_membarrier,
    SYS_restart_syscall, SYS_open_tree, SYS_fsopen, SYS_fsmount, FSCONFIG, SYS_mincore,
};

/* Requests that only read: of files, terminals, btrfs, XFS, block devices. */
static const unsigned long harmless_ioctls[] = {
    0x5401, 0x5413, 0x540f, 0x541b, 0x5450, 0x5451, 0x80086601, 0xC020660B, 0x80111500, 0x8100587E, 0x8400941F,
    0xD000941E, 0xD0009412, 0xC0709411, 0xD0009411, 0xC038943B, 0xC0389424, 0x81F8943C, 0x80089419, 0x40089416,
    0xC0109414, 0x80087601, 0x5421, 0x80081272, 0x1260, 0x1268,
};

/* Names for people, and which argument is a path; what is not here is called by its number. */
static const struct { long number; const char *name; int path; } names[] = {
    {SYS_write, "write", -1}, {SYS_pwrite64, "pwrite", -1}, {SYS_writev, "writev", -1}, {SYS_pwritev, "pwritev", -1},
    {SYS_sendfile, "sendfile", -1}, {SYS_copy_file_range, "copy_file_range", -1}, {SYS_splice, "splice", -1},
    {SYS_open, "open", 0}, {SYS_openat, "openat", 1}, {OPENAT2, "openat2", 1}, {SYS_creat, "creat", 0},
    {SYS_ftruncate, "ftruncate", -1}, {SYS_truncate, "truncate", 0}, {SYS_fallocate, "fallocate", -1},
    {SYS_rename, "rename", 1}, {SYS_renameat, "renameat", 3}, {SYS_renameat2, "renameat2", 3}, {SYS_link, "link", 1},
    {SYS_linkat, "linkat", 3}, {SYS_symlink, "symlink", 1}, {SYS_symlinkat, "symlinkat", 2}, {SYS_mknod, "mknod", 0},
    {SYS_mknodat, "mknodat", 1}, {SYS_mkdir, "mkdir", 0}, {SYS_mkdirat, "mkdirat", 1}, {SYS_rmdir, "rmdir", 0},
    {SYS_unlink, "unlink", 0}, {SYS_unlinkat, "unlinkat", 1}, {SYS_chmod, "chmod", 0}, {SYS_fchmod, "fchmod", -1},
    {SYS_fchmodat, "fchmodat", 1}, {452, "fchmodat2", 1}, {SYS_chown, "chown", 0}, {SYS_fchown, "fchown", -1},
    {SYS_lchown, "lchown", 0}, {SYS_fchownat, "fchownat", 1}, {SYS_utimensat, "utimensat", 1},
    {SYS_setxattr, "setxattr", 0}, {SYS_lsetxattr, "lsetxattr", 0}, {SYS_fsetxattr, "fsetxattr", -1},
    {SYS_removexattr, "removexattr", 0}, {SYS_fremovexattr, "fremovexattr", -1}, {SYS_fsync, "fsync", -1},
    {SYS_fdatasync, "fdatasync", -1}, {SYS_syncfs, "syncfs", -1}, {SYS_sync, "sync", -1}, {SYS_ioctl, "ioctl", -1},
    {SYS_mount, "mount", 1}, {SYS_umount2, "umount2", 0}, {SYS_move_mount, "move_mount", -1},
    {SYS_mount_setattr, "mount_setattr", -1}, {SYS_unshare, "unshare", -1}, {SYS_setns, "setns", -1},
    {SYS_fork, "fork", -1}, {SYS_vfork, "vfork", -1}, {SYS_clone, "clone", -1}, {SYS_clone3, "clone3", -1},
    {SYS_sendto, "send", -1}, {SYS_sendmsg, "sendmsg", -1}, {SYS_kill, "kill", -1}, {SYS_tgkill, "tgkill", -1},
    {SYS_pidfd_send_signal, "pidfd_send_signal", -1}, {SYS_setuid, "setuid", -1}, {SYS_setgid, "setgid", -1},
};

static const struct { unsigned long request; const char *name; } ioctls[] = {
    {0x50009417, "btrfs snapshot"}, {0x5000940E, "btrfs create"}, {0x5000940F, "btrfs destroy"},
    {0x5000943F, "btrfs destroy"}, {0x4008941A, "btrfs setflags"}, {0x9408, "btrfs sync"}, {0x40049409, "clone"},
    {0x4020940D, "clone range"}, {0x40086602, "setflags"}, {0x8080583A, "xfs free"}, {0xC0045877, "freeze"},
    {0xC0045878, "thaw"},
};

static struct task {
    pid_t tid, group;
    int role, die, inside; /* inside: a call, as far as the registers have shown */
    long number; /* of the call that it is in, if that counts */
    char label[700];
} tasks[TASKS];
static int task_count, roles;
static pid_t groups[ROLES]; /* by role; 0: ended or left alone */
static long counts[ROLES];
static FILE *out;
static int kill_role = -1, kill_after, victim = -1, killer = SIGKILL; /* victim -1: all */
static long kill_number;

static void fail(const char *what) { perror(what); exit(125); }

static char *link_of(pid_t tid, long fd, char *text, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%ld", tid, fd);
    ssize_t length = readlink(path, text, size - 1);
    text[length > 0 ? length : 0] = 0;
    return text;
}

static size_t fetch(pid_t tid, unsigned long from, char *text, size_t size) {
    /* Page by page: a string may end right before memory that is not there. */
    size_t got = 0;
    while (got < size - 1) {
        size_t step = 4096 - (from + got) % 4096;
        if (step > size - 1 - got) step = size - 1 - got;
        struct iovec here = {text + got, step}, there = {(void *)(from + got), step};
        ssize_t n = process_vm_readv(tid, &here, 1, &there, 1, 0);
        if (n <= 0) break;
        got += n;
        if (memchr(text + got - n, 0, n)) break;
    }
    text[got] = 0;
    return got;
}

static void printable(char *text) {
    for (char *c = text; *c; c++) if ((unsigned char)*c < ' ' || (unsigned char)*c > '~') *c = ' ';
}

/* Whether bytes written to a descriptor change anything outside of the process. */
static int write_counts(pid_t tid, long fd, char *detail, size_t size) {
    struct stat status;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%ld", tid, fd);
    if (stat(path, &status) != 0) return 0;
    link_of(tid, fd, detail, size);
    if (S_ISREG(status.st_mode)) return strncmp(detail, "/memfd:", 7) != 0 && fd > 2;
    return S_ISFIFO(status.st_mode) && fd > 2;
}

/* Given a packet to a database server (length, number, command, statement), whether it may change something. */
static int statement_counts(pid_t tid, unsigned long from, size_t length, char *detail, size_t size) {
    char text[200];
    struct iovec here = {text, length < sizeof text ? length : sizeof text - 1}, there = {(void *)from, here.iov_len};
    ssize_t got = process_vm_readv(tid, &here, 1, &there, 1, 0);
    if (got > 5 && text[4] == 3) {
        text[got] = 0;
        snprintf(detail, size, "%.100s", text + 5);
        return strncasecmp(text + 5, "SELECT", 6) && strncasecmp(text + 5, "SHOW", 4);
    }
    snprintf(detail, size, "a packet");
    return 1;
}

static int counts_call(pid_t tid, const struct __ptrace_syscall_info *info, char *label, size_t size) {
    long number = info->entry.nr;
    const unsigned long long *a = (const unsigned long long *)info->entry.args;
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) if (harmless[i] == number) return 0;
    char detail[512] = "", name[64];
    int path = -1;
    snprintf(name, sizeof name, "syscall-%ld", number);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].number == number) { snprintf(name, sizeof name, "%s", names[i].name); path = names[i].path; }
    switch (number) {
    case SYS_write: case SYS_pwrite64: case SYS_writev: case SYS_pwritev: case SYS_sendfile:
        if (!write_counts(tid, a[0], detail, sizeof detail)) return 0;
        break;
    case SYS_copy_file_range: case SYS_splice: link_of(tid, a[2], detail, sizeof detail); break;
    case SYS_open: if (!(a[1] & (O_CREAT | O_TRUNC))) return 0; break;
    case SYS_openat: if (!(a[2] & (O_CREAT | O_TRUNC)) && (a[2] & O_TMPFILE) != O_TMPFILE) return 0; break;
    case OPENAT2: {
        uint64_t flags = 0;
        struct iovec here = {&flags, sizeof flags}, there = {(void *)(uintptr_t)a[2], sizeof flags};
        if (process_vm_readv(tid, &here, 1, &there, 1, 0) != sizeof flags) break;
        if (!(flags & (O_CREAT | O_TRUNC)) && (flags & O_TMPFILE) != O_TMPFILE) return 0;
        break;
    }
    case SYS_ioctl:
        for (size_t i = 0; i < sizeof harmless_ioctls / sizeof *harmless_ioctls; i++)
            if (harmless_ioctls[i] == (a[1] & 0xffffffff)) return 0;
        snprintf(name, sizeof name, "ioctl-0x%llx", a[1] & 0xffffffff);
        for (size_t i = 0; i < sizeof ioctls / sizeof *ioctls; i++)
            if (ioctls[i].request == (a[1] & 0xffffffff)) snprintf(name, sizeof name, "ioctl-%s", ioctls[i].name);
        for (char *c = name; *c; c++) if (*c == ' ') *c = '-';
        break;
    case SYS_clone: if (a[0] & CLONE_THREAD) return 0; break;
    case SYS_clone3: {
        uint64_t flags = 0;
        struct iovec here = {&flags, sizeof flags}, there = {(void *)(uintptr_t)a[0], sizeof flags};
        if (process_vm_readv(tid, &here, 1, &there, 1, 0) == sizeof flags && flags & CLONE_THREAD) return 0;
        break;
    }
    case SYS_sendto: if (!statement_counts(tid, a[1], a[2], detail, sizeof detail)) return 0; break;
    case SYS_kill: case SYS_pidfd_send_signal: if (!a[1]) return 0; snprintf(detail, sizeof detail, "%lld", a[1]); break;
    case SYS_fsync: case SYS_fdatasync: case SYS_syncfs: case SYS_ftruncate: case SYS_fchmod: case SYS_fchown:
    case SYS_fsetxattr: case SYS_fremovexattr: case SYS_fallocate: link_of(tid, a[0], detail, sizeof detail); break;
    default: break;
    }
    if (path >= 0) fetch(tid, a[path], detail, sizeof detail);
    if (number == SYS_utimensat && !detail[0]) link_of(tid, a[0], detail, sizeof detail);
    printable(detail);
    snprintf(label, size, "%s %s", name, detail);
    return 1;
}

static pid_t group_of(pid_t tid) {
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/%d/status", tid);
    FILE *file = fopen(path, "re");
    pid_t group = tid;
    while (file && fgets(line, sizeof line, file)) if (sscanf(line, "Tgid: %d", &group) == 1) break;
    if (file) fclose(file);
    return group;
}

static struct task *task_of(pid_t tid) {
    for (int i = 0; i < task_count; i++) if (tasks[i].tid == tid) return &tasks[i];
    if (task_count == TASKS || roles == ROLES) { fprintf(stderr, "tracer: too many processes\n"); exit(125); }
    struct task *task = &tasks[task_count++];
    *task = (struct task){.tid = tid, .group = group_of(tid), .role = -1};
    for (int role = roles - 1; role >= 0; role--) if (groups[role] == task->group) { task->role = role; break; }
    if (task->role < 0) { task->role = roles; groups[roles++] = task->group; }
    return task;
}

static void write_down(struct task *task, long error) {
    if (out && task->number) fprintf(out, "%d %ld %ld %s\n", task->role, task->number, error, task->label);
    task->number = 0;
}

static void forget(struct task *task) {
    write_down(task, 0);
    if (task->tid == task->group && groups[task->role] == task->tid) {
        groups[task->role] = 0;
        if (out) fprintf(out, "%d 0 0 end\n", task->role);
    }
    *task = tasks[--task_count];
}

static void strike(void) {
    for (int role = 0; role < roles; role++)
        if (groups[role] && (victim < 0 || victim == role)) kill(groups[role], killer);
}

/* User Mode Linux does not tell it by itself: by the registers, then. */
static int read_call(struct task *task, struct __ptrace_syscall_info *info) {
    if (ptrace(PTRACE_GET_SYSCALL_INFO, task->tid, sizeof *info, info) > 0) return 1;
#ifdef __x86_64__
    struct user_regs_struct regs;
    if (ptrace(PTRACE_GETREGS, task->tid, 0, &regs)) return 0;
    *info = (struct __ptrace_syscall_info){.op = PTRACE_SYSCALL_INFO_EXIT};
    task->inside = !task->inside && (long)regs.rax == -ENOSYS;
    if (task->inside) {
        const unsigned long long arguments[] = {regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9};
        info->op = PTRACE_SYSCALL_INFO_ENTRY;
        info->entry.nr = regs.orig_rax;
        memcpy((void *)info->entry.args, arguments, sizeof arguments);
    } else {
        info->exit.rval = regs.rax;
        info->exit.is_error = (long)regs.rax < 0 && (long)regs.rax >= -4095;
    }
    return 1;
#else
    return 0;
#endif
}

static void at_call(struct task *task) {
    struct __ptrace_syscall_info info;
    if (!read_call(task, &info)) return;
    if (info.op == PTRACE_SYSCALL_INFO_EXIT) {
        write_down(task, info.exit.is_error ? -info.exit.rval : 0);
        if (task->die) { task->die = 0; strike(); }
        return;
    }
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY || !counts_call(task->tid, &info, task->label, sizeof task->label)) return;
    task->number = ++counts[task->role];
    if (task->role != kill_role || task->number != kill_number) return;
    if (kill_after) task->die = 1; else strike();
}

int main(int argc, char **argv) {
    if (argc < 4) { fprintf(stderr, "usage: tracer LOG KILL PROGRAM ARG...\n"); return 125; }
    char when[8] = "", which[8] = "";
    if (strcmp(argv[1], "-") && !(out = fopen(argv[1], "we"))) fail(argv[1]);
    if (strcmp(argv[2], "-")) {
        if (sscanf(argv[2], "%d:%ld:%7[a-z]:%7[a-z0-9]:%d", &kill_role, &kill_number, when, which, &killer) != 5) fail("KILL");
        kill_after = !strcmp(when, "after");
        if (strcmp(which, "all")) victim = atoi(which);
    }
    int gate[2];
    if (pipe2(gate, O_CLOEXEC)) fail("pipe");
    pid_t program = fork();
    if (program < 0) fail("fork");
    if (program == 0) {
        char byte;
        close(gate[1]);
        if (read(gate[0], &byte, 1) != 1) _exit(125);
        execvp(argv[3], argv + 3);
        perror(argv[3]);
        _exit(127);
    }
    close(gate[0]);
    task_of(program);
    long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE |
                   PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SEIZE, program, 0, options)) fail("ptrace");
    if (ptrace(PTRACE_INTERRUPT, program, 0, 0)) fail("ptrace");
    if (write(gate[1], "g", 1) != 1) fail("write");
    close(gate[1]);
    int status, result = 0;
    pid_t tid;
    while ((tid = waitpid(-1, &status, __WALL)) > 0 || errno == EINTR) {
        if (tid < 0) continue;
        struct task *task = task_of(tid);
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            if (tid == program) result = status;
            forget(task);
            continue;
        }
        int signal_number = WSTOPSIG(status), event = status >> 16, deliver = 0;
        if (event == PTRACE_EVENT_EXEC && task->role != 0) {
            char path[64], target[512];
            snprintf(path, sizeof path, "/proc/%d/exe", tid);
            ssize_t length = readlink(path, target, sizeof target - 1);
            target[length > 0 ? length : 0] = 0;
            if (out) fprintf(out, "%d 0 0 exec %s\n", task->role, target);
            groups[task->role] = 0;
            ptrace(PTRACE_DETACH, tid, 0, 0);
            forget(task);
            continue;
        }
        if (signal_number == (SIGTRAP | 0x80)) at_call(task);
        else if (event == PTRACE_EVENT_STOP && signal_number != SIGTRAP) {
            ptrace(PTRACE_LISTEN, tid, 0, 0); /* stopped, and to stay so */
            continue;
        } else if (!event) deliver = signal_number;
        ptrace(PTRACE_SYSCALL, tid, 0, deliver);
    }
    if (out) fclose(out);
    if (WIFSIGNALED(result)) {
        signal(WTERMSIG(result), SIG_DFL);
        kill(getpid(), WTERMSIG(result));
        pause();
    }
    return WEXITSTATUS(result);
}
