// A file that is as slow as a spinning disk: see arm.h.
//
//   disk BACKING MOUNTPOINT "SEEK_FIRST_S SEEK_FULL_S ROTATION_S BYTES_PER_S SEED"
//
// MOUNTPOINT/disk has BACKING's content and size. What is discarded costs nothing.
#define FUSE_USE_VERSION 314
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "arm.h"

static const char name[] = "/disk";
static const unsigned most_bytes = 1 << 20;
static int backing;

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
  if (count != 4 || (backing = open(words[1], O_RDWR | O_CLOEXEC)) < 0 || fstat(backing, &found) ||
      !set_arm(words[3], (double)found.st_size)) {
    fprintf(stderr, "disk: BACKING MOUNTPOINT NUMBERS, of a file with a size\n");
    return 2;
  }
  // Who started it unmounts; if that one is killed, this goes, and the mount is dead.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  char *arguments[] = {words[0], "-f", "-o", "fsname=snapmgr-lab-disk,max_read=1048576,max_threads=64", words[2], NULL};
  return fuse_main(5, arguments, &operations, NULL);
}
