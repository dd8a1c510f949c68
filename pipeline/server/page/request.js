// What the form asks for, as a request body, as curl and as Python.

const FIELDS = [ // name, label, input's attributes, title
  ["max_tokens", "most tokens", {type: "number", min: 1, step: 1, value: 200}, "how long the answer may get"],
  ["temperature", "temperature", {type: "number", min: 0, max: 2, step: 0.05}, "0 is greedy; empty: what the recipe or the model says"],
  ["top_p", "top_p", {type: "number", min: 0.01, max: 1, step: 0.01}, "only the likeliest tokens that make up this much"],
  ["top_k", "top_k", {type: "number", min: 0, step: 1}, "only so many of the likeliest tokens; 0 is off"],
  ["min_p", "min_p", {type: "number", min: 0, max: 1, step: 0.01}, "only tokens at least this likely beside the likeliest"],
  ["repetition_penalty", "repetition penalty", {type: "number", min: 0.01, max: 100, step: 0.01}, "1 is off"],
  ["presence_penalty", "presence penalty", {type: "number", min: -2, max: 2, step: 0.1}, "0 is off"],
  ["frequency_penalty", "frequency penalty", {type: "number", min: -2, max: 2, step: 0.1}, "0 is off"],
  ["seed", "seed", {type: "number", min: 0, step: 1}, "the same seed gives the same answer"],
  ["stop", "stop at", {type: "text"}, "the answer ends before this text"],
];
const FORMS = {
  "": ["any text", null],
  guided_json: ["JSON of a schema", JSON.parse],
  guided_regex: ["a regular expression", text => text],
  guided_choice: ["one of these, a line each", text => text.split("\n").filter(Boolean)],
};
const OPENAI = new Set(["model", "messages", "stream", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"]);
const NAME = "HEADRACE_API_KEY"; // the key itself is never shown

/** Build the controls with `make` into `place`; returns a function that reads them as part of a body. */
export function controls(make, place) {
  const system = make("textarea", {id: "f-system", rows: 1});
  const inputs = FIELDS.map(([name, , attributes, title]) => [name, make("input", {id: `f-${name}`, title, ...attributes})]);
  const form = make("select", {id: "f-form"}, ...Object.entries(FORMS).map(([value, [label]]) => make("option", {value}, label)));
  const source = make("textarea", {id: "f-source", rows: 3, spellcheck: "false"});
  const labelled = (label, input, wide) => make("div", {class: wide ? "field wide" : "field"}, make("label", {for: input.id}, label), input);
  const sourced = labelled("the form itself", source, true);
  sourced.hidden = true;
  form.addEventListener("change", () => { sourced.hidden = !form.value; });
  place.append(labelled("system message", system, true),
    ...inputs.map(([, input], at) => labelled(FIELDS[at][1], input)),
    labelled("form of the answer", form), sourced);
  return () => {
    const body = {};
    for (const [name, input] of inputs) {
      if (input.value !== "") body[name] = input.type === "number" ? Number(input.value) : input.value;
    }
    if (form.value && source.value) body[form.value] = FORMS[form.value][1](source.value);
    return {body, system: system.value};
  };
}

export function asCurl(base, body, locked) {
  const quoted = JSON.stringify(body, null, 1).replace(/\n\s*/g, " ").replaceAll("'", String.raw`'\''`);
  const lines = [`curl -N ${base}v1/chat/completions`, "-H 'content-type: application/json'"];
  if (locked) lines.push(`-H "authorization: Bearer $${NAME}"`);
  return [...lines, `-d '${quoted}'`].join(" \\\n  ");
}

export function asPython(base, body, locked) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
  return [
    ...(locked ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${base}v1`)}, api_key=${locked ? `os.environ["${NAME}"]` : '"none"'})`,
    "stream = client.chat.completions.create(",
    ...lines,
    ")",
    "for chunk in stream:",
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

/** A JSON value as Python writes it. JSON's strings are Python's, but for what is above U+FFFF. */
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item)}`).join(", ")}}`;
  return JSON.stringify(value);
}
