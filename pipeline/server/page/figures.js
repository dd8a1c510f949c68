// Tiles and charts: how fast, how many, how much memory, how good the drafts are.
import {bytes, find, make, number, say, share} from "./dom.js";
import {count, rate, SMOOTH} from "./history.js";

const HEIGHT = 130;
const STEPS = Array.from({length: 13}, (none, power) => [1, 2, 5].map(step => step * 10 ** power)).flat(); // no halves of requests and bytes
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Tiles {
  constructor() {
    this.values = new Map();
    find("tiles").replaceChildren();
  }

  set(name, value, note = "") {
    if (!this.values.has(name)) {
      const pair = [make("dd"), make("dd", {class: "note"})];
      this.values.set(name, pair);
      find("tiles").append(make("div", {}, make("dt", {}, name), ...pair));
    }
    const [element, noted] = this.values.get(name);
    say(element, value);
    say(noted, note);
  }

  update(history) {
    const now = history.now, rows = now.rows, counts = now.counts;
    this.set("tokens a second", number(rate(now, history.ago(SMOOTH)), 1), `${number(count(now, "emitted_tokens"))} so far`);
    this.set("requests running", number(rows.active + rows.prefilling), `of at most ${rows.max}`);
    this.set("in the queue", number(rows.waiting), counts.requests_refused ? `${number(counts.requests_refused)} refused so far` : "none refused");
    this.set("drafts accepted", share(counts.accepted ?? 0, counts.drafted ?? 0), drafts(counts));
    this.set("KV bytes in use", bytes(now.kv_bytes),
      budget(now) === null ? "no budget set" : `of ${bytes(budget(now))} for rows and tiers`);
    this.set("prompt tokens reused", share(counts.cached_tokens ?? 0, counts.prompt_tokens ?? 0), `of ${number(count(now, "prompt_tokens"))}`);
  }
}

function drafts(counts) {
  if (!counts.drafted) return "nothing drafted yet";
  return `${number(counts.emitted_tokens / Math.max(1, counts.rounds), 2)} tokens a round`;
}

/** Bytes that limits=budget leaves to rows and tiers; without it nothing is enforced, and it is null. */
function budget(now) {
  const {budget_bytes: all, weights_bytes: weights, work_bytes: work} = now.memory.estimate;
  return all ? Math.max(0, all - weights - work) : null;
}

export class Charts {
  constructor(seconds) {
    this.seconds = seconds;
    find("charts").replaceChildren();
    this.speed = this.chart("Tokens a second", ["tokens/s"], ["--s0"], value => number(value, value < 10 ? 1 : 0));
    this.load = this.chart("Requests", ["running", "queue"], ["--s2", "--s1"], value => number(value));
    this.memory = this.chart("KV bytes of running rows", ["in use", "budget"], ["--s3", "--bad"], bytes);
    this.positions = this.panel("Drafts accepted, by position");
    this.tiers = this.panel("Saved state, tier by tier");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.resize()).observe(find("charts"));
  }

  panel(title) {
    const body = make("div", {class: "panel-body"}), now = make("span", {class: "muted"});
    find("charts").append(make("figure", {}, make("figcaption", {}, make("b", {}, title), " ", now), body));
    return {body, now, title};
  }

  chart(title, names, colours, format) {
    const panel = this.panel(title);
    const series = names.map((label, at) => ({
      label, width: 1.5, stroke: () => colour(colours[at]), points: {show: false},
      fill: at === 0 ? () => `${colour(colours[at])}22` : undefined,
      dash: label === "budget" ? [4, 4] : undefined,
    }));
    const axis = {stroke: () => colour("--muted"), grid: {stroke: () => colour("--grid"), width: 1}, ticks: {show: false}, font: "11px system-ui"};
    const ago = (plot, splits) => splits.map(at => at >= -0.5 ? "now" : `${-at} s`);
    const plot = new uPlot({
      width: this.width, height: HEIGHT, cursor: {show: false}, legend: {show: false}, padding: [6, 14, 0, 0],
      scales: {x: {time: false, range: () => [-this.seconds, 0]}, y: {range: (plot, low, high) => [0, Math.max(1, 1.1 * high)]}},
      series: [{}, ...series],
      axes: [{...axis, values: ago, incrs: [30], size: 22}, {...axis, values: (plot, splits) => splits.map(format), incrs: STEPS, size: 52}],
    }, [[], ...names.map(() => [])], panel.body);
    plot.root.setAttribute("aria-hidden", "true"); // the caption says the figure
    return {...panel, plot, format, names};
  }

  get width() { return Math.max(200, find("charts").clientWidth - 20); }

  resize() {
    for (const {plot} of [this.speed, this.load, this.memory]) {
      if (plot.width !== this.width) plot.setSize({width: this.width, height: HEIGHT});
    }
  }

  redraw() {
    for (const {plot} of [this.speed, this.load, this.memory]) plot.redraw();
  }

  update(history) {
    const now = history.now;
    this.draw(this.speed, history, [rate]);
    this.draw(this.load, history, [at => at.rows.active + at.rows.prefilling, at => at.rows.waiting]);
    this.draw(this.memory, history, [at => at.kv_bytes, budget]);
    this.drawPositions(now);
    this.drawTiers(now);
  }

  draw({plot, now, names, format}, history, values) {
    const columns = values.map(value => history.series(value));
    const times = columns[0][0].map(at => at - history.now.at);
    plot.setData([times, ...columns.map(([, found]) => found)]);
    const last = names.map((name, at) => [name, columns[at][1].at(-1)]).filter(([, value]) => value != null);
    say(now, last.map(([name, value]) => `${name} ${format(value)}`).join(", "));
  }

  drawPositions(now) {
    const {drafted_by_position: drafted, accepted_by_position: accepted} = now;
    if (!drafted.length) {
      this.positions.body.replaceChildren(make("p", {class: "muted"}, "No draft has been verified yet."));
      return;
    }
    say(this.positions.now, `of ${number(drafted[0])} proposals`);
    this.positions.body.replaceChildren(bars(drafted.map((count, at) => ({
      name: `${at + 1}`, value: (accepted[at] ?? 0) / count, text: `${share(accepted[at] ?? 0, count)} of ${number(count)}`,
    })), "position"));
  }

  drawTiers(now) {
    const tiers = Object.entries(now.tiers);
    if (!tiers.length) {
      this.tiers.body.replaceChildren(make("p", {class: "muted"}, "No tier keeps state in this recipe."));
      return;
    }
    this.tiers.body.replaceChildren(bars(tiers.map(([name, tier]) => ({
      name, value: tier.bytes / tier.cap_bytes,
      text: `${number(tier.entries)} entries, ${number(tier.tokens)} tokens, ${bytes(tier.bytes)} of ${bytes(tier.cap_bytes)}; ${share(tier.hits, tier.hits + tier.misses)} of ${number(tier.hits + tier.misses)} look-ups hit`,
    })), "tier"));
  }
}

/** A table whose rows have a bar each: name, bar, text. */
function bars(rows, head) {
  const body = rows.map(({name, value, text}) => {
    const fill = make("span", {class: "fill"});
    fill.style.width = `${Math.min(100, 100 * value)}%`;
    return make("tr", {}, make("th", {scope: "row"}, make("span", {class: "unseen"}, `${head} `), name),
      make("td", {class: "bar-cell", "aria-hidden": "true"}, make("span", {class: "bar"}, fill)), make("td", {}, text));
  });
  return make("table", {class: "bars"}, make("tbody", {}, ...body));
}
