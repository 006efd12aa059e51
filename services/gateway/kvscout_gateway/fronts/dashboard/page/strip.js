// One chart: a strip of time with a title, the values of one moment, and lines or bars.
const LEFT = 44, RIGHT = 8, TOP = 6, BOTTOM = 5;
const BRIDGED = 60; // seconds without a value over which a line goes on

class Strip {
  // series: [{ name, of(point), kind }], kind: "area" | "first" | "second" | "failed"
  constructor(title, series, format, { top, label = format, brief = title } = {}) {
    Object.assign(this, { title, series, format, top, label });
    this.values = element("dl", { className: "values" }, ...series.map((one) => element("div", {}, element("dt", { className: one.kind }, one.name), element("dd"))));
    this.svg = drawn("svg", { role: "img", "aria-label": title });
    this.node = element("div", { className: "strip" }, element("div", { className: "legend" }, element("h3", {}, element("span", { className: "long" }, title), element("abbr", { title }, brief)), this.values), this.svg);
  }
  draw(points, frame, chosen) {
    const { clientWidth: width, clientHeight: height } = this.svg;
    Object.assign(this, { points, frame, height, width });
    const values = this.series.flatMap((one) => points.map(one.of)).filter((value) => value != null);
    this.most = this.top ?? nice(Math.max(...values, 0));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [];
    for (const share of [0, 1]) {
      const y = this.y(share * this.most);
      parts.push(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      parts.push(drawn("text", { x: LEFT - 6, y: share ? y + 8 : y, "text-anchor": "end" }, share ? this.label(this.most) : "0"));
    }
    this.series.forEach((one) => parts.push(...(one.kind.startsWith("failed") ? this.bars(one) : this.lines(one))));
    if (chosen) parts.push(drawn("line", { class: "cross", x1: frame.x(chosen.at), x2: frame.x(chosen.at), y1: 0, y2: height }));
    this.svg.replaceChildren(...parts);
    this.tell(chosen, values);
  }
  y(value) {
    return TOP + (1 - Math.min(1, value / this.most)) * (this.height - TOP - BOTTOM);
  }
  tell(chosen, values) {
    const shown = chosen ?? this.points.findLast((one) => this.series.some((each) => each.of(one) != null));
    const texts = this.series.map((one) => (shown ? this.format(one.of(shown)) : "–"));
    texts.forEach((text, index) => say(this.values.children[index].lastChild, text));
    const spoken = this.series.map((one, index) => `${one.name} ${texts[index]}`).join(", ");
    const range = values.length ? `; between ${this.format(Math.min(...values))} and ${this.format(Math.max(...values))} since ${at(this.frame.begin)}` : "";
    this.svg.setAttribute("aria-label", `${this.title}: ${spoken}${range}`);
  }
  // What stands alone is drawn as long as it lasted: a stroke, no dot.
  lines(one) {
    const parts = [], base = this.y(0);
    let run = [], last = null;
    const end = () => {
      if (!run.length) return;
      if (run.length === 1) run.unshift([Math.min(this.frame.x(last.at - last.seconds), run[0][0] - 6), run[0][1]]);
      const path = "M" + run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      if (one.kind === "area") parts.push(drawn("path", { class: "area", d: `${path}L${run.at(-1)[0].toFixed(1)} ${base}L${run[0][0].toFixed(1)} ${base}Z` }));
      parts.push(drawn("path", { class: one.kind === "area" ? "first" : one.kind, d: path }));
      run = [];
    };
    for (const point of this.points) {
      const value = one.of(point);
      if (value == null) continue;
      if (last && point.at - point.seconds - last.at > BRIDGED) end();
      run.push([this.frame.x(point.at), this.y(value)]);
      last = point;
    }
    end();
    return parts;
  }
  bars(one) {
    const below = this.series.slice(0, this.series.indexOf(one)).filter((each) => each.kind.startsWith("failed"));
    return this.points.filter((point) => one.of(point) > 0).map((point) => {
      const from = below.reduce((sum, each) => sum + (each.of(point) ?? 0), 0);
      const top = this.y(from + one.of(point)), high = Math.max(3, this.y(from) - top);
      const right = this.frame.x(point.at), wide = Math.max(3, right - this.frame.x(point.at - point.seconds) - 1);
      return drawn("rect", { class: one.kind, x: right - wide, y: Math.min(top, this.y(from) - high), width: wide, height: high });
    });
  }
}
function nice(value) {
  if (!value) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}
