// Draws lanes, axis and overview. Cost: the pixels, not the operations.
const NAMED = ["read", "write", "fsync", "flush", "getattr", "lookup", "open", "create", "release", "unlink"];
const LABEL = 17; // pixels above a thread's first lane, for its name
const GAP = 9;
const STRIP = 46; // pixels of a series of the object store, with its name

class Painter {
  constructor(trace, model) {
    this.trace = trace;
    this.model = model;
    this.overviewImage = null;
    const others = trace.names.filter((name) => !NAMED.includes(name)).sort();
    this.variables = trace.names.map((name) =>
      NAMED.includes(name) ? `--op-${name}` : `--op-${(others.indexOf(name) % 5) + 1}`,
    );
    this.recolour();
    this.layout();
  }

  // Reads the colours of the theme in force.
  recolour() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    this.colours = Object.fromEntries(["card", "text", "quiet", "line", "track", "accent", "alarm", "grid", "veil", "op-read", "op-write"].map((name) => [name, get(`--${name}`)]));
    this.kinds = this.variables.map(get);
    this.words = Uint32Array.from([...this.kinds, this.colours.alarm], word);
    this.track = word(this.colours.track);
    this.overviewImage = null;
  }

  // Where each lane lies, in pixels from the top.
  layout() {
    let y = 0;
    let thread = null;
    this.boxes = [];
    // Few threads get more room each; further lanes of a thread are half as high as its first.
    const threads = new Set(this.trace.lanes.filter((lane) => !lane.hidden).map((lane) => lane.thread)).size;
    const tall = threads <= 4 ? 44 : threads <= 12 ? 30 : 22;
    for (const lane of this.trace.lanes) {
      if (lane.hidden) continue;
      const head = thread !== lane.thread;
      if (head) y += (thread === null ? 2 : GAP) + LABEL;
      const height = lane.number === 0 ? tall : Math.floor(tall / 2);
      this.boxes.push({ lane, y, height, head });
      y += height + 1;
      thread = lane.thread;
    }
    this.height = Math.max(y + 6, 60);
  }

  boxAt(y) {
    return this.boxes.find((box) => y >= box.y - (box.head ? LABEL : 0) && y <= box.y + box.height + 1);
  }

  // Given a canvas, its size in pixels of the page and the time in view, paint what is from `top` on.
  lanes(canvas, width, height, from, to, top, marked) {
    const ratio = fit(canvas, width, height);
    const context = canvas.getContext("2d");
    const { image, pixels } = this.room(context, canvas);
    const texts = [];
    for (const { lane, y, height: tall, head } of this.boxes) {
      if (y + tall < top || y - LABEL > top + height) continue;
      const wide = this.band(pixels, canvas.width, canvas.height, lane, from, to, Math.round((y - top) * ratio), Math.round(tall * ratio));
      for (let i = 0; i < wide.length; i += 3) if (tall >= 20 && wide[i + 2] - wide[i + 1] > 64 * ratio) texts.push([wide[i], wide[i + 1] / ratio, wide[i + 2] / ratio, y - top + tall / 2]);
      if (head) texts.push([lane, y - top]);
    }
    context.putImageData(image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.grid(context, width, height, from, to);
    this.holes(context, width, height, from, to, top);
    this.texts(context, texts, width);
    for (const [row, colour] of marked) this.mark(context, row, colour, width, from, to, top);
  }

  // What each frame needs, made once for each size: pixels, and a lane's columns.
  room(context, { width, height }) {
    if (this.kept?.image.width !== width || this.kept.image.height !== height) {
      const image = context.createImageData(width, height);
      const pixels = new Uint32Array(image.data.buffer);
      this.kept = { image, pixels, share: new Float32Array(width * (this.model.kinds + 1)), edges: new Uint8Array(width) };
    }
    this.kept.pixels.fill(0);
    return this.kept;
  }

  // One lane into the image: in each column its kinds upon each other, as high as they were busy.
  band(pixels, width, height, lane, from, to, top, tall) {
    const stride = this.model.kinds + 1;
    const { share, edges } = this.kept;
    const wide = [];
    share.fill(0);
    edges.fill(0);
    this.model.columns(lane, from, to, width, share, wide);
    for (let i = 0; i < wide.length; i += 3) edges[Math.floor(wide[i + 1])] = 1;
    for (let column = 0; column < width; column++) {
      let y = top + tall;
      let sum = 0;
      for (let kind = 0; kind < stride - 1; kind++) sum += share[column * stride + kind];
      // Clocks and halves of columns: more than all of a column's time cannot be spent.
      const scale = tall / Math.max(sum, 1);
      let filled = 0;
      // What is short is seen, too.
      const stub = Math.max(Math.round(tall / 7), 1);
      for (let kind = 0; kind < stride - 1 && sum > 0; kind++) {
        const part = share[column * stride + kind];
        if (part === 0) continue;
        filled += part * scale;
        const end = Math.max(top + tall - Math.max(Math.round(filled), stub), top);
        for (; y > end; y--) if (y <= height && y > 0) pixels[(y - 1) * width + column] = edges[column] ? this.track : this.words[kind];
      }
      for (; y > top; y--) if (y <= height && y > 0) pixels[(y - 1) * width + column] = this.track;
      if (share[column * stride + stride - 1] > 0)
        for (y = Math.max(top - 3, 0); y < top && y < height; y++) pixels[y * width + column] = this.words[stride - 1];
    }
    return wide;
  }

  texts(context, texts, width) {
    for (const text of texts) {
      if (text.length === 2) {
        const [lane, y] = text;
        const share = lane.us / this.trace.span;
        const words = `${threadName(this.trace, lane.thread)}  ·  ${count(lane.operations)}  ·  ${share > 1 ? `${round(share)} at once` : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} % busy`}`;
        context.font = "12px system-ui, sans-serif";
        context.fillStyle = this.colours.quiet;
        context.fillText(words, 3, y - 5, width - 6);
      } else {
        const [row, left, right, y] = text;
        const words = `${this.trace.names[this.trace.name[row]]} ${lasting(this.trace.duration[row])}`;
        context.font = "12px system-ui, sans-serif";
        if (context.measureText(words).width + 12 > right - left) continue;
        context.fillStyle = "#101418";
        context.fillText(words, Math.max(left, 0) + 7, y + 4);
      }
    }
  }

  mark(context, row, colour, width, from, to, top) {
    const index = laneOf(this.trace, row);
    const box = this.boxes.find(({ lane }) => lane === this.trace.lanes[index]);
    if (!box) return;
    const scale = width / (to - from);
    const left = (this.trace.start[row] - from) * scale;
    const wide = Math.max(this.trace.duration[row] * scale, 3);
    context.strokeStyle = this.colours[colour];
    context.lineWidth = 2;
    context.strokeRect(left - 1, box.y - top - 1, wide + 2, box.height + 2);
  }

  grid(context, width, height, from, to) {
    context.fillStyle = this.colours.quiet;
    context.globalAlpha = 0.16;
    for (const time of ticks(from, to, width)) context.fillRect(Math.round(((time - from) / (to - from)) * width), 0, 1, height);
    context.globalAlpha = 1;
  }

  // Spans in which lines may be missing are hatched over the lanes of the recording; in the overview over all (no `top`).
  holes(context, width, tall, from, to, top = null) {
    const scale = width / (to - from);
    for (const [begin, end, names] of this.trace.holes) {
      const boxes = this.boxes.filter(({ lane }) => threadName(this.trace, lane.thread).startsWith(names));
      if (!boxes.length) continue;
      const whole = top === null || !names;
      const upper = whole ? 0 : boxes[0].y - LABEL - top;
      const height = whole ? tall : boxes.at(-1).y + boxes.at(-1).height - top - upper;
      const [left, right] = [Math.max((begin - from) * scale, 0), Math.min((end - from) * scale, width)];
      if (right <= left) continue;
      const wide = Math.max(right - left, 2);
      context.save();
      context.beginPath();
      context.rect(left, upper, wide, height);
      context.clip();
      context.fillStyle = context.strokeStyle = this.colours.alarm;
      context.globalAlpha = 0.08;
      context.fillRect(left, upper, wide, height);
      context.globalAlpha = 0.5;
      context.lineWidth = 1.5;
      context.beginPath();
      // From a fixed grid, so that the hatching does not swim when the window moves.
      for (let x = Math.floor((left - height) / 9) * 9; x < left + wide; x += 9) {
        context.moveTo(x, upper + height);
        context.lineTo(x + height, upper);
      }
      context.stroke();
      context.globalAlpha = 1;
      const words = `no line for ${lasting(end - begin)}`;
      context.font = "12px system-ui, sans-serif";
      const room = context.measureText(words).width + 12;
      if (height > 50 && room < wide) {
        context.fillStyle = this.colours.card;
        context.fillRect(left + (wide - room) / 2, upper + height / 2 - 11, room, 20);
        context.fillStyle = this.colours.alarm;
        context.fillText(words, left + (wide - room) / 2 + 6, upper + height / 2 + 3);
      }
      context.restore();
    }
  }

  axis(canvas, width, from, to) {
    const height = 24;
    const ratio = fit(canvas, width, height);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = this.colours.quiet;
    const times = ticks(from, to, width);
    const step = times.length > 1 ? times[1] - times[0] : to - from;
    for (const time of times) {
      const words = moment(time, step);
      const x = ((time - from) / (to - from)) * width;
      const wide = context.measureText(words).width;
      context.fillText(words, Math.min(Math.max(x - wide / 2, 1), width - wide - 1), 16);
      context.fillRect(Math.round(x), 20, 1, 4);
    }
  }

  // What went to and came from the object store, and what waits for its upload: one strip each, as high as its most.
  objects(canvas, width, from, to) {
    const { series } = this.trace;
    canvas.hidden = !series.length;
    if (!series.length) return;
    const height = series.length * STRIP;
    canvas.style.height = `${height}px`;
    const ratio = fit(canvas, width, height);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    const scale = width / (to - from);
    for (const [number, { name, unit, words, steps }] of series.entries()) {
      const bottom = (number + 1) * STRIP - 3;
      const tall = STRIP - LABEL - 4;
      // The strips of two recordings have one scale.
      const alike = series.filter((each) => each.name.split(" ").at(-1) === name.split(" ").at(-1));
      const most = Math.max(...alike.flatMap((each) => each.steps.map(([, , value]) => value)), 1);
      context.fillStyle = this.colours.track;
      context.fillRect(0, bottom - tall, width, tall);
      context.fillStyle = this.colours[{ GET: "op-read", PUT: "op-write" }[name.split(" ").at(-1)] ?? "accent"];
      for (const [begin, end, value] of steps) {
        const [left, right] = [Math.max((begin - from) * scale, 0), Math.min((end - from) * scale, width)];
        const high = value > 0 ? Math.max((value / most) * tall, 1) : 0;
        if (right > left && high) context.fillRect(left, bottom - high, Math.max(right - left, 0.7), high);
      }
      const own = Math.max(...steps.map(([, , value]) => value), 0);
      context.fillStyle = this.colours.quiet;
      context.fillText(`${name}  ·  ${words}  ·  up to ${size(Math.round(own))}${unit === "bytes/s" ? "/s" : ""}`, 3, bottom - tall - 5, width - 6);
    }
  }

  // All lanes upon each other over the whole trace; the window is left bright. The picture is kept until it changes.
  overview(canvas, width, from, to) {
    const height = 44;
    const ratio = fit(canvas, width, height);
    const context = canvas.getContext("2d");
    if (!this.overviewImage || this.overviewImage.width !== canvas.width) this.overviewImage = this.whole(context, canvas.width, canvas.height);
    context.putImageData(this.overviewImage, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.holes(context, width, height, 0, this.trace.span);
    const [left, right] = [(from / this.trace.span) * width, (to / this.trace.span) * width];
    context.fillStyle = this.colours.veil;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.strokeStyle = this.colours.accent;
    context.lineWidth = 2;
    context.strokeRect(Math.min(left, width - 4) + 1, 1, Math.max(right - left, 4) - 2, height - 2);
  }

  whole(context, width, height) {
    const stride = this.model.kinds + 1;
    const share = new Float32Array(width * stride);
    for (const { lane } of this.boxes) this.model.columns(lane, 0, this.trace.span, width, share, []);
    const sums = Array.from({ length: width }, (_, column) => share.subarray(column * stride, column * stride + stride - 1).reduce((a, b) => a + b, 0));
    const most = Math.max(...sums, 1);
    const image = context.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer).fill(this.track);
    for (let column = 0; column < width; column++) {
      let y = height;
      let filled = 0;
      for (let kind = 0; kind < stride - 1; kind++) {
        filled += (share[column * stride + kind] / most) * (height - 4);
        for (const end = height - Math.round(filled); y > end; y--) pixels[(y - 1) * width + column] = this.words[kind];
      }
    }
    return image;
  }
}

// A colour "#rrggbb" as a pixel of an image.
function word(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return new Uint32Array(Uint8Array.of(red, green, blue, 255).buffer)[0];
}

// Gives a canvas the pixels of the screen for its place; returns how many each pixel of the page has.
function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, tall] = [Math.max(Math.round(width * ratio), 1), Math.max(Math.round(height * ratio), 1)];
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== tall) canvas.height = tall;
  return ratio;
}

// Round times, some 100 pixels apart.
function ticks(from, to, width) {
  const rough = ((to - from) * 100) / width;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].find((each) => each * power >= rough) * power, 1);
  const times = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) times.push(time);
  return times;
}
