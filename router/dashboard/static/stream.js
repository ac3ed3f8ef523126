// The live stream, read with fetch: an EventSource cannot send a key.

const QUIET_MS = 20000; // the node says something every five seconds

export const keys = {
  get: () => sessionStorage.getItem("dormouse-key") ?? "",
  set: (key) => (key ? sessionStorage.setItem("dormouse-key", key) : sessionStorage.removeItem("dormouse-key")),
};

export function call(path, options = {}) {
  const key = keys.get();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers, credentials: "omit", cache: "no-store", redirect: "error" });
}

export async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the node answered ${answer.status}`;
  }
}

// Pieces of text, as they come.
export async function* pieces(answer, touched = () => {}) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      touched();
      yield decoder.decode(value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Events of an event stream: [name, data].
export async function* events(answer, touched) {
  let rest = "";
  for await (const piece of pieces(answer, touched)) {
    const blocks = (rest + piece).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message", data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) yield [name, data];
    }
  }
}

// on.event(name, value), on.state("connected" | "lost" | "refused", text). Returns how to begin anew, and how to stop.
export function watch(on) {
  let run = 0, control = null;
  const pause = (wait_ms) => new Promise((done) => setTimeout(done, wait_ms));

  async function go(own) {
    let wait_ms = 500;
    while (own === run) {
      control = new AbortController();
      const mine = control;
      let quiet = setTimeout(() => mine.abort(), QUIET_MS);
      const touched = () => {
        clearTimeout(quiet);
        quiet = setTimeout(() => mine.abort(), QUIET_MS);
      };
      try {
        const answer = await call("/admin/watch", { signal: mine.signal });
        if (own !== run) return;
        if (answer.status === 401 || answer.status === 403) {
          on.state("refused", await refusal(answer));
          return;
        }
        if (!answer.ok) throw new Error(await refusal(answer));
        for await (const [name, data] of events(answer, touched)) {
          if (own !== run) return;
          wait_ms = 500;
          if (name === "snapshot") on.state("connected", "");
          on.event(name, JSON.parse(data));
        }
        throw new Error("the node has ended the stream");
      } catch (error) {
        if (own !== run) return;
        on.state("lost", error.name === "AbortError" ? "the node says nothing" : error.message);
      } finally {
        clearTimeout(quiet);
      }
      await pause(wait_ms);
      wait_ms = Math.min(5000, wait_ms * 2);
    }
  }

  const stop = () => {
    run += 1;
    control?.abort();
  };
  const begin = () => {
    stop();
    go(run);
  };
  return [begin, stop];
}
