// A chat whose tokens are coloured by where they came from.
import {find, make, milliseconds, number, say} from "./dom.js";
import {ask, events, key, Refused} from "./link.js";
import {asCurl, asPython, controls} from "./request.js";

const KINDS = { // of `token_origins`, in the legend's order
  accepted: "drafted, and right",
  bonus: "the model's own after a right draft",
  correction: "the model's own for a wrong draft",
  rejected: "drafted, and given up",
  plain: "not drafted",
  constrained: "the form forbade the model's favourite",
};

export class Playground {
  constructor() {
    this.model = "";
    this.messages = [];
    this.read = controls(make, find("fields"));
    this.drawLegend();
    this.listen();
    this.show();
  }

  listen() {
    find("ask").addEventListener("submit", event => { event.preventDefault(); this.send(); });
    find("ask").addEventListener("input", () => this.show());
    find("ask").addEventListener("change", () => this.show());
    find("words").addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      find("ask").requestSubmit();
    });
    find("stop").addEventListener("click", () => this.running?.abort());
    find("clear").addEventListener("click", () => this.clear());
    for (const button of document.querySelectorAll("[data-copies]")) {
      button.addEventListener("click", () => copy(button));
    }
  }

  drawLegend() {
    find("legend").replaceChildren(...Object.entries(KINDS).map(([kind, text]) =>
      make("span", {}, make(kind === "rejected" ? "del" : "span", {class: `t ${kind}`}, kind), make("span", {class: "muted"}, ` ${text}`))));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    find("talk").replaceChildren();
    find("words").focus();
    this.show();
  }

  /** The request as it would be sent now. */
  body(words) {
    const {body, system} = this.read();
    body.model = this.model;
    const messages = [...(system ? [{role: "system", content: system}] : []), ...this.messages, {role: "user", content: words}];
    return {...body, messages, stream: true};
  }

  show() {
    try {
      const body = this.body(find("words").value || find("words").dataset.last || "Name three rivers.");
      const base = new URL(".", location.href).href, locked = Boolean(key.get());
      say(find("curl"), asCurl(base, body, locked));
      say(find("python"), asPython(base, body, locked));
    } catch (fault) { // a schema that is being typed
      for (const name of ["curl", "python"]) say(find(name), `The form of the answer is no JSON yet: ${fault.message}`);
    }
  }

  async send() {
    const words = find("words").value;
    if (!words.trim() || this.running) return;
    let body;
    try {
      body = this.body(words);
    } catch (fault) {
      this.add("fault").append(`The form of the answer is no JSON: ${fault.message}`);
      return;
    }
    find("words").value = "";
    find("words").dataset.last = words;
    this.add("user").append(words);
    this.busy(new AbortController());
    const answer = new Answer(this.add("assistant"));
    try {
      const content = await this.stream(body, answer);
      this.messages.push({role: "user", content: words}, {role: "assistant", content});
    } catch (fault) {
      this.fail(fault, answer);
    }
    this.busy(null);
    this.show();
  }

  async stream(body, answer) {
    const options = {method: "POST", headers: {"content-type": "application/json"}, signal: this.running.signal};
    const seed = body.seed ?? crypto.getRandomValues(new Uint32Array(1))[0]; // said, so that it can be had again
    const wanted = {...body, seed, token_origins: true, stream_options: {include_usage: true}};
    const reply = await ask("v1/chat/completions", {...options, body: JSON.stringify(wanted)});
    let whole = false;
    for await (const {data} of events(reply)) {
      if (data === "[DONE]") { whole = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error.message);
      answer.take(chunk);
      follow(find("talk"));
    }
    if (!whole) throw new Refused(0, "The link to the server broke before the answer was complete.");
    answer.end();
    follow(find("talk"));
    say(find("told"), `The answer is complete: ${answer.summary}`);
    return answer.content;
  }

  fail(fault, answer) {
    const stopped = fault.name === "AbortError";
    const text = stopped ? "Stopped." : fault instanceof Refused ? fault.message : "The server cannot be reached.";
    answer.close(text, stopped ? "muted" : "fault");
    say(find("told"), text);
  }

  busy(running) {
    this.running = running;
    find("stop").hidden = !running;
    find("send").disabled = Boolean(running);
  }

  add(kind) {
    const element = make("div", {class: `said ${kind}`});
    find("talk").append(element);
    follow(find("talk"));
    return element;
  }
}

/** One answer while it is being written. */
class Answer {
  constructor(element) {
    this.text = make("p", {class: "tokens"});
    this.notes = make("p", {class: "notes"});
    element.append(this.text, this.notes);
    this.counts = new Map();
    this.content = "";
    this.began = performance.now();
    this.first = 0;
  }

  take(chunk) {
    for (const choice of chunk.choices) {
      this.content += choice.delta?.content ?? "";
      for (const token of choice.headrace?.tokens ?? []) this.token(token);
      if (choice.finish_reason) this.told = {...choice.headrace, reason: choice.finish_reason};
    }
    this.usage = chunk.usage ?? this.usage;
  }

  token({text, origin, constrained, rejected}) {
    this.first ||= performance.now();
    this.count(origin);
    if (constrained) this.count("constrained");
    if (rejected) {
      this.count("rejected", rejected.length);
      this.text.append(make("del", {class: "t rejected", title: `${rejected.length} drafted tokens given up`}, rejected.join("")));
    }
    if (text) this.text.append(make("span", {class: `t ${origin}${constrained ? " constrained" : ""}`, title: `${origin}: ${KINDS[origin] ?? "drawn by an attempt before a crash"}`}, text));
  }

  count(kind, more = 1) {
    this.counts.set(kind, (this.counts.get(kind) ?? 0) + more);
  }

  /** One line of figures, which says in words what the colours say. */
  end() {
    const tokens = this.usage?.completion_tokens ?? 0, seconds = (performance.now() - this.first) / 1e3;
    const kinds = [...this.counts].map(([kind, count]) => `${number(count)} ${kind}`).join(", ");
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const speed = tokens > 1 && this.first ? ` in ${milliseconds(seconds)} (${number((tokens - 1) / seconds, 1)} a second)` : "";
    const prompt = `prompt of ${number(this.usage?.prompt_tokens ?? 0)}${cached ? `, ${number(cached)} from saved state` : ""}`;
    this.summary = `${number(tokens)} tokens${speed}: ${kinds || "none"}`;
    const first = this.first ? `first token after ${milliseconds((this.first - this.began) / 1e3)}; ` : "";
    this.close(`${this.summary}. ${first}${prompt}; seed ${this.told?.seed}${this.told?.reason === "length" ? "; cut at the most tokens" : ""}.`);
  }

  close(text, kind = "muted") {
    this.notes.className = `notes ${kind}`;
    say(this.notes, text);
  }
}

/** Keep the end in sight, unless the reader has scrolled up. */
function follow(box) {
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

async function copy(button) {
  const word = button.textContent;
  try {
    await navigator.clipboard.writeText(find(button.dataset.copies).textContent);
    say(button, "Copied");
  } catch { // no permission, or no secure context: the text can still be selected
    getSelection().selectAllChildren(find(button.dataset.copies));
    say(button, "Selected: copy it by hand");
  }
  setTimeout(() => say(button, word), 2000);
}
