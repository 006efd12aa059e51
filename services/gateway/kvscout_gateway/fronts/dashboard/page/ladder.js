// The ladder as a waterfall, and what larger caches would hold.
let ladders = { on: true, windows: {} };
for (const id of ["ladder-model", "ladder-sessions", "ladder-window"])
  $(id).addEventListener("change", ({ target }) => {
    target.wish = target.value;
    showLadders();
  });
const modelOf = (one) => JSON.stringify([one.tenant, one.model]);

function showLadders(next = ladders) {
  ladders = next;
  const window = $("ladder-window"), found = ladders.windows[window.value] ?? [], wholes = found.filter((one) => !one.sessions);
  const tenants = new Set(wholes.map((one) => one.tenant)).size > 1;
  options($("ladder-model"), wholes.map((one) => (tenants ? `${one.model} · ${one.tenant}` : one.model)), wholes.map(modelOf));
  const ofModel = found.filter((one) => modelOf(one) === $("ladder-model").value);
  options($("ladder-sessions"), ofModel.map((one) => one.sessions || "all sessions"), ofModel.map((one) => one.sessions));
  $("ladder-model").hidden = wholes.length < 2;
  $("ladder-sessions").hidden = ofModel.length < 2;
  const shown = ofModel.find((one) => one.sessions === $("ladder-sessions").value) ?? ofModel[0];
  for (const id of ["sizes-section", "ladder"]) $(id).hidden = !shown;
  window.hidden = !ladders.on;
  if (!shown) {
    say($("ladder-summary"), ladders.on ? `No request has ended in the last ${window.selectedOptions[0].text}.` : "The gateway runs with --no-ladder.");
    for (const id of ["ladder-verdict", "ladder-notes"]) say($(id), "");
    return;
  }
  say($("ladder-summary"), `${shown.model} · ${many(shown.requests, "request")}, ${many(shown.prompt, "prompt token")} of this gateway`);
  say($("ladder-verdict"), shown.verdict);
  rows($("ladder").tBodies[0], waterfall(shown), (one) => one.name, step);
  say($("ladder-notes"), notes(shown).join(" "));
  showSizes(shown);
}
// Rungs from the top, each after the losses that lead down to it.
function waterfall({ prompt, rungs, unpredicted }) {
  const steps = [], share = (tokens) => tokens / (prompt || 1);
  let level = share(prompt);
  for (const rung of rungs) {
    for (const loss of rung.losses) {
      const size = share(loss.tokens);
      level -= size;
      steps.push({ kind: "loss", name: loss.name, from: Math.max(0, level), size, seconds: loss.seconds, saved: loss.saved, remedy: loss.remedy });
    }
    if (rung.name === "actual" && unpredicted) steps.push({ kind: "gain", name: "more than predicted", from: level, size: share(unpredicted), seconds: null, remedy: "" });
    level = share(rung.tokens);
    steps.push({ kind: "rung", name: rung.name, from: 0, size: level, seconds: null, remedy: "" });
  }
  const most = steps.filter((one) => one.kind === "loss" && one.name !== "never seen before").reduce((best, one) => (one.size > (best?.size ?? 0) ? one : best), null);
  if (most) most.largest = true;
  return steps;
}
function step({ kind, name, from, size, seconds: time, saved, remedy, largest }, row) {
  row.className = `${kind} ${largest ? "largest" : ""}`;
  const made = element("div", { className: "bar", "aria-hidden": "true" }, element("i"));
  made.firstChild.style.left = `${100 * from}%`;
  made.firstChild.style.width = `${100 * Math.min(1 - from, size)}%`;
  const sign = { loss: "−", gain: "+", rung: "" }[kind];
  return [
    cell("Step", [element("span", { className: kind === "rung" ? "name" : "" }, `${largest ? "▲ " : ""}${name}`), saved ? sub(`saved ${seconds(saved)} of waiting`) : ""]),
    cell("Of the prompt tokens", made, "wide"),
    cell("Share", `${sign}${percent(size)}`, "number"),
    cell("GPU time", kind === "loss" ? (time ? seconds(time) : "–") : "", "number"),
    cell("What would help", element("span", {}, remedy), "wide help"),
  ];
}
function notes({ unreported, blocks, sample }) {
  return [
    unreported ? `${many(unreported, "request")}: the engines report no cached tokens.` : "",
    blocks ? "" : "The size of some cache is unknown: no token counts as lost to capacity.",
    sample > 1 ? `Estimated from one block in ${figure(sample)}.` : "",
  ].filter(Boolean);
}
const SIZES_LEFT = 50, SIZES_RIGHT = 26, SIZES_TOP = 20, SIZES_BOTTOM = 34;
let drawnSizes = null;
function showSizes(shown = drawnSizes) {
  drawnSizes = shown;
  const svg = $("sizes"), { clientWidth: width, clientHeight: height } = svg;
  if (!shown || !width) return;
  const share = (tokens) => tokens / (shown.prompt || 1), capacity = shown.rungs.find((one) => one.name === "capacity").tokens;
  const points = [[1, capacity], ...shown.sizes].map(([factor, tokens]) => ({ factor, share: share(tokens) }));
  const last = points.at(-1).factor, actual = share(shown.rungs.at(-1).tokens);
  const x = (factor) => SIZES_LEFT + ((factor - 1) / (last - 1)) * (0.86 * (width - SIZES_LEFT - SIZES_RIGHT)) + 14;
  const y = (part) => SIZES_TOP + (1 - Math.min(1, part)) * (height - SIZES_TOP - SIZES_BOTTOM), end = width - SIZES_RIGHT;
  const line = (from, to) => `M${from.map((one) => one.toFixed(1)).join(" ")}L${to.map((one) => one.toFixed(1)).join(" ")}`;
  const parts = [0, 0.5, 1].flatMap((part) => [
    drawn("line", { class: "grid", x1: SIZES_LEFT, x2: end, y1: y(part), y2: y(part) }),
    drawn("text", { x: SIZES_LEFT - 6, y: y(part) + 4, "text-anchor": "end" }, `${100 * part}${THIN}%`),
  ]);
  parts.push(drawn("path", { class: "second", d: line([x(1), y(actual)], [end, y(actual)]) }));
  parts.push(drawn("path", { class: "first", d: `M${points.map((one) => `${x(one.factor).toFixed(1)} ${y(one.share).toFixed(1)}`).join("L")}` }));
  parts.push(drawn("path", { class: "first unsure", d: line([x(last), y(points.at(-1).share)], [end, y(share(shown.unbounded))]) }));
  parts.push(drawn("text", { x: 0, y: height - 18 }, "size"), drawn("text", { x: 0, y: height - 4 }, shown.workers ? "workers" : ""));
  let written = -Infinity;
  for (const { factor, share: part } of [...points, { factor: Infinity, share: share(shown.unbounded) }]) {
    const place = factor === Infinity ? end : x(factor), name = factor === Infinity ? "∞" : `${figure(factor)}×`;
    parts.push(drawn("line", { class: "tick", x1: place, x2: place, y1: y(part) - 4, y2: y(part) + 4 }));
    if (place - written < 44) continue;
    written = place;
    const workers = factor === Infinity || !shown.workers ? "" : figure(Math.round(factor * shown.workers));
    parts.push(drawn("text", { x: place, y: y(part) - 8, "text-anchor": "middle" }, percent(part)));
    parts.push(drawn("text", { x: place, y: height - 18, "text-anchor": "middle" }, name));
    parts.push(drawn("text", { x: place, y: height - 4, "text-anchor": "middle" }, workers));
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", `One cache of all workers would hold: ${points.map((one) => `${percent(one.share)} at ${figure(one.factor)} times the size`).join(", ")}, ${percent(share(shown.unbounded))} unbounded. Cached now: ${percent(actual)}.`);
  say($("sizes-summary"), `what one LRU cache would hold, in sizes of today's caches${shown.workers ? ` and in workers (${figure(shown.workers)} now)` : ""}; dashed: cached now, ${percent(actual)}`);
}
redraws.push(showSizes);
new ResizeObserver(() => showSizes()).observe($("sizes"));
