"use strict";
// Whatever comes from outside is shown by textContent; nothing here makes markup of text.
(() => {
  const SILENT_MS = 16000; // the gateway says something every five seconds
  const KEY = "kvscout token";
  const $ = (id) => document.getElementById(id);
  const number = new Intl.NumberFormat("en");
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const hourOf = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const at = (seconds) => clock.format(new Date(1000 * seconds));
  const many = (count, one, more = one + "s") => `${number.format(count)} ${count === 1 ? one : more}`;
  const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share > 0.9995 || share === 0 ? 0 : 1)}\u00a0%`);
  const ms = (value, onAxis) => (value == null ? "–" : onAxis ? (value >= 1000 ? `${value / 1000} s` : value ? `${value} ms` : "0") : value >= 1000 ? `${(value / 1000).toFixed(2)}\u00a0s` : `${value < 10 ? value.toFixed(1) : Math.round(value)}\u00a0ms`);
  const round = (value) => (value == null ? "–" : Math.abs(value) >= 1000 ? short.format(value) : String(+value.toFixed(1)));
  const age = (s) => (s == null ? "–" : s < 1 ? "now" : s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`);

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
        const focused = row.contains(document.activeElement) && document.activeElement.tagName;
        row.replaceChildren(...contentOf(item, row));
        if (focused) row.querySelector(focused)?.focus();
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

  // ---- totals -------------------------------------------------------------------------------------------------
  function showTotals(state) {
    const totals = state.totals, span = state.span;
    const ill = totals.trouble;
    const tiles = [
      ["Hit rate", percent(span.hit ?? totals.hit), span.hit == null ? "since the start" : `last seconds; ${percent(totals.hit)} in all`],
      ["Requests", totals.rate == null ? "–" : `${round(totals.rate)}/s`, `${number.format(totals.requests)} in all`],
      ["Running", number.format(totals.in_flight), "in this gateway"],
      ["Waiting in line", number.format(totals.queued), "at the schedulers"],
      ["Failed", number.format(totals.failures), totals.requests ? `${percent(totals.failures / totals.requests)} of all` : ""],
      ["State", ill ? `▲ ${ill} in trouble` : "✓ all well", `${many(state.workers.length + state.more_workers, "worker rank")}, ${many(state.services.length, "service")}`],
    ];
    const list = $("totals");
    if (list.children.length !== tiles.length)
      list.replaceChildren(...tiles.map(() => element("div", {}, element("dt"), element("dd"), element("dd", { className: "note" }))));
    tiles.forEach((texts, index) => texts.forEach((text, part) => say(list.children[index].children[part], text)));
    list.lastChild.children[1].className = ill ? "trouble" : "";
  }

  // ---- doctor -------------------------------------------------------------------------------------------------
  const SEVERITY = { error: ["✕ error", "error"], warning: ["▲ warning", "trouble"], note: ["i note", ""] };
  function evidence(texts, row) {
    const list = (some) => element("ul", {}, ...some.map((text) => element("li", {}, text)));
    if (texts.length <= 4) return [list(texts)];
    const open = Boolean(row.querySelector("details")?.open);
    return [list(texts.slice(0, 3)), element("details", { open }, element("summary", {}, `and ${texts.length - 3} more`), list(texts.slice(3)))];
  }
  let lastFound = null;
  function showDoctor(report) {
    const found = report.findings;
    const when = `looked at ${at(report.at)}`;
    say($("doctor-summary"), found.length ? `${many(found.length, "finding")}; ${when}` : `✓ Nothing is wrong; ${when}`);
    rows($("doctor"), found, (one) => one.id, (one, row) => {
      const [word, kind] = SEVERITY[one.severity] ?? [one.severity, ""];
      return [
        element("div", { className: "row" }, element("span", { className: `pill ${kind}` }, word), element("b", {}, one.what)),
        ...evidence(one.evidence, row),
        element("p", { className: "remedy" }, one.remedy),
      ];
    }, "li");
    const ids = found.map((one) => one.id).join(" ");
    if (lastFound !== null && ids !== lastFound) announce(found.length ? `Doctor: ${found.map((one) => one.what).join("; ")}` : "Doctor: nothing is wrong");
    lastFound = ids;
  }

  // ---- shadow -------------------------------------------------------------------------------------------------
  function showShadow(shadow) {
    $("shadow-section").hidden = !shadow;
    if (!shadow) return;
    say($("shadow-summary"), shadow.summary);
    rows($("shadow").tBodies[0], shadow.hours, (one) => `${one.begin} ${one.tenant} ${one.model}`, (one) => [
      cell("Hour", element("span", { className: "name" }, hourOf.format(new Date(1000 * one.begin)))),
      cell("Model", one.model || "–"),
      cell("Requests", number.format(one.requests), "number"),
      cell("Compared", number.format(one.compared), "number"),
      cell("Hit rate as it is", percent(one.actual), "number"),
      cell("With the policy", element("b", {}, percent(one.policy)), "number"),
      cell("Same worker", percent(one.same), "number"),
    ]);
  }

  // ---- charts -------------------------------------------------------------------------------------------------
  const HOUR = 3600, LEAST = 300, LEFT = 52, RIGHT = 6, TOP = 8, BOTTOM = 20, HEIGHT = 150;
  class Chart {
    constructor(id, title, names, valuesOf, format, top) {
      Object.assign(this, { title, names, valuesOf, format, top, points: [], chosen: -1 });
      this.figure = $(id);
      this.readout = element("span");
      this.svg = drawn("svg", { role: "img", tabindex: "0", "aria-label": title });
      this.figure.append(element("figcaption", {}, element("b", {}, title), this.readout), this.svg);
      this.svg.addEventListener("pointermove", (event) => this.choose(this.nearest(event.clientX)));
      this.svg.addEventListener("pointerleave", () => this.choose(-1));
      this.svg.addEventListener("blur", () => this.choose(-1));
      this.svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step || !this.points.length) return;
        event.preventDefault();
        const from = this.chosen < 0 ? this.points.length - (step > 0 ? 2 : 0) : this.chosen;
        this.choose(Math.max(0, Math.min(this.points.length - 1, from + step)));
        announce(this.readout.textContent);
      });
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }
    show(points, now) {
      const held = this.points[this.chosen]?.at;
      this.points = points;
      this.now = now;
      this.chosen = held == null ? -1 : points.findIndex((one) => one.at === held);
      this.draw();
    }
    choose(index) {
      if (index !== this.chosen) {
        this.chosen = index;
        this.draw();
      }
    }
    nearest(clientX) {
      const x = clientX - this.svg.getBoundingClientRect().left;
      let best = -1;
      this.points.forEach((one, index) => {
        if (best < 0 || Math.abs(this.x(one.at) - x) < Math.abs(this.x(this.points[best].at) - x)) best = index;
      });
      return best;
    }
    x(time) {
      return LEFT + ((time - this.begin) / (this.now - this.begin)) * (this.width - LEFT - RIGHT);
    }
    y(value) {
      return TOP + (1 - value / this.most) * (HEIGHT - TOP - BOTTOM);
    }
    draw() {
      this.width = this.svg.clientWidth;
      if (!this.width || !this.now) return;
      const first = this.points.length ? this.points[0].at - this.points[0].seconds : this.now;
      this.begin = Math.max(this.now - HOUR, Math.min(first, this.now - LEAST));
      const values = this.points.flatMap((one) => this.valuesOf(one)).filter((value) => value != null);
      this.most = this.top ?? nice(Math.max(...values, 1));
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
      const parts = [];
      for (const share of [0, 0.5, 1]) {
        const y = this.y(share * this.most);
        parts.push(drawn("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
        parts.push(drawn("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.format(share * this.most, true)));
      }
      for (const [time, anchor] of [[this.begin, "start"], [this.now, "end"]])
        parts.push(drawn("text", { x: this.x(time), y: HEIGHT - 4, "text-anchor": anchor }, at(time).slice(0, 5)));
      this.names.forEach((_, index) => parts.push(...this.line(index)));
      const chosen = this.points[this.chosen];
      if (chosen) {
        parts.push(drawn("line", { class: "cross", x1: this.x(chosen.at), x2: this.x(chosen.at), y1: TOP, y2: HEIGHT - BOTTOM }));
        this.valuesOf(chosen).forEach((value, index) => {
          if (value != null) parts.push(this.dot(index, chosen.at, value));
        });
      }
      this.svg.replaceChildren(...parts);
      const shown = chosen ?? this.points.findLast((one) => this.valuesOf(one).some((value) => value != null));
      const texts = shown ? this.valuesOf(shown).map((value, index) => `${this.names[index]}${this.format(value)}`) : ["nothing yet"];
      say(this.readout, shown ? `${chosen ? at(shown.at) + "  " : ""}${texts.join(" · ")}` : texts[0]);
      const span = values.length ? `, between ${this.format(Math.min(...values))} and ${this.format(Math.max(...values))} since ${at(this.begin)}` : "";
      this.svg.setAttribute("aria-label", `${this.title}: ${texts.join(", ")}${span}. Arrow keys read single values.`);
    }
    line(index) {
      const kind = index ? "second" : "first", parts = [], segments = [];
      let segment = [];
      const begin = this.begin;
      for (const one of this.points) {
        const value = this.valuesOf(one)[index];
        if (value == null || one.at < begin) {
          segments.push(segment);
          segment = [];
        } else segment.push([this.x(one.at), this.y(Math.min(value, this.most)), one.at, value]);
      }
      segments.push(segment);
      for (const each of segments) {
        if (each.length === 1) parts.push(this.dot(index, each[0][2], each[0][3]));
        if (each.length < 2) continue;
        const path = "M" + each.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
        if (!index) parts.push(drawn("path", { class: "first area", d: `${path}L${each.at(-1)[0]} ${this.y(0)}L${each[0][0]} ${this.y(0)}Z` }));
        parts.push(drawn("path", { class: kind, d: path }));
      }
      return parts;
    }
    dot(index, time, value) {
      return drawn("circle", { class: `dot ${index ? "second" : "first"}`, r: 2.5, cx: this.x(time), cy: this.y(Math.min(value, this.most)) });
    }
  }
  function nice(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 2, 5, 10].find((step) => step * power >= value);
  }
  const charts = [
    new Chart("chart-hit", "Hit rate", [""], (one) => [one.hit], (value, onAxis) => (onAxis ? `${100 * value} %` : percent(value)), 1),
    new Chart("chart-ttft", "Time to first token", ["median ", "p95 (dashed) "], (one) => one.ttft, ms),
    new Chart("chart-itl", "Time between tokens", ["median ", "p95 (dashed) "], (one) => one.itl, ms),
  ];
  let past = [], span = null;
  function showCharts() {
    const points = span && span.seconds >= 1 ? [...past, span] : past;
    const now = Math.max(span?.at ?? 0, past.at(-1)?.at ?? 0);
    charts.forEach((chart) => chart.show(points, now));
  }

  // ---- workers ------------------------------------------------------------------------------------------------
  const loadOf = (one) => one.state;
  const worst = (one) => one.events.find((each) => !each.well) ?? one.events[0];
  const COLUMNS = [
    ["Worker", (one) => one.worker + "/" + String(one.rank).padStart(4, "0")],
    ["Events", (one) => (one.well && !one.problem ? "1" : "0") + worst(one).state],
    ["Cached blocks", (one) => one.cached],
    ["Active blocks", (one) => one.load?.decode ?? -1],
    ["Prefill queue", (one) => one.load?.prefill ?? -1],
    ["Running", (one) => one.load?.requests ?? -1],
    ["Hit rate", (one) => one.hit ?? -1],
    ["State", loadOf],
  ];
  let sorted = [1, 1], workers = [], moreWorkers = 0;
  $("workers").tHead.rows[0].append(
    ...COLUMNS.map(([name], index) => {
      const button = element("button", { type: "button" }, name);
      button.addEventListener("click", () => {
        sorted = [index, sorted[0] === index ? -sorted[1] : index < 2 || index === 7 ? 1 : -1];
        showWorkers();
      });
      return element("th", { scope: "col", className: index > 1 && index < 7 ? "number" : "" }, button);
    }),
  );
  $("find").addEventListener("input", () => showWorkers());
  function share(part, whole) {
    const bar = element("div", { className: "bar", "aria-hidden": "true" }, element("i"));
    bar.firstChild.style.width = `${Math.min(100, (100 * part) / whole)}%`;
    return bar;
  }
  function showWorkers() {
    const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (one) => [one.worker, one.model, one.tenant, one.role, loadOf(one), ...one.events.flatMap((each) => [each.state, each.reason])].join(" ").toLowerCase();
    const found = words.length ? workers.filter((one) => words.every((word) => text(one).includes(word))) : [...workers];
    const [column, direction] = sorted, by = COLUMNS[column][1], name = COLUMNS[0][1];
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    found.sort((a, b) => direction * compare(by(a), by(b)) || compare(name(a), name(b)));
    [...$("workers").tHead.rows[0].cells].forEach((head, index) => (index === column ? head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort")));
    const tenants = new Set(workers.map((one) => one.tenant)).size > 1;
    const more = moreWorkers ? `; ${number.format(moreWorkers)} more are not shown` : "";
    say($("workers-summary"), workers.length ? `${words.length ? `${number.format(found.length)} of ` : ""}${many(workers.length, "worker rank")}${more}. The prefill queue is in tokens, caches are in blocks.` : "No worker is registered: kvscout workers register, --workers-file, or a bridge beside the engine.");
    rows($("workers").tBodies[0], found, (one) => JSON.stringify([one.tenant, one.worker, one.rank]), (one) => {
      const event = worst(one), load = one.load;
      return [
        cell("Worker", [element("div", { className: "name" }, `${one.worker}/${one.rank}`), sub([one.model, one.role, tenants ? one.tenant : ""].filter(Boolean).join(" · "))]),
        cell("Events", element("div", {}, element("span", { className: `pill ${one.well ? "" : "trouble"}` }, `${one.well ? "✓" : "▲"} ${event.state}`), event.reason ? sub(event.reason) : "", event.age == null ? "" : sub(`${event.age < 1 ? "event just now" : `event ${age(event.age)} ago`}`)), one.well ? "" : "wide"),
        cell("Cached blocks", number.format(one.cached), "number"),
        cell("Active blocks", load ? [element("span", {}, load.blocks ? `${number.format(load.decode)} / ${short.format(load.blocks)}` : number.format(load.decode)), load.blocks ? share(load.decode, load.blocks) : ""] : "–", "number"),
        cell("Prefill queue", load ? number.format(load.prefill) : "–", "number"),
        cell("Running", load ? number.format(load.requests) : "–", "number"),
        cell("Hit rate", percent(one.hit), "number"),
        cell("State", [element("div", {}, element("span", { className: one.problem ? "pill trouble" : "" }, one.problem ? `▲ ${loadOf(one)}` : loadOf(one)), one.problem ? sub(one.problem) : "", one.failures ? sub(`${number.format(one.failures)} of ${number.format(one.requests)} failed`) : "")], one.problem || one.failures ? "wide" : ""),
      ];
    });
  }

  // ---- decisions ----------------------------------------------------------------------------------------------
  let held = false;
  $("hold").addEventListener("click", () => {
    held = !held;
    $("hold").setAttribute("aria-pressed", String(held));
    say($("hold"), held ? "Held: go on" : "Hold");
  });
  function showDecisions(decisions) {
    if (held || !decisions.length) return;
    say($("decisions-summary"), "The newest first. A cost is in blocks of work; the cheapest candidate wins. Where there are many decisions, some of each few seconds are shown.");
    rows($("decisions"), decisions, (one) => one.id, (one, row) => {
      const open = row.querySelector("details")?.open;
      const overlap = one.error ? element("span", { className: "error" }, `✕ ${one.error}`) : element("span", {}, `${number.format(one.overlap)} of ${many(one.blocks, "block")} cached`);
      overlap.classList.add("overlap");
      const summary = element(
        "summary", {},
        element("span", { className: "time" }, at(one.at)),
        element("span", { className: "request", title: one.request }, one.request || "query"),
        element("b", {}, one.error ? "no worker" : `→ ${one.worker}`),
        overlap,
        element("span", { className: "cost number" }, one.error ? "" : `cost ${round(one.cost)}`),
      );
      return [element("details", { open: Boolean(open) }, summary, element("div", { className: "why" }, ...why(one)))];
    }, "li");
  }
  function why(one) {
    const facts = `${at(one.at)} · ${one.request || "query"} · ${one.model} · ${many(one.tokens, "token")}${one.error ? "" : `, ${number.format(one.uncached)} to compute · policy ${one.policy}`}`;
    if (one.error) return [element("p", { className: "faint" }, facts)];
    const heads = ["Candidate", "Cached blocks", "On slower tiers", "Prefill blocks", "Active blocks", "Cost"];
    const body = one.candidates.map((each) =>
      element(
        "tr", { className: each.chosen ? "chosen" : "" },
        element("td", {}, `${each.chosen ? "✓ " : ""}${each.worker}`),
        ...[each.device, each.slower, each.prefill, each.decode].map((value) => element("td", { className: "number" }, round(value))),
        element("td", { className: "number" }, each.why_not ? `not: ${each.why_not}` : round(each.cost)),
      ),
    );
    return [
      element("p", {}, one.reason),
      element("p", { className: "faint" }, facts),
      element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((text, index) => element("th", { scope: "col", className: index ? "number" : "" }, text)))), element("tbody", {}, ...body)),
      one.more_candidates ? element("p", { className: "faint" }, `${many(one.more_candidates, "dearer candidate")} not shown`) : "",
    ].filter(Boolean);
  }

  // ---- services -----------------------------------------------------------------------------------------------
  function showServices(services) {
    rows($("services").tBodies[0], services, (one) => `${one.kind} ${one.address}`, (one) => [
      cell("Service", element("span", { className: "name" }, one.kind)),
      cell("Address", one.address),
      cell("State", [element("div", {}, element("span", { className: one.well ? "" : "trouble" }, `${one.well ? "✓" : "▲"} ${one.state}`), ...one.warnings.map(sub))], "wide"),
      cell("Version", one.version || "–"),
      cell("Up", age(one.uptime), "number"),
    ]);
  }

  // ---- the stream ---------------------------------------------------------------------------------------------
  const handlers = {
    history(points) {
      past = points;
      showCharts();
    },
    state(state) {
      span = state.span;
      workers = state.workers;
      moreWorkers = state.more_workers;
      say($("about"), `gateway ${state.gateway} · ${state.version}`);
      $("board").hidden = false;
      showTotals(state);
      showShadow(state.shadow);
      showCharts();
      showWorkers();
      showDecisions(state.decisions);
      showServices(state.services);
    },
    doctor: showDoctor,
  };
  function announce(text) {
    say($("announcement"), text);
  }
  let lostSince = null;
  function connection(state, text) {
    const node = $("connection");
    if (node.dataset.state !== state) announce(state === "live" ? "connected, live" : text);
    node.dataset.state = state;
    say(node, text);
    $("board").classList.toggle("stale", state === "lost");
  }
  function token() {
    return sessionStorage.getItem(KEY);
  }
  function askForToken(why) {
    sessionStorage.removeItem(KEY);
    $("board").hidden = $("sign-out").hidden = true;
    $("sign-in").hidden = false;
    say($("sign-in-why"), why);
    $("sign-in-clear").hidden = isSecureContext;
    connection("waiting", "a token is needed");
    $("token").focus();
    return new Promise((resolve) => {
      $("sign-in").onsubmit = (event) => {
        event.preventDefault();
        sessionStorage.setItem(KEY, $("token").value);
        $("token").value = "";
        $("sign-in").hidden = true;
        resolve();
      };
    });
  }
  let stop = null;
  $("sign-out").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    stop?.abort();
  });
  class Refused extends Error {}
  async function watch() {
    stop = new AbortController();
    let timer;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENT_MS);
    };
    try {
      alive();
      const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
      const response = await fetch("dashboard/events", { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: stop.signal });
      if (!response.ok) {
        const text = await response.json().then((answer) => answer.error.message, () => `status ${response.status}`);
        if (response.status === 401 || (response.status === 403 && token())) throw new Refused(text);
        throw new Error(text);
      }
      $("sign-out").hidden = !token();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) throw new Error("the gateway has ended the stream");
        alive();
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const text of events) {
          const fields = Object.fromEntries(text.split("\n").map((line) => line.split(/: (.*)/s)));
          if (!fields.event) continue;
          handlers[fields.event]?.(JSON.parse(fields.data));
          lostSince = null;
          connection("live", `● live, ${clock.format(new Date())}`);
        }
      }
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
  }
  async function run() {
    for (let pause = 1000; ; ) {
      const began = performance.now();
      try {
        await watch();
      } catch (error) {
        if (error instanceof Refused) {
          await askForToken(error.message);
          continue;
        }
        lostSince ??= new Date();
        const reason = error.name === "AbortError" ? "it is silent" : error instanceof TypeError ? "it cannot be reached" : error.message;
        connection("lost", `✕ no gateway since ${clock.format(lostSince)}: ${reason}`);
      }
      pause = performance.now() - began > 10000 ? 1000 : Math.min(2 * pause, 5000);
      await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
    }
  }
  run();
})();
