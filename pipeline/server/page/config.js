// The resolved configuration: each group's option, who chose it, and where each value comes from.
import {breakable, find, make} from "./dom.js";

export function drawConfig(served) {
  const settings = Map.groupBy(served.settings, one => one.path.split(".")[0]);
  const none = served.settings.length ? "It has no settings." : "Settings are shown to keys with admin: true.";
  const groups = served.choices.map(choice => group(choice, settings.get(choice.group) ?? [], none));
  const known = new Set(served.choices.map(choice => choice.group));
  const others = [...settings].filter(([name]) => !known.has(name))
    .map(([name, own]) => group({group: name, options: [], about: ["Settings of single stages."], by: ""}, own));
  find("config").replaceChildren(...groups, ...others);
}

function group({group: name, options, about, by}, settings, none = "") {
  const said = settings.filter(one => !isDefault(one)), chosen = by && by !== "base";
  const head = make("summary", {},
    make("code", {}, options.length ? `${name}=${options.join(",")}` : name),
    by && make("span", {class: chosen ? "by set" : "by"}, by),
    said.length ? make("span", {class: "by set"}, `${said.length} set`) : null,
    make("span", {class: "about"}, about.join(" ")));
  const rows = settings.map(one => make("tr", {class: isDefault(one) ? "" : "set"},
    make("th", {scope: "row"}, make("code", {}, ...breakable(one.path))), make("td", {}, make("code", {}, text(one.value))), make("td", {}, one.from)));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...["setting", "value", "from"].map(word => make("th", {scope: "col"}, word)))),
    make("tbody", {}, ...rows));
  return make("details", {open: said.length > 0}, head, rows.length ? table : make("p", {class: "muted"}, none));
}

/** The option's own value, which nobody has changed. */
function isDefault(one) {
  return /^[\w@]+[=/]/.test(one.from) && !/^(tuning|debug)=/.test(one.from);
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
