/* Lists of objects, in the order of their keys. */
#define _GNU_SOURCE
#include "objectstore.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct names {
  char **items; /* an encoded name each, behind what sorts it: the decoded one, with a slash at its end if a folder */
  size_t count, room;
};

static void names_free(struct names *names) {
  for (size_t i = 0; i < names->count; i++) free(names->items[i]);
  free(names->items);
}

static int by_key(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int names_read(const char *path, struct names *names) {
  DIR *folder = opendir(path);
  if (!folder) return errno;
  for (struct dirent *item; (item = readdir(folder));) {
    bool leaf;
    char name[NAME_MAX + 1], *text;
    if (!name_decode(item->d_name, &leaf, name)) continue;
    if (names->count == names->room) {
      names->room = names->room ? names->room * 2 : 64;
      names->items = realloc(names->items, names->room * sizeof *names->items);
    }
    size_t key = strlen(name) + (leaf ? 0 : 1), size = key + 1 + strlen(item->d_name) + 1;
    if (!names->items || !(text = malloc(size))) abort();
    sprintf(text, "%s%s", name, leaf ? "" : "/");
    strcpy(text + key + 1, item->d_name);
    names->items[names->count++] = text;
  }
  closedir(folder);
  if (names->count) qsort(names->items, names->count, sizeof *names->items, by_key);
  return 0;
}

static bool take(struct listing *listing, const char *key, const char *path) {
  if (strcmp(key, listing->after) <= 0) return true;
  const char *rest = key + strlen(listing->prefix), *end = NULL;
  if (*listing->delimiter && (end = strstr(rest, listing->delimiter))) end += strlen(listing->delimiter);
  struct entry entry = {.common = end != NULL};
  snprintf(entry.key, sizeof entry.key, "%.*s", end ? (int)(end - key) : KEY_MAX, key);
  if (end) {
    if (listing->count && !strcmp(listing->entries[listing->count - 1].key, entry.key)) return true;
    /* A marker that is a common prefix stands for all below it. */
    if (!strncmp(listing->after, entry.key, strlen(entry.key))) return true;
  }
  if (listing->count == listing->limit) {
    listing->more = true;
    return false;
  }
  if (!end) {
    struct object object;
    if (object_stat(path, &object)) return true; /* deleted meanwhile */
    entry.size = object.size, entry.mtime = object.mtime;
    strcpy(entry.etag, object.etag);
  }
  listing->entries[listing->count++] = entry;
  return true;
}

/* Returns false when the listing is full. `key` is what the folder's keys begin with. */
static bool walk(struct listing *listing, const char *path, const char *key) {
  struct names names = {0};
  bool going = true;
  if (names_read(path, &names)) return true; /* removed meanwhile */
  for (size_t i = 0; going && i < names.count; i++) {
    char below[PATH_MAX], full[KEY_MAX + 1];
    const char *item = names.items[i], *file = item + strlen(item) + 1;
    if (snprintf(full, sizeof full, "%s%s", key, item) >= (int)sizeof full) continue;
    if (snprintf(below, sizeof below, "%s/%s", path, file) >= (int)sizeof below) continue;
    size_t length = strlen(full), prefix = strlen(listing->prefix);
    if (strncmp(full, listing->prefix, length < prefix ? length : prefix)) continue;
    if (file[0] == '=') {
      if (length >= prefix) going = take(listing, full, below);
    } else if (strncmp(full, listing->after, length) >= 0) {
      /* All keys below begin with `full`: none of them is behind a marker that is greater and does not. */
      going = walk(listing, below, full);
    }
  }
  names_free(&names);
  return going;
}

int list_objects(const char *bucket, struct listing *listing) {
  struct stat status;
  if (!*bucket || *bucket == '.' || stat(bucket, &status)) return ENOENT;
  walk(listing, bucket, "");
  return 0;
}

static void count_below(const char *path, int64_t *objects, int64_t *bytes) {
  DIR *folder = opendir(path);
  if (!folder) return;
  for (struct dirent *item; (item = readdir(folder));) {
    char below[PATH_MAX];
    struct stat status;
    if (item->d_name[0] == '.' || snprintf(below, sizeof below, "%s/%s", path, item->d_name) >= PATH_MAX) continue;
    if (stat(below, &status)) continue;
    if (S_ISDIR(status.st_mode)) {
      count_below(below, objects, bytes);
    } else {
      ++*objects;
      *bytes += status.st_size;
    }
  }
  closedir(folder);
}

int count_objects(int64_t *objects, int64_t *bytes) {
  *objects = *bytes = 0;
  count_below(".", objects, bytes);
  return 0;
}
