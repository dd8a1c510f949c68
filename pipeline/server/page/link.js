// Server-sent events over fetch, since EventSource can send no key.

const KEY = "headrace-key";
const SILENT_MS = 8000; // figures come once a second: a link that is silent so long is dead
const FIRST_WAIT_MS = 500, LONGEST_WAIT_MS = 5000;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: value => sessionStorage.setItem(KEY, value),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The reply to a request, with the key; a `Refused` with the server's own words if it is no success. */
export async function ask(path, options = {}) {
  const headers = {...options.headers};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(path, {...options, headers, cache: "no-store"});
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, said.error?.message ?? `The server answered ${reply.status}.`);
}

/** Each event of a stream as {event, data}; comments are passed over. `heard` is called for every piece. */
export async function* events(reply, heard = () => {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    heard();
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const read = name => block.split("\n").filter(line => line.startsWith(`${name}: `))
        .map(line => line.slice(name.length + 2)).join("\n");
      if (read("data")) yield {event: read("event"), data: read("data")};
    }
  }
}

/** Follow /events for ever. `on.state(word, why)` is told of the link, `on.pipeline` and `on.figures` get the
 *  data. A link that breaks is made again, sooner first; with `await on.key(refused)` a key is waited for. */
export async function follow(on) {
  let wait = FIRST_WAIT_MS;
  for (;;) {
    await shown();
    try {
      on.state("connecting");
      await listen(on, () => { wait = FIRST_WAIT_MS; });
    } catch (fault) {
      if (fault instanceof Refused && [401, 403].includes(fault.status)) {
        on.state("locked");
        await on.key(fault);
        continue;
      }
    }
    if (document.hidden) continue;
    on.state("lost");
    await new Promise(resolve => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

async function listen(on, begun) {
  const stop = new AbortController();
  const hide = () => document.hidden && stop.abort();
  document.addEventListener("visibilitychange", hide);
  let watch = 0;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => stop.abort(), SILENT_MS);
  };
  try {
    heard();
    const reply = await ask("events", {signal: stop.signal});
    for await (const {event, data} of events(reply, heard)) {
      if (event === "pipeline") begun();
      try {
        on[event](JSON.parse(data));
      } catch (fault) {
        reportError(fault); // a fault in drawing is no broken link
      }
    }
  } finally {
    clearTimeout(watch);
    document.removeEventListener("visibilitychange", hide);
    stop.abort();
  }
}

/** A page that nobody sees asks for nothing. */
function shown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise(resolve => document.addEventListener("visibilitychange", resolve, {once: true}));
}
