// What packing.py packed: base64, deflated, columns sorted by the weight of their bytes.
async function unpack(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(inflated).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const trace = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  let at = 4 + length;
  for (const [name, width] of trace.columns) {
    trace[name] = column(bytes.subarray(at, at + trace.count * width), trace.count, width);
    at += trace.count * width;
  }
  place(trace);
  return trace;
}

function column(bytes, count, width) {
  if (width === 1) return bytes;
  const kind = { 2: Uint16Array, 4: Uint32Array, 8: Float64Array }[width];
  const numbers = new kind(count);
  for (let weight = width - 1; weight >= 0; weight--) {
    const from = weight * count;
    for (let i = 0; i < count; i++) numbers[i] = numbers[i] * 256 + bytes[from + i];
  }
  return numbers;
}

// Steps become times from the trace's first start, in microseconds; lanes get the rows that they have.
function place(trace) {
  const start = new Float64Array(trace.count);
  let row = 0;
  let end = 0;
  let head = null; // the thread's first lane, which has the sums of all of them
  trace.lanes = trace.lanes.map(([thread, number, count]) => {
    const lane = { thread, number, from: row, to: row + count, operations: 0, us: 0, end: 0 };
    if (number === 0) head = lane;
    head.operations += count;
    let time = 0;
    for (; row < lane.to; row++) {
      time += trace.start[row];
      start[row] = time;
      head.us += trace.duration[row];
      lane.end = Math.max(lane.end, time + trace.duration[row]);
    }
    end = Math.max(end, lane.end);
    return lane;
  });
  trace.start = start;
  trace.span = Math.max(end, 1);
  // Each of two recordings has a length of its own.
  const side = (lane) => (trace.compared ? threadName(trace, lane.thread)[0] : "");
  const ends = { A: 1, B: 1, "": trace.span };
  for (const lane of trace.lanes) ends[side(lane)] = Math.max(ends[side(lane)], lane.end);
  for (const lane of trace.lanes) lane.span = ends[side(lane)];
}
