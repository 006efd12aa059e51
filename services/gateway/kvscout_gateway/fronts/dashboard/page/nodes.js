// Nodes of the page. Whatever comes from outside is shown by textContent; nothing makes markup of text.
const $ = (id) => document.getElementById(id);

function element(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null && child !== ""));
  return made;
}
function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  return made;
}
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
function announce(text) {
  say($("announcement"), text);
}
const inSelection = (node) => {
  const selection = getSelection();
  return selection && !selection.isCollapsed && selection.containsNode(node, true);
};
// Keeps the rows of what is still there, so that focus, an open detail and a selection outlive an update.
function rows(parent, items, keyOf, contentOf, tag = "tr") {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    const text = JSON.stringify(item);
    let row = known.get(key);
    known.delete(key);
    if (!row) {
      row = element(tag);
      row.dataset.key = key;
    }
    if (row.shown !== text && !inSelection(row)) {
      row.shown = text;
      const focused = row.contains(document.activeElement) && document.activeElement.className;
      row.replaceChildren(...contentOf(item, row));
      if (focused) row.getElementsByClassName(focused)[0]?.focus();
    }
    if (row === place) place = place.nextSibling;
    else parent.insertBefore(row, place);
  }
  known.forEach((row) => row.remove());
}
function cell(label, content, kind = "") {
  const made = element("td", { className: kind });
  made.dataset.label = label;
  made.append(...(Array.isArray(content) ? content.filter(Boolean) : [content]));
  return made;
}
const sub = (text) => element("div", { className: "sub" }, text);
// A bar of two shares: what is, and a mark at what could be.
function bar(share, mark) {
  const made = element("div", { className: "bar", "aria-hidden": "true" }, element("i"));
  made.firstChild.style.width = `${100 * Math.min(1, share)}%`;
  if (mark != null && mark > share) {
    made.append(element("b"));
    made.lastChild.style.left = `${100 * Math.min(1, mark)}%`;
  }
  return made;
}
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers give the clipboard to pages of TLS and of localhost only.
    const area = element("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce(`copied: ${text}`);
}
// A request id: short; in full on hover and focus; a click copies it.
function requestId(id) {
  if (!id) return element("span", { className: "id" }, "query");
  const short = id.length > 12 ? `…${id.slice(-8)}` : id;
  const button = element("button", { type: "button", className: "id", "aria-label": `Copy request id ${id}` }, short);
  button.dataset.full = id;
  button.addEventListener("click", async () => {
    await copy(id);
    button.dataset.full = "copied";
    setTimeout(() => (button.dataset.full = id), 1500);
  });
  return button;
}
