// Node's fetch: ADDRESS KEY FILE; what it makes of a node, as JSON. See stock_http.py.

import { writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const [address, key, file] = process.argv.slice(2);
const echo = "/functions/f/invoke", stream = "/functions/s/invoke";
const value = JSON.stringify({ a: [1, "é"] }), large = Buffer.alloc(20 << 20, "a");
const json = { "content-type": "application/json" }, bytes = { "content-type": "application/octet-stream" };
const form = new FormData();
form.append("file", new Blob([large]), "a.bin");

function* pieces() {
  for (let start = 0; start < large.length; start += 1 << 16) yield large.subarray(start, start + (1 << 16));
}

const call = (method, path, body, headers = {}) =>
  fetch(`http://${address}${path}`, { method, body, headers: { authorization: `Bearer ${key}`, ...headers }, duplex: "half" });
const told = (name, status, text) => console.log(JSON.stringify({ [name]: [status, text] }));
const ask = async (name, ...asked) => {
  const answer = await call(...asked);
  told(name, answer.status, await answer.text());
};

const asked = {
  json: ["POST", echo, value, json],
  upload: ["POST", echo, large, bytes],
  chunked: ["POST", echo, ReadableStream.from(pieces()), bytes],
  form: ["POST", echo, form],
  413: ["POST", echo, Buffer.concat([large, large]), bytes],
  404: ["POST", "/functions/none/invoke", large, bytes],
  401: ["POST", echo, large, { ...bytes, authorization: "Bearer dm_0_0" }],
  415: ["POST", echo, large, { ...bytes, "content-encoding": "br" }],
  gzip: ["POST", echo, gzipSync(value), { ...json, "content-encoding": "gzip" }],
  head: ["HEAD", "/healthz"],
  slash: ["POST", `${echo}/`, value, json],
  empty: ["POST", echo, '"nothing"', json],
};
for (const [name, each] of Object.entries(asked)) {
  await ask(name, ...each);
  await ask(`after ${name}`, ...asked.json);
}
const reader = (await call("POST", stream, JSON.stringify(file), json)).body.getReader(), decoder = new TextDecoder();
told("first part", 200, decoder.decode((await reader.read()).value));
writeFileSync(file, "");
let rest = "";
for (let part = await reader.read(); !part.done; part = await reader.read()) rest += decoder.decode(part.value);
told("rest", 200, rest);
