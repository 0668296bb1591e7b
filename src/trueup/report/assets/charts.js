// Figures: values at the pointer, touch or arrow keys; legend buttons

const tip = one("#tip");
let current = null; // the chart whose values are shown
const hide = () => {
  tip.hidden = true;
  current = null;
  for (const cursor of all(".cursor")) cursor.remove();
};
const place = (x, y) => {
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = x + 14 + width > innerWidth - 8;
  tip.style.left = `${Math.max(8, right ? x - width - 14 : x + 14)}px`;
  tip.style.top = `${Math.max(8, Math.min(y - height / 2, innerHeight - height - 8))}px`;
};
const mark = (svg, values, stop, rows_) => {
  const [x, y] = stop;
  const cursor = draw("g", { class: "cursor" });
  if (!values.plane) cursor.append(draw("line", { x1: x, x2: x, y1: values.top, y2: values.bottom }));
  if (values.side) {
    const half = values.side / 2;
    cursor.append(draw("rect", { x: x - half, y: y - half, width: values.side - 1, height: values.side - 1 }));
  }
  for (const [, , height] of rows_) {
    if (height !== null) cursor.append(draw("circle", { cx: x, cy: height, r: 3.5 }));
  }
  svg.append(cursor);
};
const showValues = (chart, at, speak) => {
  hide();
  const { values, labels, off, samples } = chart.state;
  const stop = values.stops[at];
  if (!stop) return;
  const shown = stop[3].filter(([number]) => number === null || !off.has(number));
  if (!shown.length) return;
  tip.replaceChildren();
  if (stop[2]) tip.append(make("strong", { textContent: stop[2] }));
  for (const [number, said] of shown) {
    const line = make("div");
    if (number !== null) line.append(samples[number].cloneNode(true), make("span", { textContent: labels[number] }));
    if (said) line.append(make("span", { textContent: said }));
    tip.append(line);
  }
  const svg = one("svg", chart);
  mark(svg, values, stop, shown);
  current = chart;
  const box = svg.getBoundingClientRect();
  const scale = box.width / svg.viewBox.baseVal.width;
  const height = values.plane ? stop[1] : (values.top + Number(values.bottom)) / 2;
  place(box.left + stop[0] * scale, box.top + height * scale);
  if (speak) say([stop[2], ...shown.map(([number, said]) => `${labels[number] ?? ""} ${said}`)].join("; "));
};
const nearest = (chart, event) => {
  const svg = one("svg", chart);
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  const { values } = chart.state;
  let [best, found] = [Infinity, -1];
  values.stops.forEach((stop, i) => {
    if (gone(chart.state, i)) return;
    const far = values.plane ? Math.hypot(stop[0] - x, stop[1] - y) : Math.abs(stop[0] - x);
    if (far < best) [best, found] = [far, i];
  });
  const reach = values.near ?? (values.side ? values.side : Infinity);
  return best <= reach ? found : -1;
};
const gone = ({ values, off }, at) => values.stops[at][3].every(([number]) => number !== null && off.has(number));
const step = (chart, key) => {
  const { values, at } = chart.state;
  const last = values.stops.length - 1;
  const moves = { ArrowRight: [at + 1, 1], ArrowLeft: [at - 1, -1], Home: [0, 1], End: [last, -1] };
  if (values.wide) Object.assign(moves, { ArrowDown: [at + values.wide, values.wide], ArrowUp: [at - values.wide, -values.wide] });
  if (!(key in moves)) return null;
  let [next, by] = at < 0 ? moves.Home : moves[key];
  while (next >= 0 && next <= last && gone(chart.state, next)) next += by;
  return next >= 0 && next <= last ? next : at;
};
const wire = (chart) => {
  const point = (event) => {
    const at = nearest(chart, event);
    if (at < 0) hide();
    else if (at !== chart.state.at || tip.hidden) {
      chart.state.at = at;
      showValues(chart, at, false);
    }
  };
  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  chart.addEventListener("focus", () => {
    const { at } = chart.state;
    if (!chart.matches(":focus-visible")) return;
    showValues(chart, chart.state.at = at < 0 || gone(chart.state, at) ? step(chart, "Home") : at, true);
  });
  chart.addEventListener("blur", () => { if (current === chart) hide(); });
  chart.addEventListener("keydown", (event) => {
    const at = step(chart, event.key);
    if (at === null) return;
    event.preventDefault();
    showValues(chart, chart.state.at = at, true);
  });
};
for (const figure of all(".figure")) {
  const { labels, charts } = json(`${figure.id}-values`);
  const off = new Set();
  const samples = all(".keys .sample", figure);
  all(".chart", figure).forEach((chart, i) => {
    chart.state = { values: charts[i], labels, off, samples, at: -1 };
    if (charts[i].stops.length) wire(chart);
  });
  for (const button of all(".keys button", figure)) {
    button.addEventListener("click", () => {
      const number = Number(button.dataset.series);
      const on = off.has(number);
      if (on) off.delete(number);
      else off.add(number);
      button.setAttribute("aria-pressed", String(on));
      for (const marks of all(`.chart .series[data-series="${number}"]`, figure)) marks.classList.toggle("off", !on);
    });
  }
}

// Hiding the values

document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".chart")) hide(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
// Focus may scroll a chart into view, so the values follow.
addEventListener("scroll", () => {
  if (!current) return;
  const { top, bottom, left, right } = current.getBoundingClientRect();
  const away = bottom < 0 || top > innerHeight;
  const cursor = one(".cursor", current).getBoundingClientRect();
  const x = cursor.left + cursor.width / 2; // a chart may scroll inside its box
  if ((away && current !== document.activeElement) || x < left || x > right) hide();
  else showValues(current, current.state.at, false);
}, { passive: true, capture: true });
addEventListener("beforeprint", hide);
