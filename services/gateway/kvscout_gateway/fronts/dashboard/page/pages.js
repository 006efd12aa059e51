// The pages: what the fragment of the address names, the overview otherwise.
const PAGES = ["overview", "hit-rate", "requests"];
const redraws = [showCharts]; // of what needs the width of its place
function showPage() {
  const name = location.hash.slice(1), shown = PAGES.includes(name) ? name : "overview";
  $("board").dataset.page = shown;
  for (const link of document.querySelectorAll("nav a")) {
    if ((link.hash.slice(1) || "overview") === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  redraws.forEach((redraw) => redraw());
  // The skip link leads to what another page may have hidden.
  if (name && !PAGES.includes(name)) $(name)?.focus();
}
addEventListener("hashchange", showPage);
// What was chosen is chosen again when it comes back.
function options(select, texts, values) {
  const key = JSON.stringify(texts);
  if (select.shown === key) return;
  select.shown = key;
  select.replaceChildren(...texts.map((text, index) => element("option", { value: values[index] }, text)));
  select.value = values.includes(select.wish) ? select.wish : values[0];
}
