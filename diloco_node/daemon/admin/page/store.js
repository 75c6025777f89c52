// What is known: the last status of each region, its history, and rates from the counters of the last seconds. Bounded.
import { written } from "./dom.js";
import { greatest, isNumber, list, table, tables } from "./text.js";

const POINTS_MAX = 1024;
const REGIONS_MAX = 64;
const MARKS_MAX = 1024;
const RATE_WINDOW_S = 8;
const MEANS = new Set(["loss", "tokens_per_second"]);
const COLUMNS = ["unix", "step", "tokens", "loss", "loss_merged", "tokens_per_second", "bytes_out", "bytes_in", "val_loss"];

// health: of all regions together, where the server joins them; else each region has its own.
// regions: name -> {status, rows, marks, period, settings, counters}. heard: when anything came, in ms of the browser's clock.
export const store = { regions: new Map(), health: null, summary: null, isReport: false, heard: null, isOpen: false };

// A `snapshot` event, or what a report holds.
export function begin(document) {
  store.summary = document.summary || null;
  store.health = document.health || null;
  for (const one of tables(document.regions)) {
    const [status, history] = [table(one.status), table(one.history)];
    const region = regionOf(status);
    if (written(history.columns) === written(COLUMNS)) merge(region, history);
    if (Array.isArray(one.settings)) region.settings = one.settings.filter((row) => Array.isArray(row) && row.length === 3);
    take(status);
    region.isWhole = region.answered;
  }
}

// What a region has kept replaces what was seen of the same time.
function merge(region, history) {
  mark(region, list(history.marks));
  const rows = list(history.rows).filter((row) => Array.isArray(row) && isNumber(row[0]));
  if (!rows.length) return;
  const [first, last] = [rows[0][0], rows.at(-1)[0]];
  region.rows = [...region.rows.filter((row) => row[0] < first), ...rows, ...region.rows.filter((row) => row[0] > last)];
  region.period = Math.max(region.period, isNumber(history.period_s) ? history.period_s : 0);
  while (region.rows.length >= POINTS_MAX) halve(region);
}

// Marks of the curves, [unix, letter], each once.
function mark(region, marks) {
  const isNew = (one) => Array.isArray(one) && isNumber(one[0]) && !region.marks.some(([unix, letter]) => letter === one[1] && Math.abs(unix - one[0]) < 1);
  region.marks = [...region.marks, ...marks.filter(isNew)].slice(-MARKS_MAX);
}

// A region that is listed no longer has another name by now: until it answers it is called by its place.
export function forgetOthers(statuses) {
  const names = new Set(statuses.map(nameOf));
  for (const name of store.regions.keys()) if (!names.has(name)) store.regions.delete(name);
}

// Whether there is a region that answers, of which no snapshot has come since it was away.
export const hasGap = () => byName().some((one) => one.answered && !one.isWhole);

const nameOf = (status) => written(status.region ?? "?");

function regionOf(status) {
  const name = nameOf(status);
  if (!store.regions.has(name)) {
    if (store.regions.size >= REGIONS_MAX) store.regions.delete(store.regions.keys().next().value);
    store.regions.set(name, { name, status: {}, rows: [], marks: [], period: 2, settings: [], counters: [], isWhole: false });
  }
  return store.regions.get(name);
}

// A `status` event.
export function take(status) {
  const region = regionOf(status);
  // A region that does not answer keeps what was last known of it.
  region.status = status.error ? { ...region.status, region: region.name, error: written(status.error) } : status;
  region.answered = !status.error;
  region.isWhole &&= region.answered;
  const unix = table(status.clock).unix;
  if (!isNumber(unix)) return;
  mark(region, list(status.marks).map((one) => [unixOf(status, { at_ns: list(one)[0] }), list(one)[1]]));
  const learner = table(status.learner);
  const speed = speedOf(status);
  // Also when the clock was set back.
  if (status.learner && (!region.rows.length || Math.abs(unix - region.rows.at(-1)[0]) >= region.period)) {
    // As the history has them: since the run began, whatever learner was there.
    const row = [unix, status.inner_steps, status.tokens, learner.loss, learner.val_loss_global, speed];
    region.rows.push([...row, status.wire_bytes_out, status.wire_bytes_in, learner.val_loss].map((one) => (isNumber(one) ? one : null)));
    if (region.rows.length >= POINTS_MAX) halve(region);
  }
  if (region.counters.length && unix < region.counters.at(-1)[0]) region.counters = [];
  region.counters.push([unix, countersOf(status)]);
  while (region.counters.length > 2 && unix - region.counters[0][0] > RATE_WINDOW_S) region.counters.shift();
}

export function speedOf(status) {
  const learner = table(status.learner);
  return learner.current_tokens_per_second ?? (("current_tokens_per_second" in learner) ? null : learner.tokens_per_second);
}

function halve(region) {
  region.period *= 2;
  const halved = [];
  for (let at = 0; at + 1 < region.rows.length; at += 2) halved.push(joined(region.rows[at], region.rows[at + 1]));
  region.rows = halved;
}

const joined = (first, second) =>
  COLUMNS.map((name, at) => {
    if (second[at] === null) return first[at];
    return MEANS.has(name) && first[at] !== null ? (first[at] + second[at]) / 2 : second[at];
  });

function countersOf(status) {
  const found = { out: status.wire_bytes_out, in: status.wire_bytes_in };
  for (const [peer, use] of Object.entries(table(table(status.budget).peers))) {
    for (const [lane, row] of Object.entries(table(table(use).lanes))) found[`${peer} ${lane}`] = table(row).used_bytes;
  }
  return found;
}

// Bytes per second of a counter over the last seconds; null if not known.
export function rateOf(region, name) {
  if (store.isReport) return meanRate(region, COLUMNS.indexOf(`bytes_${name}`));
  const [first, last] = [region.counters[0], region.counters.at(-1)];
  if (!first || last[0] - first[0] < 0.5) return null;
  const used = last[1][name] - first[1][name];
  return isNumber(used) && used >= 0 ? used / (last[0] - first[0]) : null;
}

// Over the run as far as it is known, for what is over.
function meanRate(region, column) {
  const rows = region.rows.filter((row) => isNumber(row[column]));
  const [first, last] = [rows[0], rows.at(-1)];
  return rows.length > 1 && last[column] >= first[column] ? (last[column] - first[column]) / (last[0] - first[0]) : null;
}

export const isOver = (status) => status.state === "finished" || status.state === "finishing";

// Daemons end one after the other when a run has finished: who answers no more then is no failure.
export const isRunOver = () => byName().some((one) => one.status.state === "finished" || one.status.end);

// When a note was made, in seconds since 1970.
export function unixOf(status, note) {
  const at = table(status.clock);
  return isNumber(at.unix) && isNumber(note.at_ns) ? at.unix - (at.monotonic_ns - note.at_ns) / 1e9 : null;
}

export const byName = () => [...store.regions.values()].sort((a, b) => (a.name < b.name ? -1 : 1));

// All regions of the run: those that answer, and those that these know of.
export function allNames() {
  const names = new Set(store.regions.keys());
  for (const region of store.regions.values()) for (const peer of tables(region.status.peers)) names.add(written(peer.name));
  return [...names].sort();
}

// What others say of a region: the last peer entry of any region that answers.
export function asPeer(name) {
  for (const region of byName()) {
    const peer = region.answered && tables(region.status.peers).find((one) => one.name === name);
    if (peer) return { ...peer, by: region.name };
  }
  return null;
}

// A region's row among the members: as it knows itself where it answers, for it knows best what it waits for.
export function asMember(name) {
  const own = store.regions.get(name);
  for (const region of [...(own?.answered ? [own] : []), ...byName()]) {
    const row = region.answered && tables(table(region.status.members).rows).find((one) => one.region === name);
    if (row) return row;
  }
  return {};
}

// "Now" of the run: what its regions said last, so that a report stays at its time.
export const now = () => greatest(byName().map((one) => table(one.status.clock).unix));
