// The figures of the last two minutes, and what changed in a span of them.

const SECONDS = 120;
export const SMOOTH = 3; // takings over which a rate is told

export class History {
  constructor() {
    this.taken = [];
  }

  add(figures) {
    if (this.taken.length && figures.target_calls < this.now.target_calls) this.taken = []; // another engine's
    this.taken.push(figures);
    while (figures.at - this.taken[0].at > SECONDS) this.taken.shift();
  }

  get now() { return this.taken.at(-1); }

  /** The figures of `seconds` ago, or the oldest there are. */
  ago(seconds) {
    return this.taken.findLast(one => this.now.at - one.at >= seconds - 0.5) ?? this.taken[0];
  }

  /** Runs and seconds of every step since `before`; since the engine opened where there is none. */
  steps(before, after = this.now) {
    const found = new Map();
    for (const [phase, stages] of Object.entries(after.phases)) {
      for (const [stage, {runs, seconds}] of Object.entries(stages)) {
        const old = before?.phases[phase]?.[stage] ?? {runs: 0, seconds: 0};
        found.set(`${phase}/${stage}`, {runs: runs - old.runs, seconds: seconds - old.seconds});
      }
    }
    return found;
  }

  /** Of all takings but the first: when, and what `value` makes of each and the one `span` takings before. */
  series(value, span = SMOOTH) {
    const later = this.taken.slice(1);
    return [later.map(one => one.at), later.map((one, at) => value(one, this.taken[Math.max(0, at + 1 - span)]))];
  }
}

export const count = (figures, name) => figures.counts[name] ?? 0;

/** Tokens a second between two takings. */
export function rate(after, before) {
  const seconds = after.at - before.at;
  return seconds > 0 ? (count(after, "emitted_tokens") - count(before, "emitted_tokens")) / seconds : 0;
}
