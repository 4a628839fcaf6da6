/* What S3's requests mean. */
#define _GNU_SOURCE
#include "objectstore.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct counters counters;
const char *access_key;

static bool answer_errno(struct connection *c, int error) {
  switch (error) {
    case ENOENT: return answer_error(c, 404, "NoSuchKey");
    case EINVAL:
    case ENAMETOOLONG: return answer_error(c, 400, "KeyTooLongError");
    case ENOSPC:
    case EDQUOT: return answer_error(c, 507, "InsufficientStorage");
    default: return answer_error(c, 500, "InternalError");
  }
}

static bool no_bucket(struct connection *c) {
  struct stat status;
  const char *bucket = c->request.bucket;
  return *bucket == '.' || strchr(bucket, '/') || stat(bucket, &status);
}

static void http_date(time_t when, char text[40]) {
  struct tm parts;
  gmtime_r(&when, &parts);
  strftime(text, 40, "%a, %d %b %Y %H:%M:%S GMT", &parts);
}

static void xml_date(time_t when, char text[40]) {
  struct tm parts;
  gmtime_r(&when, &parts);
  strftime(text, 40, "%Y-%m-%dT%H:%M:%S.000Z", &parts);
}

/* ---------------------------------------------------------------------------------------------------------- objects */

/* Given "bytes=2-5", "bytes=2-" or "bytes=-4", narrow offset and bytes. Returns 200 (not a range), 206 or 416. */
static int narrow(const char *range, int64_t size, int64_t *offset, int64_t *bytes) {
  long long first, last;
  char rest;
  *offset = 0, *bytes = size;
  if (strncmp(range, "bytes=", 6) || strchr(range, ',')) return 200;
  range += 6;
  if (*range == '-') {
    if (sscanf(range + 1, "%lld%c", &last, &rest) != 1) return 200;
    if (last <= 0 || !size) return 416;
    *offset = last < size ? size - last : 0;
    *bytes = size - *offset;
    return 206;
  }
  int found = sscanf(range, "%lld-%lld", &first, &last);
  if (found < 1 || first < 0) return 200;
  if (first >= size) return 416;
  if (found < 2 || last >= size) last = size - 1;
  if (last < first) return 200;
  *offset = first, *bytes = last - first + 1;
  return 206;
}

static bool get_object(struct connection *c, bool body) {
  char path[PATH_MAX], headers[META_MAX + 512], date[40], range[128] = "";
  struct object object;
  int64_t offset, bytes;
  int error = object_path(c->request.bucket, c->request.key, path);
  if (!error) error = body ? object_open(path, &object) : object_stat(path, &object);
  pace_latency(pace.get_latency_ns, c->request.received_ns);
  if (error) return answer_errno(c, error == ENOTDIR ? ENOENT : error);
  int status = narrow(c->request.range, object.size, &offset, &bytes);
  if (status == 416) {
    if (body) close(object.fd);
    return answer_error(c, 416, "InvalidRange");
  }
  if (status == 206)
    snprintf(range, sizeof range, "Content-Range: bytes %lld-%lld/%lld\r\n", (long long)offset,
             (long long)(offset + bytes - 1), (long long)object.size);
  http_date(object.mtime, date);
  snprintf(headers, sizeof headers, "Last-Modified: %s\r\nETag: %s\r\nAccept-Ranges: bytes\r\n%s%s", date, object.etag,
           range, object.meta);
  if (!body) return answer(c, status, headers, NULL, (size_t)bytes);
  bool again = answer_file(c, status, headers, object.fd, offset, bytes);
  close(object.fd);
  return again;
}

/* Fill a draft with the request's body, or with what the request wants to be copied. 0 or an errno; EPIPE: the client
 * has gone. */
static int fill(struct connection *c, struct draft *draft) {
  struct request *request = &c->request;
  const char *data;
  ssize_t got;
  if (*request->copy_source) {
    char path[PATH_MAX], *key = strchr(request->copy_source, '/');
    struct object source;
    int64_t offset, bytes;
    if (!key) return EINVAL;
    *key++ = 0;
    int error = object_path(request->copy_source, key, path);
    if (!error) error = object_open(path, &source);
    if (error) return error;
    if (narrow(request->copy_range, source.size, &offset, &bytes) == 416) error = EINVAL;
    if (!error && lseek(source.fd, offset, SEEK_SET) < 0) error = errno;
    if (!error) error = draft_append_fd(draft, source.fd, bytes);
    if (!*request->meta) strcpy(request->meta, source.meta);
    close(source.fd);
    return error;
  }
  while ((got = body_read(c, &data)) > 0) {
    int error = draft_append(draft, data, (size_t)got);
    if (error) return error;
  }
  return got ? EPIPE : 0;
}

static bool put_object(struct connection *c) {
  char path[PATH_MAX], id[40], number[16], etag[48], headers[128], date[40], body[256];
  struct request *request = &c->request;
  struct draft draft;
  int error = object_path(request->bucket, request->key, path);
  bool part = query_get(request, "uploadId", id, sizeof id);
  if (no_bucket(c)) return answer_error(c, 404, "NoSuchBucket");
  if (part) {
    upload_path(id, 0, path);
    if (strchr(id, '/') || access(path, F_OK)) return answer_error(c, 404, "NoSuchUpload");
    query_get(request, "partNumber", number, sizeof number);
    if (atoi(number) < 1 || atoi(number) > 10000) return answer_error(c, 400, "InvalidArgument");
    upload_path(id, atoi(number), path);
  }
  if (!error) error = draft_begin(&draft, path);
  if (error) return answer_errno(c, error);
  error = fill(c, &draft);
  if (error) {
    draft_drop(&draft);
    return error != EPIPE && answer_errno(c, error);
  }
  /* The store has the last byte now, and takes its time. */
  int64_t now = clock_ns();
  error = draft_commit(&draft, path, request->meta, 0, etag);
  pace_latency(pace.put_latency_ns, now);
  if (error) return answer_errno(c, error);
  if (*request->copy_source) {
    xml_date(time(NULL), date);
    const char *what = part ? "CopyPartResult" : "CopyObjectResult";
    int length = snprintf(body, sizeof body, "<%s><LastModified>%s</LastModified><ETag>%s</ETag></%s>", what, date, etag, what);
    return answer(c, 200, "Content-Type: application/xml\r\n", body, (size_t)length);
  }
  snprintf(headers, sizeof headers, "ETag: %s\r\n", etag);
  return answer(c, 200, headers, NULL, 0);
}

static bool delete_object(struct connection *c) {
  char path[PATH_MAX], id[40];
  if (query_get(&c->request, "uploadId", id, sizeof id)) {
    if (!strchr(id, '/')) upload_drop(id);
    return answer(c, 204, NULL, NULL, 0);
  }
  if (no_bucket(c)) return answer_error(c, 404, "NoSuchBucket");
  int error = object_path(c->request.bucket, c->request.key, path);
  if (!error) error = object_delete(path);
  pace_latency(pace.put_latency_ns, c->request.received_ns);
  return error ? answer_errno(c, error) : answer(c, 204, NULL, NULL, 0);
}

/* --------------------------------------------------------------------------------------------------- multipart uploads */

static bool begin_upload(struct connection *c) {
  static _Atomic uint64_t serial;
  char id[40], path[PATH_MAX], body[KEY_MAX + 512];
  if (no_bucket(c)) return answer_error(c, 404, "NoSuchBucket");
  snprintf(id, sizeof id, "%llx-%llx", (unsigned long long)clock_ns(), (unsigned long long)++serial);
  upload_path(id, 0, path);
  if (mkdir(path, 0755)) return answer_errno(c, errno);
  int length = snprintf(body, sizeof body,
                        "<InitiateMultipartUploadResult><Bucket>%s</Bucket><UploadId>%s</UploadId>"
                        "</InitiateMultipartUploadResult>", c->request.bucket, id);
  return answer(c, 200, "Content-Type: application/xml\r\n", body, (size_t)length);
}

/* The parts are put together in the order that the client names. */
static bool complete_upload(struct connection *c, const char *id) {
  char path[PATH_MAX], etag[48], body[512], *order;
  struct draft draft;
  const char *data;
  size_t filled = 0;
  ssize_t got;
  int parts = 0, error = object_path(c->request.bucket, c->request.key, path);
  if (error || c->request.body_bytes > 4 << 20) return answer_error(c, 400, "MalformedXML");
  if (!(order = malloc((size_t)c->request.body_bytes + 1))) abort();
  while ((got = body_read(c, &data)) > 0) memcpy(order + filled, data, (size_t)got), filled += (size_t)got;
  order[filled] = 0;
  error = got < 0 ? EPIPE : draft_begin(&draft, path);
  bool drafted = !error;
  for (char *at = order; !error && (at = strstr(at, "<PartNumber>")); parts++) {
    char from[PATH_MAX];
    struct object part;
    at += strlen("<PartNumber>");
    upload_path(id, atoi(at) < 1 ? 99999 : atoi(at), from);
    error = strchr(id, '/') ? ENOENT : object_open(from, &part);
    if (error) break;
    error = draft_append_fd(&draft, part.fd, part.size);
    close(part.fd);
  }
  free(order);
  if (!error && !parts) error = ENOENT;
  if (error) {
    if (drafted) draft_drop(&draft);
    return error != EPIPE && (error == ENOENT ? answer_error(c, 400, "InvalidPart") : answer_errno(c, error));
  }
  error = draft_commit(&draft, path, "", parts, etag);
  if (error) return answer_errno(c, error);
  upload_drop(id);
  pace_latency(pace.put_latency_ns, c->request.received_ns);
  int length = snprintf(body, sizeof body,
                        "<CompleteMultipartUploadResult><ETag>%s</ETag></CompleteMultipartUploadResult>", etag);
  return answer(c, 200, "Content-Type: application/xml\r\n", body, (size_t)length);
}

/* ---------------------------------------------------------------------------------------------------------- buckets */

static void write_key(FILE *out, const char *key, bool url) {
  for (; *key; key++) {
    unsigned char byte = (unsigned char)*key;
    bool plain = byte > 0x20 && byte < 0x7f && !strchr(url ? "\"#%&'+<>?[\\]^`{|}" : "&<>\"", byte);
    if (plain || (!url && byte >= 0x20))
      fprintf(out, plain ? "%c" : byte == '&' || byte == '<' || byte == '>' || byte == '"' ? "&#%d;" : "%c", byte);
    else
      fprintf(out, url ? "%%%02X" : "&#%d;", byte);
  }
}

static bool list_bucket(struct connection *c) {
  char prefix[KEY_MAX + 1], delimiter[64], after[KEY_MAX + 1], token[KEY_MAX + 1], text[40], *body = NULL;
  struct request *request = &c->request;
  size_t length = 0;
  query_get(request, "prefix", prefix, sizeof prefix);
  query_get(request, "delimiter", delimiter, sizeof delimiter);
  query_get(request, "list-type", text, sizeof text);
  bool second = !strcmp(text, "2");
  query_get(request, second ? "start-after" : "marker", after, sizeof after);
  if (second && query_get(request, "continuation-token", token, sizeof token)) strcpy(after, token);
  query_get(request, "encoding-type", text, sizeof text);
  bool url = !strcmp(text, "url");
  int limit = query_get(request, "max-keys", text, sizeof text) ? atoi(text) : 1000;
  if (limit < 0 || limit > 1000) limit = 1000;
  struct listing list = {.prefix = prefix, .delimiter = delimiter, .after = after, .limit = limit};
  if (!(list.entries = malloc(sizeof *list.entries * (size_t)(limit + 1)))) abort();
  int error = list_objects(request->bucket, &list);
  pace_latency(pace.get_latency_ns, request->received_ns);
  if (error) {
    free(list.entries);
    return answer_error(c, 404, "NoSuchBucket");
  }
  FILE *out = open_memstream(&body, &length);
  if (!out) abort();
  fprintf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult><Name>%s</Name><Prefix>", request->bucket);
  write_key(out, prefix, url);
  fprintf(out, "</Prefix><KeyCount>%d</KeyCount><MaxKeys>%d</MaxKeys><IsTruncated>%s</IsTruncated>%s", list.count, limit,
          list.more && limit ? "true" : "false", url ? "<EncodingType>url</EncodingType>" : "");
  if (list.more && list.count) {
    fprintf(out, second ? "<NextContinuationToken>" : "<NextMarker>");
    /* A token is sent back as it is, so it is the plain key; a marker is encoded as keys are. */
    write_key(out, list.entries[list.count - 1].key, url && !second);
    fprintf(out, second ? "</NextContinuationToken>" : "</NextMarker>");
  }
  for (int i = 0; i < list.count; i++) {
    const struct entry *entry = &list.entries[i];
    fprintf(out, entry->common ? "<CommonPrefixes><Prefix>" : "<Contents><Key>");
    write_key(out, entry->key, url);
    xml_date(entry->mtime, text);
    if (entry->common)
      fprintf(out, "</Prefix></CommonPrefixes>");
    else
      fprintf(out, "</Key><LastModified>%s</LastModified><ETag>%s</ETag><Size>%lld</Size>"
              "<StorageClass>STANDARD</StorageClass></Contents>", text, entry->etag, (long long)entry->size);
  }
  fprintf(out, "</ListBucketResult>");
  fclose(out);
  free(list.entries);
  bool again = answer(c, 200, "Content-Type: application/xml\r\n", body, length);
  free(body);
  return again;
}

static bool serve_bucket(struct connection *c) {
  const char *method = c->request.method, *bucket = c->request.bucket;
  if (!strcmp(method, "PUT")) {
    if (*bucket == '.' || strchr(bucket, '/')) return answer_error(c, 400, "InvalidBucketName");
    if (mkdir(bucket, 0755) && errno != EEXIST) return answer_errno(c, errno);
    return answer(c, 200, NULL, NULL, 0);
  }
  if (no_bucket(c)) return answer_error(c, 404, "NoSuchBucket");
  if (!strcmp(method, "HEAD")) return answer(c, 200, NULL, NULL, 0);
  if (strcmp(method, "GET")) return answer_error(c, 501, "NotImplemented");
  if (query_get(&c->request, "location", NULL, 0)) {
    static const char text[] = "<LocationConstraint>us-east-1</LocationConstraint>";
    return answer(c, 200, "Content-Type: application/xml\r\n", text, sizeof text - 1);
  }
  if (query_get(&c->request, "uploads", NULL, 0)) {
    static const char text[] = "<ListMultipartUploadsResult></ListMultipartUploadsResult>";
    return answer(c, 200, "Content-Type: application/xml\r\n", text, sizeof text - 1);
  }
  return list_bucket(c);
}

/* -------------------------------------------------------------------------------------------- what is not of S3: /.lab */

static void set(const struct request *request, const char *name, _Atomic int64_t *value) {
  char text[32];
  if (query_get(request, name, text, sizeof text)) *value = atoll(text);
}

static bool serve_lab(struct connection *c) {
  static const char *const names[OPERATIONS] = {"get", "put", "head", "delete", "list", "other"};
  struct request *request = &c->request;
  char *body = NULL;
  size_t length = 0;
  int64_t objects, bytes;
  struct rusage used;
  set(request, "get_latency_ns", &pace.get_latency_ns);
  set(request, "put_latency_ns", &pace.put_latency_ns);
  set(request, "request_bytes_s", &pace.request_bytes_s);
  set(request, "total_bytes_s", &pace.total_bytes_s);
  set(request, "fail_status", &pace.fail_status);
  getrusage(RUSAGE_SELF, &used);
  FILE *out = open_memstream(&body, &length);
  if (!out) abort();
  fprintf(out, "{");
  for (int i = 0; i < OPERATIONS; i++) fprintf(out, "\"%s\": %lld, ", names[i], (long long)counters.requests[i]);
  if (query_get(request, "count", NULL, 0)) {
    count_objects(&objects, &bytes);
    fprintf(out, "\"objects\": %lld, \"object_bytes\": %lld, ", (long long)objects, (long long)bytes);
  }
  fprintf(out, "\"failed\": %lld, \"bytes_in\": %lld, \"bytes_out\": %lld, \"active_max\": %lld, \"cpu_s\": %.3f}",
          (long long)counters.failed, (long long)counters.bytes_in, (long long)counters.bytes_out,
          (long long)counters.active_max,
          (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
              (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
  fclose(out);
  bool again = answer(c, 200, "Content-Type: application/json\r\n", body, length);
  free(body);
  return again;
}

/* ----------------------------------------------------------------------------------------------------- one request */

static bool permitted(const struct request *request) {
  if (!access_key) return true;
  size_t length = strlen(access_key);
  const char *given = strstr(request->authorization, "Credential=");
  return given && !strncmp(given + 11, access_key, length) && given[11 + length] == '/';
}

static enum operation kind(const struct request *request) {
  const char *method = request->method;
  if (!*request->key) return strcmp(method, "GET") ? OP_OTHER : OP_LIST;
  if (!strcmp(method, "GET")) return OP_GET;
  if (!strcmp(method, "PUT")) return OP_PUT;
  if (!strcmp(method, "HEAD")) return OP_HEAD;
  return strcmp(method, "DELETE") ? OP_OTHER : OP_DELETE;
}

static bool serve_object(struct connection *c) {
  struct request *request = &c->request;
  char id[40];
  switch (kind(request)) {
    case OP_GET: return get_object(c, true);
    case OP_HEAD: return get_object(c, false);
    case OP_PUT: return put_object(c);
    case OP_DELETE: return delete_object(c);
    default: break;
  }
  if (strcmp(request->method, "POST")) return answer_error(c, 405, "MethodNotAllowed");
  if (query_get(request, "uploads", NULL, 0)) return begin_upload(c);
  if (query_get(request, "uploadId", id, sizeof id)) return complete_upload(c, id);
  return answer_error(c, 501, "NotImplemented");
}

bool serve(struct connection *c) {
  struct request *request = &c->request;
  if (!strcmp(request->bucket, ".lab")) return serve_lab(c);
  counters.requests[kind(request)]++;
  if (pace.fail_status) return answer_error(c, (int)pace.fail_status, "ServiceUnavailable");
  if (!permitted(request)) return answer_error(c, 403, "InvalidAccessKeyId");
  if (request->streaming) return answer_error(c, 501, "NotImplemented");
  if (!*request->bucket) return answer_error(c, 501, "NotImplemented");
  return *request->key ? serve_object(c) : serve_bucket(c);
}
