// Doctor: one line when all is well; else the first finding in a sentence, the rest folded.
const SEVERITY = { error: ["✕", "error"], warning: ["▲", "trouble"], note: ["i", "note"] };
let report = null, troubles = [], lostText = "";

function inOneLine() {
  if (lostText) return ["✕", "error", lostText, "What you see below is older."];
  if (!report) return ["…", "note", "Checking every service and engine", ""];
  const [first] = report.findings, [trouble] = troubles;
  if (first && first.severity !== "note") return [...(SEVERITY[first.severity] ?? SEVERITY.warning), first.what, first.evidence[0] ?? ""];
  // Services say at once what doctor finds at its next look.
  if (trouble) return [...SEVERITY.warning, trouble.replace(/^[a-z-]+: /, ""), ""];
  return ["✓", "well", "All is well.", `Doctor checked at ${at(report.at)}.`];
}
function showDoctor(next = report) {
  report = next;
  const [sign, kind, what, which] = inOneLine();
  $("doctor-line").dataset.kind = kind;
  say($("doctor-sign"), sign);
  say($("doctor-what"), what);
  say($("doctor-which"), which);
  showFolded(report?.findings ?? []);
}
function showFolded(found) {
  $("doctor").hidden = !found.length || Boolean(lostText);
  const others = found.length - 1, notes = found.every((one) => one.severity === "note");
  say($("doctor-more"), notes ? many(found.length, "note") : others > 0 ? `What to do, and ${many(others, "more finding", "more findings")}` : "What to do");
  // The first one's sentence is the line above, with its first evidence.
  const rest = ([first, ...others]) => [{ ...first, evidence: first.evidence.slice(1) }, ...others.map((one) => ({ ...one, titled: true }))];
  rows($("findings"), notes ? found.map((one) => ({ ...one, titled: true })) : rest(found), (one) => one.id, (one) => [
    one.titled ? element("b", { className: SEVERITY[one.severity]?.[1] }, `${SEVERITY[one.severity]?.[0] ?? "▲"} ${one.what}`) : "",
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
