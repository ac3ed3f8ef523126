// The functions: what is wrong first, filtered and sorted; a plain table, of which only what changed is written.

import { byId, colour, h, link, ms, percent, size, text } from "/dashboard/dom.js";

const LATER_MS = 1000; // rows change places no more often than this

const latency = (row) => row.llm?.ttft_ms?.p99 ?? row.p99_ms;
const wanted = (row) => row.llm?.wanted_ttft_ms ?? row.deadline_ms;
const wrong = (row) => (row.broken ? 0 : row.failing ? 1 : row.late ? 2 : row.running + row.queued ? 3 : 4);
const said = (row) => (row.failing && !row.broken ? `${row.state}, fails` : row.state);
const on = (row) => Object.keys(row.gpu_nbytes ?? {}).filter((gpu) => row.gpu_nbytes[gpu]);
const where = (row) => {
  const gpus = on(row);
  const parts = gpus.length ? [`GPU ${gpus.join(", ")}`] : [];
  if (row.host_nbytes) parts.push("host");
  if (row.file_nbytes) parts.push("files");
  return parts.join(", ");
};

// title, class, what it says, what it is sorted by; the greatest first where `down`
const COLUMNS = [
  ["function", "name", null, (row, name) => name],
  ["state", "", (row) => (row.deploying ? `${said(row)}, deploying` : said(row)), (row) => row.state],
  ["queue", "n", (row) => row.queued || "", (row) => row.queued, true],
  ["running", "n", (row) => row.running || "", (row) => row.running, true],
  ["requests", "n", (row) => row.requests || "", (row) => row.requests, true],
  ["errors", "n errors", (row) => row.errors || "", (row) => row.errors, true],
  ["p50", "n", (row) => ms(row.llm?.ttft_ms?.p50 ?? row.p50_ms), (row) => row.llm?.ttft_ms?.p50 ?? row.p50_ms ?? -1, true],
  ["p99", "n time", (row) => ms(latency(row)), (row) => latency(row) ?? -1, true],
  ["deadline", "n", (row) => ms(wanted(row)), (row) => wanted(row)],
  ["in time", "n time", (row) => (row.counted ? percent(row.in_time) : ""), (row) => row.in_time ?? 2],
  ["model", "n", (row) => (row.nbytes ? size(row.nbytes) : ""), (row) => row.nbytes ?? 0, true],
  ["where", "", where, where],
  ["wakes", "n", (row) => row.wakes || "", (row) => row.wakes ?? 0, true],
  ["error", "what", (row) => row.why ?? "", (row) => (row.error ? 0 : 1)],
];


export class Functions {
  constructor(box) {
    this.rows = new Map();
    this.data = {};
    this.sort = null; // a column; null: what is wrong first
    this.turned = false;
    this.placed_ms = -Infinity;
    this.order = "";
    this.filter = h("input", { type: "search", placeholder: "Filter by name, state, tenant or error ( / )",
      "aria-label": "filter functions", oninput: () => this.place(true) });
    this.only = h("select", { "aria-label": "which functions", onchange: () => this.place(true) },
      [["all", "all"], ["wrong", "what is wrong"], ["busy", "busy"], ["gpu", "on a GPU"]].map(([value, word]) =>
        h("option", { value }, word)));
    this.count = h("span", { class: "quiet", role: "status" });
    this.first = h("button", { type: "button", onclick: () => this.by(null) }, "What is wrong first");
    this.heads = COLUMNS.map(([title, kind], index) => h("th", { class: kind, scope: "col" },
      h("button", { type: "button", onclick: () => this.by(index) }, title)));
    this.body = h("tbody");
    this.table = h("table", {}, h("thead", {}, h("tr", {}, this.heads)), this.body);
    box.append(h("div", { class: "row" }, this.filter, this.only, this.first, this.count), h("div", { class: "wide" }, this.table));
  }

  search() {
    this.filter.focus();
  }

  by(index) {
    this.turned = index !== null && index === this.sort && !this.turned;
    this.sort = index;
    for (const [at, head] of this.heads.entries())
      if (at === index) head.setAttribute("aria-sort", Boolean(COLUMNS[at][4]) !== this.turned ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    this.place(true);
  }

  all(data) {
    this.data = data;
    for (const name of this.rows.keys()) if (data[name] === undefined) this.rows.delete(name);
    for (const name of Object.keys(data)) this.changed(name, data[name]);
    this.order = "";
    this.due = true;
  }

  changed(name, row) {
    this.due = true;
    if (row === undefined) {
      this.rows.get(name)?.element.remove();
      this.rows.delete(name);
      return;
    }
    let known = this.rows.get(name);
    if (known === undefined) {
      known = this.make(name);
      this.rows.set(name, known);
    }
    known.element.className = row.broken || row.failing ? "broken" : row.late ? "late" : "";
    for (const [index, [, , say]] of COLUMNS.entries()) if (say !== null) text(known.cells[index], say(row));
    const error = known.cells[COLUMNS.length - 1];
    if (error.title !== (row.error ?? "")) error.title = row.error ?? "";
  }

  make(name) {
    const dot = h("i", { class: "dot" });
    dot.style.backgroundColor = colour(name);
    const cells = COLUMNS.map(([title, kind, say]) => say === null
      ? h("td", { class: kind, title: name }, dot, h("a", { href: link(name) }, name)) : h("td", { class: kind, "data-column": title }));
    return { cells, element: h("tr", { "data-function": name }, cells) };
  }

  draw() {
    if (this.due && performance.now() - this.placed_ms >= LATER_MS) this.place(false);
    else if (this.due && !this.later)
      this.later = setTimeout(() => {
        this.later = null;
        if (this.due) this.place(false);
      }, LATER_MS);
  }

  keeps(name, row) {
    const only = this.only.value, words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (only === "wrong" && wrong(row) > 2) return false;
    if (only === "busy" && !(row.running + row.queued)) return false;
    if (only === "gpu" && !on(row).length) return false;
    const text = words.length ? `${name} ${said(row)} ${row.tenant} ${where(row)} ${row.error ?? ""}`.toLowerCase() : "";
    return words.every((word) => text.includes(word));
  }

  compare([name, row], [other, than]) {
    if (this.sort === null)
      return wrong(row) - wrong(than) || than.running + than.queued - row.running - row.queued ||
        than.requests - row.requests || (name < other ? -1 : 1);
    const [, , , value, down] = COLUMNS[this.sort], own = value(row, name), its = value(than, other);
    const sign = Boolean(down) !== this.turned ? -1 : 1;
    return (own < its ? -sign : own > its ? sign : 0) || (name < other ? -1 : 1);
  }

  // `asked`: by the person, who then also wants to see it now.
  place(asked) {
    const moving = this.body.contains(document.activeElement);
    this.due = moving && !asked; // a row that has the focus does not run away
    this.placed_ms = performance.now();
    const all = Object.entries(this.data), seen = all.filter(([name, row]) => this.keeps(name, row));
    if (moving && !asked && this.body.children.length) {
      const there = new Set([...this.body.children]);
      for (const [name] of seen) if (!there.has(this.rows.get(name).element)) this.body.append(this.rows.get(name).element);
      return;
    }
    seen.sort((one, other) => this.compare(one, other));
    const order = JSON.stringify(seen.map(([name]) => name));
    if (order !== this.order) {
      this.order = order;
      this.body.replaceChildren(...seen.map(([name]) => this.rows.get(name).element));
    }
    const bad = all.filter(([, row]) => wrong(row) < 3).length;
    text(this.count, `${seen.length === all.length ? all.length : `${seen.length} of ${all.length}`}` +
      (bad ? `, ${bad} broken, failing or late` : ""));
    text(byId("functions-title"), `Functions (${all.length})`);
  }
}
