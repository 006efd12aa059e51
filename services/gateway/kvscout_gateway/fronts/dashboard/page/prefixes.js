// The heat map: workers in rows, the prefixes that the last prompts share in columns.
const FIRST_HOLDERS = 12;
let prefixes = { prefixes: [], rows: [], workers: 0, missed: "" }, allHolders = false;
$("more-holders").addEventListener("click", () => {
  allHolders = !allHolders;
  showPrefixes();
});
function showPrefixes(next = prefixes) {
  prefixes = next;
  const { prefixes: shared, rows: holders, workers, missed } = prefixes;
  const listed = allHolders ? holders : holders.slice(0, FIRST_HOLDERS);
  say($("prefixes-summary"), missed || (shared.length ? "how much of each, in percent, by KV events; the last 256 requests of this gateway" : "No two of the last requests begin alike."));
  const head = $("prefixes").tHead.rows[0];
  if (head.cells.length !== shared.length + 1 || !shared.length)
    head.replaceChildren(...(shared.length ? [element("th", { scope: "col" }, "Worker"), ...shared.map((_, index) => element("th", { scope: "col" }, String(index + 1)))] : []));
  rows($("prefixes").tBodies[0], listed.map(([worker, ...blocks]) => [worker, ...blocks.map((each, index) => Math.round((100 * each) / shared[index].blocks))]), (one) => one[0], ([worker, ...shares]) => [
    element("th", { scope: "row", className: "name" }, worker),
    ...shares.map((share) => element("td", { className: `heat${Math.ceil(share / 25)}` }, share ? String(share) : "·")),
  ]);
  $("more-holders").hidden = holders.length <= FIRST_HOLDERS;
  say($("more-holders"), allHolders ? "Show fewer" : `Show ${figure(holders.length - FIRST_HOLDERS)} more of ${figure(workers)} that hold some`);
  rows($("prefix-list"), shared.map((one, index) => ({ ...one, number: index + 1 })), (one) => String(one.number), (one) => [
    `${one.model}: ${many(one.tokens, "token")}, ${many(one.requests, "request")}, whole on ${one.holders ? many(one.holders, "worker") : "no worker"}`,
  ], "li");
}
