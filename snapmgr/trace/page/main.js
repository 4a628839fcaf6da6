// Puts the page together.
function themed(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

async function main() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  themed(dark.matches ? "dark" : "light");
  if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot unpack the operations: it is older than 2023");
  const trace = await unpack(byId("data").textContent);
  byId("data").remove();
  const facts = `${count(trace.count)} operations of ${count(new Set(trace.lanes.map((lane) => lane.thread)).size)} threads in ${lasting(trace.span)}`;
  byId("facts").textContent = trace.count ? (trace.compared ? `${facts}, both from 0 s on` : `${facts}, from ${stamp(trace, 0)}`) : "The trace holds no operation.";
  byId("hatched").hidden = !trace.holes.length;
  const model = new Model(trace);
  const painter = new Painter(trace, model);
  const view = new View(trace, model, painter);
  const tables = new Tables(trace, model, painter, (row) => view.show(row));
  view.settled = () => {
    tables.fill(view.from, view.to);
    byId("window").textContent = `${lasting(view.to - view.from)} from ${moment(view.from, (view.to - view.from) / 100)}`;
  };
  const recolour = (theme) => {
    if (theme) themed(theme);
    painter.recolour();
    chips(trace, model, painter, changed);
    view.paint();
    view.settled();
  };
  const changed = () => {
    model.apply();
    painter.overviewImage = null;
    painter.layout();
    view.choose(view.chosen >= 0 && model.visible[view.chosen] ? view.chosen : -1);
    byId("shown").textContent = model.shown === trace.count ? "all operations" : `${count(model.shown)} of ${count(trace.count)} operations`;
    view.set(view.from, view.to);
  };
  buttons(view, recolour);
  dark.addEventListener("change", (event) => recolour(event.matches ? "dark" : "light"));
  printing(recolour);
  filters(trace, model, changed);
  recolour();
  changed();
}

function buttons(view, recolour) {
  const press = (id, act) => byId(id).addEventListener("click", act);
  press("back", () => view.move(-0.3));
  press("forth", () => view.move(0.3));
  press("closer", () => view.zoom(0.5));
  press("farther", () => view.zoom(2));
  press("whole", () => view.whole());
  const toggle = () => recolour(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  press("theme", toggle);
  press("help-open", () => byId("help").showModal());
  addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, select, textarea") || byId("help").open;
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = { "?": () => byId("help").showModal(), "/": () => byId("file").focus(), t: toggle };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  });
}

// Paper is white, whatever the screen is.
function printing(recolour) {
  let before = null;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    recolour("light");
  });
  addEventListener("afterprint", () => recolour(before));
}

// The legend, whose entries can be switched off.
function chips(trace, model, painter, changed) {
  const counts = new Array(trace.names.length).fill(0);
  for (let row = 0; row < trace.count; row++) counts[trace.name[row]] += 1;
  const order = [...counts.keys()].sort((a, b) => counts[b] - counts[a]);
  const made = order.map((name) => {
    const swatch = element("i");
    swatch.style.color = painter.kinds[name];
    const chip = element("button", { type: "button", "aria-pressed": !model.filter.names.has(name) }, swatch, trace.names[name], element("small", {}, count(counts[name])));
    chip.addEventListener("click", () => {
      if (!model.filter.names.delete(name)) model.filter.names.add(name);
      chip.setAttribute("aria-pressed", !model.filter.names.has(name));
      changed();
    });
    return chip;
  });
  byId("chips").replaceChildren(...made);
}

function filters(trace, model, changed) {
  const { filter } = model;
  const threads = [...new Set(trace.lanes.map((lane) => lane.thread))].slice(0, 2000);
  byId("thread").append(...threads.map((thread) => element("option", { value: thread }, threadName(trace, thread))));
  byId("files").append(...trace.files.filter(([, path]) => path).slice(0, 500).map(([, path]) => element("option", { value: path })));
  const read = () => {
    filter.thread = byId("thread").value;
    filter.file = byId("file").value;
    filter.least_us = Number(byId("least").value || 0) * 1000;
    filter.failed = byId("failed").checked;
    changed();
  };
  let timer = 0;
  for (const id of ["thread", "file", "least", "failed"])
    byId(id).addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(read, 120);
    });
  byId("reset").addEventListener("click", () => {
    filter.names.clear();
    for (const id of ["thread", "file", "least"]) byId(id).value = "";
    byId("failed").checked = false;
    for (const chip of byId("chips").children) chip.setAttribute("aria-pressed", true);
    read();
  });
}

main().catch((error) => {
  byId("facts").textContent = "";
  byId("trouble").hidden = false;
  byId("trouble").textContent = `The operations cannot be shown: ${error.message}.`;
});
