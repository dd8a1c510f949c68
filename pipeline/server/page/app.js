// The page: one stream of figures, and what draws them.
import {drawConfig} from "./config.js";
import {find, say} from "./dom.js";
import {Charts, Tiles} from "./figures.js";
import {Graph} from "./graph.js";
import {History} from "./history.js";
import {follow, key} from "./link.js";
import {Playground} from "./playground.js";

const SPAN_S = 10; // over which shares of time are shown
const WORDS = {
  connecting: "connecting …", live: "live", lost: "the server does not answer; trying again …", locked: "an API key is needed",
};

const STATES = {
  draining: "the server is ending: it takes no new requests", restarting: "the engine is being started again",
  failed: "the engine has failed; the server's log says why", closed: "the server has ended",
};

class Page {
  constructor() {
    this.playground = new Playground();
  }

  state(word, note = "") {
    find("link").dataset.state = word;
    say(find("link-text"), note || WORDS[word]);
  }

  pipeline(served) {
    const again = this.served && this.served.instance !== served.instance;
    if (!this.served || again) this.begin(served);
    this.live = again ? `live: the server was started again at ${new Date().toLocaleTimeString()}` : this.live ?? WORDS.live;
    find("key").hidden = true;
    find("main").hidden = false;
    this.charts ??= new Charts(120);
    this.state("live", this.live);
  }

  begin(served) {
    this.served = served;
    this.history = new History();
    this.graph = new Graph(served);
    this.tiles ??= new Tiles();
    this.playground.model = served.model;
    this.playground.show();
    drawConfig(served);
    document.title = `${served.recipe} · Headrace`;
    say(find("what"), `${served.recipe}${served.recipe === served.model ? "" : ` · ${served.model}`}`);
    say(find("device"), describe(served));
  }

  figures(taken) {
    const {history} = this;
    history.add(taken);
    const last = history.steps(history.ago(1)), span = history.steps(history.ago(SPAN_S));
    const busy = [...span].some(([name, step]) => step.runs && !name.startsWith("idle/"));
    const shown = busy ? span : history.steps(null);
    this.graph.update(taken, shown, history.taken.length > 1 ? last : new Map(), busy ? `of the last ${SPAN_S} seconds` : "since the start");
    this.tiles.update(history);
    this.charts.update(history);
    this.state("live", STATES[taken.state] ?? this.live);
  }

  /** Resolves once another key was given. */
  key(refused) {
    find("key").hidden = false;
    find("main").hidden = true;
    say(find("key-fault"), key.get() ? refused.message : "");
    find("key-value").focus();
    return new Promise(resolve => find("key").addEventListener("submit", event => {
      event.preventDefault();
      key.set(find("key-value").value.trim());
      find("key-value").value = "";
      resolve();
    }, {once: true}));
  }
}

function describe({device, context}) {
  const words = [device.kind, device.blas, device.threads && `${device.threads} thread${device.threads === 1 ? "" : "s"}`, `MLX ${device.mlx}`];
  return [...words, `context ${context.toLocaleString("en")} tokens`].filter(Boolean).join(" · ");
}

follow(new Page());
