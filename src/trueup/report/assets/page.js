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

// Sorting: better end first, then reversed, then the original order

const value = (row, at) => {
  const cell = row.cells[at];
  const said = cell.dataset.v ?? cell.textContent.trim();
  const number = Number(said.replace("−", "-"));
  return said === "" || /^(–|nan( ±|$))/.test(said) ? null : Number.isNaN(number) ? said : number;
};
const before = (a, b) => (typeof a === "number" && typeof b === "number"
  ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
const ends = (head) => (head.dataset.first === "descending" ? ["descending", "ascending"] : ["ascending", "descending"]);
const order = (head, next) => {
  const body = head.closest("table").tBodies[0];
  const at = head.cellIndex;
  for (const each of head.parentNode.cells) each.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", next);
  const rows = [...body.rows].filter((row) => !row.classList.contains("detail"));
  rows.forEach((row, i) => { row.dataset.at ??= i; });
  const keyed = rows.map((row) => [next === "none" ? Number(row.dataset.at) : value(row, at), row]);
  const turn = next === "descending" ? -1 : 1;
  keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : turn * before(a, b)));
  const details = new Map(all(":scope > .detail", body).map((row) => [row.dataset.of, row]));
  body.append(...keyed.flatMap(([, row]) => [row, details.get(row.dataset.run)].filter(Boolean)));
};
const sort = (head) => {
  const [first, other] = ends(head);
  const next = { none: first, [first]: other, [other]: "none" }[head.getAttribute("aria-sort")];
  order(head, next);
  say(next === "none" ? "original order" : `sorted by ${head.textContent}, ${next}`);
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
const replace = (block, markup) => {
  const name = (head) => `${head.textContent} ${head.dataset.target ?? ""}`;
  const old = one("th[aria-sort$='ending']", block);
  one(".view", block).innerHTML = markup; // generated and escaped with the page
  const head = old && all("thead th", block).find((each) => name(each) === name(old));
  if (head) order(head, ends(head)[ends(old).indexOf(old.getAttribute("aria-sort"))]); // the better end stays first
};
const show = async () => {
  const stored = await unpack();
  for (const block of all(".block")) {
    const names = block.dataset.metrics.split(" ");
    const name = names.includes(chosen("metric")) ? chosen("metric") : names[0];
    if (name !== block.dataset.shown) {
      block.dataset.shown = name;
      replace(block, stored[block.dataset.block][name].view);
    }
  }
  filter();
};
const copy = async (button) => {
  const block = button.closest(".block");
  const text = (await unpack())[block.dataset.block][block.dataset.shown][button.dataset.form];
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    done = document.execCommand("copy"); // for file:// pages without clipboard access
    field.remove();
    button.focus({ preventScroll: true });
  }
  const name = (button.dataset.name ??= button.textContent);
  button.textContent = done ? "Copied" : "Could not copy";
  say(done ? `copied as ${name}` : "could not copy");
  setTimeout(() => { button.textContent = name; }, 1200);
};
one("#choose-metric")?.addEventListener("change", show);
for (const name of ["#choose-target", "#choose-settings"]) one(name)?.addEventListener("change", filter);
one("#filter-methods")?.addEventListener("input", filter);

// Runs: the list, and the record of each row

const table = one(".runs");
const rows = table ? [...table.tBodies[0].rows] : [];
const texts = new Map();
const kinds = table ? [...table.tHead.rows[0].cells].map((head) => head.dataset.kind) : [];
const terms = { word: (word) => word, seed: (word) => `seed=${word};`, number: () => "" };
const texted = (row) => [...row.cells].map((cell, at) => terms[kinds[at]](cell.textContent)).join(" ");
one("#filter-runs")?.addEventListener("input", () => {
  const seeded = one("#filter-runs").value.toLowerCase().replace(/\bseed[\s=]+(\S+)/g, "seed=$1;"); // 1 is not 10
  const wanted = seeded.split(/\s+/).filter(Boolean);
  let left = 0;
  for (const row of rows) {
    if (!texts.has(row)) texts.set(row, texted(row));
    row.hidden = !matches(texts.get(row), wanted);
    left += !row.hidden;
    const detail = document.getElementById(`run-${row.dataset.run}`);
    if (detail) detail.hidden = row.hidden || one("button", row).getAttribute("aria-expanded") === "false";
  }
  one("#count").textContent = `${wanted.length ? `${left} of ` : ""}${rows.length} run${rows.length === 1 ? "" : "s"}`;
});
const [LONG, MANY] = [400, 20]; // longer values and sections are folded
let stored = null;
const recordFields = (number) => {
  stored ??= json("runs-data");
  const sections = new Map();
  const add = ([section, ...path], found) => {
    const inner = path.length > 1 ? `${section}: ${path[0]}` : path.length ? section : "record";
    if (!sections.has(inner)) sections.set(inner, []);
    sections.get(inner).push([path.at(-1) ?? section, found]);
  };
  stored.paths.forEach((path, i) => {
    const at = stored.which[i]?.[number] ?? 0; // null: all runs have the same value
    if (at >= 0) add(path, stored.values[i][at]);
  });
  const order = ["record", "settings", "settings: hyper", "chosen", "results", "cost", "settings: source", "environment"];
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const fold = (summary, ...inside) => make("details", {}, make("summary", {}, summary), ...inside);
  const entry = ([name, found]) => {
    const told = typeof found === "string" ? found : JSON.stringify(found, null, 1).replace(/\s+/g, " ").replace(/(?<=[[{]) | (?=[\]}])/g, "");
    const shown = told.length > LONG ? fold(`${told.slice(0, 30)}…`, make("div", { textContent: told })) : told;
    return [make("dt", { textContent: name }), make("dd", { className: told.length > 40 ? "long" : "" }, shown)];
  };
  const lists = [...sections].sort(([a], [b]) => rank(a) - rank(b)).map(([name, pairs]) => {
    const title = make("h3", { textContent: name });
    const list = make("dl", {}, ...pairs.flatMap(entry));
    return make("section", {}, ...(pairs.length > MANY ? [fold(title, list)] : [title, list]));
  });
  return make("div", { className: "fields" }, ...lists);
};
const unfold = (button) => {
  const row = button.closest("tr");
  const name = `run-${row.dataset.run}`;
  const open = button.getAttribute("aria-expanded") !== "true";
  let detail = document.getElementById(name);
  if (!detail) {
    const cell = make("td", { colSpan: row.cells.length }, recordFields(Number(row.dataset.run)));
    detail = make("tr", { id: name, className: "detail" }, cell);
    detail.dataset.of = row.dataset.run;
    row.after(detail);
    button.setAttribute("aria-controls", name);
  }
  detail.hidden = !open;
  button.setAttribute("aria-expanded", String(open));
};

// Buttons and printing

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.closest("thead")) sort(button.closest("th"));
  else if (button.dataset.form) copy(button);
  else if (button.closest(".runs")) unfold(button);
});

let folded = [];
addEventListener("beforeprint", () => {
  folded = all("details:not([open])");
  for (const each of folded) each.open = true;
});
addEventListener("afterprint", () => { for (const each of folded) each.open = false; });
