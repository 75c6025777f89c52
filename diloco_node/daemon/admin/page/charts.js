// Curves: loss over tokens, tokens per second over time. One line per region, told apart by colour and by dashes.
import { h, panel } from "./dom.js";
import { byName, store } from "./store.js";
import { NO_DATA, clock, count, isNumber, loss } from "./text.js";

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [12, 4, 4, 4], [3, 6], [14, 3]];
const COLOURS = 8;
const TOKENS = 2;
const LOSS = 3;
const MERGED = 4;
const SPEED = 5;
const HELD_OUT = 8;
const HELD_OUT_DASH = [4, 4];
const charts = new Map();
const TWICE_S = 3;
const PERIODS_MISSED = 3;
const MARKS_OF_A_LETTER = 60;

// Marks on the curves: what each letter stands for.
const MARKS = [
  ["R", "a start of a daemon or learner"],
  ["L", "a leader was elected"],
  ["P", "a region left or came back"],
  ["Q", "a region was shut out or left out"],
];
const isDark = matchMedia("(prefers-color-scheme: dark)");

// A colour that comes again comes with other dashes.
const styleOf = (at) => ({ colour: `--c${at % COLOURS}`, dash: DASHES[(at + Math.floor(at / COLOURS)) % DASHES.length] });
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A line of the legend: what it looks like, whose it is, the last value.
function legendItem(line, shown) {
  const last = line.ys.findLast(isNumber);
  return h(
    "li",
    { "data-key": line.name },
    h("svg", { width: 28, height: 10, "aria-hidden": "true" }, h("line", { x1: 1, y1: 5, x2: 27, y2: 5, class: line.tone, "stroke-width": line.width + 0.5, "stroke-dasharray": line.dash.join(" ") || null })),
    line.name,
    " ",
    h("b", {}, shown(last)),
  );
}

function lineOf(region, at, x, y) {
  const rows = region.rows.filter((row) => isNumber(row[x]));
  const { dash } = styleOf(at);
  return { name: region.name, xs: rows.map((row) => row[x]), ys: rows.map((row) => row[y]), tone: `c${at % COLOURS}`, colour: styleOf(at).colour, width: 1.5, dash };
}

// No line is drawn where points are missing: nobody trained there, or nobody knows.
export function broken(line, gap) {
  const [xs, ys] = [[], []];
  line.xs.forEach((x, at) => {
    if (at && x - xs.at(-1) > gap) {
      xs.push((xs.at(-1) + x) / 2);
      ys.push(null);
    }
    xs.push(x);
    ys.push(line.ys[at]);
  });
  return { ...line, xs, ys };
}

// One point for each evaluation: the rows after it repeat its loss until the next.
function evaluations(region, column) {
  const rows = region.rows.filter((row) => isNumber(row[column]) && isNumber(row[TOKENS]));
  return rows.filter((row, at) => row[column] !== rows[at - 1]?.[column]);
}

function heldOutLine(name, rows, column, tone, colour, width) {
  return { name: `${name}, held out`, xs: rows.map((row) => row[TOKENS]), ys: rows.map((row) => row[column]), tone, colour, width, dash: HELD_OUT_DASH, isOptional: true };
}

// A region's own parameters, where its learner evaluates them.
const ownLine = (region, at) => heldOutLine(region.name, evaluations(region, HELD_OUT), HELD_OUT, `c${at % COLOURS}`, styleOf(at).colour, 2);

// The merged model as the region that evaluates it most often saw it: over the tokens of that region.
function mergedLine() {
  const lines = byName().map((region) => evaluations(region, MERGED));
  return heldOutLine("merged model", lines.sort((a, b) => b.length - a.length)[0] || [], MERGED, "ink", "--ink", 2.5);
}

// The marks of all regions, each once: several regions tell of one leader. [unix, letter, region].
function marksNow() {
  const found = byName().flatMap((region) => region.marks.map(([unix, letter]) => [unix, letter, region]));
  found.sort((a, b) => a[0] - b[0]);
  const gap = found.length ? Math.max(TWICE_S, (found.at(-1)[0] - found[0][0]) / MARKS_OF_A_LETTER) : 0;
  const last = {};
  const isNew = ([unix, letter]) => !(unix - last[letter] < gap) && (last[letter] = unix);
  return found.filter(isNew);
}

// Where a moment lies on the axis of tokens: at the first point after it.
const tokensAt = (region, unix) => region.rows.find((row) => row[0] >= unix && isNumber(row[TOKENS]))?.[TOKENS] ?? null;

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--quiet");
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const [x, letter] of marks) {
    const at = plot.valToPos(x, "x", true);
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top + 13 * devicePixelRatio);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(letter, at, bbox.top + 10 * devicePixelRatio);
  }
  ctx.restore();
}

// Each x at most once and increasing, as uPlot wants it: a learner that went back to a checkpoint counts again.
function increasing(line) {
  const [xs, ys] = [[], []];
  line.xs.forEach((x, at) => {
    while (xs.length && xs.at(-1) >= x) {
      xs.pop();
      ys.pop();
    }
    xs.push(x);
    ys.push(line.ys[at]);
  });
  return [xs, ys];
}

function draw(id, title, note, lines, axes, marks) {
  const letters = MARKS.filter(([letter]) => marks.some((one) => one[1] === letter));
  const known = lines.filter((line) => line.ys.some(isNumber));
  const what = known.map((line) => `${line.name} ${axes.y(line.ys.findLast(isNumber))}`).join(", ");
  panel(
    id,
    title,
    h("span", { class: "note" }, note),
    h("ul", { class: "legend" }, lines.filter((line) => known.includes(line) || !line.isOptional).map((line) => legendItem(line, axes.y)), letters.map(([letter, meaning]) => h("li", { "data-key": `mark ${letter}` }, h("b", {}, letter), ` ${meaning}`))),
    h("div", { class: "chart", "data-foreign": "1", "data-key": "chart", role: "img", "aria-label": `${title}. Last: ${what || NO_DATA}. Marks: ${marks.map(([, letter]) => letter).join(" ") || "none"}` }),
    known.length ? null : h("p", { class: "empty" }, NO_DATA),
  );
  const place = document.querySelector(`#${id} .chart`);
  place.classList.toggle("hidden", !known.length);
  if (known.length) plot(id, place, known, axes, marks);
}

function plot(id, place, lines, axes, marks) {
  const data = uPlot.join(lines.map(increasing));
  const kind = JSON.stringify([lines.map((line) => [line.name, line.tone]), isDark.matches]);
  const size = { width: Math.max(200, place.clientWidth), height: place.clientHeight || 220 };
  let chart = charts.get(id);
  if (!chart || chart.kind !== kind || chart.place !== place) {
    chart?.plot.destroy();
    chart = { kind, place, marks };
    charts.set(id, chart);
    const drawn = { hooks: { draw: [(one) => drawMarks(one, charts.get(id).marks)] } };
    chart.plot = new uPlot({ ...options(lines, axes, size), ...drawn }, data, place);
    return;
  }
  chart.marks = marks;
  if (chart.plot.width !== size.width || chart.plot.height !== size.height) chart.plot.setSize(size);
  chart.plot.setData(data);
}

function options(lines, axes, size) {
  const [ink, grid] = [css("--quiet"), css("--rule")];
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
  const series = lines.map((line) => ({ stroke: css(line.colour), width: line.width, dash: line.dash, spanGaps: !axes.isBroken, points: { show: line.isOptional || line.ys.filter(isNumber).length < 3 } }));
  return {
    ...size,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false }, y: { range: (plot, low, high) => axes.range(low, high) } },
    axes: [
      { ...axis, size: 26, space: 70, values: (plot, ticks) => ticks.map((tick) => axes.x(tick, ticks[1] - ticks[0])) },
      { ...axis, size: 48, space: 34, values: (plot, ticks) => ticks.map(axes.tick) },
    ],
    series: [{}, ...series],
  };
}

const padded = (low, high) => {
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
};

export function drawCharts() {
  const regions = byName();
  const marks = marksNow();
  const onTokens = marks.map(([unix, letter, region]) => [tokensAt(region, unix), letter]).filter(([x]) => x !== null);
  draw("loss", "Loss over tokens", "tokens of the region's learner", [...regions.map((one, at) => lineOf(one, at, TOKENS, LOSS)), ...regions.map(ownLine), mergedLine()], { x: (value) => count(value), y: loss, tick: (value) => value.toFixed(2), range: padded }, onTokens);
  draw("speed", "Tokens per second", store.isReport ? "over the run" : "over time", regions.map((one, at) => broken(lineOf(one, at, 0, SPEED), PERIODS_MISSED * one.period)), { isBroken: true, x: (value, step) => (step < 60 ? clock(value) : clock(value).slice(0, 5)), y: count, tick: count, range: (low, high) => [0, padded(0, high)[1] || 1] }, marks);
}
