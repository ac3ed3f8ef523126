// Brings the stream to the parts of the page. The state is what the node has said last.

import { byId, h, text } from "/dashboard/dom.js";
import { keys, refusal, watch } from "/dashboard/stream.js";
import { Gpus } from "/dashboard/gpus.js";
import { Timeline } from "/dashboard/timeline.js";
import { Hour } from "/dashboard/hour.js";
import { Functions } from "/dashboard/functions.js";
import { One } from "/dashboard/one.js";

const state = { node: {}, problems: [], store: {}, gpus: {}, functions: {}, whole: true, rights: [] };
const parts = { gpus: new Gpus(byId("gpus")), timeline: new Timeline(byId("timeline")), hour: new Hour(byId("hour")) };
const functions = new Functions(byId("table"));
const one = new One(byId("one"), state, ask);
const NOTED_MS = 60000; // how long it is said that a process was started again
let connected = false, drawn = true;

function event(name, value) {
  if (name === "snapshot") {
    for (const part of ["node", "problems", "store", "gpus", "functions", "whole", "rights"]) state[part] = value[part];
    parts.timeline.clock(value);
    parts.hour.all(value);
    parts.gpus.all(state);
    functions.all(state.functions);
  } else if (name === "change") {
    for (const part of ["node", "problems", "store"]) if (value[part] !== undefined) state[part] = value[part];
    for (const part of ["gpus", "functions"])
      for (const [key, row] of Object.entries(value[part] ?? {}))
        if (row === null) delete state[part][key];
        else state[part][key] = row;
    if (value.minutes !== undefined) parts.hour.changed(value.minutes);
    for (const key of Object.keys(value.functions ?? {})) functions.changed(key, state.functions[key]);
  } else if (name === "spans") {
    parts.timeline.add(value);
    return;
  }
  if (drawn) {
    drawn = false;
    requestAnimationFrame(draw);
  }
}

const lately = new Map(); // by process: when it ended, and when it was back
function processes() {
  const gone = state.node.gone ?? [], now = Date.now();
  for (const role of gone) if ((lately.get(role) ?? { back: 0 }).back !== null) lately.set(role, { ended: now, back: null });
  for (const [role, each] of lately) {
    if (each.back === null && !gone.includes(role)) {
      each.back = now;
      setTimeout(draw, NOTED_MS + 100);
    }
    if (each.back !== null && now - each.back > NOTED_MS) lately.delete(role);
  }
  return [...lately].filter(([, each]) => each.back !== null).map(([role, each]) =>
    `${role} ended at ${new Date(each.ended).toLocaleTimeString()} and was up again ${((each.back - each.ended) / 1000).toFixed(1)} s later`);
}

function draw() {
  drawn = true;
  const node = state.node, notes = [...processes(), ...(state.node.intended ?? [])];
  document.title = `${state.problems.length ? `(${state.problems.length}) ` : ""}${node.name ?? "Dormouse"}`;
  text(byId("node"), [node.name, node.address].filter(Boolean).join(" at "));
  const box = byId("problems");
  box.className = state.problems.length ? "bad" : "";
  box.replaceChildren(
    ...(state.problems.length + notes.length // a process that has died first: all else may come of it
      ? [h("ul", {}, [...notes, ...state.problems].map((problem) => h("li", {}, problem)))]
      : connected ? [h("span", {}, "Nothing is wrong.")] : []),
  );
  parts.gpus.draw(state);
  parts.timeline.lanes(Object.keys(state.gpus));
  functions.draw();
  one.draw();
}

// --- a link of `dormouse dashboard`: its ticket is good once, so the browser's history shall not have it

let used = ""; // why the link is good no more
const ticket = location.hash.match(/^#ticket=(dt_[0-9a-f]+)$/);
if (ticket) {
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("/dashboard/session", {
    method: "POST", headers: { "x-dormouse-ticket": ticket[1] }, credentials: "omit", cache: "no-store",
  });
  if (answer.ok) keys.set((await answer.json()).key);
  else used = await refusal(answer);
}

const [restart, stop] = watch({
  event,
  state(word, why) {
    connected = word === "connected";
    const pill = byId("link");
    pill.className = `pill ${connected ? "good" : "bad"}`;
    text(pill, word === "lost" ? `not connected: ${why}` : word === "refused" ? "needs a key" : "live");
    if (word === "refused") ask(used || why);
    else if (connected) byId("ask").hidden = true;
  },
});

// --- the key

function ask(why) {
  text(byId("why"), why);
  byId("ask").hidden = false;
  byId("secret").focus();
}

byId("ask").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  keys.set(byId("secret").value.trim());
  byId("secret").value = "";
  byId("ask").hidden = true;
  used = "";
  restart();
  one.again();
});
byId("unask").addEventListener("click", () => (byId("ask").hidden = true));
byId("key").addEventListener("click", () =>
  ask(keys.get() ? "This tab has a key. Another one, or none:" : "A key for this node:"));

// --- dark and light

const root = document.documentElement;
function theme(word) {
  if (word) root.dataset.theme = word;
  parts.timeline.colours();
}
theme(localStorage.getItem("dormouse-theme"));
byId("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("dormouse-theme", dark ? "light" : "dark");
  theme(dark ? "light" : "dark");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => parts.timeline.colours());

// --- places

function place() {
  if (location.hash.startsWith("#ticket=")) return location.reload();
  const match = location.hash.match(/^#\/f\/(.+)$/);
  let name = null;
  try {
    name = match && decodeURIComponent(match[1]);
  } catch {
    // no name: the overview
  }
  byId("home").hidden = Boolean(name);
  one.show(name);
  parts.timeline.shown(!name);
}
addEventListener("hashchange", place);
addEventListener("keydown", (pressed) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
  if (pressed.key === "/" && !typing && !byId("home").hidden) {
    pressed.preventDefault();
    functions.search();
  } else if (pressed.key === "Escape" && !byId("one").hidden && !typing) location.hash = "#";
});

// --- a tab that nobody looks at costs the node nothing, and leaves the browser its few connections to it

const HIDDEN_MS = 10000;
let asleep = false, hiding = 0;
function sleep() {
  asleep = true;
  stop();
  one.rest();
}
function wake() {
  clearTimeout(hiding);
  if (!asleep) return;
  asleep = false;
  restart();
  one.again();
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) hiding = setTimeout(sleep, HIDDEN_MS);
  else wake();
});
addEventListener("pagehide", sleep);
addEventListener("pageshow", wake);

place();
restart();
