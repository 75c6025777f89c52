// Fragments and rounds: which region has which version, who was missing, and where the time of a round went.
import { h, panel, toggle } from "./dom.js";
import { allNames, asPeer, byName, now, store } from "./store.js";
import { NO_DATA, clock, isNumber, known, list, median, seconds, table, tables } from "./text.js";

const CELL = { width: 62, height: 34, gap: 2 };
const ROWS_SHOWN = 12;
const ROWS_ALL = 128;
const PHASES = ["gather", "reduce", "commit", "apply"];
const SLOW = 2;

// ---- the region x fragment map

// When each version was merged, "fragment version" -> seconds since 1970: as rounds ended, or else as it was offered here.
function mergedAt() {
  const found = new Map();
  for (const { status } of byName()) {
    const at = table(status.clock);
    for (const offer of list(status.offers)) {
      if (isNumber(at.unix) && Array.isArray(offer)) earliest(found, `${offer[0]} ${offer[1]}`, at.unix - (at.monotonic_ns - offer[2]) / 1e9);
    }
    for (const one of tables(status.round_log)) if (one.outcome === "committed") earliest(found, `${one.fragment} ${one.version}`, one.ended_unix);
  }
  return found;
}

function earliest(found, key, unix) {
  if (isNumber(unix) && !(found.get(key) <= unix)) found.set(key, unix);
}

function versionsOf(name) {
  const region = store.regions.get(name);
  if (region && Array.isArray(region.status.versions)) return region.status.versions;
  return list(asPeer(name)?.versions);
}

// The members of each fragment's last merge that were missing: fragment -> names.
function missingOf() {
  const last = new Map();
  for (const { status } of byName()) {
    for (const one of tables(status.round_log)) {
      if (one.outcome === "committed" && !(last.get(one.fragment)?.version >= one.version)) last.set(one.fragment, one);
    }
  }
  return new Map([...last].map(([fragment, one]) => [fragment, list(one.missing)]));
}

export function drawMap() {
  const names = allNames();
  const versions = new Map(names.map((name) => [name, versionsOf(name)]));
  const fragments = Math.max(0, ...[...versions.values()].map((one) => one.length));
  const note = h("span", { class: "note" }, "version, and its age");
  if (!fragments) {
    panel("fragments", "Regions and fragments", note, h("p", { class: "empty" }, NO_DATA));
    return;
  }
  const [merged, missing, unix] = [mergedAt(), missingOf(), now()];
  const newest = Array.from({ length: fragments }, (_, at) => Math.max(...names.map((name) => versions.get(name)[at] ?? -1)));
  const left = 12 + 7.6 * Math.max(...names.map((name) => name.length));
  const said = [];
  const rows = names.map((name, row) => {
    const y = 18 + row * (CELL.height + CELL.gap);
    const cells = newest.map((version, fragment) => {
      const fact = { name, fragment, own: versions.get(name)[fragment], newest: version, isMissing: (missing.get(fragment) || []).includes(name) };
      fact.age = isNumber(fact.own) && unix !== null ? unix - merged.get(`${fragment} ${fact.own}`) : null;
      if (fact.isMissing || fact.own < version) said.push(cellText(fact));
      return fragmentCell(fact, left + fragment * (CELL.width + CELL.gap), y);
    });
    return [h("text", { x: 0, y: y + 21, class: "label" }, name), cells];
  });
  const heads = newest.map((_, at) => h("text", { x: left + at * (CELL.width + CELL.gap) + CELL.width / 2, y: 12, class: "axis", "text-anchor": "middle" }, `f${at}`));
  const size = { width: left + fragments * (CELL.width + CELL.gap), height: 18 + names.length * (CELL.height + CELL.gap) };
  panel(
    "fragments",
    "Regions and fragments",
    note,
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Map of regions and fragments" }, h("svg", { ...size, role: "img", "aria-label": said.slice(0, 12).join("; ") || "Every region has the newest version of every fragment." }, heads, rows)),
    h("ul", { class: "legend" }, key("current", "newest version"), key("behind", "behind, −1 a version"), key("missing", "✕ not in the last merge"), key("unknown", NO_DATA)),
  );
}

const key = (tone, text) => h("li", { "data-key": tone }, h("svg", { width: 16, height: 12, "aria-hidden": "true" }, h("rect", { x: 1, y: 1, width: 14, height: 10, class: `cell ${tone}` }), tone === "behind" ? stripes(1, 1, 14, 10) : null), text);

const stripes = (x, y, width, height) => {
  const parts = [];
  for (let at = 4; at < width; at += 6) parts.push(`M${x + at} ${y}l-4 ${height}`);
  return h("path", { d: parts.join(""), class: "stripes" });
};

function cellText({ name, fragment, own, newest, isMissing }) {
  const behind = own < newest ? `, ${newest - own} behind` : "";
  return `${name} fragment ${fragment}: ${isNumber(own) ? `version ${own}` : NO_DATA}${behind}${isMissing ? ", not in the last merge" : ""}`;
}

function fragmentCell(fact, x, y) {
  const tone = fact.own < fact.newest ? "behind" : fact.isMissing ? "missing" : isNumber(fact.own) ? "current" : "unknown";
  const [behind, middle] = [fact.own < fact.newest ? `−${fact.newest - fact.own}, ` : "", x + CELL.width / 2];
  const version = isNumber(fact.own) ? `v${fact.own}` : fact.isMissing ? "" : "–";
  const age = isNumber(fact.own) ? `${behind}${isNumber(fact.age) ? seconds(fact.age) : "age ?"}` : NO_DATA;
  return h(
    "g",
    {},
    h("title", {}, cellText(fact)),
    h("rect", { x, y, width: CELL.width, height: CELL.height, rx: 3, class: `cell ${tone}` }),
    tone === "behind" ? stripes(x, y + CELL.height - 5, CELL.width, 4) : null,
    h("text", { x: middle, y: y + 15, class: "value", "text-anchor": "middle" }, fact.isMissing ? `${version} ✕` : version),
    h("text", { x: middle, y: y + 27, class: "axis", "text-anchor": "middle" }, age),
  );
}

// ---- the timeline

// Failed, slow, or the first that a region is missing in: without it the later ones are as they can be.
export function badRounds(log) {
  const usual = median(log.map((one) => one.seconds));
  const isNew = (one, before) => list(one.missing).some((name) => !list(before?.missing).includes(name));
  return log.filter((one, at) => one.outcome !== "committed" || (usual !== null && one.seconds > SLOW * usual) || isNew(one, log[at - 1]));
}

export function drawRounds(region, view) {
  const log = region ? tables(region.status.round_log) : [];
  const bad = badRounds(log);
  const chosen = (view.onlyBad ? bad : log).slice(-(view.allRounds ? ROWS_ALL : ROWS_SHOWN)).reverse();
  const open = region && region.answered !== false ? tables(region.status.rounds) : [];
  panel(
    "rounds",
    "Rounds",
    h("span", { class: "note" }, region ? `as ${region.name} saw them` : ""),
    h("p", { class: "acts" }, toggle("only-bad", `Only bad (${bad.length} of ${log.length})`, view.onlyBad), toggle("all-rounds", "Show all", view.allRounds)),
    open.map((one) => h("p", { class: "open", "data-key": `${one.fragment} ${one.version}` }, h("b", {}, `fragment ${one.fragment} to v${one.version}`), ` open ${seconds(one.open_seconds)}: ${known(one.reason)}`)),
    log.length ? strip(log, bad) : h("p", { class: "empty" }, NO_DATA),
    chosen.length ? waterfall(chosen, bad) : log.length ? h("p", { class: "empty" }, "no bad round among those known") : null,
    log.length ? h("ul", { class: "legend" }, PHASES.map((phase, at) => h("li", { "data-key": phase }, h("svg", { width: 16, height: 12, "aria-hidden": "true" }, block(phase, 1, 1, 14, 10)), `${at + 1} ${phase}`)), h("li", {}, "✓ merged"), h("li", {}, "! slow, or the first without a region"), h("li", {}, "✕ failed")) : null,
  );
}

// All rounds known, a lane per fragment, over time.
function strip(log, bad) {
  const [width, lane] = [720, 11];
  const lanes = [...new Set(log.map((one) => one.fragment))].sort((a, b) => a - b);
  const start = Math.min(...log.map((one) => one.ended_unix - one.seconds));
  const end = Math.max(now() ?? 0, ...log.map((one) => one.ended_unix));
  const at = (unix) => 24 + ((unix - start) / Math.max(end - start, 1e-3)) * (width - 28);
  const bars = log.map((one) => {
    const [x, y] = [at(one.ended_unix - one.seconds), lanes.indexOf(one.fragment) * lane + 1];
    const tone = one.outcome !== "committed" ? "failed" : bad.includes(one) ? "slow" : "merged";
    const size = { width: Math.max(1.5, at(one.ended_unix) - x), height: lane - 2 };
    return h("g", {}, h("title", {}, `fragment ${one.fragment} to v${one.version}: ${one.outcome}, ${seconds(one.seconds)}`), h("rect", { x, y: tone === "failed" ? y : y + 1, ...size, height: tone === "failed" ? size.height : size.height - 2, class: `bar ${tone}` }), tone === "merged" ? null : h("path", { d: tone === "failed" ? `M${x - 1} ${y}l5 8m-5 0l5 -8` : `M${x} ${y + 4}h${Math.max(3, size.width)}`, class: "flag" }));
  });
  const failed = log.filter((one) => one.outcome !== "committed").length;
  const height = lanes.length * lane + 14;
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "Timeline of rounds" },
    h(
      "svg",
      { class: "strip", viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `${log.length} rounds from ${clock(start)} to ${clock(end)}, ${failed} failed` },
      lanes.map((fragment, row) => h("text", { x: 0, y: row * lane + 9, class: "axis" }, `f${fragment}`)),
      bars,
      h("text", { x: 24, y: height - 2, class: "axis" }, clock(start)),
      h("text", { x: width - 4, y: height - 2, class: "axis", "text-anchor": "end" }, clock(end)),
    ),
  );
}

function waterfall(rounds, bad) {
  const longest = Math.max(...rounds.map((one) => one.seconds || 0), 1e-3);
  const heads = ["ended", "fragment", "took", "phases", "missing", "waited for"];
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table of rounds" }, h("table", { class: "rounds" }, h("thead", {}, h("tr", {}, heads.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, rounds.map((one) => roundRow(one, bad, longest)))));
}

function roundRow(one, bad, longest) {
  const mark = one.outcome !== "committed" ? ["✕", "bad", "failed"] : bad.includes(one) ? ["!", "warn", "merged, but slow, or the first without a region"] : ["✓", "good", "merged"];
  const waited = table(one.waited_for);
  const why = [waited.region ? `${waited.region}${waited.phase ? ` (${waited.phase})` : ""}` : "", one.reason || ""].filter(Boolean).join(": ");
  return h(
    "tr",
    { "data-key": `${one.fragment} ${one.version} ${one.ended_unix}` },
    h("td", { "data-label": "ended" }, clock(one.ended_unix)),
    h("td", { "data-label": "fragment" }, h("span", { class: `mark ${mark[1]}`, "aria-hidden": "true" }, mark[0]), h("span", { class: "hidden" }, mark[2]), ` f${one.fragment} → v${one.version}`),
    h("td", { class: "number", "data-label": "took" }, seconds(one.seconds)),
    h("td", { "data-label": "phases" }, phaseBar(one, longest)),
    h("td", { "data-label": "missing" }, list(one.missing).join(", ") || "nobody"),
    h("td", { class: "why", "data-label": "waited for" }, why || (one.outcome === "committed" ? "nothing in particular" : NO_DATA)),
  );
}

function phaseBar(one, longest) {
  const phases = PHASES.filter((phase) => isNumber(table(one.phases)[phase]));
  if (!phases.length) return h("span", { class: "quiet" }, NO_DATA);
  const width = 150;
  let x = 0;
  const blocks = phases.map((phase) => {
    const [from, long] = [x, Math.max(1, (one.phases[phase] / longest) * width)];
    x += long;
    return h("g", {}, h("title", {}, `${phase} ${seconds(one.phases[phase])}`), block(phase, from, 2, long, 12), long > 12 ? h("text", { x: from + long / 2, y: 11.5, class: "digit", "text-anchor": "middle" }, PHASES.indexOf(phase) + 1) : null);
  });
  const said = phases.map((phase) => `${phase} ${seconds(one.phases[phase])}`).join(", ");
  return h("svg", { width, height: 16, role: "img", "aria-label": said }, blocks);
}

const block = (phase, x, y, width, height) => h("rect", { x, y, width, height, class: `phase ${phase}` });
