/* How slow the store is: latency, one request's bandwidth, and that of all requests together. */
#include "objectstore.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

struct pace pace;

/* A sleep that is shorter than this is not worth its two switches: it is made good by the next one. */
static const int64_t slack_ns = 500 * 1000;
/* What a lane may catch up on after a sleep that was too long. */
static const int64_t credit_ns = 1000 * 1000;

static struct {
  pthread_mutex_t lock;
  int64_t free_ns;
} lanes[2] = {{.lock = PTHREAD_MUTEX_INITIALIZER}, {.lock = PTHREAD_MUTEX_INITIALIZER}};

int64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(int64_t then_ns) {
  struct timespec then = {.tv_sec = then_ns / 1000000000LL, .tv_nsec = then_ns % 1000000000LL};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &then, NULL) == EINTR) {
  }
}

void pace_latency(int64_t latency_ns, int64_t since_ns) {
  if (latency_ns > 0) sleep_until(since_ns + latency_ns);
}

/* Take `bytes` of a lane, in the order of those who ask, and wait until they would have gone through. */
void pace_bytes(enum lane which, int64_t *own_free_ns, size_t bytes) {
  int64_t total = pace.total_bytes_s, own = pace.request_bytes_s;
  if (!total && !own) return;
  int64_t now = clock_ns(), due = now;
  if (total) {
    int64_t took = (int64_t)((double)bytes * 1e9 / (double)total);
    pthread_mutex_lock(&lanes[which].lock);
    int64_t start = lanes[which].free_ns;
    if (start < now - credit_ns) start = now - credit_ns;
    due = lanes[which].free_ns = start + took;
    pthread_mutex_unlock(&lanes[which].lock);
  }
  if (own) {
    int64_t start = *own_free_ns > now - credit_ns ? *own_free_ns : now - credit_ns;
    *own_free_ns = start + (int64_t)((double)bytes * 1e9 / (double)own);
    if (due < *own_free_ns) due = *own_free_ns;
  }
  if (due > now + slack_ns) sleep_until(due);
}
