"use strict";
// The live page of a node or a gateway. All text that comes from outside is set as text, never as HTML.

const MOST = 1200, SHOWN = 40, SMOOTH_S = 4, SILENT_MS = 6000;
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function el(tag, set = {}, ...inner) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(set)) {
    if (key === "style") for (const [name, of] of Object.entries(value)) made.style.setProperty(name, of);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...inner.filter((one) => one !== null && one !== undefined && one !== ""));
  return made;
}

// Numbers, as people read them

function scaled(value, units, step = 1000) {
  let at = 0, size = Math.abs(value);
  for (; size >= step && at < units.length - 1; at++) { size /= step; value /= step; }
  const digits = size === 0 || (at === 0 && Number.isInteger(value)) ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return value.toFixed(digits) + units[at];
}
const count = (value) => scaled(value, ["", "k", "M", "G", "T"]);
const bytes = (value) => scaled(value, [" B", " kB", " MB", " GB", " TB"]);
const binary = (value) => scaled(value, [" B", " KiB", " MiB", " GiB", " TiB"], 1024);
const rate = (value) => `${count(value)}/s`;
const speed = (value) => `${bytes(value)}/s`;
const trimmed = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
const plural = (number, word) => `${Number(number).toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
function duration(s) {
  if (s < 0.9995) return `${s < 0.00995 ? (1000 * s).toFixed(1) : Math.round(1000 * s)} ms`;
  if (s < 90) return `${s < 9.95 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} days`;
}

// What has come: samples are rows [unix seconds, value, ...], as many as the node keeps

let names = new Map(), rows = [], state = null, prefixes = null, span = 180, received = 0;
const requests = new Map();

const value = (row, name) => (names.has(name) ? row[names.get(name)] ?? 0 : 0);
const latest = () => rows[rows.length - 1];
const now = (name) => (rows.length ? value(latest(), name) : 0);
const all = (start) => [...names.keys()].filter((name) => name.startsWith(start));

/** Index of the first row that is not older than `seconds` before row `at`. */
function before(at, seconds) {
  let low = 0, high = at;
  const from = rows[at][0] - seconds;
  while (low < high) { const mid = (low + high) >> 1; if (rows[mid][0] < from) low = mid + 1; else high = mid; }
  return low;
}
/** Growth a second of a counter up to row `at`; null where nothing is known. */
function growth(at, series, seconds = SMOOTH_S) {
  const from = before(at, seconds), elapsed = rows[at][0] - rows[from][0];
  if (elapsed <= 0) return null;
  const grown = series.of(rows[at]) - series.of(rows[from]);
  return grown < 0 ? null : grown / elapsed;
}
const sum = (...wanted) => (row) => wanted.reduce((total, name) => total + value(row, name), 0);
const series = (label, color, name, of) => ({ label, color, name, of: of ?? sum(name) });

// Panels. Each has `draw`, which brings it up to date and keeps what is focused.

const panels = [];
function panel(title, note, kind, ...inner) {
  const noted = el("p", { class: "quiet" }, note);
  const card = el("section", { class: `card ${kind}`, "aria-label": title },
    el("div", { class: "head" }, el("h2", {}, title), noted), ...inner);
  $("main").append(card);
  return { card, noted };
}

/** Rates over time with a table of them: where the pointer is, else now. stacked: on each other. */
function chart(title, note, list, { show = rate, total = count, stacked = false, more = null, empty = "" }) {
  const plot = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title}, over time: the table below has the numbers` });
  const cells = list.map((one) => ({ now: el("td", { class: "n" }), total: el("td", { class: "n" }),
    extra: more ? more.cells.map((_, j) => el("td", { class: j ? "n" : "n optional" })) : [] }));
  const at = el("th", { class: "n", scope: "col" }, "now");
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "what")), at,
    ...(more ? more.heads.map((head, j) => el("th", { class: j ? "n" : "n optional", scope: "col" }, head)) : []), el("th", { class: "n", scope: "col" }, "since start"))),
  el("tbody", {}, ...list.map((one, i) => el("tr", {}, el("td", {}, el("span", { class: "swatch", style: { background: `var(--${one.color})`,
    opacity: one.pale ?? 1 } }), one.label), cells[i].now, ...cells[i].extra, cells[i].total))));
  const silentOnes = el("p", { class: "quiet" });
  panel(title, note, "half", plot, table, silentOnes);
  let drawn = null, data = [[]], rates = [], hover = null;

  function numbers() {
    const last = data[0].length - 1, index = hover ?? last;
    at.textContent = hover === null ? "now" : new Date(1000 * data[0][index]).toLocaleTimeString("en-GB");
    list.forEach((one, i) => {
      const found = rates[i]?.[index];
      cells[i].now.textContent = found === null || found === undefined ? "–" : show(found);
      cells[i].total.textContent = total(one.of(latest()));
      if (one.name) { cells[i].total.dataset.metric = one.name; cells[i].total.dataset.value = one.of(latest()); }
      more?.cells.forEach((cell, j) => { cells[i].extra[j].textContent = cell(one, rates[i] ?? []); });
    });
    const never = list.length > 5 ? list.filter((one) => !one.of(latest())) : [];
    list.forEach((one, i) => { cells[i].now.parentNode.hidden = never.includes(one); });
    silentOnes.textContent = never.length && never.length < list.length ? `Not once: ${never.map((one) => one.label).join("; ")}` : "";
  }
  function make() {
    drawn?.destroy();
    const grid = { stroke: css("line"), width: 1 }, axis = { stroke: css("quiet"), grid, ticks: grid, font: "11px system-ui" };
    drawn = new uPlot({
      width: plot.clientWidth, height: plot.clientHeight, legend: { show: false }, scales: { y: { range: (_, __, max) => [0, max > 0 ? 1.08 * max : 1] } },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      axes: [{ ...axis, space: 70, size: 28, values: (_, ticks) => ticks.map((tick) => new Date(1000 * tick).toLocaleTimeString("en-GB")) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => trimmed(show(tick).replace("/s", ""))) }],
      series: [{}, ...list.map((one) => ({ stroke: css(one.color), width: stacked ? 0 : 2, alpha: one.pale ?? 1, points: { show: false },
        fill: stacked ? css(one.color) : undefined }))],
      bands: stacked ? list.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
      hooks: { setCursor: [(u) => { hover = u.cursor.left >= 0 && u.cursor.idx !== null ? u.cursor.idx : null; numbers(); }] },
    }, data, plot);
  }
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") { hover = null; drawn?.setCursor({ left: -10, top: -10 }); }
    if (!step || !drawn) return;
    event.preventDefault();
    const index = Math.min(Math.max((hover ?? data[0].length) + step, 0), data[0].length - 1);
    drawn.setCursor({ left: drawn.valToPos(data[0][index], "x"), top: 10 });
  });
  plot.addEventListener("blur", () => drawn?.setCursor({ left: -10, top: -10 }));
  new ResizeObserver(() => { if (drawn) drawn.setSize({ width: plot.clientWidth, height: plot.clientHeight }); }).observe(plot);

  panels.push({
    recolor() { if (drawn) make(); },
    draw() {
      const last = rows.length - 1, first = before(last, span), step = Math.max(1, Math.floor((last - first) / 400));
      const shown = [];
      for (let i = last; i >= first; i -= step) shown.push(i);
      shown.reverse();
      rates = list.map((one) => shown.map((i) => growth(i, one)));
      const lines = stacked ? rates.reduce((sums, line) => [...sums, line.map((of, i) => (of === null ? null : of + (sums.at(-1)?.[i] ?? 0)))], []) : rates;
      data = [shown.map((i) => rows[i][0]), ...lines];
      const silent = empty && list.every((one) => !one.of(latest()));
      if (silent) { drawn?.destroy(); drawn = null; plot.replaceChildren(el("p", { class: "quiet empty" }, empty)); }
      else if (!drawn) { plot.replaceChildren(); make(); }
      else drawn.setData(data);
      numbers();
    },
  });
}

function tiles(list) {
  const cells = list.map(([label]) => [el("dt", {}, label), el("dd", {})]);
  $("main").append(el("dl", { class: "tiles" }, ...cells.map((pair) => el("div", {}, ...pair))));
  panels.push({ draw() {
    list.forEach(([, tell], i) => {
      const [text, unit] = tell();
      cells[i][1].replaceChildren(el("span", { class: "whole" }, text), unit ? el("small", {}, ` ${unit}`) : "");
    });
  } });
}

// The node

const TIERS = ["device", "host", "storage", "direct"];
const FOUND = ["on the device", "on the host", "in storage", "at a peer"];
const WHY = { never_stored: "never stored", evicted: "evicted", damaged: "damaged in storage", late: "storage too late", not_worth_it: "computing was faster",
  failed: "the transfer failed", in_flight: "another request computes it", last_token: "the last token, for its logits", not_asked: "asked without cache" };
const looked = (result) => `tierkv_lookup_tokens_total{result="${result}"}`;
const missed = (reason) => `tierkv_missed_tokens_total{reason="${reason}"}`;
const moved = (leg) => `tierkv_transfer_bytes_total{direction="${leg}"}`;
const evicted = (tier) => all("tierkv_evictions_total{").filter((name) => name.includes(`tier="${tier}"`));

function nodePage() {
  const hits = TIERS.map((tier) => looked(`hit_${tier}`)), asked = [...hits, looked("miss")];
  const minute = (...list) => (rows.length ? growth(rows.length - 1, { of: sum(...list) }, 60) ?? 0 : 0);
  tiles([
    ["Found in cache", () => { const total = minute(...asked); return total ? [percent(minute(...hits) / total), "last minute"] : ["–", "no requests"]; }],
    ["Prompt tokens", () => [rate(growth(rows.length - 1, { of: sum(...asked) }) ?? 0)]],
    ["Computed tokens", () => [rate(growth(rows.length - 1, { of: sum("tierkv_computed_tokens_total") }) ?? 0)]],
    ["Requests", () => [count(now('tierkv_inflight_requests{state="running"}')), `run, ${count(now('tierkv_inflight_requests{state="waiting"}'))} wait`]],
    ["First token", () => { const took = [...requests.values()].map((one) => one.at.computed - one.at.began).filter((s) => s >= 0).sort((a, b) => a - b);
      return took.length ? [duration(took[took.length >> 1]), `median of ${took.length}`] : ["–"]; }],
    ["Loop late by", () => [state ? duration(state.worst_lag_s) : "–", "at worst"]],
  ]);
  occupancy();
  health();
  chart("Where prompt tokens were found", "tokens a second", [
    ...TIERS.map((tier, i) => series(FOUND[i], tier, looked(`hit_${tier}`))), series("nowhere: computed", "miss", looked("miss"))],
  { stacked: true, empty: "No request has come yet. Prompts show here as they are admitted." });
  chart("Why tokens were not found", "tokens a second", all("tierkv_missed_tokens_total{").map((name, i) => {
    const reason = name.split('"')[1];
    return series(WHY[reason] ?? reason, `why${i}`, name);
  }), { stacked: true, empty: "Nothing was missed yet." });
  const legs = [["host → device", "host", "h2d"], ["device → host", "device", "d2h"], ["storage → host", "storage", "storage_read"], ["host → storage", "direct", "storage_write"]];
  chart("Transfers", "bytes a second that arrived", legs.map(([label, color, leg]) => ({ ...series(label, color, moved(leg)), leg })), {
    show: speed, total: bytes, empty: "Nothing was moved between tiers yet.",
    more: { heads: ["fastest shown"], cells: [(_, line) => speed(Math.max(0, ...line.filter((of) => of !== null)))] },
  });
  chart("Evictions", "blocks a second", [
    series("from the device", "device", null, (row) => sum(...evicted("device"))(row)), series("from the host", "host", null, (row) => sum(...evicted("host"))(row)),
    series("gone from both", "bad", "tierkv_forgotten_blocks_total"), series("not copied down: no room", "warn", "tierkv_skipped_offloads_total")],
  { empty: "Nothing was evicted: all that was cached since the start is still here." });
  timeline();
  icicle();
}

function occupancy() {
  const bars = ["device", "host"].map((tier) => {
    const used = el("div", { class: "used", style: { background: `var(--${tier})`, width: "0" } }), bar = el("div", { class: "bar", role: "meter",
      "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `${tier} tier` }, used), words = el("p", { class: "quiet" });
    return { tier, used, bar, words, row: el("div", { class: "tier" }, el("span", {}, tier[0].toUpperCase() + tier.slice(1)), bar, words) };
  });
  const stored = el("p", { class: "quiet" });
  const sessions = el("p", { class: "quiet" });
  const { noted } = panel("Occupancy", "", "half", ...bars.map((one) => one.row), el("div", { class: "tier" }, el("span", {}, "Storage"), stored),
    el("div", { class: "tier" }, el("span", {}, "Sessions"), sessions));
  panels.push({ draw() {
    bars.forEach(({ tier, used, bar, words }) => {
      const taken = now(`tierkv_blocks{state="used",tier="${tier}"}`), free = now(`tierkv_blocks{state="free",tier="${tier}"}`), capacity = taken + free;
      const share = capacity ? taken / capacity : 0;
      used.style.setProperty("width", `${100 * share}%`);
      bar.setAttribute("aria-valuenow", Math.round(100 * share));
      words.textContent = `${percent(share)} · ${count(taken)} of ${plural(capacity, "block")} · ${binary(now(`tierkv_tier_used_bytes{tier="${tier}"}`))} of ` +
        `${binary(now(`tierkv_tier_capacity_bytes{tier="${tier}"}`))}`;
      for (const [kind, of] of [["used", taken], ["free", free]]) words.dataset[kind] = of;
    });
    noted.textContent = state ? `${plural(state.block_tokens, "token")}, ${binary(state.block_bytes)} a block` : "";
    const turns = now('tierkv_session_turns_total{outcome="kept"}') + now('tierkv_session_turns_total{outcome="not_kept"}'), hints = ["followed", "ignored"].map((outcome) => now(`tierkv_kv_hints_total{outcome="${outcome}"}`));
    sessions.textContent = [turns ? `${count(now("tierkv_sessions"))} kept, ${plural(turns, "turn")} since the start` : "none so far", hints[0] + hints[1] ? `hints: ${count(hints[0])} followed, ${count(hints[1])} ignored` : ""].filter(Boolean).join(" · ");
    stored.textContent = state && !state.stores.length ? "none: what leaves the host is gone" : `${bytes(now(moved("storage_write")))} written, ${bytes(now(moved("storage_read")))} read since the start`;
  } });
}

function health() {
  const list = el("ul", { class: "health" });
  panel("Health", "", "half", list);
  let shown = "";
  panels.push({ draw() {
    if (!state) return;
    const lines = state.health.map(([part, status, words]) => [part, status, part === "device" && status === "ok" ? `works: ${words}` : words]);
    for (const store of state.stores) {
      const line = lines.find(([part]) => part === (store.tenant ? `storage of ${store.tenant}` : "storage"));
      const facts = [];
      if (store.write_refusal) facts.push(`refuses writes: ${store.write_refusal}`);
      else if (line && line[1] === "ok") facts.push("accepts writes");
      if (store.degraded_s) facts.push(`circuit was open for ${duration(store.degraded_s)} in all`);
      if (store.retries) facts.push(`${plural(store.retries, "read")} tried again`);
      if (store.refused) facts.push(`${plural(store.refused, "operation")} refused`);
      if (store.dropped_writes) facts.push(`${plural(store.dropped_writes, "write")} dropped`);
      if (store.waiting_write_bytes) facts.push(`${bytes(store.waiting_write_bytes)} wait to be written`);
      if (line && line[1] === "ok") line[2] = `answers at ${line[2]}`;
      if (line && facts.length) line[2] += `; ${facts.join(", ")}`;
    }
    const damaged = now("tierkv_integrity_failures_total"), failed = all("tierkv_storage_errors_total{").reduce((total, name) => total + now(name), 0);
    lines.push(["blocks", damaged ? "degraded" : "ok", damaged ? `${plural(damaged, "stored block")} came back damaged and were computed instead` : "every stored block that was read was what had been written"]);
    if (failed) lines.push(["errors", "degraded", `${plural(failed, "block")} not read or not written by the store since the start`]);
    if (JSON.stringify(lines) === shown) return;
    shown = JSON.stringify(lines);
    list.replaceChildren(...lines.map(([part, status, words]) => el("li", { "data-is": status }, el("b", {}, part), " ", el("span", { class: "words" }, status === "ok" ? words : `${status}: ${words}`))));
  } });
}

const PHASES = [["ticket", "ticket", "wait for the ticket"], ["match", "matched", "match: what is where, storage asked"], ["fetch", "fetched", "fetch from storage"], ["queue", "admitted", "wait for room"],
  ["compute", "computed", "compute to the first token"], ["generate", "ended", "generate"]];

/** Each phase ends with its moment and begins with the one before it; the first whose moment has not come goes on, if it is one of those that all have. */
function phasesOf(one) {
  const { at } = one, phases = [];
  let start = at.began;
  for (const [kind, to, words] of PHASES) {
    if (at[to] === undefined && ["ticket", "match", "fetch"].includes(kind)) continue;
    const stop = Math.max(at[to] ?? at.ended ?? latest()[0], start);
    phases.push({ kind, words, start, stop, isOpen: at[to] === undefined && at.ended === undefined });
    if (at[to] === undefined) break;
    start = stop;
  }
  return phases;
}

function timeline() {
  const list = el("div", {}), key = el("p", { class: "key" }, ...[["why6", "match"], ["storage", "fetch"], ["miss", "wait for ticket or room"], ["device", "compute"], ["host", "load"]].map(([color, word]) =>
    el("span", {}, el("span", { class: "swatch", style: { background: `var(--${color})` } }), word)), el("span", {}, "pale: after the first token"));
  const heads = el("div", { class: "request heads", "aria-hidden": "true" }, el("span", {}, "request"), el("span", { class: "what" }, "what it waited for"), el("span", {}, "found"), el("span", { class: "n" }, "first token"));
  const { noted } = panel("Recent requests", "", "", key, heads, list);
  const kept = new Map();
  let open = null;

  function make(one) {
    const parts = { id: el("span", { class: "id" }), track: el("span", { class: "track" }), found: el("span", { class: "found" }), took: el("span", { class: "n" }) };
    const button = el("button", { type: "button", class: "request", "aria-expanded": "false", onclick: () => toggle(one.n) }, parts.id, parts.track, parts.found, parts.took);
    return { ...parts, button, detail: null, box: el("div", {}, button) };
  }
  function toggle(number) {
    const was = open;
    open = open === number ? null : number;
    for (const each of [was, open]) if (each !== null && kept.has(each)) fill(each);
  }
  async function fill(number) {
    const row = kept.get(number), one = requests.get(number);
    row.button.setAttribute("aria-expanded", String(open === number));
    row.detail?.remove();
    row.detail = null;
    if (open !== number) return;
    const explained = el("div", { role: "status" }, el("h3", {}, "What of its prompt is cached now"), el("p", {}, "asking …"));
    row.detail = el("div", { class: "detail" }, moments(one), story(one), explained);
    row.box.append(row.detail);
    const words = await explain(number);
    explained.replaceChildren(explained.firstChild, ...words.map((line) => el("p", {}, line)));
  }
  function moments(one) {
    const lines = phasesOf(one).map((phase) => `${duration(phase.stop - phase.start)} ${phase.words}${phase.isOpen ? " (so far)" : ""}`);
    if (one.at.loaded && one.at.admitted) lines.push(`${duration(one.at.loaded - one.at.admitted)} load to the device, beside computing`);
    return el("div", {}, el("h3", {}, `Began ${new Date(1000 * one.at.began).toLocaleTimeString("en-GB")}`), ...lines.map((line) => el("p", {}, line)));
  }
  function story(one) {
    const lines = one.found.map((tokens, i) => (tokens ? `${plural(tokens, "token")} ${FOUND[i]}` : "")).filter(Boolean);
    const left = one.tokens - one.found.reduce((a, b) => a + b, 0);
    if (one.at.admitted && left) lines.push(`${plural(left, "token")} computed: ${WHY[one.missed] ?? one.missed}${one.since ? ` (${one.since.tier}, ${duration(one.since.s)} before${one.since.detail ? `: ${one.since.detail}` : ""})` : ""}`);
    if (one.new) lines.push(`${plural(one.new, "token")} after the prompt`);
    if (one.session) lines.push(`Turn of session ${one.session}`);
    if (one.problem) lines.push(`Came to nothing: ${one.problem}`);
    return el("div", {}, el("h3", {}, `Prompt of ${plural(one.tokens, "token")}`), ...lines.map((line) => el("p", {}, line)));
  }

  panels.push({ draw() {
    const shown = [...requests.values()].sort((a, b) => b.n - a.n);
    const pinned = shown.slice(0, SHOWN);
    if (open !== null && requests.has(open) && !pinned.some((one) => one.n === open)) pinned.push(requests.get(open));
    noted.textContent = pinned.length ? `the newest first; the widest bar is ${duration(Math.max(...pinned.map(longest)))}` : "";
    if (!pinned.length) { list.replaceChildren(el("p", { class: "quiet" }, "No request of yours has come yet. Each shows here with what it waited for.")); kept.clear(); }
    heads.hidden = key.hidden = !pinned.length;
    if (!pinned.length) return;
    const widest = Math.max(...pinned.map(longest), 1e-6);
    for (const number of kept.keys()) if (!pinned.some((one) => one.n === number)) kept.delete(number);
    if (open !== null && !kept.has(open) && !requests.has(open)) open = null;
    for (const one of pinned) {
      if (!kept.has(one.n)) kept.set(one.n, make(one));
      const row = kept.get(one.n), stamp = `${JSON.stringify(one)}${widest}${one.at.ended ? "" : latest()[0]}`;
      if (row.stamp === stamp) continue;
      row.stamp = stamp;
      row.id.textContent = one.id;
      row.id.title = one.id;
      const bar = (kind, start, stop) => el("i", { class: `p-${kind}`, style: { left: `${100 * (start - one.at.began) / widest}%`, width: `${100 * (stop - start) / widest}%` } });
      row.track.replaceChildren(...phasesOf(one).map((phase) => bar(one.problem ? "bad" : phase.kind, phase.start, phase.stop)),
        ...(one.at.loaded && one.found[1] + one.found[2] + one.found[3] ? [bar("load", one.at.admitted, one.at.loaded)] : []));
      row.found.replaceChildren(...one.found.map((tokens, i) => el("span", { style: { background: `var(--${TIERS[i]})`, width: `${100 * tokens / one.tokens}%` } })));
      row.found.title = `${percent(one.found.reduce((a, b) => a + b, 0) / one.tokens)} of ${plural(one.tokens, "token")} found`;
      row.took.textContent = one.problem ? "refused" : duration((one.at.computed ?? one.at.ended ?? latest()[0]) - one.at.began);
      row.button.setAttribute("aria-label", `Request ${one.id}: ${row.took.textContent} to the first token, ${row.found.title}. Explain`);
    }
    const boxes = pinned.map((one) => kept.get(one.n).box);
    for (const child of [...list.children]) if (!boxes.includes(child)) child.remove();
    boxes.forEach((box, i) => { if (list.children[i] !== box) keepFocus(() => list.insertBefore(box, list.children[i] ?? null)); });
  } });
}
const longest = (one) => (one.at.ended ?? latest()[0]) - one.at.began;
function keepFocus(change) {
  const focused = document.activeElement;
  change();
  if (focused && focused !== document.activeElement && document.contains(focused)) focused.focus({ preventScroll: true });
}

async function explain(number) {
  try {
    const answer = await ask(`live/requests/${number}/explain`), body = await answer.json();
    if (!answer.ok) return [body.detail ?? body.title];
    const lines = body.runs.map((run) => `blocks ${run.start} to ${run.stop - 1}: ${run.where === "loading" ? "on the way to the device" : `${run.where === "storage" ? "in" : "on the"} ${run.where}`}`);
    if (body.partial_tokens) lines.push(`the first ${plural(body.partial_tokens, "token")} of one more block`);
    if (body.first_miss === null) return [...lines, "Nothing is missing."];
    const when = body.ago_s === null ? "" : ` ${duration(body.ago_s)} ago`;
    return [...lines, `Block ${body.first_miss} is missing: ${body.reason}${body.tier ? ` (${body.tier})` : ""}${when}${body.detail ? `. ${body.detail}` : ""}`];
  } catch (error) {
    return [`It could not be asked: ${error.message}`];
  }
}

function icicle() {
  const area = el("div", { class: "icicle", role: "group", "aria-label": "Prefixes; arrow keys go from one to the next" }), told = el("p", { class: "quiet", role: "status" });
  const key = el("p", { class: "key" }, ...["device", "host"].map((tier) => el("span", {}, el("span", { class: "swatch", style: { background: `var(--${tier})` } }), tier === "host" ? "on the host only" : "on the device")));
  const { noted } = panel("Largest prefixes", "", "", key, area, told);
  let shown = null, chosen = 0;

  function choose(at, focus) {
    const buttons = [...area.querySelectorAll("button")];
    if (!buttons.length) return;
    chosen = Math.min(Math.max(at, 0), buttons.length - 1);
    buttons.forEach((button, i) => { button.tabIndex = i === chosen ? 0 : -1; button.setAttribute("aria-pressed", String(i === chosen)); });
    if (focus) buttons[chosen].focus({ preventScroll: true });
    const run = shown.runs[chosen], size = state?.block_bytes ?? 0, tokens = state?.block_tokens ?? 0;
    told.textContent = `Blocks ${run.start} to ${run.start + run.blocks - 1} (${plural(run.blocks * tokens, "token")}): ${run.device} on the device, ${run.host} on the host only, ${run.stored} stored` +
      ` · used ${plural(run.hits, "time")}${run.held ? " · in use" : ""} · with all that goes on from it ${plural(run.total, "block")}, ${binary(run.total * size)}${run.space ? ` · space ${run.space}` : ""}`;
  }
  area.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) { event.preventDefault(); choose(chosen + step, true); }
  });
  panels.push({ draw() {
    if (!prefixes || prefixes === shown) return;
    const focused = area.contains(document.activeElement);
    shown = prefixes;
    const tops = shown.runs.filter((run) => run.parent < 0), whole = tops.reduce((total, run) => total + run.total, 0);
    noted.textContent = whole ? `width is blocks: ${count(whole)} in all, of ${plural(shown.looked_at, "run")}` : "";
    if (!whole) { area.replaceChildren(el("p", { class: "quiet" }, "Nothing is cached yet.")); area.style.setProperty("height", "auto"); told.textContent = ""; return; }
    const starts = new Map([[-1, 0]]), depth = Math.max(...shown.runs.map((run) => run.depth));
    area.style.setProperty("height", `${27 * (depth + 1)}px`);
    area.replaceChildren(...shown.runs.map((run, i) => {
      const left = starts.get(run.parent), device = 100 * run.device / run.blocks;
      starts.set(run.parent, left + run.total);
      starts.set(i, left);
      return el("button", { type: "button", onclick: () => choose(i, true), "aria-label": `blocks ${run.start} to ${run.start + run.blocks - 1}, ${plural(run.total, "block")} with what goes on from it`,
        style: { left: `${100 * left / whole}%`, width: `${100 * run.total / whole}%`, top: `${27 * run.depth}px`, background: `linear-gradient(to right, var(--device) ${device}%, var(--host) ${device}%)` } },
      run.total / whole > 0.07 ? plural(run.blocks * (state?.block_tokens ?? 0), "token") : "");
    }));
    choose(chosen, focused);
  } });
}

// The gateway

function gatewayPage() {
  const outcome = (word) => `tierkv_gateway_requests_total{outcome="${word}"}`, routed = (how) => `tierkv_gateway_routed_total{how="${how}"}`;
  const last = (list) => growth(rows.length - 1, { of: sum(...list) }) ?? 0;
  tiles([
    ["Completions", () => [rate(last(all("tierkv_gateway_requests_total{")))]],
    ["Tokens generated", () => [rate(last(["tierkv_gateway_tokens_total"]))]],
    ["Prompts", () => [count(now('tierkv_gateway_prompts{state="running"}')), `run, ${count(now('tierkv_gateway_prompts{state="waiting"}'))} wait`]],
    ["Hand-offs", () => [count(now(routed("handoff"))), "since start"]],
    ["Failovers", () => [count(now(routed("resumed"))), "since start"]],
    ["Nodes ready", () => [state ? `${state.nodes.filter((node) => node.state === "ready").length} of ${state.nodes.length}` : "–"]],
  ]);
  nodes();
  chart("Completions", "a second, by how they ended", [series("answered", "host", outcome("ok")), series("the caller went", "miss", outcome("client_gone")),
    series("refused: the caller's error", "storage", outcome("client_error")), series("failed", "bad", outcome("server_error"))], { stacked: true, empty: "No completion was asked for yet." });
  chart("How prompts went", "attempts a second", [series("handed over: prefill, then decode", "device", routed("handoff")), series("at one node alone", "host", routed("one_node")),
    series("failover: went on at another node", "storage", routed("resumed"))], { empty: "No prompt was given to a node yet." });
  const why = [["node_failed", "the node failed", "bad"], ["node_busy", "the node was busy", "storage"], ["handoff_refused", "the hand-off was refused", "direct"], ["without_ticket", "the ticket was of no use", "host"]];
  chart("Attempts that came to nothing", "a second; another node is tried then", why.map(([word, label, color]) => series(label, color, null, (row) =>
    sum(...all("tierkv_gateway_failed_attempts_total{").filter((name) => name.includes(`why="${word}"`)))(row))), { empty: "Every attempt at a node has come to an answer." });
  chart("Tokens", "generated a second", [series("for callers", "device", "tierkv_gateway_tokens_total")], { empty: "No token was generated yet." });
}

function nodes() {
  const heads = ["Node", "Role", "State", "Requests", "Tokens outstanding", "Failures in a row", "Came back", "Failed attempts"];
  const body = el("tbody");
  panel("Nodes", "", "", el("div", {}, el("table", { class: "nodes" }, el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { scope: "col", class: i > 2 ? "n" : "" }, head)))), body)));
  let shown = "";
  panels.push({ draw() {
    if (!state) return;
    const words = { ready: "ok", unready: "waiting", ejected: "down", other_model: "down" };
    const lines = state.nodes.map((node) => [node, all("tierkv_gateway_failed_attempts_total{").filter((name) => name.includes(`node="${node.url}"`)).reduce((total, name) => total + now(name), 0)]);
    if (JSON.stringify(lines) === shown) return;
    shown = JSON.stringify(lines);
    const at = [...body.querySelectorAll("a")].indexOf(document.activeElement);
    body.replaceChildren(...lines.map(([node, failed]) => {
      const link = /^https?:/.test(node.url) ? el("a", { href: node.url, rel: "noreferrer" }, node.url) : node.url;
      const told = [link, node.role, el("span", {}, el("span", { "data-is": node.reason && node.state === "ready" ? "degraded" : words[node.state] }, node.state.replace("_", " ")), node.reason ? el("span", { class: "reason" }, ` ${node.reason}`) : ""),
        count(node.running), count(node.outstanding_tokens), count(node.failures), plural(node.recoveries, "time"), count(failed)];
      return el("tr", {}, ...told.map((cell, i) => el("td", { class: i > 2 ? "n" : "", "data-head": heads[i] }, cell)));
    }));
    if (at >= 0) body.querySelectorAll("a")[at]?.focus({ preventScroll: true });
  } });
}

// What is told: a stream of events over fetch, since EventSource cannot say who asks

let token = sessionStorage.getItem("tierkv-token") ?? "", isDue = false, heardAt = 0, page = null, stop = null;
const ask = (path, more = {}) => fetch(path, { ...more, cache: "no-store", credentials: "same-origin", headers: { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...more.headers } });

function link(is, words) {
  $("link").dataset.is = is;
  if ($("link").textContent !== words) $("link").textContent = words;
  $("main").classList.toggle("stale", is === "down");
}

const heard = {
  names(told) { names = new Map(told.map((name, i) => [name, i + 1])); rows = []; requests.clear(); prefixes = null; },
  samples(told) { received += told.length; rows.push(...told); if (rows.length > MOST) rows = rows.slice(-MOST); },
  state(told) { state = told; },
  prefixes(told) {
    prefixes = { looked_at: told.looked_at, runs: told.runs.map(([parent, space, depth, start, blocks, device, host, stored, hits, held, total]) =>
      ({ parent, space, depth, start, blocks, device, host, stored, hits, held, total })) };
  },
  requests(told) {
    for (const one of told) requests.set(one.n, one);
    for (const number of [...requests.keys()].sort((a, b) => a - b).slice(0, -3 * SHOWN)) requests.delete(number);
  },
};

function take(block) {
  let kind = "message", data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data = line.slice(6);
  }
  heard[kind]?.(JSON.parse(data));
  return kind;
}

function draw() {
  isDue = false;
  if (!state || !rows.length) return;
  if (page !== state.kind) {
    page = state.kind;
    panels.length = 0;
    $("main").replaceChildren();
    (page === "gateway" ? gatewayPage : nodePage)();
  }
  $("main").hidden = false;
  document.body.dataset.samples = received;
  document.title = `${state.name} · tierkv`;
  $("name").textContent = page === "gateway" ? `Gateway of ${state.name}` : state.name;
  $("facts").textContent = [page === "gateway" ? "" : `${state.role} · ${state.model} on ${state.device}`, `tierkv ${state.version}`, `up ${duration(latest()[0] - state.started_at)}`].filter(Boolean).join(" · ");
  const wrong = (state.health ?? []).map((part) => part[1]), isBad = wrong.includes("degraded");
  if (state.is_draining) link("degraded", "draining: takes no new work");
  else if (state.is_asleep) link("degraded", "asleep: requests wait");
  else if (state.is_paused) link("degraded", "paused: requests wait");
  else if (page === "gateway" && !state.nodes.some((node) => node.state === "ready")) link("degraded", "no node is ready");
  else if (wrong.includes("down")) link("degraded", "takes no requests");
  else link(isBad ? "degraded" : "ok", isBad ? "live, degraded" : "live");
  for (const one of panels) one.draw();
}
function due() { if (!isDue) { isDue = true; requestAnimationFrame(draw); } }

async function listen() {
  stop = new AbortController();
  const answer = await ask("live/stream", { signal: stop.signal, headers: { Accept: "text/event-stream" } });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    if (answer.status === 401 || answer.status === 403) return login(problem.detail ?? problem.title ?? "This token may not look.");
    throw new Error(problem.detail ?? `it answered ${answer.status}`);
  }
  $("login").hidden = true;
  $("forget").hidden = !token;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", kind = ""; ;) {
    const { value: text, done } = await reader.read();
    if (done) throw new Error(kind === "end" ? "it was shut down" : "the connection broke off");
    heardAt = Date.now();
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) kind = take(block);
    due();
  }
}

function login(words) {
  $("main").hidden = true;
  $("forget").hidden = true;
  $("login").hidden = false;
  $("why").textContent = token ? `That did not do: ${words}.` : `This ${page ?? "address"} asks who looks: ${words}.`;
  link("waiting", "waiting for a token");
  $("token").focus();
  return new Promise((resolve) => { $("login").onsubmit = (event) => {
    event.preventDefault();
    token = $("token").value.trim();
    sessionStorage.setItem("tierkv-token", token);
    $("token").value = "";
    resolve("again");
  }; });
}

async function run() {
  for (let pause = 250; ;) {
    try {
      if (await listen() === "again") continue;
    } catch (error) {
      if (heardAt) { pause = 250; heardAt = 0; }
      link("down", `no connection: ${error.name === "AbortError" ? "nothing was heard" : error instanceof TypeError ? "nobody answers" : error.message}; trying again`);
    }
    await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
    pause = Math.min(2 * pause, 4000);
  }
}

addEventListener("DOMContentLoaded", () => {
  for (const input of document.querySelectorAll("#span input")) input.addEventListener("change", () => { span = Number(input.value); due(); });
  $("forget").addEventListener("click", () => { sessionStorage.removeItem("tierkv-token"); location.reload(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const one of panels) one.recolor?.(); });
  setInterval(() => { if (heardAt && Date.now() - heardAt > SILENT_MS) stop.abort(); }, 1000);
  run();
});
