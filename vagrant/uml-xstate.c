// Preloaded into the guest's kernel: lets it set its processes' registers on processors with more of them than it knows.
//
// User Mode Linux up to 6.12 gives PTRACE_SETREGSET an extended state of a fixed size. The host's kernel wants all of it,
// which is 8 KiB more on processors with AMX, and refuses with EFAULT: the first process of the guest crashes. Here what
// is missing is filled up with zeros: by the header that comes with them those parts are in their initial state, and no
// process in the guest can use them.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static char whole[1 << 16];

long ptrace(enum __ptrace_request request, ...) {
  static long (*real)(enum __ptrace_request, ...);
  if (!real)
    real = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
  va_list rest;
  va_start(rest, request);
  int pid = va_arg(rest, int);
  void *address = va_arg(rest, void *);
  void *data = va_arg(rest, void *);
  va_end(rest);
  long result = real(request, pid, address, data);
  // errno says nothing: the guest's thread for its disk shares it with this one, and sets it at any time.
  if (request != PTRACE_SETREGSET || (unsigned long)address != NT_X86_XSTATE || result == 0)
    return result;
  const struct iovec *given = data;
  unsigned size = 0, unused;
  // Of all that the host has switched on.
  __cpuid_count(0xd, 0, unused, size, unused, unused);
  if (size > sizeof whole || given->iov_len >= size)
    return result;
  memcpy(whole, given->iov_base, given->iov_len);
  memset(whole + given->iov_len, 0, size - given->iov_len);
  struct iovec filled = {.iov_base = whole, .iov_len = size};
  return real(request, pid, address, &filled);
}
