// Elements made of text and other elements. Nothing on this page is ever read as HTML.

export const find = id => document.getElementById(id);

/** make("p", {class: "muted"}, "text", other) */
export function make(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...inside.filter(item => item != null));
  return element;
}

/** Change an element's text only where it differs, so that nothing is drawn for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A name that may be broken where its words end. */
export function breakable(name) {
  return name.split(/(?<=[._])/).flatMap(word => [word, make("wbr")]);
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${number(value, at && value < 100 ? 1 : 0)} ${units[at]}`;
}

export function milliseconds(seconds) {
  const ms = seconds * 1e3;
  if (ms >= 1000) return `${number(ms / 1000, 1)} s`;
  return ms >= 0.1 ? `${number(ms, ms < 10 ? 1 : 0)} ms` : `${number(ms * 1e3)} µs`;
}

export function share(part, whole) {
  return whole > 0 ? `${number(100 * part / whole)} %` : "–";
}
