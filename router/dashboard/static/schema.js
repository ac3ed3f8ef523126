// What a function takes, from the JSON schema of its type hints: for people, and as an example.

const NODES = 2000; // of one schema, written out
const DEPTH = 12;

// With what it names elsewhere put in; "…" where that has become too much: a type may name itself many times.
export function resolved(schema) {
  const named = schema?.$defs ?? {};
  let left = NODES;
  const within = (each, depth) => {
    if (left-- <= 0) return "…";
    if (each === null || typeof each !== "object") return each;
    if (depth > DEPTH) return "…";
    if (Array.isArray(each)) return each.map((one) => within(one, depth + 1));
    if (typeof each.$ref === "string") return within(named[each.$ref.split("/").at(-1)] ?? {}, depth + 1);
    return Object.fromEntries(Object.entries(each).filter(([key]) => key !== "$defs")
      .map(([key, one]) => [key, within(one, depth + 1)]));
  };
  return within(schema, 0);
}

export function example(schema, depth = 0) {
  if (schema === null || typeof schema !== "object" || depth > 6) return null;
  if ("default" in schema) return schema.default;
  if (schema.enum) return schema.enum[0];
  if (schema.anyOf) return example(schema.anyOf[0], depth + 1);
  if (schema.type === "object")
    return Object.fromEntries(Object.entries(schema.properties ?? {}).map(([key, each]) => [key, example(each, depth + 1)]));
  if (schema.type === "array") return schema.items ? [example(schema.items, depth + 1)] : [];
  return { string: "", integer: schema.minimum ?? 0, number: schema.minimum ?? 0, boolean: false }[schema.type] ?? {};
}
