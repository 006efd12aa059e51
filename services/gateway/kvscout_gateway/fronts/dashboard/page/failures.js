// The last failures of this gateway; or requests that were answered, but not as they should have been.
const FIRST_FAILURES = 3, MORE_FAILURES = 50;
const WHOSE = { caller: "caller", engine: "engine", router: "router" };
let failures = { failed: [], answered: [] }, shownFailures = FIRST_FAILURES, showsAnswered = false;
$("answered").addEventListener("click", () => {
  showsAnswered = !showsAnswered;
  $("answered").setAttribute("aria-pressed", String(showsAnswered));
  showFailures();
});
$("more-failures").addEventListener("click", () => {
  shownFailures = shownFailures === FIRST_FAILURES ? MORE_FAILURES : FIRST_FAILURES;
  showFailures();
});
function showFailures(next = failures) {
  failures = next;
  const { failed, answered } = failures, listed = showsAnswered || !failed.length ? answered : failed;
  $("failures-section").hidden = !failed.length && !answered.length;
  say($("failures-summary"), listed === failed ? "" : "answered anyway");
  $("answered").hidden = !failed.length || !answered.length;
  rows($("failures").tBodies[0], listed.slice(0, shownFailures), (one) => String(one.number), (one) => [
    cell("Time", at(one.at)),
    cell("Cause", [element("span", { className: one.owner === "caller" ? "" : "error" }, `${one.owner === "caller" ? "○" : "✕"} ${one.cause}`), sub(WHOSE[one.owner])], "cause"),
    cell("What happened", [element("div", { className: "message", title: one.message }, one.message), sub([one.front, one.status].filter(Boolean).join(" · "))]),
    cell("Worker", one.workers.join(", ") || "–"),
    cell("Request", requestId(one.request), "number"),
  ]);
  $("more-failures").hidden = listed.length <= FIRST_FAILURES;
  say($("more-failures"), shownFailures === FIRST_FAILURES ? `Show ${figure(Math.min(MORE_FAILURES, listed.length) - FIRST_FAILURES)} more` : "Show fewer");
}
