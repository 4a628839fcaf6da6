// A file that is as slow as a spinning disk: one arm, so one request at a time, each with seek, rotation and transfer.
//
//   disk BACKING MOUNTPOINT SEEK_FIRST_S SEEK_FULL_S ROTATION_S BYTES_PER_S SEED
//
// MOUNTPOINT/disk has BACKING's content and size. A request that goes on where the last one ended costs its transfer alone.
// Any other one moves the arm first, SEEK_FIRST_S + SEEK_FULL_S * sqrt(distance / size), and waits for a part of a
// rotation, evenly distributed. Requests are served in the order in which they come; there is no write cache, and no
// request is put before another one: ordering is the business of whose kernel uses the disk. What is discarded costs nothing.
#define FUSE_USE_VERSION 314
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <linux/falloc.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char name[] = "/disk";
static const unsigned most_bytes = 1 << 20;
// The platters turn on between two requests that follow on each other: meanwhile a buffer is filled ahead, or emptied.
static const double buffer_s = 0.05;
// So far around the arm's place the buffer takes requests in any order: a stream's parts may overtake each other on the way.
static const double near_bytes = 2 << 20;

static int backing;
static double size, seek_first_s, seek_full_s, rotation_s, bytes_s;

static pthread_mutex_t arm = PTHREAD_MUTEX_INITIALIZER;
static double free_at_s;
static double position;
static unsigned long long state;

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

// xorshift64*: from 0 to below 1.
static double random_part(void) {
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return (double)(state * 2685821657736338717ULL >> 11) / 9007199254740992.0;
}

// Waits until the arm has served a request for `length` bytes at `offset`, behind all that came before it.
static void serve(off_t offset, size_t length) {
  pthread_mutex_lock(&arm);
  double start = now_s(), taken = (double)length / bytes_s;
  double end = (double)offset + (double)length;
  int follows = fabs((double)offset - position) <= near_bytes;
  if (free_at_s > start || (follows && start < free_at_s + buffer_s))
    start = free_at_s;
  if (!follows)
    taken += seek_first_s + seek_full_s * sqrt(fabs((double)offset - position) / size) + rotation_s * random_part();
  position = follows && position > end ? position : end;
  double until = free_at_s = start + taken;
  pthread_mutex_unlock(&arm);
  struct timespec when = {.tv_sec = (time_t)until, .tv_nsec = (long)((until - floor(until)) * 1e9)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR) {
  }
}

static int disk_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
  (void)info;
  memset(found, 0, sizeof *found);
  if (strcmp(path, "/") == 0) {
    found->st_mode = S_IFDIR | 0700;
    found->st_nlink = 2;
    return 0;
  }
  if (strcmp(path, name) != 0)
    return -ENOENT;
  found->st_mode = S_IFREG | 0600;
  found->st_nlink = 1;
  found->st_size = (off_t)size;
  return 0;
}

static int disk_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *info,
                        enum fuse_readdir_flags flags) {
  (void)path, (void)offset, (void)info, (void)flags;
  fill(buffer, ".", NULL, 0, 0);
  fill(buffer, "..", NULL, 0, 0);
  fill(buffer, name + 1, NULL, 0, 0);
  return 0;
}

static int disk_open(const char *path, struct fuse_file_info *info) {
  if (strcmp(path, name) != 0)
    return -ENOENT;
  info->direct_io = 1;
  return 0;
}

static int disk_read(const char *path, char *buffer, size_t length, off_t offset, struct fuse_file_info *info) {
  (void)path, (void)info;
  ssize_t got = pread(backing, buffer, length, offset);
  if (got > 0)
    serve(offset, (size_t)got);
  return got < 0 ? -errno : (int)got;
}

static int disk_write(const char *path, const char *buffer, size_t length, off_t offset, struct fuse_file_info *info) {
  (void)path, (void)info;
  if ((double)offset >= size)
    return -ENOSPC;
  if ((double)offset + (double)length > size)
    length = (size_t)(size - (double)offset);
  ssize_t put = pwrite(backing, buffer, length, offset);
  if (put > 0)
    serve(offset, (size_t)put);
  return put < 0 ? -errno : (int)put;
}

static int disk_fallocate(const char *path, int mode, off_t offset, off_t length, struct fuse_file_info *info) {
  (void)path, (void)info;
  if (mode != (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE))
    return -EOPNOTSUPP;
  return fallocate(backing, mode, offset, length) ? -errno : 0;
}

// What was written is on the disk already.
static int disk_fsync(const char *path, int data_only, struct fuse_file_info *info) {
  (void)path, (void)data_only, (void)info;
  return 0;
}

static void *disk_init(struct fuse_conn_info *connection, struct fuse_config *config) {
  connection->max_write = most_bytes;
  connection->max_read = most_bytes;
  connection->max_readahead = most_bytes;
  config->direct_io = 1;
  return NULL;
}

static const struct fuse_operations operations = {
    .init = disk_init,
    .getattr = disk_getattr,
    .readdir = disk_readdir,
    .open = disk_open,
    .read = disk_read,
    .write = disk_write,
    .fallocate = disk_fallocate,
    .fsync = disk_fsync,
};

int main(int count, char **words) {
  struct stat found;
  if (count != 8 || (backing = open(words[1], O_RDWR | O_CLOEXEC)) < 0 || fstat(backing, &found) || found.st_size <= 0) {
    fprintf(stderr, "disk: BACKING MOUNTPOINT SEEK_FIRST_S SEEK_FULL_S ROTATION_S BYTES_PER_S SEED, of a file with a size\n");
    return 2;
  }
  size = (double)found.st_size;
  seek_first_s = strtod(words[3], NULL);
  seek_full_s = strtod(words[4], NULL);
  rotation_s = strtod(words[5], NULL);
  bytes_s = strtod(words[6], NULL);
  state = strtoull(words[7], NULL, 10) * 2 + 1;
  if (bytes_s <= 0 || seek_first_s < 0 || seek_full_s < 0 || rotation_s < 0)
    return 2;
  // Who started it unmounts; if that one is killed, this goes, and the mount is dead.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  char *arguments[] = {words[0], "-f", "-o", "fsname=snapmgr-lab-disk,max_read=1048576,max_threads=64", words[2], NULL};
  return fuse_main(5, arguments, &operations, NULL);
}
