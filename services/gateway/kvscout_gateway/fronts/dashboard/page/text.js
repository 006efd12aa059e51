// Numbers and times as text. All numbers of the page are written by `figure` and what it is used in.
const THIN = "\u202f"; // between a number and its unit
const LEAST_SHORT = 10000; // from here on with k, M or G

function figure(value, digits = 3) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= LEAST_SHORT) {
    const power = Math.min(3, Math.floor(Math.log10(size * (1 + 10 ** -digits / 2)) / 3));
    return `${significant(value / 1000 ** power, digits)}${THIN}${" kMG"[power]}`;
  }
  const text = significant(value, Math.max(digits, size >= 1000 ? 4 : 0));
  return text.replace(/\B(?=(\d{3})+$)/g, ","); // as in the sentences of doctor and scheduler
}
function significant(value, digits) {
  if (Number.isInteger(value) && Math.abs(value) < LEAST_SHORT) return String(value);
  const before = Math.floor(Math.log10(Math.abs(value) || 1)) + 1;
  const text = value.toFixed(Math.min(Math.max(0, digits - before), before > 0 ? 2 : digits));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
const many = (count, one, more = one + "s") => `${figure(count)}${"\u00a0"}${count === 1 ? one : more}`;
const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share > 0.9995 || share === 0 ? 0 : 1)}${THIN}%`);
function seconds(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  const [unit, name] = [[1e-6, "µs"], [1e-3, "ms"], [1, "s"], [60, "min"], [3600, "h"], [86400, "d"]].findLast(
    ([size], index) => value >= size * (index > 2 ? 2 : 1)) ?? [1e-6, "µs"];
  return `${figure(value / unit, 2 + (value / unit >= 100))}${THIN}${name}`;
}
const ms = (value) => seconds(value == null ? null : value / 1000);
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const hourOf = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const at = (time) => clock.format(new Date(1000 * time));
