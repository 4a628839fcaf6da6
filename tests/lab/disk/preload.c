// Preloaded into a program, makes one of its files as slow as a spinning disk: see arm.h.
//
// $SNAPMGR_LAB_DISK_FILE is the file, $SNAPMGR_LAB_DISK "SEEK_FIRST_S SEEK_FULL_S ROTATION_S BYTES_PER_S SEED". What the
// program reads and writes there by pread and pwrite takes as long as on the disk; all else is as it was. For a User Mode
// Linux guest, whose driver asks for each page by itself: a file system in user space, whose answers take some 200 us,
// gives such a guest 15 to 35 MB/s of the disk's 150, and this all of them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "arm.h"

static struct stat disk;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("SNAPMGR_LAB_DISK_FILE"), *numbers = getenv("SNAPMGR_LAB_DISK");
  if (!file || !numbers)
    return;
  if (stat(file, &disk) || !set_arm(numbers, (double)disk.st_size)) {
    fprintf(stderr, "SNAPMGR_LAB_DISK: %s is no disk of \"%s\"\n", file, numbers);
    _exit(2);
  }
}

// Looked at each time: numbers of files that were closed are given again.
static int is_disk(int fd) {
  struct stat found;
  return disk.st_ino && !fstat(fd, &found) && found.st_ino == disk.st_ino && found.st_dev == disk.st_dev;
}

ssize_t pread64(int fd, void *buffer, size_t length, off64_t offset) {
  static ssize_t (*real)(int, void *, size_t, off64_t);
  if (!real)
    real = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
  ssize_t got = real(fd, buffer, length, offset);
  if (got > 0 && is_disk(fd))
    serve(offset, (size_t)got);
  return got;
}

ssize_t pwrite64(int fd, const void *buffer, size_t length, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real)
    real = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
  ssize_t put = real(fd, buffer, length, offset);
  if (put > 0 && is_disk(fd))
    serve(offset, (size_t)put);
  return put;
}

ssize_t pread(int fd, void *buffer, size_t length, off_t offset) { return pread64(fd, buffer, length, offset); }

ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset) { return pwrite64(fd, buffer, length, offset); }
