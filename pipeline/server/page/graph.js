// The recipe's graph: phases from left to right, stages in each from top to bottom, live.
import {breakable, find, make, milliseconds, number, say, share} from "./dom.js";

const PHASE_ROWS = { // how many requests are in a phase, from /stats' `rows`
  admit: rows => Math.max(0, rows.open_requests - rows.waiting - rows.prefilling - rows.active),
  prefill: rows => rows.prefilling,
  decode: rows => rows.active,
};
const MOST_DOTS = 8;
const HOME = "decode";
const HANDS = 2; // lines in a card
const THREADS = {prepare: "preparation pool", owner: "owner thread", io: "I/O thread"};

export class Graph {
  constructor(served) {
    this.graph = served.graph;
    this.choices = new Map(served.choices.map(choice => [choice.group, choice]));
    this.stages = new Map(); // "phase/stage" -> its elements
    this.phases = new Map();
    find("graph").replaceChildren(...this.graph.phases.map(phase => this.phase(phase)));
    this.explain(null);
  }

  phase(phase) {
    const rows = make("span", {class: "rows"});
    const stages = phase.stages.map(stage => make("li", {}, this.stage(phase.name, stage)));
    const element = make("li", {class: "phase", "data-phase": phase.name, "data-loop": phase.loop},
      make("div", {class: "phase-head"}, make("h3", {}, phase.name), rows,
        make("span", {class: "when"}, (phase.loop ? "↻ " : "") + phase.when)),
      make("ol", {class: "stages"}, ...stages));
    this.phases.set(phase.name, {rows, element});
    return element;
  }

  stage(phase, stage) {
    const time = make("span", {class: "time"}), bar = make("span", {class: "fill"});
    const parts = stage.parts.map(group => make("span", {class: "part"}, this.part(group)));
    const all = this.hands(phase, stage.stage);
    const hands = all.slice(0, HANDS).map(({fields, targets}) =>
      make("span", {class: "hand"}, fields.join(", "), make("span", {class: "to"}, ` → ${targets.join(", ")}`)));
    if (all.length > HANDS) hands.push(make("span", {class: "hand"}, `… and ${all.length - HANDS} more`));
    const button = make("button", {type: "button", class: "stage", "aria-pressed": "false", "aria-controls": "detail"},
      make("span", {class: "stage-head"}, make("span", {class: "name"}, ...breakable(stage.stage)), time),
      make("span", {class: "bar", "aria-hidden": "true"}, bar),
      make("span", {class: "does"}, this.does(phase, stage.stage)),
      make("span", {class: "parts"}, ...parts),
      make("span", {class: "hands", "aria-hidden": "true"}, ...hands));
    button.addEventListener("click", () => this.explain(this.chosen === button ? null : {phase, stage, button}));
    this.stages.set(`${phase}/${stage.stage}`, {button, time, bar});
    return button;
  }

  /** What a stage is for; of one in several phases it is said once, in the loop that most of the time is spent in. */
  does(phase, name) {
    const has = one => one.stages.some(stage => stage.stage === name);
    const home = this.graph.phases.find(one => one.name === HOME && has(one)) ?? this.graph.phases.find(has);
    return phase === home.name ? this.graph.about[name] ?? "" : `As in ${home.name}.`;
  }

  /** As in `headrace graph`: kv=paged. */
  part(group) {
    return `${group}=${this.graph.choices[group] ?? "none"}`;
  }

  /** What a stage's fields go to, alike ones together. */
  hands(phase, name) {
    const byTarget = new Map();
    const own = this.graph.edges.filter(edge => edge.from[0] === phase && edge.from[1] === name);
    const near = edge => Number(edge.to[0] !== phase); // the same phase first
    for (const edge of own.toSorted((a, b) => near(a) - near(b))) {
      const known = byTarget.get(edge.to[1]) ?? new Set();
      byTarget.set(edge.to[1], new Set([...known, ...edge.fields]));
    }
    const byFields = new Map();
    for (const [target, fields] of byTarget) {
      const names = [...fields].join(", ");
      byFields.set(names, {fields: [...fields], targets: [...(byFields.get(names)?.targets ?? []), target]});
    }
    return [...byFields.values()];
  }

  /** What one stage does, below the graph; who gives to it and takes from it is marked in the graph. */
  explain(shown) {
    this.chosen?.setAttribute("aria-pressed", "false");
    for (const {button} of this.stages.values()) delete button.dataset.role;
    this.chosen = shown?.button ?? null;
    if (!shown) {
      find("detail").replaceChildren(make("p", {class: "muted"}, "Choose a stage to see what it does, reads and writes."));
      return;
    }
    const {phase, stage, button} = shown;
    button.setAttribute("aria-pressed", "true");
    const here = place => place[0] === phase && place[1] === stage.stage;
    for (const edge of this.graph.edges) {
      if (here(edge.to)) this.mark(edge.from, "gives");
      if (here(edge.from)) this.mark(edge.to, "takes");
    }
    find("detail").replaceChildren(...this.told(phase, stage));
  }

  mark(place, role) {
    const found = this.stages.get(place.join("/"));
    if (found && found.button !== this.chosen) found.button.dataset.role = role;
  }

  told(phase, stage) {
    const edges = this.graph.edges, same = place => place[0] === phase && place[1] === stage.stage;
    const lines = [
      ...edges.filter(edge => same(edge.to)).map(edge => ["from", edge.from, edge.fields]),
      ...edges.filter(edge => same(edge.from)).map(edge => ["to", edge.to, edge.fields]),
    ].map(([word, place, fields]) => make("li", {}, `${word} ${place[1]} (${place[0]}): `, make("code", {}, fields.join(", "))));
    const parts = stage.parts.map(group => make("li", {}, make("code", {}, this.part(group)),
      ` ${this.choices.get(group)?.about.join(" ") ?? ""}`));
    return [
      make("h3", {}, stage.stage),
      make("p", {}, `${this.graph.about[stage.stage] ?? ""} Runs ${this.graph.phases.find(one => one.name === phase).when}, on the ${THREADS[stage.thread]}.`),
      make("ul", {}, ...lines), make("ul", {}, ...parts),
    ];
  }

  /** `since` holds runs and seconds of the span that is shown; `last` those of the last second. */
  update(figures, since, last, span) {
    say(find("graph-span"), span);
    const whole = sum(since, step => step.seconds);
    for (const [name, {button, time, bar}] of this.stages) {
      const step = since.get(name);
      bar.style.width = `${whole && step ? 100 * step.seconds / whole : 0}%`;
      say(time, step?.runs ? `${milliseconds(step.seconds / step.runs)} · ${share(step.seconds, whole)}` : "–");
      time.title = step?.runs ? `${number(step.runs)} runs` : "";
      button.toggleAttribute("data-busy", Boolean(last.get(name)?.runs));
    }
    for (const [name, {rows, element}] of this.phases) {
      element.toggleAttribute("data-unused", !figures.phases[name]);
      const many = PHASE_ROWS[name]?.(figures.rows);
      if (many === undefined) continue;
      const dots = "●".repeat(Math.min(many, MOST_DOTS)) + (many > MOST_DOTS ? "…" : "");
      say(rows, `${dots} ${many} ${many === 1 ? "request" : "requests"}`);
      rows.toggleAttribute("data-some", many > 0);
    }
  }
}

function sum(steps, value) {
  return [...steps.values()].reduce((total, step) => total + value(step), 0);
}
