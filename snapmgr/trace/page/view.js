// The window of time in view, and all that moves it: mouse, touch, wheel and keys.
const LEAST = 20; // microseconds
const SETTLED = 140; // milliseconds without a change, until the tables follow

class View {
  constructor(trace, model, painter) {
    Object.assign(this, { trace, model, painter, from: 0, to: trace.span, chosen: -1, hovered: -1, asked: 0, timer: 0 });
    this.canvas = byId("timeline");
    this.scroller = byId("scroller");
    this.settled = () => {};
    this.pointers = new Map();
    this.listen();
  }

  get width() {
    return this.scroller.clientWidth;
  }

  set(from, to) {
    const span = Math.min(Math.max(to - from, LEAST), this.trace.span);
    // Rounding of the middle must not let a window at the end creep.
    this.from = Math.min(Math.max(from, 0), this.trace.span - span);
    this.to = this.from + span;
    this.repaint();
    this.settle();
  }

  move(share) {
    const step = (this.to - this.from) * share;
    this.set(this.from + step, this.to + step);
  }

  zoom(factor, middle = (this.from + this.to) / 2) {
    const span = Math.min(Math.max((this.to - this.from) * factor, LEAST), this.trace.span);
    const share = (middle - this.from) / (this.to - this.from);
    this.set(middle - span * share, middle + span * (1 - share));
  }

  whole() {
    this.set(0, this.trace.span);
  }

  repaint() {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      this.paint();
    });
  }

  // After the last of many changes.
  settle() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.settled(), SETTLED);
  }

  paint() {
    const { width, scroller, canvas, painter, from, to } = this;
    byId("space").style.height = `${painter.height}px`;
    const height = scroller.clientHeight;
    canvas.style.height = `${height}px`;
    const marked = [];
    if (this.hovered >= 0) marked.push([this.hovered, "quiet"]);
    if (this.chosen >= 0) marked.push([this.chosen, "accent"]);
    painter.lanes(canvas, width, height, from, to, scroller.scrollTop, marked);
    painter.axis(byId("axis"), width, from, to);
    painter.objects(byId("objects"), width, from, to);
    painter.overview(byId("overview"), byId("overview").clientWidth, from, to);
    canvas.dataset.from = from;
    canvas.dataset.to = to;
  }

  timeAt(x) {
    return this.from + ((x - this.canvas.getBoundingClientRect().left) / this.width) * (this.to - this.from);
  }

  rowAt(event) {
    const box = this.painter.boxAt(event.clientY - this.canvas.getBoundingClientRect().top + this.scroller.scrollTop);
    if (!box) return { row: -1, count: 0 };
    return this.model.at(box.lane, this.timeAt(event.clientX), (2.5 * (this.to - this.from)) / this.width);
  }

  choose(row) {
    this.chosen = row;
    const place = byId("chosen");
    if (row < 0) place.replaceChildren(element("span", { class: "quiet" }, "No operation chosen: click one, or press . in the timeline for the next."));
    else {
      const [first, ...rest] = sentences(this.trace, row);
      place.replaceChildren(element("b", {}, first), ` · ${rest.join(" · ")}`);
    }
    this.repaint();
  }

  // Brings an operation into view, as a tenth of the window.
  show(row) {
    const lasted = Math.max(this.trace.duration[row], 2);
    const span = lasted * 10;
    const middle = this.trace.start[row] + lasted / 2;
    this.choose(row);
    this.set(middle - span / 2, middle + span / 2);
    const lane = this.trace.lanes[laneOf(this.trace, row)];
    const box = this.painter.boxes.find((each) => each.lane === lane);
    if (box && (box.y - LABEL < this.scroller.scrollTop || box.y + box.height > this.scroller.scrollTop + this.scroller.clientHeight))
      this.scroller.scrollTop = box.y - LABEL;
    this.canvas.scrollIntoView({ block: "nearest" });
    this.canvas.focus({ preventScroll: true });
  }

  hover(event) {
    const place = byId("hover");
    const { row, count: here } = event ? this.rowAt(event) : { row: -1 };
    if (row !== this.hovered) {
      this.hovered = row;
      this.repaint();
    }
    place.hidden = row < 0;
    if (row < 0) return;
    const [first, ...rest] = sentences(this.trace, row);
    const more = here > 1 ? [element("div", {}, `the longest of ${count(here)} operations here`)] : [];
    place.replaceChildren(element("b", {}, first), ...rest.map((text) => element("div", {}, text)), ...more);
    const [x, y] = [event.clientX + 14, event.clientY + 16];
    const { offsetWidth: wide, offsetHeight: tall } = place;
    place.style.left = `${Math.max(Math.min(x, window.innerWidth - wide - 8), 8)}px`;
    place.style.top = `${y + tall > window.innerHeight ? Math.max(event.clientY - tall - 12, 4) : y}px`;
  }

  listen() {
    const { canvas, scroller } = this;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    for (const type of ["pointerup", "pointercancel"]) canvas.addEventListener(type, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.clientX)));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    scroller.addEventListener("scroll", () => this.repaint());
    new ResizeObserver(() => this.repaint()).observe(scroller);
    const overview = byId("overview");
    const jump = (event) => {
      const middle = ((event.clientX - overview.getBoundingClientRect().left) / overview.clientWidth) * this.trace.span;
      const half = (this.to - this.from) / 2;
      this.set(middle - half, middle + half);
    };
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      // From the whole trace a place is asked for, not the same whole again.
      if (this.to - this.from > 0.999 * this.trace.span) this.zoom(0.1);
      jump(event);
    });
    overview.addEventListener("pointermove", (event) => event.buttons && jump(event));
    overview.addEventListener("wheel", (event) => this.wheel(event, true), { passive: false });
  }

  down(event) {
    if (event.button > 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.travelled = this.pointers.size > 1 ? Infinity : 0;
    this.spanned = event.shiftKey && this.pointers.size === 1 ? this.timeAt(event.clientX) : null;
    if (event.pointerType !== "touch") this.canvas.focus({ preventScroll: true });
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return event.pointerType !== "touch" && this.hover(event);
    const now = { x: event.clientX, y: event.clientY };
    this.travelled += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    this.pointers.set(event.pointerId, now);
    if (this.spanned !== null || this.travelled < 4) return;
    this.hover(null);
    this.canvas.classList.add("held");
    const scale = (this.to - this.from) / this.width;
    if (others.length) {
      const [was, is] = [Math.max(Math.abs(before.x - others[0].x), 8), Math.max(Math.abs(now.x - others[0].x), 8)];
      this.zoom(was / is, this.timeAt((now.x + others[0].x) / 2));
    }
    const shift = ((before.x - now.x) * scale) / (others.length + 1);
    this.set(this.from + shift, this.to + shift);
    if (event.pointerType !== "touch") this.scroller.scrollTop += before.y - now.y;
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    this.canvas.classList.remove("held");
    if (event.type === "pointercancel") return;
    if (this.spanned !== null && this.travelled >= 4) {
      const [from, to] = [this.spanned, this.timeAt(event.clientX)].sort((a, b) => a - b);
      this.set(from, to);
    } else if (this.travelled < 4) this.choose(this.rowAt(event).row);
    this.spanned = null;
  }

  wheel(event, anyway = false) {
    const [dx, dy] = event.shiftKey ? [event.deltaX || event.deltaY, 0] : [event.deltaX, event.deltaY];
    if (Math.abs(dx) > Math.abs(dy)) this.move((dx * (event.deltaMode ? 20 : 1)) / this.width);
    // A page that cannot be scrolled past its picture is a trap: the wheel alone zooms only what was clicked.
    else if (event.ctrlKey || event.metaKey || anyway || document.activeElement === this.canvas)
      this.zoom(Math.exp(Math.max(Math.min(dy * (event.deltaMode ? 20 : 1), 240), -240) / 400), anyway ? undefined : this.timeAt(event.clientX));
    else return;
    event.preventDefault();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.to - this.from;
    const acts = {
      ArrowLeft: () => this.move(event.shiftKey ? -0.5 : -0.1),
      ArrowRight: () => this.move(event.shiftKey ? 0.5 : 0.1),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      _: () => this.zoom(2),
      Home: () => this.set(0, span),
      End: () => this.set(this.trace.span - span, this.trace.span),
      0: () => this.whole(),
      ArrowUp: () => this.thread(-1),
      ArrowDown: () => this.thread(1),
      ".": () => this.step(1),
      ",": () => this.step(-1),
      Enter: () => this.chosen >= 0 && this.show(this.chosen),
      Escape: () => this.choose(-1),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  }

  // Chooses the operation in the middle of the window in the lane above or below.
  thread(step) {
    const boxes = this.painter.boxes;
    const current = this.chosen < 0 ? -1 : boxes.findIndex(({ lane }) => lane.from <= this.chosen && this.chosen < lane.to);
    const next = current < 0 ? (step > 0 ? 0 : boxes.length - 1) : Math.min(Math.max(current + step, 0), boxes.length - 1);
    if (boxes[next]) this.nearest(boxes[next].lane);
  }

  nearest(lane) {
    const row = Math.min(this.model.first(lane, (this.from + this.to) / 2), lane.to - 1);
    const found = this.model.visible[row] ? row : Math.max(this.model.beside(lane, row, 1), this.model.beside(lane, row, -1));
    this.reveal(found);
  }

  step(by) {
    if (this.chosen < 0) return this.thread(1);
    const row = this.model.beside(this.trace.lanes[laneOf(this.trace, this.chosen)], this.chosen, by);
    if (row >= 0) this.reveal(row);
  }

  reveal(row) {
    if (row < 0) return;
    const [begin, span] = [this.trace.start[row], this.to - this.from];
    this.choose(row);
    if (begin < this.from || begin + this.trace.duration[row] > this.to) this.set(begin - span / 2, begin + span / 2);
    const box = this.painter.boxes.find(({ lane }) => lane.from <= row && row < lane.to);
    if (box) this.scroller.scrollTop = Math.min(Math.max(this.scroller.scrollTop, box.y + box.height - this.scroller.clientHeight + 4), box.y - LABEL);
  }
}
