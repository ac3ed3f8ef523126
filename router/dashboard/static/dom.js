// Elements and words. Whatever functions have written is set as text, never as markup.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

export const byId = (id) => document.getElementById(id);

export function text(element, value) {
  const said = value === null || value === undefined ? "" : String(value);
  if (element.textContent !== said) element.textContent = said;
}

export function size(nbytes) {
  if (nbytes === null || nbytes === undefined) return "";
  for (const [unit, step] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (nbytes >= step) return `${(nbytes / step).toPrecision(3)} ${unit}`;
  return `${nbytes} B`;
}

export function ms(value) {
  if (value === null || value === undefined) return "";
  return value < 1000 ? `${value.toFixed(1)} ms` : `${(value / 1000).toFixed(2)} s`;
}

export const percent = (share) => (share === null || share === undefined ? "" : `${(share * 100).toFixed(1)}%`);

const hues = new Map();
export function colour(name) {
  let said = hues.get(name);
  if (said === undefined) {
    let hash = 2166136261;
    for (let i = 0; i < name.length; i++) hash = Math.imul(hash ^ name.charCodeAt(i), 16777619);
    hash ^= hash >>> 15;
    said = `hsl(${(hash >>> 0) % 360} ${52 + ((hash >>> 9) % 20)}% ${50 + ((hash >>> 17) % 14)}%)`;
    hues.set(name, said);
  }
  return said;
}

// One tab stop for a row of elements: arrow keys, Home and End go along it.
export function roving(box) {
  box.addEventListener("keydown", (event) => {
    const all = [...box.querySelectorAll("[data-stop]")], at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(all.length - 1, to))];
    for (const each of all) each.tabIndex = each === next ? 0 : -1;
    next.focus();
  });
}

export const link = (name) => `#/f/${encodeURIComponent(name)}`;

export const legend = (entries) =>
  h("div", { class: "legend" }, entries.map(([kind, word]) => h("span", {}, h("i", { class: `s-${kind}` }), word)));
