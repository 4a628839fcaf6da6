/* Objects as files: ROOT/BUCKET/FOLDER/…/=NAME, with the ETag and the headers to be kept in an extended attribute.
 *
 * An object comes into being by a rename, so there is never half of one, whenever we are killed. Nothing is synced: what
 * a power cut does to a test's store is of no interest.
 */
#define _GNU_SOURCE
#include "objectstore.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static const char attribute[] = "user.objectstore";
/* Neither is a name of an object: those have no dot in front. */
static const char draft_name[] = ".draft-";
static const char uploads[] = ".uploads";
static _Atomic uint64_t serial;

/* Delete all that is in a folder, or all drafts that are in it and below. */
static void sweep(const char *path, bool drafts_only) {
  DIR *folder = opendir(path);
  if (!folder) return;
  for (struct dirent *item; (item = readdir(folder));) {
    if (!strcmp(item->d_name, ".") || !strcmp(item->d_name, "..")) continue;
    char below[PATH_MAX];
    if (snprintf(below, sizeof below, "%s/%s", path, item->d_name) >= PATH_MAX) continue;
    if (item->d_type == DT_DIR) {
      sweep(below, drafts_only);
      if (!drafts_only) rmdir(below);
    } else if (!drafts_only || !strncmp(item->d_name, draft_name, strlen(draft_name))) {
      unlink(below);
    }
  }
  closedir(folder);
}

/* What a server that was killed had begun is removed here. */
int store_start(const char *root) {
  if (mkdir(root, 0755) && errno != EEXIST) return errno;
  if (chdir(root)) return errno;
  if (mkdir(uploads, 0755) && errno != EEXIST) return errno;
  sweep(uploads, false);
  sweep(".", true);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  serial = (uint64_t)now.tv_sec << 32 ^ (uint64_t)now.tv_nsec;
  struct draft probe;
  int error = draft_begin(&probe, ".uploads/probe");
  if (error) return error;
  if (fsetxattr(probe.fd, attribute, "", 0, 0)) error = errno;
  draft_drop(&probe);
  return error;
}

/* ------------------------------------------------------------------------------------------------------------ names */

static bool plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || (c && strchr("_-.,+@~", c));
}

/* A part of a key as a file's name. "=" stands before an object's own, so "a" and "a/b" can both be; "%" alone is the
 * empty part of "a//b". */
bool name_encode(const char *name, size_t length, bool leaf, char out[NAME_MAX + 1]) {
  size_t n = 0;
  if (leaf) out[n++] = '=';
  if (!length && !leaf) out[n++] = '%';
  for (size_t i = 0; i < length; i++) {
    if (n + 3 > NAME_MAX) return false;
    if (plain(name[i]) && !(name[i] == '.' && i == 0))
      out[n++] = name[i];
    else
      n += (size_t)sprintf(out + n, "%%%02X", (unsigned char)name[i]);
  }
  out[n] = 0;
  return true;
}

bool name_decode(const char *name, bool *leaf, char out[NAME_MAX + 1]) {
  if (name[0] == '.') return false;
  *leaf = name[0] == '=';
  if (*leaf) name++;
  if (!strcmp(name, "%")) name++;
  return url_decode(name, strlen(name), out, NAME_MAX + 1, false);
}

int object_path(const char *bucket, const char *key, char path[PATH_MAX]) {
  if (!*bucket || *bucket == '.' || strchr(bucket, '/') || !*key || strlen(key) > KEY_MAX) return EINVAL;
  size_t n = (size_t)snprintf(path, PATH_MAX, "%s", bucket);
  for (const char *part = key;;) {
    const char *end = strchrnul(part, '/');
    char name[NAME_MAX + 1];
    if (!name_encode(part, (size_t)(end - part), !*end, name)) return EINVAL;
    if (n + strlen(name) + 2 > PATH_MAX) return EINVAL;
    n += (size_t)sprintf(path + n, "/%s", name);
    if (!*end) return 0;
    part = end + 1;
  }
}

/* ---------------------------------------------------------------------------------------------------------- objects */

static int read_attribute(const char *path, struct object *object) {
  char text[META_MAX + 64];
  ssize_t length = path ? getxattr(path, attribute, text, sizeof text - 1)
                        : fgetxattr(object->fd, attribute, text, sizeof text - 1);
  if (length < 0) return errno;
  text[length] = 0;
  char *meta = strchr(text, '\n');
  if (!meta) return EIO;
  *meta++ = 0;
  snprintf(object->etag, sizeof object->etag, "%.47s", text);
  snprintf(object->meta, sizeof object->meta, "%.*s", META_MAX - 1, meta);
  return 0;
}

static void take_stat(const struct stat *status, struct object *object) {
  object->size = status->st_size;
  object->mtime = status->st_mtime;
}

int object_open(const char *path, struct object *object) {
  struct stat status;
  object->fd = open(path, O_RDONLY | O_CLOEXEC);
  if (object->fd < 0) return errno;
  int error = fstat(object->fd, &status) ? errno : read_attribute(NULL, object);
  if (error) close(object->fd);
  take_stat(&status, object);
  return error;
}

int object_stat(const char *path, struct object *object) {
  struct stat status;
  object->fd = -1;
  if (stat(path, &status)) return errno;
  take_stat(&status, object);
  return read_attribute(path, object);
}

int object_delete(const char *path) { return unlink(path) && errno != ENOENT && errno != ENOTDIR ? errno : 0; }

/* ----------------------------------------------------------------------------------------------------------- drafts */

static int make_folders(const char *path) {
  char parent[PATH_MAX];
  snprintf(parent, sizeof parent, "%s", path);
  /* The first part is the bucket, which is there or is missed. */
  for (char *slash = strchr(strchrnul(parent, '/') + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    if (mkdir(parent, 0755) && errno != EEXIST) return errno;
    *slash = '/';
  }
  return 0;
}

/* In the object's own folder: renames from one folder to another take turns in the whole file system. */
int draft_begin(struct draft *draft, const char *path) {
  const char *slash = strrchr(path, '/');
  int length = slash ? (int)(slash - path) : 0;
  if (!length || length + 32 > (int)sizeof draft->path) return EINVAL;
  snprintf(draft->path, sizeof draft->path, "%.*s/%s%016llx", length, path, draft_name, (unsigned long long)serial++);
  for (int again = 0; again < 2; again++) {
    draft->fd = open(draft->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (draft->fd >= 0) return 0;
    if (errno != ENOENT || again || make_folders(path)) break;
  }
  return errno;
}

int draft_append(const struct draft *draft, const char *data, size_t bytes) {
  while (bytes) {
    ssize_t wrote = write(draft->fd, data, bytes);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return errno;
    data += wrote;
    bytes -= (size_t)wrote;
  }
  return 0;
}

int draft_append_fd(const struct draft *draft, int fd, int64_t bytes) {
  while (bytes > 0) {
    ssize_t sent = sendfile(draft->fd, fd, NULL, (size_t)(bytes > 1 << 30 ? 1 << 30 : bytes));
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return sent ? errno : EIO;
    bytes -= sent;
  }
  return 0;
}

/* Put the draft in the place of what was there, at once. ETags are opaque, as those of encrypted objects are in S3: an
 * MD5 of the content would cost more than all the rest. */
int draft_commit(struct draft *draft, const char *path, const char *meta, int parts, char etag[48]) {
  char text[META_MAX + 64];
  uint64_t number = serial++ * 0x9E3779B97F4A7C15ULL;
  number ^= number >> 29;
  snprintf(etag, 48, "\"%016llx%016llx", (unsigned long long)number, (unsigned long long)(number * 0xBF58476D1CE4E5B9ULL));
  snprintf(etag + 33, 15, parts ? "-%d\"" : "\"", parts);
  int length = snprintf(text, sizeof text, "%s\n%s", etag, meta);
  int error = fsetxattr(draft->fd, attribute, text, (size_t)length, 0) ? errno : 0;
  if (!error && rename(draft->path, path)) error = errno;
  if (error)
    draft_drop(draft);
  else
    close(draft->fd);
  return error;
}

void draft_drop(struct draft *draft) {
  close(draft->fd);
  unlink(draft->path);
}

/* ---------------------------------------------------------------------------------------------------------- uploads */

void upload_path(const char *id, int part, char path[PATH_MAX]) {
  int length = snprintf(path, PATH_MAX, ".uploads/%.32s", id);
  if (part) snprintf(path + length, (size_t)(PATH_MAX - length), "/%d", part);
}

void upload_drop(const char *id) {
  char path[PATH_MAX];
  upload_path(id, 0, path);
  sweep(path, false);
  rmdir(path);
}
