// Regions, bandwidth, tokens, events, settings.
import { h, panel, patch, toggle, written } from "./dom.js";
import { allNames, asMember, asPeer, byName, isOver, isRunOver, now, rateOf, speedOf, store, unixOf } from "./store.js";
import { NO_DATA, bytes, classOf, clock, count, day, greatest, isNumber, known, loss, percent, rate, seconds, table, tables, whole } from "./text.js";

const EVENTS_SHOWN = 64;
const LANES = ["rounds", "control", "recovery", "measurement"];

const cell = (label, text, more) => h("td", { ...more, "data-label": label, class: [more?.class, classOf(text)].filter(Boolean).join(" ") || null }, text);
const scroll = (label, ...children) => h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, ...children);

function head(...names) {
  return h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
}

// ---- regions

// Participation counts rounds while there was a learner: of one that is gone it would say that all was well.
const hasLearner = (region, peer) => (region?.answered ? region.status.learner || isOver(region.status) : peer?.is_alive && isNumber(peer.step));
const tookPart = (name) => byName().map((one) => table(one.status.participation_of)[name]).find(isNumber);

function regionRow(name, chosen) {
  const region = store.regions.get(name);
  const status = region ? region.status : {};
  const peer = asPeer(name);
  const learner = table(status.learner);
  const lag = isNumber(status.last_index) && isNumber(status.applied_index) ? status.last_index - status.applied_index : null;
  const [mark, tone, state] = shownState(region, peer);
  const process = table(status.learner_process);
  const member = asMember(name);
  const joins = member.has_folder === false && member.since ? member.state : "";
  const why = region?.answered === false ? status.error : joins || (region ? status.reason || process.reason : peer?.error) || "";
  return h(
    "tr",
    { id: `region-${name}`, "data-key": name, tabindex: "-1", class: name === chosen ? "chosen" : null },
    h("th", { scope: "row" }, region ? h("button", { type: "button", class: "link", "data-do": "region", "data-name": name, "aria-pressed": String(name === chosen) }, name) : name),
    h("td", { "data-label": "state" }, h("span", { class: `mark ${tone}`, "aria-hidden": "true" }, mark), ` ${state}`),
    cell("member", known(member.kind), { title: known(member.state) }),
    cell("since", isNumber(member.since_unix) ? clock(member.since_unix) : isNumber(member.since) ? `entry ${whole(member.since)}` : NO_DATA, { class: "tight", title: `${isNumber(member.since_unix) ? `${day(member.since_unix)}, ` : ""}entry ${whole(member.since)} of the ledger` }),
    cell("step", whole(learner.step === undefined ? peer?.step : status.inner_steps ?? learner.step), { class: "number", title: "in all lives of the learner" }),
    cell("loss", loss(learner.loss), { class: "number" }),
    cell("tokens/s", count(region?.status.learner ? speedOf(status) : null), { class: "number" }),
    cell("report", seconds(learner.report_age_seconds), { class: "number" }),
    cell("round trip", seconds(peer?.rtt_seconds), { class: "number" }),
    cell("entries behind", whole(region ? lag : null), { class: "number" }),
    cell("took part", percent(hasLearner(region, peer) ? status.participation ?? tookPart(name) : null), { class: "number" }),
    cell("waits for", known(why), { class: "why" }),
  );
}

function shownState(region, peer) {
  if (isRunOver() && (region ? !region.answered : peer && !peer.is_alive)) return ["■", "good", "gone: the run is over"];
  if (region?.answered === false) return ["✕", "bad", "no answer"];
  if (region) {
    const state = known(region.status.state);
    const role = region.status.role === "leader" && !isOver(region.status) ? ", leader" : "";
    return [state === "waiting" ? "!" : "✓", state === "waiting" ? "warn" : "good", `${state}${role}`];
  }
  if (peer?.is_alive) return ["✓", "good", `seen by ${peer.by}`];
  return ["✕", "bad", peer ? `link ${known(peer.link)}` : NO_DATA];
}

export function drawRegions(chosen) {
  const members = table(chosen?.status.members);
  const witness = tables(members.rows).find((one) => one.kind === "witness");
  const lines = [!isRunOver() && members.tolerance, witness && `${witness.region}: witness; ${witness.state}`].filter(Boolean);
  const names = ["region", "state", "member", "since", "step", "loss", "tokens/s", "report", "round trip", "entries behind", "took part", "waits for"];
  panel("regions", "Regions", h("span", { class: "note" }, "a name chooses whose rounds, bandwidth, events and settings are shown"), lines.map((line) => h("p", {}, line)), scroll("Table of regions", h("table", { class: "regions" }, head(...names), h("tbody", {}, allNames().map((name) => regionRow(name, chosen?.name))))));
}

// ---- bandwidth

function laneBar(uses, limit) {
  const width = 120;
  const total = uses.reduce((sum, [, speed]) => sum + (speed || 0), 0);
  const full = Math.max(limit || 0, total, 1);
  let x = 0;
  const parts = uses.map(([lane, speed]) => {
    const [from, long] = [x, ((speed || 0) / full) * width];
    x += long;
    return h("rect", { x: from, y: 2, width: long, height: 10, class: `lane ${lane}` });
  });
  const said = limit ? `${percent(total / limit)} of the budget` : "no limit";
  const edge = limit ? h("line", { x1: (limit / full) * width - 1, y1: 0, x2: (limit / full) * width - 1, y2: 14, class: "edge" }) : null;
  return h("svg", { width, height: 14, role: "img", "aria-label": said }, h("rect", { x: 0, y: 2, width, height: 10, class: "trough" }), parts, edge);
}

function peerRow(region, peer, use) {
  const lanes = table(use.lanes);
  const names = [...LANES.filter((lane) => lane in lanes), ...Object.keys(lanes).filter((lane) => !LANES.includes(lane))];
  const uses = names.map((lane) => [lane, rateOf(region, `${peer} ${lane}`), table(lanes[lane])]).filter(([, speed, one]) => speed || one.used_bytes);
  const limit = use.egress_bytes_per_s;
  const sums = uses.map(([, speed]) => speed).filter(isNumber);
  const detail = uses.map(([lane, speed, one]) => `${lane} ${isNumber(speed) ? rate(speed) : bytes(one.used_bytes)}`).join(" · ");
  return h(
    "tr",
    { "data-key": peer },
    h("th", { scope: "row" }, `to ${peer}`),
    cell("now", rate(sums.length ? sums.reduce((a, b) => a + b, 0) : null), { class: "number" }),
    h("td", { "data-label": "use" }, laneBar(uses, limit)),
    cell("limit", isNumber(limit) ? `${rate(limit)}${use.limited_by ? ` (${use.limited_by})` : ""}` : "no limit", { class: "tight" }),
    cell("total", bytes(uses.reduce((sum, [, , one]) => sum + one.used_bytes, 0)), { class: "number" }),
    h("td", { class: "why", "data-label": "lanes" }, detail || "nothing sent"),
  );
}

export function drawBandwidth(region) {
  const budget = table(region?.status.budget);
  const peers = Object.entries(table(budget.peers));
  const ceilings = [["egress", "out", "wire_bytes_out"], ["ingress", "in", "wire_bytes_in"]].map(([direction, counter, total]) => {
    const limit = budget[`${direction}_bytes_per_s`];
    return h("p", { class: "ceiling", "data-key": direction }, h("b", {}, direction), ` ${rate(region && rateOf(region, counter))} `, laneBar([[direction, region && rateOf(region, counter)]], limit), isNumber(limit) ? ` of ${rate(limit)}` : " no limit", store.isReport ? " · on average" : "", ` · ${bytes(region?.status[total])} since the start`);
  });
  const busy = isNumber(budget.share_used) ? h("p", { class: "note" }, `${percent(budget.share_used)} of the egress budget was used while there was something to send`) : null;
  panel(
    "bandwidth",
    "Bandwidth",
    h("span", { class: "note" }, region ? `of ${region.name}` : ""),
    region?.status.budget_warning ? h("p", { class: "open" }, `! ${region.status.budget_warning}`) : null,
    ceilings,
    busy,
    peers.length ? scroll("Table of bandwidth", h("table", {}, head("peer", "now", "use", "limit", "total", "lanes"), h("tbody", {}, peers.map(([peer, use]) => peerRow(region, peer, table(use)))))) : h("p", { class: "empty" }, NO_DATA),
    peers.length ? h("ul", { class: "legend" }, LANES.map((lane) => h("li", { "data-key": lane }, h("svg", { width: 16, height: 12, "aria-hidden": "true" }, h("rect", { x: 1, y: 1, width: 14, height: 10, class: `lane ${lane}` })), lane))) : null,
  );
}

// ---- tokens

function account() {
  const told = table(store.summary?.tokens);
  if (isNumber(told.trained)) return { ...told, source: told.balanced ? "the ledger; it balances" : "the ledger; it does NOT balance" };
  const books = byName().map((one) => table(one.status.token_account));
  const isWhole = books.length === allNames().length;
  const sum = (name) => (isWhole && books.every((one) => isNumber(one[name])) ? books.reduce((total, one) => total + one[name], 0) : null);
  const merged = greatest([...books.map((one) => one.run_merged), ...byName().map((one) => one.status.tokens_merged)]);
  const source = isWhole ? "the learners and the ledger" : "the ledger; not every region answers here";
  return { trained: sum("trained"), merged, carried: sum("carried"), discarded: greatest(books.map((one) => one.run_discarded)), source };
}

export function drawAccount() {
  const one = account();
  const rows = [["trained", one.trained], ["merged", one.merged], ["carried: only in a living learner", one.carried], ["discarded: died with a process", one.discarded]];
  panel(
    "account",
    "Token account",
    h("span", { class: "note" }, `from ${one.source}`),
    h("table", { class: "account" }, h("tbody", {}, rows.map(([name, value]) => h("tr", { "data-key": name }, h("th", { scope: "row" }, name), cell("", whole(value), { class: "number" }), cell("", percent(isNumber(value) && one.trained ? value / one.trained : null), { class: "number" }))))),
    h("h3", {}, "Trained by each region"),
    h("table", { class: "account" }, h("tbody", {}, allNames().map((name) => {
      const status = store.regions.get(name)?.status || {};
      return h("tr", { "data-key": name }, h("th", { scope: "row" }, name), cell("", whole(status.tokens), { class: "number" }), cell("", isNumber(one.trained) && isNumber(status.tokens) && one.trained > 0 ? percent(status.tokens / one.trained) : NO_DATA, { class: "number" }));
    }))),
  );
}

// ---- events

export function drawEvents(region, view) {
  const all = tables(region?.status.notes).slice(-EVENTS_SHOWN).reverse();
  const kinds = [...new Set(all.map((one) => written(one.kind)))].sort();
  const ofKind = all.filter((one) => !kinds.includes(view.kind) || written(one.kind) === view.kind);
  const alarms = ofKind.filter((one) => one.is_alarm);
  const rows = (view.onlyAlarms ? alarms : ofKind).map((one) =>
    h(
      "li",
      { "data-key": `${one.at_ns} ${one.kind}`, class: one.is_alarm ? "alarm" : null },
      h("span", { class: "when" }, clock(unixOf(region.status, one))),
      h("span", { class: "kind" }, one.is_alarm ? h("span", { class: "mark bad" }, "! ") : null, known(one.kind)),
      h("span", { class: "text" }, one.fragment >= 0 ? h("b", {}, `f${one.fragment} v${one.version} `) : null, known(one.text), one.count > 1 ? ` (${one.count} times)` : ""),
    ),
  );
  const buttons = kinds.map((kind) => toggle("kind", `${kind} (${all.filter((one) => written(one.kind) === kind).length})`, kind === view.kind, kind));
  panel(
    "events",
    "Events",
    h("span", { class: "note" }, region ? `of ${region.name}, newest first: ${rows.length} of ${all.length}` : ""),
    h("p", { class: "acts" }, toggle("only-alarms", `Only alarms (${alarms.length} of ${ofKind.length})`, view.onlyAlarms), buttons),
    rows.length ? h("ol", { class: "events scroll", tabindex: "0", "aria-label": "Events" }, rows) : h("p", { class: "empty" }, all.length ? "no alarms" : NO_DATA),
  );
}

// ---- settings

export function drawSettings(region, view) {
  const rows = region ? region.settings : [];
  const changed = rows.filter((row) => row[2] !== "default");
  const chosen = view.allSettings ? rows : changed;
  panel(
    "settings",
    "Settings",
    h("span", { class: "note" }, region ? `of ${region.name}, and where each was set` : ""),
    h("p", { class: "acts" }, toggle("all-settings", `Defaults too (${rows.length - changed.length})`, view.allSettings)),
    rows.length ? scroll("Table of settings", h("table", { class: "settings" }, head("setting", "value", "set in"), h("tbody", {}, chosen.map(([name, value, origin]) => h("tr", { "data-key": name }, h("th", { scope: "row" }, name), h("td", { "data-label": "value" }, value), h("td", { "data-label": "set in", class: "quiet", title: origin }, written(origin).split("/").at(-1))))))) : h("p", { class: "empty" }, NO_DATA),
  );
}

export function drawFoot() {
  const status = byName()[0]?.status || {};
  patch(document.getElementById("foot"), h("p", {}, "Read-only. ", store.isReport ? "Written by diloco-node report." : "Change things with the command line: diloco-node --help.", isNumber(now()) && status.manifest_digest ? ` Model ${written(status.manifest_digest).slice(0, 12)}, ${count(status.parameters)} parameters.` : ""));
}
