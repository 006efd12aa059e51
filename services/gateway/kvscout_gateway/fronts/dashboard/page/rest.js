// Shadow, services, and what to do where there is nothing yet.
function showShadow(shadow) {
  $("shadow-section").hidden = !shadow;
  if (!shadow) return;
  say($("shadow-summary"), shadow.summary);
  rows($("shadow").tBodies[0], shadow.hours, (one) => `${one.begin} ${one.tenant} ${one.model}`, (one) => [
    cell("Hour", element("span", { className: "name" }, hourOf.format(new Date(1000 * one.begin)))),
    cell("Model", one.model || "–"),
    cell("Requests", figure(one.requests), "number"),
    cell("Compared", figure(one.compared), "number"),
    cell("Hit rate as it is", percent(one.actual), "number"),
    cell("With the policy", element("b", {}, percent(one.policy)), "number"),
    cell("Same worker", percent(one.same), "number"),
  ]);
}
function showServices(services) {
  const ill = services.filter((one) => !one.well);
  say($("services-summary"), ill.length ? `▲ ${ill.map((one) => `${one.kind} ${one.address}: ${one.state}`).join("; ")}` : `✓ ${many(services.length, "service")} ok`);
  $("services-summary").className = ill.length ? "trouble" : "faint";
  rows($("services").tBodies[0], services, (one) => `${one.kind} ${one.address}`, (one) => [
    cell("Service", element("span", { className: "name" }, one.kind)),
    cell("Address", one.address),
    cell("State", [element("div", {}, element("span", { className: one.well ? "" : "trouble" }, `${one.well ? "✓" : "▲"} ${one.state}`), ...one.warnings.map(sub))], "wide"),
    cell("Version", one.version || "–"),
    cell("Up", seconds(one.uptime), "number"),
  ]);
}
// Text as one word of a shell.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
function showTry({ totals, workers, gateway }) {
  const idle = totals.requests === 0;
  for (const id of ["charts", "decisions-section"]) $(id).hidden = idle;
  $("try").hidden = !idle;
  if (!idle) return;
  const model = workers.pools.find((one) => one.role !== "decode")?.model;
  say($("try-title"), model ? "No request yet. Try one:" : "No worker is registered yet");
  say($("try-why"), model ? "" : "Start an engine, and register it:");
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }], max_tokens: 16 });
  const key = token() ? " \\\n  -H \"Authorization: Bearer $KVSCOUT_TOKEN\"" : "";
  const url = new URL("v1/chat/completions", location.href).href;
  say($("try-command"), model ? `curl ${url}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(body)}` : `kvscout workers register vllm-0 --gateway ${gateway} \\\n  --model llama-3-8b --block-size 16 --http-endpoint http://10.0.0.5:8000`);
}
$("try-copy").addEventListener("click", () => copy($("try-command").textContent));
