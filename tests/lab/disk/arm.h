// How long a spinning disk takes: one arm, so one request at a time, each with seek, rotation and transfer.
//
// A request that goes on where the last one ended costs its transfer alone; one a little farther on, on the same track, waits
// until what is between has passed. Any other one moves the arm first, seek_first_s + seek_full_s * sqrt(distance / size), and
// waits for a part of a rotation, evenly distributed. Requests are served in the order in which they come; no request is put
// before another one: ordering is the business of whose kernel uses the disk.
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/types.h>
#include <time.h>

// The platters turn on between two requests that follow on each other: meanwhile a buffer is filled ahead, or emptied.
static const double buffer_s = 0.05;
// So far behind the arm's place the buffer holds what has passed unasked: a stream's parts may overtake each other on the way.
static const double behind_bytes = 2 << 20;
// What follows may be this far ahead of the platters: a buffer's interface is quicker than they are. Without this pages that
// are asked for one by one, each 27 us long, would each wait for the kernel to wake somebody up.
static const double ahead_s = 0.002;

static double size, seek_first_s, seek_full_s, rotation_s, bytes_s;

static pthread_mutex_t arm = PTHREAD_MUTEX_INITIALIZER;
static double free_at_s;
static double position;
// What has passed unasked since the last seek: its time is paid for.
static double passed;
static unsigned long long state;

// Given "SEEK_FIRST_S SEEK_FULL_S ROTATION_S BYTES_PER_S SEED" and the disk's size; 0 if these make no disk.
static int set_arm(const char *numbers, double size_bytes) {
  size = size_bytes;
  if (sscanf(numbers, "%lf %lf %lf %lf %llu", &seek_first_s, &seek_full_s, &rotation_s, &bytes_s, &state) != 5)
    return 0;
  state = state * 2 + 1;
  return size > 0 && bytes_s > 0 && seek_first_s >= 0 && seek_full_s >= 0 && rotation_s >= 0;
}

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
  double end = (double)offset + (double)length, distance = (double)offset - position;
  int ahead = distance >= 0 && distance <= rotation_s * bytes_s;
  int behind = distance < 0 && -distance <= behind_bytes && (double)length <= passed;
  int follows = ahead || behind;
  if (free_at_s > start || (follows && start < free_at_s + buffer_s))
    start = free_at_s;
  if (behind) {
    taken = 0;
    passed -= (double)length;
  } else if (ahead) {
    taken += distance / bytes_s;
    passed = fmin(passed + distance, behind_bytes);
    position = end;
  } else {
    taken += seek_first_s + seek_full_s * sqrt(fabs(distance) / size) + rotation_s * random_part();
    passed = 0;
    position = end;
  }
  double until = free_at_s = start + taken;
  pthread_mutex_unlock(&arm);
  if (follows && until < now_s() + ahead_s)
    return;
  struct timespec when = {.tv_sec = (time_t)until, .tv_nsec = (long)((until - floor(until)) * 1e9)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR) {
  }
}
