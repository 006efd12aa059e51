// The last decisions: how much of the prompt the chosen worker had, and why it was chosen.
const FIRST_DECISIONS = 5;
let paused = false, allShown = false, decisions = [];
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Resume" : "Pause");
});
$("more-decisions").addEventListener("click", () => {
  allShown = !allShown;
  showDecisions();
});
function showDecisions(next = decisions) {
  if (!paused) decisions = next;
  const shown = allShown ? decisions : decisions.slice(0, FIRST_DECISIONS);
  const policies = [...new Set(decisions.map((one) => one.policy).filter(Boolean))].join(", ");
  say($("decisions-summary"), decisions.length ? `policy ${policies}` : "None since this page was opened.");
  $("more-decisions").hidden = decisions.length <= FIRST_DECISIONS;
  say($("more-decisions"), allShown ? "Show fewer" : `Show ${figure(decisions.length - FIRST_DECISIONS)} more`);
  rows($("decisions"), shown, (one) => one.id, (one, row) => {
    const open = row.querySelector(".toggle")?.getAttribute("aria-expanded") === "true";
    const detail = element("div", { className: "detail", hidden: !open }, ...(open ? explained(one) : []));
    const toggle = element("button", { type: "button", className: "toggle", "aria-expanded": String(open) }, ...summary(one));
    toggle.addEventListener("click", () => {
      const opens = detail.hidden;
      detail.hidden = !opens;
      toggle.setAttribute("aria-expanded", String(opens));
      detail.replaceChildren(...(opens ? explained(one) : []));
    });
    return [toggle, requestId(one.request), detail];
  }, "li");
}
function summary(one) {
  const time = element("span", { className: "time" }, at(one.at));
  if (one.error) return [time, element("span", { className: "error why" }, `✕ no worker: ${one.error}`)];
  const whole = one.blocks || 1;
  return [
    time,
    element("b", { className: "worker" }, `→ ${one.worker}`),
    element("span", { className: "hit" }, bar(one.overlap / whole, one.best / whole), element("span", {}, `${figure(one.overlap)} of ${many(one.blocks, "block")}`)),
    element("span", { className: "why" }, one.summary),
  ];
}
function explained(one) {
  const facts = `${one.model} · ${many(one.tokens, "token")}${one.error ? "" : `, ${figure(one.uncached)} to compute`}`;
  const about = element("p", { className: "faint" }, facts, one.request ? element("span", { className: "full" }, ` · request ${one.request}`) : "");
  if (one.error) return [about];
  const heads = ["Candidate", "Cached blocks", "On slower tiers", "To prefill, blocks", "Active blocks", "Cost"];
  const body = one.candidates.map((each) =>
    element(
      "tr", { className: each.chosen ? "chosen" : "" },
      element("td", {}, `${each.chosen ? "✓ " : ""}${each.worker}`),
      ...[each.device, each.slower, each.prefill, each.decode].map((value) => element("td", { className: "number" }, figure(value))),
      element("td", { className: "number" }, each.why_not ? `left out: ${each.why_not}` : typeof each.cost === "string" ? each.cost : figure(each.cost)),
    ),
  );
  const head = element("tr", {}, ...heads.map((text, index) => element("th", { scope: "col", className: index ? "number" : "" }, text)));
  return [
    element("p", {}, one.summary),
    one.reason ? element("p", { className: "faint" }, one.reason) : "",
    about,
    element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))),
    one.more_candidates ? element("p", { className: "faint" }, `${many(one.more_candidates, "dearer candidate")} not shown`) : "",
  ].filter(Boolean);
}
