// What became of requests, a bar for each minute of the last hour; what the node cannot know is a gap, not nothing.

import { h, legend, roving, text } from "/dashboard/dom.js";

const KEPT = 60, MINUTE_S = 60; // as router/front/minutes.py has them
const KINDS = [["gpu", "in time"], ["late", "late"], ["failed", "failed"], ["unknown", "turned away, given up or asked wrongly"]];
const sum = (counts) => counts.reduce((all, count) => all + count, 0);
const words = (counts) => KINDS.flatMap(([, word], at) => (counts[at] ? [`${counts[at]} ${word}`] : [])).join(", ");

export class Hour {
  constructor(box) {
    this.minutes = {}; // [of each kind], by minute of the node's clock
    this.told = h("div", { class: "quiet", "data-hour": true, role: "status" });
    this.chosen = null;
    this.bars = Array.from({ length: KEPT }, () => this.bar());
    this.map = h("div", { class: "hour", role: "group", "aria-label": "requests by minute; arrow keys go from one to the next" }, this.bars);
    roving(this.map);
    this.card = h("div", { class: "card" }, this.told, this.map, legend([...KINDS, ["gap", "before the router's start: not known"]]));
    box.append(this.card);
    this.timer = setInterval(() => this.draw(), 5000);
  }

  bar() {
    const parts = KINDS.map(([kind]) => h("i", { class: `s-${kind}` }));
    const bar = h("div", { "data-stop": "minute", role: "img", tabindex: -1 }, [...parts].reverse());
    bar.parts = parts;
    const choose = (chosen) => () => {
      this.chosen = chosen;
      this.say();
    };
    for (const event of ["mouseenter", "focus"]) bar.addEventListener(event, choose(bar));
    for (const event of ["mouseleave", "blur"]) bar.addEventListener(event, choose(null));
    return bar;
  }

  rest() {
    clearInterval(this.timer);
  }

  all({ now, since, minutes }) {
    [this.ahead_s, this.since_s] = [now - performance.now() / 1000, since];
    this.minutes = { ...minutes };
    this.draw();
  }

  changed(minutes) {
    for (const [minute, counts] of Object.entries(minutes))
      if (counts === null) delete this.minutes[minute];
      else this.minutes[minute] = counts;
    this.draw();
  }

  draw() {
    if (this.ahead_s === undefined || document.hidden) return;
    const now_s = performance.now() / 1000 + this.ahead_s;
    const newest = Math.max(Math.floor(now_s / MINUTE_S), ...Object.keys(this.minutes).map(Number));
    const first = Math.floor(this.since_s / MINUTE_S), shown = this.bars.map((_, at) => newest - KEPT + 1 + at);
    const counts = shown.map((minute) => this.minutes[minute] ?? [0, 0, 0, 0]), most = Math.max(1, ...counts.map(sum));
    for (const [at, bar] of this.bars.entries()) {
      const gap = shown[at] < first, clock = new Date(Date.now() - (now_s - shown[at] * MINUTE_S) * 1000);
      const said = `${clock.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })}: ` +
        (gap ? "not known, before the router's start" : words(counts[at]) || "no requests");
      bar.classList.toggle("s-gap", gap);
      bar.tabIndex = (this.chosen ?? this.bars.at(-1)) === bar ? 0 : -1;
      for (const [kind, part] of bar.parts.entries()) {
        const height = `${(100 * counts[at][kind]) / most}%`;
        if (part.style.height !== height) {
          part.style.height = height;
          part.style.minHeight = counts[at][kind] ? "2px" : "0"; // one failure of thousands is seen
        }
      }
      if (bar.title !== said) {
        bar.title = said;
        bar.setAttribute("aria-label", said);
      }
    }
    const all = KINDS.map((_, kind) => counts.reduce((count, each) => count + each[kind], 0));
    const known = newest - first + 1, during = known >= KEPT ? "the last hour"
      : `the ${Math.max(0, Math.round((now_s - this.since_s) / MINUTE_S))} min since the router's start; before that nothing is known`;
    this.whole = `${sum(all)} request${sum(all) === 1 ? "" : "s"} in ${during}` + (sum(all) ? `: ${words(all)}` : "");
    this.say();
  }

  say() {
    text(this.told, this.chosen?.title ?? this.whole);
  }
}
