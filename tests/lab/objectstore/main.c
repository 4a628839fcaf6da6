/* objectstore ROOT PORT PARENT [ACCESS-KEY]: serves the folder ROOT on 127.0.0.1 until the process PARENT ends.
 *
 * PORT 0 takes a free one. The port is printed when it listens. How slow it is, and what it counts, is set and read at
 * /.lab: see requests.c.
 */
#define _GNU_SOURCE
#include "objectstore.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void *converse(void *argument) {
  struct connection *c = argument;
  /* Latencies of a millisecond are meant. */
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  for (bool again = true; again;) {
    int got = request_read(c);
    if (!got) break;
    int64_t active = ++counters.active, most = counters.active_max;
    while (active > most && !atomic_compare_exchange_weak(&counters.active_max, &most, active)) {
    }
    if (got == 1) {
      again = serve(c);
    } else {
      answer_error(c, got, "InvalidRequest");
      again = false;
    }
    counters.active--;
  }
  close(c->fd);
  free(c->buffer);
  free(c);
  return NULL;
}

static void welcome(int fd) {
  static const int on = 1;
  pthread_attr_t attributes;
  pthread_t thread;
  struct connection *c = calloc(1, sizeof *c);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  if (c) c->fd = fd, c->buffer = malloc(CHUNK + 1);
  if (!c || !c->buffer || pthread_create(&thread, &attributes, converse, c)) {
    if (c) free(c->buffer);
    free(c);
    close(fd);
  }
  pthread_attr_destroy(&attributes);
}

static void fail(const char *what, int error) {
  fprintf(stderr, "objectstore: %s: %s\n", what, strerror(error));
  exit(1);
}

int main(int count, char **arguments) {
  if (count < 4 || count > 5) {
    fprintf(stderr, "usage: objectstore ROOT PORT PARENT [ACCESS-KEY]\n");
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  if (getppid() != atoi(arguments[3])) return 0;
  signal(SIGPIPE, SIG_IGN);
  access_key = count == 5 ? arguments[4] : NULL;
  int error = store_start(arguments[1]);
  if (error) fail(error == ENOTSUP ? "the folder's file system has no extended attributes" : arguments[1], error);
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(arguments[2]))};
  socklen_t length = sizeof address;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1024)) fail("127.0.0.1", errno);
  getsockname(listener, (struct sockaddr *)&address, &length);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  for (;;) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
      welcome(fd);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
      usleep(10000);
    else if (errno != EINTR && errno != ECONNABORTED)
      fail("accept", errno);
  }
}
