/* HTTP/1.1 as far as an S3 client speaks it: requests with a Content-Length, connections that stay. */
#define _GNU_SOURCE
#include "objectstore.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* --------------------------------------------------------------------------------------------------------- requests */

static int hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool url_decode(const char *text, size_t length, char *out, size_t room, bool plus) {
  size_t n = 0;
  for (size_t i = 0; i < length; i++) {
    char c = text[i];
    if (c == '%') {
      if (i + 2 >= length || hex(text[i + 1]) < 0 || hex(text[i + 2]) < 0) return false;
      c = (char)(hex(text[i + 1]) << 4 | hex(text[i + 2]));
      i += 2;
    } else if (c == '+' && plus) {
      c = ' ';
    }
    if (!c || n + 1 >= room) return false;
    out[n++] = c;
  }
  out[n] = 0;
  return true;
}

/* Given a name in the query, copy its decoded value; "" if there is none. Returns whether the name is there. */
bool query_get(const struct request *request, const char *name, char *value, size_t room) {
  size_t length = strlen(name);
  if (room) value[0] = 0;
  for (const char *item = request->query; *item;) {
    const char *end = strchrnul(item, '&');
    if (!strncmp(item, name, length) && (item[length] == '=' || item + length == end)) {
      const char *text = item[length] == '=' ? item + length + 1 : end;
      return !room || url_decode(text, (size_t)(end - text), value, room, true);
    }
    item = *end ? end + 1 : end;
  }
  return false;
}

static bool header_is(const char *line, const char *name, const char **value) {
  size_t length = strlen(name);
  if (strncasecmp(line, name, length) || line[length] != ':') return false;
  line += length + 1;
  while (*line == ' ' || *line == '\t') line++;
  *value = line;
  return true;
}

static int take_target(struct request *request, char *target) {
  if (*target != '/') return 400;
  char *query = strchr(target, '?');
  if (query) *query++ = 0;
  if (query && strlen(query) >= sizeof request->query) return 414;
  strcpy(request->query, query ? query : "");
  char *bucket = target + 1, *key = strchrnul(bucket, '/');
  if (!url_decode(bucket, (size_t)(key - bucket), request->bucket, sizeof request->bucket, false)) return 400;
  if (*key) key++;
  return url_decode(key, strlen(key), request->key, sizeof request->key, false) ? 0 : 400;
}

static int take_header(struct request *request, const char *line) {
  const char *value;
  if (header_is(line, "content-length", &value)) {
    char *end;
    errno = 0;
    request->body_bytes = strtoll(value, &end, 10);
    if (errno || end == value || *end || request->body_bytes < 0) return 400;
  } else if (header_is(line, "transfer-encoding", &value)) {
    return 501;
  } else if (header_is(line, "connection", &value)) {
    request->close = !strcasecmp(value, "close");
  } else if (header_is(line, "expect", &value)) {
    request->expects_continue = !strcasecmp(value, "100-continue");
  } else if (header_is(line, "range", &value)) {
    snprintf(request->range, sizeof request->range, "%s", value);
  } else if (header_is(line, "authorization", &value)) {
    snprintf(request->authorization, sizeof request->authorization, "%s", value);
  } else if (header_is(line, "x-amz-copy-source", &value)) {
    if (*value == '/') value++;
    if (!url_decode(value, strlen(value), request->copy_source, sizeof request->copy_source, false)) return 400;
  } else if (header_is(line, "x-amz-copy-source-range", &value)) {
    snprintf(request->copy_range, sizeof request->copy_range, "%s", value);
  } else if (header_is(line, "x-amz-content-sha256", &value)) {
    request->streaming = !strncmp(value, "STREAMING-", 10);
  } else if (!strncasecmp(line, "x-amz-meta-", 11) || header_is(line, "content-type", &value)) {
    size_t used = strlen(request->meta), length = strlen(line);
    if (used + length + 3 > sizeof request->meta) return 400;
    sprintf(request->meta + used, "%s\r\n", line);
  }
  return 0;
}

/* Move what is unused to the front and receive more. Returns what recv returns. */
static ssize_t receive(struct connection *c) {
  memmove(c->buffer, c->buffer + c->used, c->filled - c->used);
  c->filled -= c->used;
  c->used = 0;
  ssize_t got;
  do got = recv(c->fd, c->buffer + c->filled, CHUNK - c->filled, 0);
  while (got < 0 && errno == EINTR);
  if (got > 0) c->filled += (size_t)got;
  return got;
}

int request_read(struct connection *c) {
  char *end;
  while (!(end = memmem(c->buffer + c->used, c->filled - c->used, "\r\n\r\n", 4))) {
    if (c->filled - c->used >= HEAD_MAX) return 431;
    if (receive(c) <= 0) return 0;
  }
  struct request *request = &c->request;
  memset(request, 0, sizeof *request);
  request->received_ns = clock_ns();
  char *line = c->buffer + c->used;
  c->used = (size_t)(end + 4 - c->buffer);
  end[2] = 0;
  char *next = strstr(line, "\r\n");
  *next = 0;
  char *target = strchr(line, ' '), *version = target ? strchr(target + 1, ' ') : NULL;
  if (!version || target - line >= (ssize_t)sizeof request->method || strcmp(version + 1, "HTTP/1.1")) return 400;
  *target++ = *version = 0;
  strcpy(request->method, line);
  int status = take_target(request, target);
  for (line = next + 2; !status && (next = strstr(line, "\r\n")); line = next + 2) {
    *next = 0;
    status = take_header(request, line);
  }
  return status ? status : 1;
}

/* Given the connection of a request, return the next piece of its body, as slowly as the pace wants it. */
ssize_t body_read(struct connection *c, const char **data) {
  struct request *request = &c->request;
  int64_t left = request->body_bytes - request->body_read;
  if (left <= 0) return 0;
  if (c->used == c->filled) {
    if (request->expects_continue && send(c->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL) != 25) return -1;
    request->expects_continue = false;
    if (receive(c) <= 0) return -1;
  }
  size_t bytes = c->filled - c->used;
  if ((int64_t)bytes > left) bytes = (size_t)left;
  *data = c->buffer + c->used;
  c->used += bytes;
  request->body_read += (int64_t)bytes;
  counters.bytes_in += (int64_t)bytes;
  pace_bytes(LANE_IN, &c->in_free_ns, bytes);
  return (ssize_t)bytes;
}

/* ---------------------------------------------------------------------------------------------------------- answers */

static const char *reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 204: return "No Content";
    case 206: return "Partial Content";
    case 400: return "Bad Request";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 409: return "Conflict";
    case 414: return "URI Too Long";
    case 416: return "Range Not Satisfiable";
    case 431: return "Request Header Fields Too Large";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 507: return "Insufficient Storage";
    default: return status < 500 ? "Error" : "Internal Server Error";
  }
}

static int head(char *text, int status, const char *headers, int64_t bytes) {
  static _Atomic uint64_t number;
  char length[48] = "";
  if (status != 204) snprintf(length, sizeof length, "Content-Length: %lld\r\n", (long long)bytes);
  return snprintf(text, HEAD_MAX, "HTTP/1.1 %d %s\r\nServer: snapmgr-lab\r\nx-amz-request-id: %016llx\r\n%s%s\r\n", status,
                  reason(status), (unsigned long long)++number, length, headers ? headers : "");
}

static bool send_all(int fd, struct iovec *parts, int count, int flags) {
  while (count) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | flags);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    while (count && (size_t)sent >= parts->iov_len) {
      sent -= (ssize_t)parts->iov_len;
      parts++, count--;
    }
    if (count) {
      parts->iov_base = (char *)parts->iov_base + sent;
      parts->iov_len -= (size_t)sent;
    }
  }
  return true;
}

/* What is left of a body has to go before the next request. Returns false if the connection cannot be used again. */
static bool drained(struct connection *c) {
  const char *data;
  struct request *request = &c->request;
  /* Who waits for our leave to send it has not sent it. */
  if (request->body_bytes > request->body_read && request->expects_continue && c->used == c->filled) return false;
  while (request->body_bytes > request->body_read)
    if (body_read(c, &data) <= 0) return false;
  return true;
}

bool answer(struct connection *c, int status, const char *headers, const char *body, size_t bytes) {
  char text[HEAD_MAX];
  bool again = drained(c) && !c->request.close;
  bool bodiless = !strcmp(c->request.method, "HEAD");
  struct iovec parts[2] = {{text, (size_t)head(text, status, headers, (int64_t)bytes)}, {(void *)body, bytes}};
  return send_all(c->fd, parts, bytes && !bodiless ? 2 : 1, 0) && again;
}

bool answer_error(struct connection *c, int status, const char *code) {
  char body[512];
  int length = snprintf(body, sizeof body,
                        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>%s</Message>"
                        "<Resource>/%.200s</Resource></Error>", code, code, c->request.bucket);
  if (status >= 400) counters.failed++;
  return answer(c, status, "Content-Type: application/xml\r\n", body, (size_t)length);
}

bool answer_file(struct connection *c, int status, const char *headers, int fd, int64_t offset, int64_t bytes) {
  char text[HEAD_MAX];
  bool again = drained(c) && !c->request.close;
  struct iovec part = {text, (size_t)head(text, status, headers, bytes)};
  if (!send_all(c->fd, &part, 1, bytes ? MSG_MORE : 0)) return false;
  while (bytes > 0) {
    size_t piece = bytes > CHUNK ? CHUNK : (size_t)bytes;
    pace_bytes(LANE_OUT, &c->out_free_ns, piece);
    for (size_t left = piece; left;) {
      ssize_t sent = sendfile(c->fd, fd, &offset, left);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return false;
      left -= (size_t)sent;
      counters.bytes_out += sent;
    }
    bytes -= (int64_t)piece;
  }
  return again;
}
