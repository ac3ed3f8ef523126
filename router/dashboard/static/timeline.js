// When requests had a GPU: a row for each GPU, a bar for each request, coloured by where its model came from.

import { h, legend, ms, text } from "/dashboard/dom.js";

const WINDOW_S = 60, KEPT = 6000, LANE = 15, GAP = 3, TOP = 6, AXIS = 18, LEFT = 58, MOST_LANES = 8;
const SOURCES = { gpu: "on this GPU already", peer: "from another GPU", host: "from host memory", disk: "from files" };
const FIELDS = ["number", "function", "gpu", "begun", "copied", "ended", "source", "outcome", "queued"];

function where(gpu) {
  return gpu < 0 ? "no GPU" : `GPU ${gpu}`;
}

export class Timeline {
  constructor(box, name = null) {
    this.only = name; // one function's alone
    this.spans = new Map(); // by number, oldest first
    this.gpus = [];
    this.ahead_s = null; // the node's clock, less ours
    this.dropped = 0;
    this.chosen = null;
    this.visible = true;
    this.canvas = h("canvas", { tabindex: 0, role: "img", height: 60,
      "aria-label": "timeline of requests; arrow keys go from one to the next" });
    this.told = h("div", { class: "quiet", "data-timeline": true, role: "status" }, "no requests yet");
    this.pause = h("button", { type: "button", onclick: () => this.hold(), "aria-pressed": "false" }, "Pause");
    const words = Object.entries(SOURCES);
    box.append(h("div", { class: "card" }, h("div", { class: "row" }, this.told, h("span", { class: "space" }), this.pause),
      this.canvas, legend([...words.map(([kind, word]) => [kind, `model ${word}`]), ["run", "its run, after the model had come"]])));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    this.colours();
    new ResizeObserver(() => this.request()).observe(this.canvas);
    this.timer = setInterval(() => this.request(), 100);
  }

  colours() {
    const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(`--${name}`).trim();
    this.hue = Object.fromEntries(["gpu", "peer", "host", "disk", "unknown", "run", "line", "text", "quiet", "bad", "free"]
      .map((name) => [name, of(name)]));
    this.request();
  }

  shown(visible) {
    this.visible = visible;
    this.request();
  }

  clock({ now, spans }) {
    this.spans.clear(); // of before: a router that was started anew has another clock, and what was open has ended
    this.ahead_s = now - performance.now() / 1000;
    this.since_s = now; // of what was before, the last requests of each function are known, with numbers below 0
    this.add({ now, spans, dropped: 0 });
  }

  get now_s() {
    return this.held ?? performance.now() / 1000 + (this.ahead_s ?? 0);
  }

  hold() {
    const now_s = this.now_s;
    this.held = this.held === undefined ? now_s : undefined;
    this.pause.setAttribute("aria-pressed", String(this.held !== undefined));
    text(this.pause, this.held === undefined ? "Pause" : "Go on");
    this.request();
  }

  lanes(gpus) {
    if (gpus.join() === this.gpus.join()) return;
    this.gpus = gpus;
    this.request();
  }

  add({ now, spans, dropped }) {
    const ahead_s = now - performance.now() / 1000;
    this.ahead_s = Math.max(this.ahead_s ?? ahead_s, ahead_s); // what came late came late: the largest is nearest
    this.dropped += dropped;
    for (const said of spans) {
      const span = Object.fromEntries(FIELDS.map((field, index) => [field, said[index]]));
      if (this.only !== null && span.function !== this.only) continue;
      this.spans.set(span.number, span);
    }
    while (this.spans.size > KEPT) this.spans.delete(this.spans.keys().next().value);
    this.request();
  }

  request() {
    if (this.asked || !this.visible || document.hidden) return;
    this.asked = requestAnimationFrame(() => {
      this.asked = null;
      this.draw();
    });
  }

  // Places each span that is to be seen: [span, row, lane]; rows have as many lanes as overlap.
  placed(from_s, now_s) {
    const rows = new Map();
    for (const gpu of this.gpus) rows.set(Number(gpu), []);
    const placed = [];
    for (const [number, span] of this.spans) {
      const end_s = span.ended ?? now_s;
      if (end_s < from_s) {
        if (this.held === undefined) this.spans.delete(number);
        continue;
      }
      if (!rows.has(span.gpu)) rows.set(span.gpu, []);
      const lanes = rows.get(span.gpu);
      let lane = lanes.findIndex((until_s) => until_s <= span.begun);
      if (lane < 0) lane = lanes.length < MOST_LANES ? lanes.push(0) - 1 : MOST_LANES - 1;
      lanes[lane] = end_s;
      placed.push([span, span.gpu, lane]);
    }
    return { rows, placed };
  }

  draw() {
    const now_s = this.now_s, from_s = now_s - WINDOW_S;
    const { rows, placed } = this.placed(from_s, now_s);
    const order = [...rows.keys()].sort((a, b) => a - b), tops = new Map();
    const since_s = Math.max(from_s, Math.min(now_s, this.since_s ?? now_s)); // before it not all is known
    let height = TOP;
    for (const gpu of order) {
      tops.set(gpu, height);
      height += Math.max(1, rows.get(gpu).length) * (LANE + GAP) + 6;
    }
    height += AXIS;
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth || 600;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const at = (when_s) => LEFT + ((when_s - from_s) / WINDOW_S) * (width - LEFT - 6);
    const c = this.canvas.getContext("2d"), hue = this.hue;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (const gpu of order) {
      const top = tops.get(gpu), tall = Math.max(1, rows.get(gpu).length) * (LANE + GAP);
      c.fillStyle = hue.free;
      c.fillRect(at(since_s), top, width - 6 - at(since_s), tall);
      c.fillStyle = hue.text;
      c.fillText(where(gpu), 4, top + tall / 2);
    }
    c.fillStyle = hue.quiet;
    for (let back = 0; back <= WINDOW_S; back += 10) {
      c.textAlign = back === 0 ? "right" : "center";
      c.fillText(back === 0 ? "now" : `-${back} s`, back === 0 ? width - 6 : at(now_s - back), height - AXIS / 2);
    }
    c.textAlign = "left";
    this.boxes = [];
    for (const [span, gpu, lane] of placed) {
      const x = Math.max(LEFT, at(span.begun)), y = tops.get(gpu) + lane * (LANE + GAP) + 1;
      const end = Math.min(width - 6, Math.max(x + 2, at(span.ended ?? now_s)));
      const copied = Math.min(end, Math.max(x + 2, at(span.copied ?? (span.source === "gpu" ? span.begun : now_s))));
      c.fillStyle = hue[span.source] ?? hue.unknown;
      c.fillRect(x, y, end - x, LANE);
      if (span.copied !== null && end - copied > 1) {
        c.fillStyle = hue.run;
        c.fillRect(copied, y + 3, end - copied, LANE - 6);
      }
      if (span.outcome && span.outcome !== "ok") {
        c.strokeStyle = hue.bad;
        c.lineWidth = 1.5;
        c.strokeRect(x, y, end - x, LANE);
      }
      if (span.number === this.chosen) {
        c.strokeStyle = hue.text;
        c.lineWidth = 2;
        c.strokeRect(x - 1, y - 1, end - x + 2, LANE + 2);
      }
      this.boxes.push([x - 2, y, end + 2, y + LANE, span.number]);
    }
    this.say(placed);
  }

  say(placed) {
    const chosen = this.spans.get(this.chosen);
    const watched = placed.filter(([span]) => span.number > 0), before = placed.length - watched.length;
    this.told.dataset.spans = String(watched.length);
    this.told.dataset.before = String(before);
    if (chosen !== undefined) {
      const span = chosen, end_s = span.ended ?? this.now_s;
      const copied = span.copied === null ? "" : `, model there after ${ms((span.copied - span.begun) * 1000)}`;
      text(this.told, `${span.function} on ${where(span.gpu)}: queued ${ms(span.queued * 1000)}, model ` +
        `${SOURCES[span.source] ?? "from a place not known"}${copied}, ` +
        `${span.ended === null ? "running since" : "done after"} ${ms((end_s - span.begun) * 1000)}` +
        (span.outcome && span.outcome !== "ok" ? `, ${span.outcome}` : ""));
      return;
    }
    const counts = {};
    for (const [span] of watched) counts[span.source || "unknown"] = (counts[span.source || "unknown"] ?? 0) + 1;
    const parts = Object.entries(counts).map(([source, count]) => `${count} ${SOURCES[source] ?? "from a place not known"}`);
    const running = watched.filter(([span]) => span.ended === null).length;
    const watched_s = Math.max(0, Math.min(WINDOW_S, Math.floor(this.now_s - (this.since_s ?? this.now_s))));
    const during = watched_s < WINDOW_S ? `the ${watched_s} s that this page has watched` : `${WINDOW_S} s`;
    text(this.told, `${watched.length} request${watched.length === 1 ? "" : "s"} in ${during}` + (parts.length ? `: model ${parts.join(", ")}` : "") +
      (running ? `; ${running} running` : "") + (before ? `; ${before} of the last ones before it` : "") + (this.dropped ? `; ${this.dropped} more were too many to show` : ""));
  }

  point(event) {
    const hit = (this.boxes ?? []).findLast(([x, y, to_x, to_y]) =>
      event.offsetX >= x && event.offsetX <= to_x && event.offsetY >= y && event.offsetY <= to_y);
    this.chosen = hit === undefined ? null : hit[4];
    this.request();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.chosen = null;
    else if (by !== undefined) {
      const numbers = [...this.spans.keys()], at = numbers.indexOf(this.chosen);
      this.chosen = numbers[at < 0 ? (by < 0 ? numbers.length - 1 : 0) : Math.max(0, Math.min(numbers.length - 1, at + by))] ?? null;
    } else return;
    event.preventDefault();
    this.request();
  }
}
