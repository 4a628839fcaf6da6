// What passes the filters, how busy each lane was at each time, and the sums of a window.
const LEAF = 8; // operations for each bin of a pyramid's lowest level, on average
const WORTH = 8192; // a lane with fewer operations is walked as it is

class Model {
  constructor(trace) {
    this.trace = trace;
    this.kinds = trace.names.length;
    this.filter = { names: new Set(), thread: "", file: "", least_us: 0, failed: false };
    this.visible = new Uint8Array(trace.count);
    // That a name or an attribute is not there is an answer: it is counted as the client tells it, but not marked.
    this.alarming = trace.names.map((name) =>
      trace.statuses.map((status, code) => code > 0 && !(/^(lookup|getxattr)$/.test(name) && /^no (such|data|attribute)/i.test(status))),
    );
    this.apply();
  }

  // Which operations pass; and the pyramids of what passes.
  apply() {
    const { trace, filter, visible } = this;
    const wanted = filter.file.trim().toLowerCase();
    const files = Uint8Array.from(trace.files, ([inode, path]) => !wanted || inode === wanted || path.toLowerCase().includes(wanted));
    const names = Uint8Array.from(trace.names, (_, name) => !filter.names.has(name));
    this.shown = 0;
    for (const lane of trace.lanes) {
      const here = filter.thread === "" || String(lane.thread) === filter.thread;
      for (let row = lane.from; row < lane.to; row++) {
        const passes = here && names[trace.name[row]] && files[trace.file[row]] && trace.duration[row] >= filter.least_us;
        visible[row] = passes && (!filter.failed || trace.status[row]) ? 1 : 0;
        this.shown += visible[row];
      }
      lane.hidden = !here;
      lane.levels = lane.to - lane.from > WORTH ? this.pyramid(lane) : [];
    }
  }

  // Levels of bins, each half as many as the one below; a bin has the busy microseconds of each kind, and of failures.
  pyramid(lane) {
    const { trace, visible } = this;
    const bins = 2 ** Math.ceil(Math.log2((lane.to - lane.from) / LEAF));
    const stride = this.kinds + 1;
    const leaf = { bins, width: trace.span / bins, busy: new Float32Array(bins * stride) };
    for (let row = lane.from; row < lane.to; row++) {
      if (!visible[row]) continue;
      const lasted = Math.max(trace.duration[row], 0.5);
      const end = trace.start[row] + lasted;
      let bin = Math.min(Math.floor(trace.start[row] / leaf.width), bins - 1);
      for (let from = trace.start[row]; from < end && bin < bins; bin++) {
        const to = bin === bins - 1 ? end : Math.min(end, (bin + 1) * leaf.width);
        leaf.busy[bin * stride + trace.name[row]] += Math.max(to - from, 0);
        if (trace.status[row] && this.alarming[trace.name[row]][trace.status[row]]) leaf.busy[bin * stride + this.kinds] = 1;
        from = to;
      }
    }
    const levels = [leaf];
    for (let below = leaf; below.bins > 512; below = levels.at(-1)) {
      const busy = new Float32Array((below.bins / 2) * stride);
      for (let bin = 0; bin < below.bins / 2; bin++)
        for (let kind = 0; kind < stride; kind++)
          busy[bin * stride + kind] = below.busy[2 * bin * stride + kind] + below.busy[(2 * bin + 1) * stride + kind];
      levels.push({ bins: below.bins / 2, width: below.width * 2, busy });
    }
    return levels;
  }

  // The lane's first operation that is not over at `time`; lane.to if there is none.
  first(lane, time) {
    const { start, duration } = this.trace;
    let [low, high] = [lane.from, lane.to];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] + duration[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Adds to `share` (kinds + 1 for each column) how much of its time each column of a window was busy, and notes in
  // `wide` the operations that are wider than a few columns: those can be told apart.
  columns(lane, from, to, width, share, wide) {
    const scale = width / (to - from);
    const level = lane.levels.findLast((each) => each.width * scale <= 0.5);
    if (level) this.fromBins(level, from, to, scale, width, share);
    else this.fromRows(lane, from, to, scale, width, share, wide);
  }

  fromBins(level, from, to, scale, width, share) {
    const stride = this.kinds + 1;
    const last = Math.min(Math.ceil(to / level.width), level.bins);
    for (let bin = Math.max(Math.floor(from / level.width), 0); bin < last; bin++) {
      const column = Math.floor(((bin + 0.5) * level.width - from) * scale);
      if (column < 0 || column >= width) continue;
      const [at, source] = [column * stride, bin * stride];
      for (let kind = 0; kind < stride; kind++) share[at + kind] += level.busy[source + kind] * scale;
    }
  }

  fromRows(lane, from, to, scale, width, share, wide) {
    const { start, duration, name, status } = this.trace;
    const stride = this.kinds + 1;
    for (let row = this.first(lane, from); row < lane.to && start[row] < to; row++) {
      if (!this.visible[row]) continue;
      const begin = Math.max((start[row] - from) * scale, 0);
      const end = Math.min((start[row] + Math.max(duration[row], 0.5) - from) * scale, width);
      if (end <= begin) continue;
      const [left, right] = [Math.floor(begin), Math.min(Math.floor(end), width - 1)];
      const kind = name[row];
      if (left === right) share[left * stride + kind] += end - begin;
      else {
        share[left * stride + kind] += left + 1 - begin;
        for (let column = left + 1; column < right; column++) share[column * stride + kind] += 1;
        share[right * stride + kind] += end - right;
      }
      if (status[row] && this.alarming[kind][status[row]]) for (let column = left; column <= right; column++) share[column * stride + this.kinds] = 1;
      if (end - begin > 3) wide.push(row, begin, end);
    }
  }

  // The operation at a time of a lane; within `slack` microseconds the longest, and how many there are.
  at(lane, time, slack) {
    const { start, duration } = this.trace;
    const found = { row: -1, count: 0 };
    for (let row = this.first(lane, time - slack); row < lane.to && start[row] <= time + slack; row++) {
      if (!this.visible[row]) continue;
      if (start[row] <= time && time <= start[row] + duration[row] && duration[row] > 2 * slack) return { row, count: 1 };
      found.count += 1;
      if (found.row < 0 || duration[row] > duration[found.row]) found.row = row;
    }
    return found;
  }

  // The next operation of the row's lane that passes the filters, or the one before it; -1 if there is none.
  beside(lane, row, step) {
    for (let next = row + step; next >= lane.from && next < lane.to; next += step) if (this.visible[next]) return next;
    return -1;
  }

  // Sums of what begins in a window, by name, thread and file, and its longest operations. In slices, so that the page
  // stays alive meanwhile; null when `dropped` says that nobody wants them any more.
  async sums(from, to, most, dropped) {
    const { trace, visible } = this;
    const [names, files, threads, longest] = [[], [], new Map(), []];
    let [rows, begun] = [0, performance.now()];
    for (const lane of trace.lanes) {
      if (!threads.has(lane.thread)) threads.set(lane.thread, nothing(lane.thread));
      const thread = threads.get(lane.thread);
      for (let row = this.first(lane, from); row < lane.to && trace.start[row] < to; row++) {
        if ((row & 8191) === 0 && performance.now() - begun > 12) {
          await new Promise((resolve) => setTimeout(resolve));
          if (dropped()) return null;
          begun = performance.now();
        }
        if (!visible[row] || trace.start[row] < from) continue;
        const [name, file, us] = [trace.name[row], trace.file[row], trace.duration[row]];
        rows += 1;
        tally((names[name] ??= nothing(name, new Latencies())), trace, row);
        names[name].latencies.add(us);
        tally(thread, trace, row);
        tally((files[file] ??= nothing(file)), trace, row);
        if (longest.length < most || us > trace.duration[longest.at(-1)]) insert(longest, row, trace, most);
      }
    }
    const some = (sums) => [...sums].filter((sum) => sum && sum.count);
    return { rows, names: some(names), threads: some(threads.values()), files: some(files), longest };
  }
}

const nothing = (key, latencies = null) => ({ key, count: 0, bytes: 0, us: 0, failed: 0, latencies });

function tally(sum, trace, row) {
  sum.count += 1;
  sum.bytes += trace.got[row];
  sum.us += trace.duration[row];
  if (trace.status[row]) sum.failed += 1;
}

function insert(longest, row, trace, most) {
  let [low, high] = [0, longest.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (trace.duration[longest[middle]] >= trace.duration[row]) low = middle + 1;
    else high = middle;
  }
  longest.splice(low, 0, row);
  if (longest.length > most) longest.pop();
}

// Percentiles with an error below 1 %: exact up to 256, then 128 bins for each power of two.
class Latencies {
  constructor() {
    this.bins = new Uint32Array(26 * 128 + 128);
    this.count = 0;
    this.most = 0;
  }

  add(us) {
    const power = us < 256 ? 0 : Math.min(24 - Math.clz32(Math.min(us, 0xffffffff)), 24);
    this.bins[power * 128 + Math.min(Math.floor(us / 2 ** power), 255)] += 1;
    this.count += 1;
    this.most = Math.max(this.most, us);
  }

  percentile(share) {
    const rank = Math.max(Math.ceil(share * this.count), 1);
    let [bin, seen] = [0, 0];
    for (; seen < rank; bin++) seen += this.bins[bin];
    const power = bin - 1 < 256 ? 0 : Math.floor((bin - 1) / 128) - 1;
    return Math.min((bin - 1 - power * 128 + (power ? 0.5 : 0)) * 2 ** power, this.most);
  }
}
