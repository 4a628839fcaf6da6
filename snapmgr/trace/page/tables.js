// The sums of the window as tables: for those who want numbers, and for those who cannot see the picture.
const MOST = 12;

class Tables {
  constructor(trace, model, painter, show) {
    Object.assign(this, { trace, model, painter, show });
  }

  async fill(from, to) {
    const { trace } = this;
    const asked = (this.asked = (this.asked ?? 0) + 1);
    const sums = await this.model.sums(from, to, MOST, () => asked !== this.asked);
    if (sums === null) return;
    const all = sums.names;
    const [us, bytes] = [all.reduce((sum, each) => sum + each.us, 0), all.reduce((sum, each) => sum + each.bytes, 0)];
    byId("scope").textContent =
      `In view, ${lasting(to - from)} from ${moment(from, (to - from) / 100)}: ${count(sums.rows)} operations that began there, ` +
      `${size(bytes)}, ${lasting(us)} in operations, ${round(us / (to - from))} at once on average.`;
    const latencies = (sum) => [0.5, 0.95, 0.99].map((share) => lasting(sum.latencies.percentile(share)));
    this.table(
      "by-name",
      ["Operation", "Count", "Bytes", "Time", "At once", "p50", "p95", "p99", "Longest", "Errors"],
      ranked(sums.names, "us", Infinity).map((sum) => [
        this.named(sum.key), count(sum.count), sum.bytes ? size(sum.bytes) : "", lasting(sum.us), atOnce(sum.us / (to - from)),
        ...latencies(sum), lasting(sum.latencies.most), sum.failed ? count(sum.failed) : "",
      ]),
    );
    const columns = ["Count", "Bytes", "Time", "At once", "Errors"];
    const cells = (sum) => [count(sum.count), sum.bytes ? size(sum.bytes) : "", lasting(sum.us), atOnce(sum.us / (to - from)), sum.failed ? count(sum.failed) : ""];
    this.table("by-thread", ["Thread", ...columns], ranked(sums.threads, "us", MOST).map((sum) => [threadName(trace, sum.key), ...cells(sum)]), sums.threads.length);
    this.table("by-file", ["File", ...columns], ranked(sums.files, "us", MOST).map((sum) => [fileName(trace, sum.key), ...cells(sum)]), sums.files.length);
    this.table(
      "longest",
      ["Operation", "Latency", "Start", "Thread", "-File", "-Extent", "-Status", ""],
      sums.longest.map((row) => [
        this.named(trace.name[row]), lasting(trace.duration[row]), moment(trace.start[row], 1000), threadName(trace, trace.lanes[laneOf(trace, row)].thread),
        fileName(trace, trace.file[row]), extent(trace, row), trace.statuses[trace.status[row]], this.button(row),
      ]),
      sums.rows,
    );
  }

  // A column whose title begins with "-" is text, aligned to the left; so is the first.
  table(id, titles, rows, total = rows.length) {
    const left = titles.map((title, column) => title.startsWith("-") || column === 0);
    const head = element("tr", {}, ...titles.map((title, column) => element("th", { scope: "col", class: left[column] ? "left" : "" }, title.replace(/^-/, ""))));
    const body = rows.map((cells) =>
      element("tr", {}, ...cells.map((cell, column) => {
        const made = element(column ? "td" : "th", left[column] ? { class: "left path" } : {}, cell);
        if (!column) made.setAttribute("scope", "row");
        if (left[column] && typeof cell === "string") made.title = cell;
        return made;
      })),
    );
    if (!rows.length) body.push(element("tr", {}, element("td", { colspan: titles.length }, "nothing in view")));
    const table = byId(id);
    table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
    if (total > rows.length) table.append(element("tfoot", {}, element("tr", {}, element("td", { colspan: titles.length, class: "quiet" }, `and ${count(total - rows.length)} more`))));
  }

  named(name) {
    const swatch = element("i");
    swatch.style.color = this.painter.kinds[name];
    const made = document.createDocumentFragment();
    made.append(swatch, this.trace.names[name]);
    return made;
  }

  button(row) {
    const made = element("button", { type: "button", "aria-label": `Show this ${this.trace.names[this.trace.name[row]]} in the timeline` }, "show");
    made.addEventListener("click", () => this.show(row));
    return made;
  }
}

// Parallel operations add up, so that this is no share of the time.
const atOnce = (number) => (number < 0.0005 ? "0" : number.toFixed(number < 0.0995 ? 3 : 2));
const ranked = (sums, by, most) => [...sums].sort((a, b) => b[by] - a[by] || b.count - a.count).slice(0, most);
