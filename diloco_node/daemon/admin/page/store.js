// What is known: the last status of each region, its history, and rates from the counters of the last seconds. Bounded.
import { isNumber, list, table, tables } from "./text.js";

const POINTS_MAX = 1024;
const REGIONS_MAX = 64;
const RATE_WINDOW_S = 8;
const MEANS = new Set(["loss", "loss_merged", "tokens_per_second"]);
const COLUMNS = ["unix", "step", "tokens", "loss", "loss_merged", "tokens_per_second", "bytes_out", "bytes_in"];

// regions: name -> {status, rows, period, settings, counters}. heard: when anything came, in ms of the browser's clock.
export const store = { regions: new Map(), summary: null, isReport: false, heard: null, isOpen: false, unix: null };

// A `snapshot` event, or what a report holds.
export function begin(document) {
  store.summary = document.summary || null;
  for (const one of tables(document.regions)) {
    const [status, history] = [table(one.status), table(one.history)];
    const region = regionOf(status);
    if (String(history.columns) === String(COLUMNS)) {
      // After a broken connection only what is new comes.
      const last = region.rows.length ? region.rows.at(-1)[0] : -Infinity;
      for (const row of list(history.rows)) if (Array.isArray(row) && row[0] > last) keep(region, row);
      region.period = Math.max(region.period, history.period_s || 0);
    }
    if (Array.isArray(one.settings)) region.settings = one.settings.filter((row) => Array.isArray(row) && row.length === 3);
    take(status);
  }
}

function regionOf(status) {
  const name = String(status.region ?? "?");
  if (!store.regions.has(name)) {
    if (store.regions.size >= REGIONS_MAX) store.regions.delete(store.regions.keys().next().value);
    store.regions.set(name, { name, status: {}, rows: [], period: 2, settings: [], counters: [] });
  }
  return store.regions.get(name);
}

// A `status` event.
export function take(status) {
  const region = regionOf(status);
  // A region that does not answer keeps what was last known of it.
  region.status = status.error ? { ...region.status, region: region.name, error: String(status.error) } : status;
  region.answered = !status.error;
  const unix = table(status.clock).unix;
  if (!isNumber(unix)) return region;
  store.unix = Math.max(store.unix ?? 0, unix);
  const learner = table(status.learner);
  const speed = speedOf(status);
  if (status.learner && (!region.rows.length || unix - region.rows.at(-1)[0] >= region.period)) {
    const row = [unix, learner.step, learner.tokens, learner.loss, learner.val_loss_global, speed];
    keep(region, [...row, status.wire_bytes_out, status.wire_bytes_in].map((one) => (isNumber(one) ? one : null)));
  }
  region.counters.push([unix, countersOf(status)]);
  while (region.counters.length > 2 && unix - region.counters[0][0] > RATE_WINDOW_S) region.counters.shift();
  return region;
}

export function speedOf(status) {
  const learner = table(status.learner);
  return learner.current_tokens_per_second ?? (("current_tokens_per_second" in learner) ? null : learner.tokens_per_second);
}

function keep(region, row) {
  region.rows.push(row);
  if (region.rows.length < POINTS_MAX) return;
  region.period *= 2;
  const halved = [];
  for (let at = 0; at + 1 < region.rows.length; at += 2) halved.push(joined(region.rows[at], region.rows[at + 1]));
  region.rows = halved;
}

const joined = (first, second) =>
  COLUMNS.map((name, at) => {
    if (!MEANS.has(name) || first[at] === null) return second[at];
    return second[at] === null ? first[at] : (first[at] + second[at]) / 2;
  });

function countersOf(status) {
  const found = { out: status.wire_bytes_out, in: status.wire_bytes_in };
  for (const [peer, use] of Object.entries(table(table(status.budget).peers))) {
    for (const [lane, row] of Object.entries(table(use.lanes))) found[`${peer} ${lane}`] = row.used_bytes;
  }
  return found;
}

// Bytes per second of a counter over the last seconds; null if not known.
export function rateOf(region, name) {
  const [first, last] = [region.counters[0], region.counters.at(-1)];
  if (!first || last[0] - first[0] < 0.5) return null;
  const used = last[1][name] - first[1][name];
  return isNumber(used) && used >= 0 ? used / (last[0] - first[0]) : null;
}

export const byName = () => [...store.regions.values()].sort((a, b) => (a.name < b.name ? -1 : 1));

// All regions of the run: those that answer, and those that these know of.
export function allNames() {
  const names = new Set(store.regions.keys());
  for (const region of store.regions.values()) for (const peer of tables(region.status.peers)) names.add(String(peer.name));
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

// "Now" of the run: of the browser only where the stream is alive, so that a report stays at its time.
export const now = () => store.unix;
