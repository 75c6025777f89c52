// Is it healthy, and what to do: the header, the alert cards, the figures.
import { h, patch, written } from "./dom.js";
import { allNames, byName, isRunOver, now, speedOf, store } from "./store.js";
import { NO_DATA, classOf, clock, count, day, greatest, isNumber, known, list, loss, seconds, table, tables, whole } from "./text.js";

const STATES = {
  healthy: ["✓", "good"],
  finished: ["■", "good"],
  starting: ["…", "calm"],
  degraded: ["!", "warn"],
  stalled: ["✕", "bad"],
  "no answer": ["✕", "bad"],
};
const SEVERITIES = { critical: ["✕", "severe", "bad"], warning: ["!", "warning", "warn"], info: ["i", "hint", "calm"] };
const SEVERITY_ORDER = ["critical", "warning", "info"];
const CARDS_MAX = 24;
const STALE_MS = 8000;

// Where the cause of an alert is shown, by a word of its code.
const PLACES = [["BUDGET", "bandwidth"], ["COMMIT", "rounds"], ["MAJORITY", "regions"], ["LEFT-OUT", "rounds"], ["SETTINGS", "settings"], ["LOSS", "loss"], ["DIGEST", "fragments"]];

export const isStale = () => !store.isReport && store.heard !== null && performance.now() - store.heard > STALE_MS;

const answering = () => byName().filter((one) => one.answered !== false);

// Of the regions that answer, as the daemons and the dashboard's server judge it. One that does not is among the alerts.
const health = () => table(store.health || answering()[0]?.status.health);

function runState() {
  if (isRunOver() && !answering().length) return "finished";
  if (isStale() || (store.regions.size && !answering().length)) return "no answer";
  return health().state || null;
}

function alerts() {
  const found = new Map();
  if (isStale()) {
    const text = `Nothing has come for ${seconds((performance.now() - store.heard) / 1000)}. What stands below is the last that was known.`;
    found.set("stale", { severity: "critical", code: "", region: "", text, hint: "Is the daemon still running? It shows at most 16 pages at once.", command: "diloco-node status", place: "regions" });
  }
  for (const region of byName()) {
    if (region.answered !== false || isRunOver()) continue;
    const hint = "It has ended, it hangs, or its machine is away. What stands below is the last that was known.";
    found.set(`gone ${region.name}`, { severity: "critical", code: "", region: region.name, text: `${region.name} does not answer: ${region.status.error}`, hint, command: "diloco-node status" });
  }
  // Several regions may say the same, each of itself.
  for (const one of answering().length ? tables(health().alerts) : []) if (!found.has(`${one.code} ${one.text}`)) found.set(`${one.code} ${one.text}`, one);
  return [...found.values()].sort((a, b) => SEVERITY_ORDER.indexOf(a.severity) - SEVERITY_ORDER.indexOf(b.severity));
}

function placeOf(alert) {
  const found = alert.place || (PLACES.find(([word]) => written(alert.code).includes(word)) || [])[1];
  return found || (alert.region && allNames().includes(alert.region) ? `region-${alert.region}` : "regions");
}

function card(alert) {
  const [mark, word, tone] = SEVERITIES[alert.severity] || SEVERITIES.info;
  return h(
    "li",
    { class: `card ${tone}`, "data-key": `${alert.code} ${alert.region}` },
    h("p", { class: "what" }, h("span", { class: "mark", "aria-hidden": "true" }, mark), h("b", {}, word), alert.region ? ` ${alert.region}` : "", alert.code ? h("span", { class: "code" }, alert.code) : null),
    h("p", {}, known(alert.text)),
    alert.hint ? h("p", { class: "hint" }, String(alert.hint).replaceAll("`", "")) : null,
    h(
      "p",
      { class: "acts" },
      alert.command ? h("code", { tabindex: "0" }, alert.command) : null,
      alert.command ? h("button", { type: "button", "data-do": "copy", "data-text": alert.command, "aria-label": `Copy the command ${alert.command}` }, "Copy") : null,
      h("a", { href: `#${placeOf(alert)}`, "data-do": "jump", "aria-label": `Show the cause: ${alert.code || word} ${alert.region || ""}` }, "Show the cause"),
    ),
  );
}

export function drawAlerts() {
  const all = alerts();
  patch(
    document.getElementById("alerts"),
    h("h2", { id: "alerts-title", class: all.length ? "" : "hidden" }, all.length ? `${all.length} alert${all.length > 1 ? "s" : ""}` : "No alerts"),
    h("ul", { class: "cards" }, all.slice(0, CARDS_MAX).map(card)),
    all.length > CARDS_MAX ? h("p", {}, `and ${all.length - CARDS_MAX} more: diloco-node status --json`) : null,
  );
}

// How many more regions may fail before merging stops, and how many learners before none trains.
function tolerances(state) {
  if (state === "finished") return [];
  const [merging, training] = state === "no answer" ? [] : [health().failure_tolerance, health().training_tolerance];
  return [tolerance("Failure tolerance", merging, "region", "fail", "merging stops"), tolerance("Training", training, "learner", "stop", "none trains")];
}

function tolerance(name, least, what, verb, end) {
  if (!isNumber(least)) return [`${name}: no data`, "quiet"];
  if (least <= 0) return [`No ${what} may ${verb}, or ${end}`, "warn"];
  return [`${least} more ${what}${least > 1 ? "s" : ""} may ${verb} before ${end}`, "good"];
}

// Since when the state holds, where the daemon knows.
function since(state) {
  const unix = health().since_unix;
  if (state !== health().state || !isNumber(unix) || !isNumber(now())) return "";
  return `for ${seconds(Math.max(0, now() - unix))}, since ${clock(unix)}`;
}

function freshness() {
  if (store.isReport) return h("span", { class: "fresh" }, `report of ${day(now())}`);
  if (store.heard === null) return h("span", { class: "fresh" }, "connecting");
  const text = isStale() || !store.isOpen ? `last heard ${clock(now())}` : `live ${clock(now())}`;
  return h("span", { class: "fresh" }, h("span", { class: isStale() ? "dot off" : "dot", "aria-hidden": "true" }), text);
}

function line() {
  if (isStale()) return "The connection is lost; it is tried again by itself.";
  if (runState() === "no answer") return "No region answers.";
  return health().line || (isRunOver() && byName().map((one) => one.status.reason).find(Boolean)) || answering()[0]?.status.reason || NO_DATA;
}

export function drawTop() {
  const state = runState();
  const [mark, tone] = STATES[state] || ["?", "calm"];
  const run = byName().map((one) => one.status.run_id).find(Boolean);
  patch(
    document.getElementById("top"),
    h("h1", {}, h("span", { class: "brand" }, "diloco-node"), " ", h("span", { class: "run" }, run ? `run ${run}` : "")),
    h("p", { class: "state", role: "status" }, h("span", { class: `pill ${tone}` }, h("span", { "aria-hidden": "true" }, `${mark} `), state || NO_DATA), tolerances(state).map(([tolerates, tone]) => h("span", { class: "tolerance", "data-tone": tone }, tolerates))),
    h("span", { class: "note" }, since(state)),
    freshness(),
    h("p", { class: "line" }, line()),
  );
  document.title = `${state === "healthy" ? "" : `${mark} `}${run || "diloco-node"}${state ? `: ${state}` : ""}`;
}

const figure = (name, value, more) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", { class: classOf(value) }, value, more ? h("small", {}, ` ${more}`) : null));

const sum = (values) => (values.length && values.every(isNumber) ? values.reduce((a, b) => a + b, 0) : null);

const furthest = (regions, key) => greatest(regions.map((one) => table(one.status.run)[key]));

export function drawFigures() {
  const regions = byName();
  const learners = regions.filter((one) => one.answered !== false && one.status.learner);
  const merged = learners.map((one) => one.status.learner).filter((one) => one.val_loss_global != null);
  // Regions evaluate at steps of their own, or one of them no more: the last evaluation counts.
  const stepOf = (one) => (isNumber(one.val_loss_global_step) ? one.val_loss_global_step : -1);
  const newest = merged.reduce((best, one) => (stepOf(one) > stepOf(best) ? one : best), merged[0]);
  const step = furthest(regions, "step") ?? greatest(learners.map((one) => one.status.learner.step));
  const steps = furthest(regions, "total_steps");
  const leader = answering().map((one) => one.status.leader).find(Boolean);
  const members = allNames().length;
  const up = regions.filter((one) => one.answered !== false).length;
  const isSeenByOne = regions.length === 1 && up === 1 && members > 1;
  patch(
    document.getElementById("figures"),
    h(
      "dl",
      {},
      figure("step", whole(step), isNumber(steps) ? `of ${whole(steps)}` : ""),
      figure("tokens merged", count(greatest(regions.map((one) => one.status.tokens_merged))), isNumber(furthest(regions, "tokens_total")) ? `of ${count(furthest(regions, "tokens_total"))}` : ""),
      figure("tokens/s", count(sum(learners.map((one) => speedOf(one.status)))), isSeenByOne ? "this region" : ""),
      figure("merged loss", loss(newest?.val_loss_global)),
      figure("rounds merged", whole(greatest(regions.map((one) => one.status.rounds_committed)))),
      figure("time left", runState() === "finished" ? "none" : seconds(furthest(regions, "eta_seconds"))),
      figure("regions", isSeenByOne ? `${members}` : `${up} of ${members}`, isSeenByOne ? `seen by ${regions[0].name}` : "answer"),
      figure("leader", known(leader)),
    ),
  );
}
