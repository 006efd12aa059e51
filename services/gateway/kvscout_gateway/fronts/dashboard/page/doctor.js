// Doctor: one line when all is well; else the first finding in a sentence, the rest folded.
const SEVERITY = { error: ["✕", "error"], warning: ["▲", "trouble"], note: ["i", "note"] };
let report = null, lostText = "";

function showDoctor(next = report) {
  report = next;
  const first = report?.findings[0];
  const line = $("doctor-line");
  const fine = !first || first.severity === "note";
  const [sign, kind] = lostText ? ["✕", "error"] : !report ? ["…", "note"] : fine ? ["✓", "well"] : SEVERITY[first.severity] ?? ["▲", "trouble"];
  line.dataset.kind = kind;
  say($("doctor-sign"), sign);
  say($("doctor-what"), lostText || (!report ? "Checking every service and engine" : fine ? "All is well." : first.what));
  say($("doctor-which"), lostText ? "What you see below is older." : !report ? "" : fine ? `Doctor checked at ${at(report.at)}.` : (first.evidence[0] ?? ""));
  showFolded(report?.findings ?? []);
}
function showFolded(found) {
  $("doctor").hidden = !found.length || Boolean(lostText);
  const others = found.length - 1, notes = found.every((one) => one.severity === "note");
  say($("doctor-more"), notes ? many(found.length, "note") : others > 0 ? `What to do, and ${many(others, "more finding", "more findings")}` : "What to do");
  rows($("findings"), found, (one) => one.id, (one) => [
    element("b", { className: SEVERITY[one.severity]?.[1] }, `${SEVERITY[one.severity]?.[0] ?? "▲"} ${one.what}`),
    element("ul", {}, ...one.evidence.slice(0, 5).map((text) => element("li", {}, text)), one.evidence.length > 5 ? element("li", {}, `and ${many(one.evidence.length - 5, "more", "more")}`) : ""),
    element("p", { className: "remedy" }, one.remedy),
  ], "li");
}
let lastFound = null;
function hearDoctor(next) {
  showDoctor(next);
  const ids = next.findings.map((one) => one.id).join(" ");
  if (lastFound !== null && ids !== lastFound) announce(ids ? `Doctor: ${next.findings.map((one) => one.what).join("; ")}` : "Doctor: all is well");
  lastFound = ids;
}
