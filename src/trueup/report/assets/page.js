"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const make = (name, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  };
  const draw = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const say = (words) => { one("#said").textContent = words; };
  const json = (name) => JSON.parse(document.getElementById(name).textContent);

  // Light and dark

  const theme = one("#theme");
  const night = () => {
    const chosen = document.documentElement.style.colorScheme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const label = () => {
    theme.textContent = night() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to the ${night() ? "light" : "dark"} theme`);
  };
  theme.addEventListener("click", () => {
    document.documentElement.style.colorScheme = night() ? "light" : "dark";
    label();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  // Sorting: first the better end, then the other, then as it was

  const value = (row, at) => {
    const cell = row.cells[at];
    const said = cell.dataset.v ?? cell.textContent.trim();
    const number = Number(said.replace("−", "-"));
    return said === "" || said.startsWith("–") ? null : Number.isNaN(number) ? said : number;
  };
  const before = (a, b) => (typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const sort = (head) => {
    const body = head.closest("table").tBodies[0];
    const at = head.cellIndex;
    const first = head.dataset.first ?? "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const next = { none: first, [first]: other, [other]: "none" }[head.getAttribute("aria-sort")];
    for (const each of head.parentNode.cells) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", next);
    const rows = [...body.rows].filter((row) => !row.classList.contains("detail"));
    rows.forEach((row, i) => { row.dataset.at ??= i; });
    const keyed = rows.map((row) => [next === "none" ? Number(row.dataset.at) : value(row, at), row]);
    const turn = next === "descending" ? -1 : 1;
    keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : turn * before(a, b)));
    const details = new Map(all(":scope > .detail", body).map((row) => [row.dataset.of, row]));
    body.append(...keyed.flatMap(([, row]) => [row, details.get(row.dataset.run)].filter(Boolean)));
    say(next === "none" ? "in the first order" : `sorted by ${head.textContent}, ${next}`);
  };

  // Tables: metric, target, table and method; copying

  let views = null;
  const unpack = async () => {
    if (views) return views;
    const bytes = Uint8Array.from(atob(one("#views-data").textContent), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    views = JSON.parse(await new Response(stream).text());
    return views;
  };
  const chosen = (name) => one(`#choose-${name}`)?.value ?? "";
  const words = (selector) => (one(selector)?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (said, wanted) => wanted.every((word) => said.toLowerCase().includes(word));
  const filter = () => {
    const [target, settings, wanted] = [chosen("target"), chosen("settings"), words("#filter-methods")];
    let left = 0;
    for (const block of all("#results .block")) {
      const heads = [...one("thead tr", block).cells];
      const has = !target || heads.some((head) => head.dataset.target === target);
      let rows = 0;
      for (const row of one("tbody", block).rows) {
        row.hidden = !matches(row.cells[0].textContent, wanted);
        rows += !row.hidden;
      }
      heads.forEach((head, at) => {
        const off = at > 0 && target !== "" && head.dataset.target !== target;
        for (const row of one("table", block).rows) row.cells[at].hidden = off;
      });
      block.hidden = !has || !rows || (settings !== "" && block.dataset.block !== settings);
      left += !block.hidden;
    }
    const more = one("#results .more");
    if (more) {
      more.hidden = !one(".block:not([hidden])", more);
      if (settings || target || wanted.length) more.open = true;
    }
    const empty = one("#results .empty");
    if (empty) empty.hidden = left > 0;
  };
  const show = async () => {
    const stored = await unpack();
    for (const block of all(".block")) {
      const names = block.dataset.metrics.split(" ");
      const name = names.includes(chosen("metric")) ? chosen("metric") : names[0];
      if (name !== block.dataset.shown) {
        block.dataset.shown = name;
        one(".view", block).innerHTML = stored[block.dataset.block][name].view; // made and escaped with the page
      }
    }
    filter();
  };
  const copy = async (button) => {
    const block = button.closest(".block");
    const text = (await unpack())[block.dataset.block][block.dataset.shown][button.dataset.form];
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = make("textarea", { value: text, className: "unseen" });
      document.body.append(field);
      field.select();
      document.execCommand("copy"); // where a file may not use the clipboard otherwise
      field.remove();
    }
    const name = button.textContent;
    button.textContent = "Copied";
    say(`copied as ${name}`);
    setTimeout(() => { button.textContent = name; }, 1200);
  };
  one("#choose-metric")?.addEventListener("change", show);
  for (const name of ["#choose-target", "#choose-settings"]) one(name)?.addEventListener("change", filter);
  one("#filter-methods")?.addEventListener("input", filter);

  // Runs: the list, and a record behind each row

  const table = one(".runs");
  const rows = table ? [...table.tBodies[0].rows] : [];
  const texts = new Map();
  one("#filter-runs")?.addEventListener("input", () => {
    const wanted = words("#filter-runs");
    let left = 0;
    for (const row of rows) {
      if (!texts.has(row)) texts.set(row, [...row.cells].map((cell) => cell.textContent).join(" "));
      row.hidden = !matches(texts.get(row), wanted);
      left += !row.hidden;
      const detail = document.getElementById(`run-${row.dataset.run}`);
      if (detail) detail.hidden = row.hidden || one("button", row).getAttribute("aria-expanded") === "false";
    }
    one("#count").textContent = `${wanted.length ? `${left} of ` : ""}${rows.length} run${rows.length === 1 ? "" : "s"}`;
  });
  let stored = null;
  const knobs = (number) => {
    stored ??= json("runs-data");
    const sections = new Map();
    const add = ([section, ...path], found) => {
      const inner = path.length > 1 ? `${section}: ${path[0]}` : path.length ? section : "record";
      if (!sections.has(inner)) sections.set(inner, []);
      sections.get(inner).push([path.at(-1) ?? section, found]);
    };
    stored.paths.forEach((path, i) => {
      const at = stored.which[i]?.[number] ?? 0; // no list: all runs have the only value
      if (at >= 0) add(path, stored.values[i][at]);
    });
    const order = ["record", "settings", "settings: hyper", "chosen", "results", "cost", "settings: source", "environment"];
    const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    const lists = [...sections].sort(([a], [b]) => rank(a) - rank(b)).map(([name, pairs]) => make(
      "section", { className: pairs.some(([, found]) => JSON.stringify(found).length > 400) ? "wide" : "" },
      make("h3", { textContent: name }),
      make("dl", {}, ...pairs.flatMap(([knob, found]) => {
        const said = typeof found === "string" ? found : JSON.stringify(found, null, 1).replace(/\s+/g, " ").replace(/(?<=[[{]) | (?=[\]}])/g, "");
        return [make("dt", { textContent: knob }), make("dd", { textContent: said, className: said.length > 40 ? "long" : "" })];
      })),
    ));
    return make("div", { className: "knobs" }, ...lists);
  };
  const unfold = (button) => {
    const row = button.closest("tr");
    const name = `run-${row.dataset.run}`;
    const open = button.getAttribute("aria-expanded") !== "true";
    let detail = document.getElementById(name);
    if (!detail) {
      const cell = make("td", { colSpan: row.cells.length }, knobs(Number(row.dataset.run)));
      detail = make("tr", { id: name, className: "detail" }, cell);
      detail.dataset.of = row.dataset.run;
      row.after(detail);
      button.setAttribute("aria-controls", name);
    }
    detail.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
  };

  // Figures: values at the pointer, at a finger, or at the arrow keys; curves on and off

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
  const tell = (chart, at, speak) => {
    hide();
    const { values, labels, off, samples } = chart.plate;
    const stop = values.stops[at];
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
    const { values, off } = chart.plate;
    let [best, found] = [Infinity, -1];
    values.stops.forEach((stop, i) => {
      if (stop[3].every(([number]) => number !== null && off.has(number))) return;
      const far = values.plane ? Math.hypot(stop[0] - x, stop[1] - y) : Math.abs(stop[0] - x);
      if (far < best) [best, found] = [far, i];
    });
    const reach = values.near ?? (values.side ? values.side : Infinity);
    return best <= reach ? found : -1;
  };
  const step = (chart, key) => {
    const { values } = chart.plate;
    const last = values.stops.length - 1;
    const at = chart.plate.at;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last };
    if (values.wide) Object.assign(moves, { ArrowDown: at + values.wide, ArrowUp: at - values.wide });
    return key in moves ? Math.min(Math.max(at < 0 ? 0 : moves[key], 0), last) : null;
  };
  const wire = (chart) => {
    const point = (event) => {
      const at = nearest(chart, event);
      if (at < 0) hide();
      else if (at !== chart.plate.at || tip.hidden) {
        chart.plate.at = at;
        tell(chart, at, false);
      }
    };
    chart.addEventListener("pointermove", point);
    chart.addEventListener("pointerdown", point);
    chart.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    chart.addEventListener("focus", () => {
      if (chart.matches(":focus-visible")) tell(chart, chart.plate.at = Math.max(chart.plate.at, 0), true);
    });
    chart.addEventListener("blur", () => { if (current === chart) hide(); });
    chart.addEventListener("keydown", (event) => {
      const at = step(chart, event.key);
      if (at === null) return;
      event.preventDefault();
      tell(chart, chart.plate.at = at, true);
    });
  };
  for (const plate of all(".plate")) {
    const { labels, charts } = json(`${plate.id}-values`);
    const off = new Set();
    const samples = all(".keys .sample", plate);
    all(".chart", plate).forEach((chart, i) => {
      chart.plate = { values: charts[i], labels, off, samples, at: -1 };
      if (charts[i].stops.length) wire(chart);
    });
    for (const button of all(".keys button", plate)) {
      button.addEventListener("click", () => {
        const number = Number(button.dataset.series);
        const on = off.has(number);
        if (on) off.delete(number);
        else off.add(number);
        button.setAttribute("aria-pressed", String(on));
        for (const marks of all(`.chart .series[data-series="${number}"]`, plate)) marks.classList.toggle("off", !on);
      });
    }
  }

  // Everywhere

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.closest("thead")) sort(button.closest("th"));
    else if (button.dataset.form) copy(button);
    else if (button.closest(".runs")) unfold(button);
  });
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".chart")) hide(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  // Focus may scroll a chart into view after its values are shown; they move along.
  addEventListener("scroll", () => {
    if (!current) return;
    const { top, bottom } = current.getBoundingClientRect();
    const gone = bottom < 0 || top > innerHeight;
    if (gone && current !== document.activeElement) hide();
    else tell(current, current.plate.at, false);
  }, { passive: true });
  let folded = [];
  addEventListener("beforeprint", () => {
    hide();
    folded = all("details:not([open])");
    for (const each of folded) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of folded) each.open = false; });
})();
