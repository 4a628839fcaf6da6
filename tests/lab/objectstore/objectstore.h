/* A slow object store for tests: a subset of S3 on 127.0.0.1, kept in a folder.
 *
 * One thread serves one connection with blocking calls. So nothing has to be polled or timed by us, and waiting, which
 * is what this server is made for, costs nothing. main.c starts it, http.c reads requests and writes answers,
 * requests.c knows S3, listing.c lists, store.c keeps the objects, pace.c makes it slow.
 */
#pragma once

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { KEY_MAX = 1024, META_MAX = 2048, CHUNK = 128 << 10, HEAD_MAX = 16 << 10 };

/* ---------------------------------------------------------------------------------------------------------- pace.c */

struct pace {
  _Atomic int64_t get_latency_ns;  /* GET, HEAD and lists: until the first byte */
  _Atomic int64_t put_latency_ns;  /* PUT, POST and DELETE: from the last byte of the body to the answer */
  _Atomic int64_t request_bytes_s; /* one request's bandwidth; 0: no limit */
  _Atomic int64_t total_bytes_s;   /* of all requests together, in each direction; 0: no limit */
  _Atomic int64_t fail_status;     /* every request is answered by this HTTP status; 0: none */
};
extern struct pace pace;

enum lane { LANE_IN, LANE_OUT };

int64_t clock_ns(void);
void pace_latency(int64_t latency_ns, int64_t since_ns);
void pace_bytes(enum lane lane, int64_t *own_free_ns, size_t bytes);

/* --------------------------------------------------------------------------------------------------------- store.c */

struct object {
  int fd;
  int64_t size;
  time_t mtime;
  char etag[48];
  char meta[META_MAX]; /* header lines as they are sent, each with its end of line */
};

struct draft { /* an object on its way in */
  int fd;
  char path[PATH_MAX];
};

/* All return 0 or an errno. EINVAL: a key that this store cannot hold. */
int store_start(const char *root);
int object_path(const char *bucket, const char *key, char path[PATH_MAX]);
int object_open(const char *path, struct object *object);
int object_stat(const char *path, struct object *object);
int object_delete(const char *path);
int draft_begin(struct draft *draft, const char *path);
int draft_append(const struct draft *draft, const char *data, size_t bytes);
int draft_append_fd(const struct draft *draft, int fd, int64_t bytes);
int draft_commit(struct draft *draft, const char *path, const char *meta, int parts, char etag[48]);
void draft_drop(struct draft *draft);
void upload_path(const char *id, int part, char path[PATH_MAX]);
void upload_drop(const char *id);
bool name_encode(const char *name, size_t length, bool leaf, char out[NAME_MAX + 1]);
bool name_decode(const char *name, bool *leaf, char out[NAME_MAX + 1]);

/* ------------------------------------------------------------------------------------------------------- listing.c */

struct entry {
  char key[KEY_MAX + 1];
  bool common; /* a common prefix */
  int64_t size;
  time_t mtime;
  char etag[48];
};

struct listing {
  const char *prefix, *delimiter, *after; /* keys behind `after` only */
  int limit;
  int count;
  bool more;
  struct entry *entries; /* room for `limit` */
};

int list_objects(const char *bucket, struct listing *listing);
int count_objects(int64_t *objects, int64_t *bytes);

/* ---------------------------------------------------------------------------------------------------------- http.c */

struct request {
  char method[8];
  char bucket[256], key[KEY_MAX + 1], query[4096];
  int64_t body_bytes, body_read;
  char authorization[512], range[128], copy_source[KEY_MAX + 300], copy_range[128], meta[META_MAX];
  bool expects_continue, close, streaming;
  int64_t received_ns;
};

struct connection {
  int fd;
  char *buffer; /* CHUNK bytes: what was received and not yet used */
  size_t used, filled;
  int64_t in_free_ns, out_free_ns;
  struct request request;
};

int request_read(struct connection *c); /* 1: there is one; 0: the client has gone; else the status to answer with */
ssize_t body_read(struct connection *c, const char **data); /* 0 at its end, -1 when the client has gone */
bool query_get(const struct request *request, const char *name, char *value, size_t room);
bool url_decode(const char *text, size_t length, char *out, size_t room, bool plus);
bool answer(struct connection *c, int status, const char *headers, const char *body, size_t bytes);
bool answer_file(struct connection *c, int status, const char *headers, int fd, int64_t offset, int64_t bytes);
bool answer_error(struct connection *c, int status, const char *code);

/* ---------------------------------------------------------------------------------------------- requests.c, main.c */

bool serve(struct connection *c); /* one request; false: close the connection */

enum operation { OP_GET, OP_PUT, OP_HEAD, OP_DELETE, OP_LIST, OP_OTHER, OPERATIONS };
struct counters {
  _Atomic int64_t requests[OPERATIONS], failed;
  _Atomic int64_t bytes_in, bytes_out; /* of bodies */
  _Atomic int64_t active, active_max;
};
extern struct counters counters;
extern const char *access_key; /* NULL: anyone's */
