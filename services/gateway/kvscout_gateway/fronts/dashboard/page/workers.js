// Workers: those in trouble first, the first rows of what is found.
const FIRST_ROWS = 10, MORE_ROWS = 100;
const inOrder = new Intl.Collator("en", { numeric: true }).compare;
const COLUMNS = [
  ["Worker", (one) => `${one.worker}/${one.rank}`, 1],
  ["State", (one) => `${one.well ? 1 : 0}${one.word}`, 1],
  ["Cached blocks", (one) => one.cached, -1],
  ["Running", (one) => one.running ?? -1, -1],
  ["Waiting tokens", (one) => one.waiting ?? -1, -1],
  ["Hit rate", (one) => one.hit ?? -1, -1],
  ["Failed", (one) => one.failures, -1],
];
let sorted = [1, 1], table = { pools: [], columns: [], rows: [], total: 0, ill: 0 }, shownRows = FIRST_ROWS;
$("workers").tHead.rows[0].append(
  ...COLUMNS.map(([name, , direction], index) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      sorted = [index, sorted[0] === index ? -sorted[1] : direction];
      showWorkers();
    });
    return element("th", { scope: "col", className: index > 2 ? "number" : "" }, button);
  }),
);
$("find").addEventListener("input", () => {
  shownRows = FIRST_ROWS;
  showWorkers();
});
$("more-workers").addEventListener("click", () => {
  shownRows += MORE_ROWS;
  showWorkers();
});
const poolText = (pool, tenants) => [pool.model, pool.role, tenants ? pool.tenant : ""].filter(Boolean).join(" · ");

function showWorkers(next = table) {
  table = next;
  const several = table.pools.length > 1, tenants = new Set(table.pools.map((one) => one.tenant)).size > 1;
  const names = table.pools.map((pool) => poolText(pool, tenants));
  const all = table.rows.map((values) => Object.fromEntries(values.map((value, index) => [table.columns[index], value])));
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter((one) => {
    const text = `${one.worker}/${one.rank} ${names[one.pool]} ${one.word} ${one.cause}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const [column, direction] = sorted, by = COLUMNS[column][1];
  const compare = (a, b) => (typeof a === "number" ? a - b : inOrder(a, b));
  found.sort((a, b) => direction * compare(by(a), by(b)) || inOrder(names[a.pool], names[b.pool]) || inOrder(`${a.worker}/${a.rank}`, `${b.worker}/${b.rank}`));
  [...$("workers").tHead.rows[0].cells].forEach((head, index) => (index === column ? head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort")));
  const most = Math.max(1, ...all.map((one) => one.blocks || one.cached));
  say($("workers-summary"), [
    several ? many(table.pools.length, "pool") : names[0],
    many(table.total, "rank"),
    table.ill ? `${figure(table.ill)} in trouble` : table.total ? "all ok" : "",
    words.length ? `${figure(found.length)} found` : "",
  ].filter(Boolean).join(" · "));
  rows($("workers").tBodies[0], found.slice(0, shownRows), (one) => JSON.stringify([one.pool, one.worker, one.rank]), (one) => [
    cell("Worker", [element("div", { className: "name" }, `${one.worker}/${one.rank}`), several ? sub(names[one.pool]) : ""]),
    cell("State", element("div", {}, element("span", { className: `pill ${one.well ? "" : "error"}` }, `${one.well ? (one.word === "ok" ? "✓" : "○") : "✕"} ${one.word}`), one.cause ? sub(one.cause) : "")),
    cell("Cached blocks", element("div", {}, bar(one.cached / (one.blocks || most)), element("span", {}, one.blocks ? `${figure(one.cached)} of ${figure(one.blocks)}` : figure(one.cached))), "cached"),
    cell("Running", figure(one.running), "number"),
    cell("Waiting tokens", figure(one.waiting), "number"),
    cell("Hit rate", percent(one.hit), "number"),
    cell("Failed", one.failures ? `${figure(one.failures)} of ${figure(one.requests)}` : figure(one.failures), "number"),
  ]);
  const hidden = found.length - shownRows, unsent = table.total - table.rows.length;
  $("more-workers").hidden = hidden <= 0;
  say($("more-workers"), `Show ${figure(Math.min(MORE_ROWS, hidden))} more of ${figure(found.length)}`);
  say($("workers-unsent"), unsent > 0 ? `${many(unsent, "more rank is", "more ranks are")} not sent to this page: those in trouble come first.` : "");
}
