// Numbers and operations in words.
const round = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));
const count = (number) => number.toLocaleString("en-US");

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  let value = bytes;
  for (const unit of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    value /= 1024;
    if (value < 1023.95 || unit === "PiB") return `${Number.isInteger(value) ? value : value.toFixed(1)} ${unit}`;
  }
}

function lasting(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${round(us / 1000)} ms`;
  if (us < 120e6) return `${round(us / 1e6)} s`;
  return us < 7200e6 ? `${round(us / 60e6)} min` : `${round(us / 3600e6)} h`;
}

// A time from the trace's start, as exact as a step of `step` microseconds asks for.
function moment(us, step) {
  const digits = Math.max(0, Math.min(6, Math.ceil(6 - Math.log10(Math.max(step, 1)))));
  return `${(us / 1e6).toFixed(digits)} s`;
}

const stamp = (trace, us) => {
  const at = trace.origin_us + us;
  return `${new Date(Math.floor(at / 1e6) * 1000).toISOString().slice(0, 19).replace("T", " ")}.${String(Math.floor(at % 1e6)).padStart(6, "0")}`;
};

const threadName = (trace, thread) => trace.threads[thread] ?? (thread === 0 ? "kernel (0)" : String(thread));

const fileName = (trace, file) => {
  const [inode, path] = trace.files[file];
  if (path && trace.compared) return path;
  return path ? `${path} (inode ${inode})` : inode === "0" ? "no file" : `inode ${inode}`;
};

function extent(trace, row) {
  const [asked, got, offset] = [trace.size[row], trace.got[row], trace.offset[row]];
  if (!asked && !got) return "";
  return `${size(asked)} at offset ${count(offset)}${got === asked ? "" : `, ${size(got)} done`}`;
}

// All about an operation, in parts; the first one is its name and latency.
function sentences(trace, row) {
  const parts = [`${trace.names[trace.name[row]]} ${lasting(trace.duration[row])}`, fileName(trace, trace.file[row]), extent(trace, row)];
  const lane = trace.lanes[laneOf(trace, row)];
  const at = trace.compared ? "" : ` (${stamp(trace, trace.start[row])})`;
  parts.push(`thread ${threadName(trace, lane.thread)}`, `from ${moment(trace.start[row], 1)}${at}`, trace.statuses[trace.status[row]]);
  return parts.filter(Boolean);
}

function laneOf(trace, row) {
  let [low, high] = [0, trace.lanes.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (trace.lanes[middle].from <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const byId = (id) => document.getElementById(id);
