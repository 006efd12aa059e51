// Timelines of requests: one bar an attempt, a piece of it for each step.
const STEPS = [
  ["lookup", "block hashes, and who holds them"],
  ["placement", "the scheduler's choice, with its queue"],
  ["prefill", "from there to the first token, with the engine's queue"],
  ["decode", "from the first token to the end"],
];
let timelines = { last: [], slowest: [] }, slowest = false, held = false;
const openTimelines = new Set();
$("steps").append(...STEPS.map(([name, what]) => element("li", {}, element("i", { className: name, "aria-hidden": "true" }), element("b", {}, name), ` ${what}`)));
for (const [id, pressed] of [["slowest", () => (slowest = !slowest)], ["hold", () => (held = !held)]])
  $(id).addEventListener("click", () => {
    $(id).setAttribute("aria-pressed", String(pressed()));
    say($("hold"), held ? "Resume" : "Pause");
    showTimelines();
  });

function showTimelines(next = timelines) {
  if (!held) timelines = next;
  const listed = slowest ? timelines.slowest : timelines.last;
  const longest = Math.max(...listed.map((one) => one.seconds), 1e-6);
  say($("timelines-summary"), listed.length ? `${slowest ? "slowest to the first token, last 5 to 10 min" : "the last ones"} of this gateway; bars up to ${seconds(longest)}` : "No request has ended yet.");
  rows($("timelines"), listed.map((one) => ({ ...one, longest })), (one) => `${one.at}/${one.request}`, (one, row) => {
    const open = openTimelines.has(row.dataset.key);
    const detail = element("div", { className: "detail", hidden: !open }, ...(open ? [stepsOf(one)] : []));
    const toggle = element("button", { type: "button", className: "toggle", "aria-expanded": String(open) },
      element("span", { className: "time" }, at(one.at)),
      element("b", { className: "worker" }, one.outcome === "ok" ? `→ ${one.attempts.at(-1)?.worker ?? "–"}` : `✕ ${one.outcome}`),
      element("span", { className: "ttft" }, `${one.ttft ? seconds(one.ttft) : "–"} · ${seconds(one.seconds)}`),
      element("span", { className: "tracks" }, ...one.attempts.map((each) => track(each, one))),
    );
    toggle.title = "Time to the first token · to the end";
    toggle.addEventListener("click", () => {
      detail.hidden = !detail.hidden;
      toggle.setAttribute("aria-expanded", String(!detail.hidden));
      if (detail.hidden) openTimelines.delete(row.dataset.key);
      else openTimelines.add(row.dataset.key);
      detail.replaceChildren(...(detail.hidden ? [] : [stepsOf(one)]));
    });
    return [toggle, requestId(one.request), detail];
  }, "li");
  const known = new Set([...$("timelines").children].map((row) => row.dataset.key));
  openTimelines.forEach((key) => known.has(key) || openTimelines.delete(key));
}
function track(attempt, { longest }) {
  const made = element("span", { className: "track", "aria-hidden": "true" });
  STEPS.forEach(([name], index) => {
    const [from, to] = attempt.ends.slice(index, index + 2);
    if (to <= from) return;
    const piece = element("i", { className: name });
    piece.style.left = `${(100 * from) / longest}%`;
    piece.style.width = `max(1px, ${(100 * (to - from)) / longest}%)`;
    made.append(piece);
  });
  return made;
}
function stepsOf(one) {
  const heads = ["Worker", "Began after", ...STEPS.map(([name]) => name), "Prompt", "Cached", "Output"];
  const body = one.attempts.map((each) =>
    element("tr", {}, element("td", {}, each.worker), ...[
      seconds(each.ends[0]),
      ...STEPS.map((_, index) => seconds(Math.max(0, each.ends[index + 1] - each.ends[index]))),
      figure(each.prompt), figure(each.cached), figure(each.output),
    ].map((text) => element("td", { className: "number" }, text))),
  );
  const head = element("tr", {}, ...heads.map((text, index) => element("th", { scope: "col", className: index ? "number" : "" }, text)));
  return element("div", {}, element("p", { className: "faint" }, `${one.model} · ${one.outcome} · request `, element("span", { className: "full" }, one.request)),
    element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
}
showPage();
