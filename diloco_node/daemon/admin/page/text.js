// Numbers and times as people read them. What is not known is "no data", never 0.
import { written } from "./dom.js";

export const NO_DATA = "no data";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const scaled = (value, step, units) => {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  const digits = at === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  // 35.0 k is 35 k.
  const shown = digits ? value.toFixed(digits).replace(/\.?0+$/, "") : value.toFixed(0);
  return `${shown}${units[at] ? ` ${units[at]}` : ""}`;
};

export const count = (value) => (isNumber(value) ? scaled(value, 1000, ["", "k", "M", "G", "T"]) : NO_DATA);
export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NO_DATA);
export const bytes = (value) => (isNumber(value) ? scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"]) : NO_DATA);
export const rate = (value) => (isNumber(value) ? `${bytes(value)}/s` : NO_DATA);
export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : NO_DATA);

// A loss that blew up comes as a text ("nan").
export const loss = (value) => (isNumber(value) ? value.toFixed(3) : typeof value === "string" ? value : NO_DATA);

export function seconds(value) {
  if (!isNumber(value)) return NO_DATA;
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.round(value / 86400)} days`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(unix) {
  if (!isNumber(unix)) return NO_DATA;
  const at = new Date(unix * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function day(unix) {
  if (!isNumber(unix)) return NO_DATA;
  const at = new Date(unix * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(unix)}`;
}

export const known = (value) => (value === null || value === undefined || value === "" ? NO_DATA : written(value));

// A cell or figure: `quiet` when there is nothing to say.
export const classOf = (text) => (text === NO_DATA ? "quiet" : null);

// Lists and objects of a document of another version may be anything.
export const list = (value) => (Array.isArray(value) ? value : []);
export const tables = (value) => list(value).filter((one) => one && typeof one === "object" && !Array.isArray(one));
export const table = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

export function greatest(values) {
  const numbers = values.filter(isNumber);
  return numbers.length ? Math.max(...numbers) : null;
}

export function median(values) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
