// The page: one stream of events in, everything drawn from what is known, at most once a second.
import { begin, byName, forgetOthers, hasGap, store, take } from "./store.js";
import { table, tables } from "./text.js";
import { drawAlerts, drawFigures, drawTop } from "./health.js";
import { drawCharts } from "./charts.js";
import { drawMap, drawRounds } from "./rounds.js";
import { drawAccount, drawBandwidth, drawEvents, drawFoot, drawRegions, drawSettings } from "./tables.js";

const AGAIN_MS = 5000;
const WHOLE_MS = 30000;
const view = { region: null, kind: null, onlyBad: false, allRounds: false, onlyAlarms: false, allSettings: false };
const TOGGLES = { "only-bad": "onlyBad", "all-rounds": "allRounds", "only-alarms": "onlyAlarms", "all-settings": "allSettings" };
let isDue = false;
let asked = -Infinity;

function chosen() {
  const regions = byName();
  const there = regions.filter((one) => one.answered);
  return regions.find((one) => one.name === view.region) || there.find((one) => one.status.role === "leader") || there[0] || regions[0];
}

function drawAll() {
  isDue = false;
  const region = chosen();
  for (const draw of [drawTop, drawAlerts, drawFigures, drawCharts, drawRegions, drawMap, drawRounds, drawBandwidth, drawAccount, drawEvents, drawSettings, drawFoot]) {
    try {
      draw(region, view);
    } catch (error) {
      console.error(error); // what one part can't show leaves the others
    }
  }
}

function soon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(drawAll);
}

// An event of the stream: "snapshot" or "status", and its document.
export function receive(kind, document) {
  store.heard = performance.now();
  store.isOpen = true;
  const regions = tables(document.regions);
  forgetOthers(kind === "snapshot" ? regions.map((one) => table(one.status)) : regions);
  if (kind === "snapshot") begin(document);
  else {
    store.health = document.health || null;
    regions.forEach(take);
  }
  soon();
}

function connect() {
  const stream = new EventSource("/api/v1/events");
  asked = performance.now();
  for (const kind of ["snapshot", "status"]) {
    stream.addEventListener(kind, (event) => {
      receive(kind, JSON.parse(event.data));
      // A region that answers only now has settings, and a history, that have not come.
      if (!hasGap() || performance.now() - asked < WHOLE_MS) return;
      stream.close();
      connect();
    });
  }
  stream.addEventListener("error", () => {
    store.isOpen = false;
    soon();
    // A server that refused (too many pages) is not asked again by the browser itself.
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  });
}

const say = (text) => {
  document.getElementById("said").textContent = text;
};

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.text);
    say("Copied.");
  } catch {
    getSelection().selectAllChildren(button.previousElementSibling);
    say("Selected: copy it with the keyboard.");
  }
}

function jump(link) {
  const place = document.getElementById(decodeURIComponent(link.hash.slice(1))) || document.getElementById("regions");
  if (!place.hasAttribute("tabindex")) place.tabIndex = -1;
  place.focus({ preventScroll: true });
  place.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-do]");
  if (!target) return;
  const action = target.dataset.do;
  if (action === "copy") copy(target);
  else if (action === "jump") {
    event.preventDefault();
    jump(target);
  } else {
    if (action === "region") view.region = target.dataset.name;
    else if (action === "kind") view.kind = view.kind === target.dataset.name ? null : target.dataset.name;
    else view[TOGGLES[action]] = !view[TOGGLES[action]];
    soon();
  }
});
addEventListener("resize", soon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);

const kept = document.getElementById("snapshot");
if (kept) {
  store.isReport = true;
  begin(JSON.parse(kept.textContent));
  soon();
} else {
  store.heard = performance.now();
  connect();
  // What has come is drawn as it comes; this is for what has not.
  setInterval(() => document.hidden || soon(), 2000);
}
soon();
