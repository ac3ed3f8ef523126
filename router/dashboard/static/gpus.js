// GPUs as maps of their memory: whose weights, KV, activations, what is lost, what is free.

import { colour, h, legend, link, percent, roving, size, text } from "/dashboard/dom.js";

const LEAST = 0.004; // of a map: what is smaller is shown together

export class Gpus {
  constructor(box) {
    this.box = box;
    this.cards = new Map();
    this.names = new Set(); // also of those that are gone for now
    this.note = h("p", { class: "quiet", hidden: true }, "This key sees its own functions, and no GPUs.");
    this.legend = legend([
      ["kv", "KV"], ["activations", "activations"], ["lost", "lost to rounding"], ["free", "free"],
    ]);
    this.legend.prepend(h("span", {}, "Weights have the colour of their function."));
    box.append(this.note);
    box.after(this.legend);
  }

  all(state) {
    this.names = new Set(Object.keys(state.gpus));
    for (const [name, card] of this.cards) if (!this.names.has(name)) this.drop(name, card);
  }

  drop(name, card) {
    card.root.remove();
    this.cards.delete(name);
  }

  draw(state) {
    this.note.hidden = state.whole;
    for (const role of [...(state.node.gone ?? [])]) if (/^gpu\d+$/.test(role)) this.names.add(role.slice(3));
    for (const name of Object.keys(state.gpus)) this.names.add(name);
    const on = new Map([...this.names].map((name) => [name, []]));
    for (const [name, row] of Object.entries(state.functions))
      for (const [gpu, nbytes] of Object.entries(row.gpu_nbytes ?? {})) if (nbytes) on.get(gpu)?.push([name, nbytes]);
    for (const name of [...this.names].sort((a, b) => a - b)) {
      let card = this.cards.get(name);
      if (card === undefined) {
        card = this.card(name);
        this.cards.set(name, card);
        const after = [...this.cards.keys()].filter((each) => each - name > 0).sort((a, b) => a - b)[0];
        this.box.insertBefore(card.root, after === undefined ? null : this.cards.get(after).root);
      }
      this.fill(card, name, state.gpus[name], on.get(name));
    }
  }

  card(name) {
    const card = {
      state: h("span", { class: "pill" }),
      what: h("span", { class: "quiet" }),
      used: h("span"),
      map: h("div", { class: "map", role: "group", "aria-label": `memory of GPU ${name}` }),
      turn: h("div", { class: "legend" }),
      stops: new Map(),
    };
    roving(card.map);
    const top = h("div", { class: "top" }, h("strong", {}, `GPU ${name}`), card.state, card.what,
      h("span", { class: "space" }), card.used);
    card.root = h("div", { class: "card", "data-gpu": name }, top, card.map, card.turn);
    return card;
  }

  fill(card, name, gpu, weights) {
    const dead = gpu === undefined || !gpu.capacity_nbytes;
    card.root.classList.toggle("dead", dead);
    card.root.dataset.state = dead ? "down" : "up";
    card.root.dataset.epoch = gpu?.epoch ?? "";
    card.state.className = `pill ${dead ? "bad" : "good"}`;
    text(card.state, dead ? "down" : "up");
    if (dead) {
      text(card.used, "");
      card.map.replaceChildren();
      card.stops.clear();
      text(card.turn, "Its executor is started again; models come back from host memory.");
      return;
    }
    text(card.what, [gpu.name, gpu.pool && `pool ${gpu.pool}`].filter(Boolean).join(", "));
    text(card.used, `${size(gpu.capacity_nbytes - gpu.free_nbytes)} of ${size(gpu.capacity_nbytes)}`);
    text(card.turn, said(gpu));
    const all = gpu.capacity_nbytes, total = weights.reduce((sum, [, nbytes]) => sum + nbytes, 0);
    const scale = total > gpu.weights_nbytes ? gpu.weights_nbytes / total : 1; // shared bytes count for each function
    const segments = [];
    let small = 0, count = 0;
    for (const [key, nbytes] of weights.sort((a, b) => b[1] - a[1])) {
      if ((nbytes * scale) / all < LEAST) {
        small += nbytes * scale;
        count += 1;
      } else segments.push([`f:${key}`, key, nbytes * scale, `${key}: weights, ${size(nbytes)}`, colour(key), ""]);
    }
    if (small) segments.push(["small", "", small, `${count} functions more: weights, ${size(small)}`, "", "s-unknown"]);
    const rest = gpu.weights_nbytes - total * scale;
    if (rest / all > LEAST) segments.push(["rest", "", rest, `weights of no function now, ${size(rest)}`, "", "s-unknown"]);
    for (const [kind, word] of [["kv", "KV"], ["activation", "activations"], ["lost", "lost to rounding"], ["free", "free"]]) {
      const nbytes = gpu[`${kind}_nbytes`];
      const largest = kind === "free" && nbytes ? `, the largest run ${size(gpu.largest_free_nbytes)}` : "";
      if (nbytes > 0)
        segments.push([kind, "", nbytes, `${word}, ${size(nbytes)}${largest}`, "", `s-${word.split(" ")[0].toLowerCase()}`]);
    }
    const had = card.map.contains(document.activeElement) ? document.activeElement.dataset.stop : null;
    const stops = new Map();
    for (const [key, name_, nbytes, title, hue, kind] of segments) {
      const stop = card.stops.get(key) ?? this.stop(key, name_, hue, kind);
      stop.style.flexGrow = String(nbytes / all);
      if (stop.title !== title) {
        stop.title = title;
        stop.setAttribute("aria-label", `${title}, ${percent(nbytes / all)}`);
      }
      stops.set(key, stop);
    }
    const now = [...stops.values()];
    if (now.length !== card.map.children.length || now.some((stop, index) => card.map.children[index] !== stop))
      card.map.replaceChildren(...now);
    card.stops = stops;
    const first = stops.get(had) ?? now.find((stop) => stop.tabIndex === 0) ?? now[0];
    for (const stop of now) stop.tabIndex = stop === first ? 0 : -1;
    if (had !== null && first) first.focus();
  }

  stop(key, name, hue, kind) {
    const go = () => name && (location.hash = link(name));
    const stop = h("div", {
      class: kind, "data-stop": key, role: name ? "link" : "img", onclick: go,
      onkeydown: (event) => event.key === "Enter" && go(),
    });
    if (hue) stop.style.backgroundColor = hue;
    if (name) stop.style.cursor = "pointer";
    stop.style.flexBasis = "0";
    return stop;
  }
}

function said(gpu) {
  const turns = (gpu.turns ?? []).map((turn) => turn.function + (turn.idle ? " (idle)" : ""));
  const seats = [...(gpu.seats ?? [])];
  for (const turn of gpu.turns ?? []) if (seats.includes(turn.function)) seats.splice(seats.indexOf(turn.function), 1);
  const parts = [turns.length ? `turn: ${turns.join(", ")}` : "nobody has a turn"];
  if (seats.length) parts.push(`seats without a turn: ${seats.join(", ")}`);
  if (gpu.fragmentation > 0.2) parts.push(`free memory in pieces: ${percent(gpu.fragmentation)}`);
  return parts.join("; ");
}
