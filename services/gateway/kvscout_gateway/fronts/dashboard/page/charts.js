// The charts of this gateway's last hour: strips above one axis of time, read at one moment.
const HOUR = 3600, LEAST = 120, AXIS = 20;
const perSecond = (count, one) => (count == null ? null : count / one.seconds);
const strips = [
  new Strip("Hit rate", [{ name: "cached", kind: "area", of: (one) => one.hit }], percent, { top: 1, label: (value) => `${100 * value}${THIN}%` }),
  new Strip("Requests a second", [
    { name: "all", kind: "area", of: (one) => one.rate },
    { name: "failed", kind: "failed", of: (one) => perSecond(one.failed, one) },
    { name: "by callers", kind: "failed mistaken", of: (one) => perSecond(one.mistaken, one) },
  ], (value) => figure(value, 2), { brief: "Requests/s" }),
  new Strip("Time to first token", [
    { name: "median", kind: "first", of: (one) => one.ttft[0] },
    { name: "p95", kind: "second", of: (one) => one.ttft[1] },
  ], ms, { brief: "TTFT" }),
  new Strip("Time between tokens", [
    { name: "median", kind: "first", of: (one) => one.itl[0] },
    { name: "p95", kind: "second", of: (one) => one.itl[1] },
  ], ms, { brief: "ITL" }),
];
const axis = drawn("svg", { class: "axis", "aria-hidden": "true" });
$("plots").append(...strips.map((one) => one.node), element("div", { className: "strip axis" }, element("div", { className: "legend" }), axis));

let past = [], span = null, chosenAt = null, points = [];
function showHistory(next) {
  // A gateway that was restarted begins anew; what it told before is kept.
  const begin = next.length ? next[0].at - next[0].seconds : Infinity;
  past = [...past.filter((one) => one.at <= begin + 1 && one.at > Date.now() / 1000 - HOUR), ...next].slice(-HOUR / 10);
  showCharts();
}
function showCharts() {
  const width = axis.clientWidth;
  if (!width) return;
  points = span && span.seconds >= 5 ? [...past, span] : past;
  const now = Math.max(span?.at ?? 0, past.at(-1)?.at ?? 0);
  const first = points.length ? points[0].at - points[0].seconds : now;
  const begin = Math.max(now - HOUR, Math.min(first, now - LEAST));
  points = points.filter((one) => one.at > begin);
  const frame = { begin, now, x: (time) => LEFT + (Math.max(0, time - begin) / (now - begin)) * (width - LEFT - RIGHT) };
  const chosen = chosenAt == null ? null : points.reduce((best, one) => (!best || Math.abs(one.at - chosenAt) < Math.abs(best.at - chosenAt) ? one : best), null);
  strips.forEach((one) => one.draw(points, frame, chosen));
  drawAxis(frame, width, chosen);
  say($("charts-when"), chosen ? `at ${at(chosen.at)}` : `the last ${many(Math.round((now - begin) / 60), "minute")}`);
}
function drawAxis(frame, width, chosen) {
  const length = frame.now - frame.begin;
  const step = [60, 120, 300, 600, 900].find((one) => length / one <= (width < 500 ? 5 : 12)) ?? 900;
  axis.setAttribute("viewBox", `0 0 ${width} ${AXIS}`);
  const parts = [];
  for (let time = Math.ceil(frame.begin / step) * step; time <= frame.now; time += step) {
    const x = frame.x(time);
    parts.push(drawn("line", { class: "grid", x1: x, x2: x, y1: 0, y2: 4 }));
    if (x > LEFT + 12 && x < width - 16) parts.push(drawn("text", { x, y: 16, "text-anchor": "middle" }, at(time).slice(0, 5)));
  }
  if (chosen) parts.push(drawn("line", { class: "cross", x1: frame.x(chosen.at), x2: frame.x(chosen.at), y1: 0, y2: 4 }));
  axis.replaceChildren(...parts);
  frame.timeAt = (x) => frame.begin + ((x - LEFT) / (width - LEFT - RIGHT)) * length;
  axis.frame = frame;
}
function choose(time) {
  if (time === chosenAt) return;
  chosenAt = time;
  showCharts();
}
$("plots").addEventListener("pointermove", (event) => {
  const x = event.clientX - axis.getBoundingClientRect().left;
  choose(x >= LEFT && axis.frame ? axis.frame.timeAt(x) : null);
});
for (const name of ["pointerleave", "blur"]) $("plots").addEventListener(name, () => choose(null));
$("plots").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!step || !points.length) return;
  event.preventDefault();
  const from = chosenAt == null ? points.length : points.findLastIndex((one) => one.at <= chosenAt);
  const next = points[Math.max(0, Math.min(points.length - 1, from + step))];
  choose(next.at);
  announce(`${at(next.at)}: ${strips.map((one) => one.svg.getAttribute("aria-label").split(";")[0]).join("; ")}`);
});
new ResizeObserver(showCharts).observe(axis);
