// One function: how it does, its log, its last errors, and a form to try it.

import { h, ms, percent, size, text } from "/dashboard/dom.js";
import { example, resolved } from "/dashboard/schema.js";
import { Hour } from "/dashboard/hour.js";
import { call, events, pieces, refusal } from "/dashboard/stream.js";

const LOG_CHARACTERS = 200_000; // what is older is not kept here; the node has it
const BEGIN = 200; // lines of the log
const HOUR_MS = 5000; // between two looks at the last hour, while requests come

export class One {
  constructor(box, state, ask) {
    this.box = box;
    this.state = state;
    this.ask = ask;
    this.name = null;
  }

  rest() {
    this.following?.abort();
    clearTimeout(this.looking);
    this.looking = null;
  }

  show(name) {
    this.rest();
    this.trying?.abort();
    this.hour?.rest();
    this.name = name;
    this.box.hidden = name === null;
    if (name === null) {
      this.hour = null;
      this.box.replaceChildren();
      return;
    }
    const hours = h("div");
    this.hour = new Hour(hours);
    this.seen = {};
    this.facts = h("dl", { class: "facts" });
    this.error = h("pre", { hidden: true, "data-error": true, tabindex: 0 });
    this.log = h("pre", { "data-log": true, tabindex: 0, "aria-label": "log" });
    this.logSays = h("p", { class: "quiet", role: "status" });
    this.errors = h("div", { "data-errors": true });
    this.body = h("textarea", { "aria-label": "request", spellcheck: "false" });
    this.send = h("button", { type: "submit" }, "Send");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.trying?.abort() }, "Stop");
    this.answerSays = h("p", { class: "quiet", role: "status", "data-answered": true });
    this.answer = h("pre", { "data-answer": true, tabindex: 0, hidden: true });
    this.takes = h("details", { hidden: true, "data-schema": true }, h("summary", {}, "What it takes and answers"));
    this.untouched = true;
    this.body.addEventListener("input", () => (this.untouched = false));
    this.title = h("h2", { tabindex: -1 }, name);
    this.form = h("form", { onsubmit: (event) => this.submit(event) }, this.takes, this.body, h("div", { class: "row" }, this.send, this.stop),
      this.answerSays, this.answer, h("p", { class: "quiet" }, "Files and bytes: ", h("a", { href: "/docs" }, "all functions' forms")));
    this.box.replaceChildren(
      h("p", {}, h("a", { href: "#" }, "All functions")), this.title, this.facts, this.error,
      h("h3", {}, "Requests of the last hour"), hours,
      h("div", { class: "two" },
        h("div", {}, h("h3", {}, "Try it"), this.form),
        h("div", {}, h("h3", {}, "Last errors"), this.errors)),
      h("h3", {}, "Log"), this.logSays, this.log);
    this.again();
    this.title.focus();
  }

  again() {
    if (this.name === null) return;
    this.seen = {};
    this.draw();
  }

  // Who needs a key for it is not sent to ask.
  mayRead() {
    const rights = this.state.rights, reads = rights.includes("deploy");
    if (rights !== this.seen.rights) {
      this.seen.rights = rights;
      this.send.disabled = !rights.includes("invoke");
      text(this.answerSays, this.send.disabled && rights.length ? "A key that may send requests has the scope invoke, or admin." : "");
      if (reads) this.follow();
      else if (rights.length) {
        const what = `Logs and errors need a key of the scope deploy. On the node, dormouse logs ${this.name} shows them.`;
        this.logSays.replaceChildren(what, " ", this.asks());
        this.errors.replaceChildren(h("p", { class: "quiet" }, "The texts need a key of the scope deploy."));
      }
    }
    return reads;
  }

  draw() {
    if (this.name === null) return;
    const row = this.state.functions[this.name];
    if (row === undefined) {
      this.facts.replaceChildren(fact("state", "there is no such function now"));
      this.seen.row = null;
      return;
    }
    const reads = this.mayRead();
    if (row === this.seen.row) return;
    this.seen.row = row;
    const wish = row.llm ? { messages: [{ role: "user", content: "Say something." }], max_tokens: 64, stream: true }
      : row.embedding ? { input: "Some text." } : null;
    if (wish !== null) {
      if (this.untouched) this.body.value = JSON.stringify({ model: this.name, ...wish }, null, 2);
    } else if (this.state.rights.includes("invoke") && ["idle", "busy"].includes(row.state) && this.seen.version !== row.version) {
      this.seen.version = row.version;
      this.schema();
    }
    this.facts.replaceChildren(...facts(row).filter(([, said]) => said !== "").map(([word, said]) => fact(word, said)));
    if (this.seen.requests !== row.requests && !this.looking) {
      this.looking = setTimeout(() => this.look(), this.seen.requests === undefined ? 0 : HOUR_MS);
      this.seen.requests = row.requests;
    }
    this.error.hidden = !row.error;
    text(this.error, row.error);
    if (reads && this.seen.errors !== row.errors) {
      this.seen.errors = row.errors;
      this.failures();
    }
  }

  // --- its log

  async follow() {
    this.following?.abort();
    const own = (this.following = new AbortController());
    text(this.logSays, "");
    this.log.replaceChildren();
    try {
      const path = `/admin/functions/${encodeURIComponent(this.name)}/logs?follow=1&tail=${BEGIN}`;
      const answer = await call(path, { signal: own.signal });
      if (!answer.ok) {
        text(this.logSays, await refusal(answer));
        if (answer.status === 401 || answer.status === 403) this.logSays.append(" ", this.asks());
        return;
      }
      for await (const piece of pieces(answer)) {
        const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 30;
        this.log.append(piece);
        let length = this.log.textContent.length;
        while (length > LOG_CHARACTERS && this.log.childNodes.length > 1) {
          length -= this.log.firstChild.textContent.length;
          this.log.firstChild.remove();
        }
        if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      }
      text(this.logSays, "the log has ended");
    } catch (error) {
      if (!own.signal.aborted) text(this.logSays, `not followed any more: ${error.message}`);
    }
  }

  asks() {
    return h("button", { type: "button", onclick: () => this.ask("A key for logs and errors has the scope deploy.") }, "Enter a key");
  }

  async look() {
    const name = this.name, row = this.state.functions[name];
    this.looking = null;
    this.seen.requests = row?.requests;
    try {
      const answer = await call(`/admin/functions/${encodeURIComponent(name)}/minutes`);
      if (answer.ok && name === this.name) this.hour.all(await answer.json());
    } catch {
      // it is asked for again when there is more
    }
  }

  async failures() {
    const name = this.name;
    try {
      const answer = await call(`/admin/functions/${encodeURIComponent(name)}/errors`);
      if (name !== this.name) return;
      if (!answer.ok) {
        this.errors.replaceChildren(h("p", { class: "quiet" }, await refusal(answer), " ", answer.status === 404 ? null : this.asks()));
        return;
      }
      const { errors } = await answer.json();
      this.errors.replaceChildren(...(errors.length ? errors.map((error) => h("details", {},
        h("summary", {}, `${new Date(error.at_s * 1000).toLocaleTimeString()} ${error.code}: ${error.why}`),
        h("pre", { tabindex: 0 }, error.text))) : [h("p", { class: "quiet" }, "none since the router's start")]));
    } catch (error) {
      if (name === this.name) this.errors.replaceChildren(h("p", { class: "quiet" }, error.message));
    }
  }

  // --- a form to try it

  // The schema of its type hints, if it has some, and an example of them.
  async schema() {
    const name = this.name;
    if (this.untouched) this.body.value = "{}";
    try {
      const answer = await call(`/functions/${encodeURIComponent(name)}/schema`);
      if (!answer.ok || name !== this.name) return;
      const { request, response, description } = await answer.json();
      if (request === undefined && response === undefined && !description) return;
      const said = { description, request: resolved(request), response: resolved(response) };
      this.takes.hidden = false;
      this.takes.replaceChildren(this.takes.firstChild, h("pre", { tabindex: 0 }, JSON.stringify(said, null, 2)));
      if (this.untouched && request !== undefined) this.body.value = JSON.stringify(example(said.request), null, 2);
    } catch {
      // it can be tried without
    }
  }

  async submit(event) {
    event.preventDefault();
    const row = this.state.functions[this.name];
    const path = row?.llm ? "/v1/chat/completions" : `/functions/${encodeURIComponent(this.name)}/invoke`;
    const own = (this.trying = new AbortController()), began_ms = performance.now();
    this.send.disabled = true;
    this.stop.hidden = false;
    this.answer.hidden = true;
    this.answer.replaceChildren();
    text(this.answerSays, "sent");
    try {
      const answer = await call(path, { method: "POST", body: this.body.value, signal: own.signal,
        headers: { "content-type": "application/json" } });
      const timing = answer.headers.get("server-timing");
      const told = () => text(this.answerSays, `${answer.status} after ${ms(performance.now() - began_ms)}` +
        (timing ? ` (${timing})` : ""));
      this.answer.hidden = false;
      if ((answer.headers.get("content-type") ?? "").startsWith("text/event-stream"))
        for await (const [name, data] of events(answer)) this.answer.append(name === "error" ? data : token(data));
      else for await (const piece of pieces(answer)) this.answer.append(piece);
      told();
    } catch (error) {
      text(this.answerSays, own.signal.aborted ? "stopped" : error.message);
    } finally {
      this.send.disabled = !this.state.rights.includes("invoke");
      this.stop.hidden = true;
    }
  }
}

function token(data) {
  if (data === "[DONE]") return "";
  try {
    const choice = JSON.parse(data).choices?.[0];
    return choice === undefined ? "" : choice.delta?.content ?? choice.text ?? "";
  } catch {
    return `${data}\n`;
  }
}

const last = (said) => (said ?? "").trim().split("\n").at(-1);
const fact = (word, said) => h("div", {}, h("dt", {}, word), h("dd", {}, said));
const woken = (wake) => wake === null || wake === undefined ? "" :
  [["host", "host"], ["peer", "another GPU"], ["file", "files"]].filter(([key]) => wake[`${key}_nbytes`])
    .map(([key, word]) => `${size(wake[`${key}_nbytes`])} from ${word}`).join(", ") +
  ` to GPU ${wake.gpu}${wake.wake_us === null ? "" : ` in ${ms(wake.wake_us / 1000)}`}`;

function facts(row) {
  const gpus = Object.entries(row.gpu_nbytes ?? {}).map(([gpu, nbytes]) => `GPU ${gpu}: ${size(nbytes)}`);
  const places = [...gpus, row.host_nbytes ? `host: ${size(row.host_nbytes)}` : "", row.file_nbytes ? `files: ${size(row.file_nbytes)}` : ""];
  const wish = row.llm ? `${row.percentile} % in ${ms(row.llm.wanted_ttft_ms)}, then ${ms(row.llm.wanted_tpot_ms)}`
    : `${row.percentile} % in ${ms(row.deadline_ms)}`;
  const shown = [
    ["state", row.deploying ? `${row.state}, another version is being deployed` : row.state],
    ["version", `${row.version} of tenant ${row.tenant}${row.traffic < 100 ? `, with ${row.traffic} % of the requests` : ""}`],
    ["in time", row.counted ? `${percent(row.in_time)} of ${row.counted}${row.complies === false ? ": missed" : ""}` : ""],
    ["wanted", wish],
    ["latency", row.p50_ms === null ? "" : `p50 ${ms(row.p50_ms)}, p99 ${ms(row.p99_ms)}`],
    ["first token", row.llm?.ttft_ms?.p50 ? `p50 ${ms(row.llm.ttft_ms.p50)}, p99 ${ms(row.llm.ttft_ms.p99)}` : ""],
    ["each further token", row.llm?.tpot_ms?.p50 ? `p50 ${ms(row.llm.tpot_ms.p50)}, p99 ${ms(row.llm.tpot_ms.p99)}` : ""],
    ["tokens", row.llm ? `${row.llm.prompt_tokens} in, ${row.llm.made_tokens} out, ${row.llm.reused_tokens} reused` : ""],
    ["adapter of", row.llm?.base ?? ""],
    ["instances", `${row.instances} of at most ${Math.max(1, row.max_instances)}${row.stateless ? ", stateless" : ""}`],
    ["running, in the queue", `${row.running}, ${row.queued}`],
    ["requests", Object.entries(row.outcomes ?? {}).map(([word, count]) => `${count} ${word}`).join(", ")],
    ["model", row.nbytes ? size(row.nbytes) : ""],
    ["where it is", places.filter(Boolean).join(", ")],
    ["shared", row.shared_nbytes ? `${size(row.shared_nbytes)} with ${row.shared_with.join(", ") || "nobody now"}` +
      (row.shared_count > row.shared_with.length ? ` and ${row.shared_count - row.shared_with.length} more` : "") : ""],
    ["wakes, evictions", row.wakes === undefined ? "" : `${row.wakes}, ${row.evictions}`],
    ["last wake", woken(row.last_wake)],
    ["last evicted", row.last_eviction ? `${size(row.last_eviction.nbytes)} from GPU ${row.last_eviction.gpu}` +
      `${row.last_eviction.for ? ` for ${row.last_eviction.for}` : ""}: ${row.last_eviction.rule}` : ""],
  ];
  for (const each of row.runtimes ?? [])
    shown.push([`runtime on GPU ${each.gpu}`, `${each.running} running, ${each.waiting} waiting, KV ${size(each.kv_nbytes)}`]);
  return shown;
}
