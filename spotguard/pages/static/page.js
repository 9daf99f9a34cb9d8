"use strict";
/* Lays out what spotguard/pages/layout.py describes. All text is set as text, never as markup. */
(() => {
  const root = document.getElementById("page");
  const shown = new Map(); // id of a part -> {json, node, part}
  const charts = new Map(); // id of a chart -> {plot, redraw}

  // ------------------------------------------------------------ elements

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
      else if (name === "class") node.className = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) {
      if (child === undefined || child === null || child === "") continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }

  const pad = (number) => String(number).padStart(2, "0");
  function when(at) {
    const day = new Date(at * 1000);
    const date = `${day.getFullYear()}-${pad(day.getMonth() + 1)}-${pad(day.getDate())}`;
    return `${date} ${pad(day.getHours())}:${pad(day.getMinutes())}:${pad(day.getSeconds())}`;
  }
  function hour(at, step) {
    const [date, time] = when(at).split(" ");
    return step >= 86400 ? date.slice(5) : step < 60 ? time : step >= 21600 ? `${date.slice(5)} ${time.slice(0, 5)}` : time.slice(0, 5);
  }
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const toned = (tone, prefix) => `${prefix}${tone || "default"}`;

  function meter(share, tone, label) {
    const fill = el("i", { class: tone || "green" });
    fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    return el("div", { class: "meter", role: "img", "aria-label": label }, fill);
  }

  function words(cell) {
    if (cell.at !== undefined) return when(cell.at);
    return cell.text || "";
  }

  // ------------------------------------------------------------ theme

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = window.localStorage.getItem("spotguard-theme"); } catch (_) { /* a file may have none */ }
  function applyTheme(theme) {
    document.documentElement.dataset.theme = theme || chosen || (dark.matches ? "dark" : "light");
    for (const { redraw } of charts.values()) redraw();
  }
  function otherTheme() {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { window.localStorage.setItem("spotguard-theme", chosen); } catch (_) { /* then not kept */ }
    applyTheme();
  }
  dark.addEventListener("change", () => applyTheme());
  window.addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    applyTheme("light");
  });
  window.addEventListener("afterprint", () => applyTheme());

  // ------------------------------------------------------------ head, cards

  function head(page) {
    const state = page.state
      ? el("span", { class: `pill ${toned(page.state.tone, "on-")}`, id: "state" }, page.state.text) : null;
    const tools = el("div", { class: "tools" },
      page.kind === "report" ? null : liveness,
      (page.actions || []).map((action) => el("button", {
        type: "button", class: action === "stop" ? "danger" : "strong", id: `ask-${action}`,
        on: { click: () => ask(action, page) },
      }, action === "stop" ? "Stop…" : "Resume…")),
      el("button", { type: "button", on: { click: otherTheme } }, "Light / dark"));
    return el("header", { class: "head" },
      el("div", { class: "names" },
        page.kind === "run" ? el("a", { href: "/", class: "crumb" }, "← all runs") : null,
        el("div", { class: "row" }, el("h1", {}, page.title), state),
        page.subtitle && page.subtitle !== page.title ? el("div", { class: "id" }, page.subtitle) : null,
        page.state && page.state.note ? el("p", { class: "detail" }, page.state.note) : null),
      tools);
  }

  function notices(page) {
    return el("div", { role: "status" },
      page.banner ? el("p", { class: "banner" }, page.banner) : null,
      (page.warnings || []).map((text) => el("p", { class: "warning" }, text)),
      page.error ? el("section", { class: "problem" }, el("h2", {}, "the job's own error"),
        el("pre", { tabindex: "0", role: "region", "aria-label": "traceback" }, page.error)) : null);
  }

  function cards(list) {
    return el("section", { class: "cards", "aria-label": "at a glance" }, list.map((card) => el("div", { class: "card" },
      el("div", { class: "label" }, card.label),
      el("div", { class: `value ${toned(card.share === undefined ? card.tone : "default", "tone-")}` }, card.value),
      card.share === undefined ? null : meter(card.share, card.tone, `${card.label}: ${Math.round(card.share * 100)} %`),
      el("div", { class: "note" }, card.note))));
  }

  // ------------------------------------------------------------ charts

  const compact = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };
  const withUnit = (curve, value) => {
    if (value === null || value === undefined) return "–";
    const unit = curve.unit || "";
    return unit.startsWith("$") ? `$${compact(value)}${unit.slice(1)}` : compact(value);
  };

  function chart(part) {
    const empty = !part.positions || part.positions.length === 0;
    const legend = el("ul", { class: "legend" });
    const place = el("div", { class: "plot", role: "img", "aria-label": part.summary });
    const box = el("section", { class: part.id === "series-loss" ? "sheet wide" : "sheet", id: part.id },
      el("header", {}, el("h2", {}, part.title), el("span", { class: "summary" }, "")),
      empty ? el("p", { class: "empty" }, part.empty || "nothing to draw yet") : [place, legend]);
    if (!empty) whenPlaced(place, () => draw(part, place, legend));
    return box;
  }

  const waiting = [];
  function whenPlaced(place, act) { waiting.push([place, act]); }
  function drawWaiting() { for (const [place, act] of waiting.splice(0)) if (place.isConnected) act(); }

  function draw(part, place, legend) {
    const curves = part.curves;
    const data = [part.positions, ...curves.map((curve) => curve.values)];
    const single = part.positions.length === 1;
    const scales = new Set(curves.map((curve) => curve.scale || "y"));

    const drawMarks = (plot) => {
      const { ctx, bbox } = plot;
      const ratio = window.devicePixelRatio || 1;
      ctx.save();
      ctx.lineWidth = ratio;
      ctx.font = `600 ${11 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
      const places = (part.marks || []).map((mark) => Math.round(plot.valToPos(mark.at, "x", true)));
      for (const [i, mark] of (part.marks || []).entries()) {
        const x = places[i];
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.strokeStyle = ctx.fillStyle = colour(mark.tone === "default" ? "soft" : mark.tone || "soft");
        ctx.setLineDash([4 * ratio, 4 * ratio]);
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
        const room = Math.min(places[i + 1] ?? Infinity, bbox.left + bbox.width) - x - 8 * ratio;
        const text = [mark.text, mark.text.split(" ")[0]].find((words) => ctx.measureText(words).width <= room);
        ctx.textAlign = "left";
        if (text) ctx.fillText(text, x + 5 * ratio, bbox.top + 11 * ratio);
      }
      ctx.restore();
    };

    const tell = (index) => {
      legend.replaceChildren(...curves.map((curve) => {
        const value = index === null || index === undefined ? lastOf(curve.values) : curve.values[index];
        const swatch = el("span", { class: `swatch ${toned(curve.tone, "line-")}` });
        return el("li", {}, swatch, `${curve.name} `, el("b", {}, withUnit(curve, value)));
      }));
      if (index !== null && index !== undefined) {
        const at = part.positions[index];
        legend.append(el("li", {}, part.along === "time" ? when(at) : `step ${at}`));
      }
    };

    const make = () => {
      place.replaceChildren();
      const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: '11px system-ui, "DejaVu Sans", sans-serif' };
      const size = (plot, values) => Math.max(44, 14 + 7 * Math.max(0, ...(values || []).map((v) => v.length)));
      const axes = [{ ...axis, space: 70, ...(part.along === "time" ? { values: (_, ticks, __, ___, step) => ticks.map((at) => hour(at, step)) } : {}) }];
      for (const scale of scales) {
        const first = curves.find((curve) => (curve.scale || "y") === scale);
        axes.push({ ...axis, scale, side: scale === "right" ? 1 : 3, size, values: (_, ticks) => ticks.map((tick) => withUnit(first, tick)), grid: { ...axis.grid, show: scale !== "right" } });
      }
      const options = {
        width: Math.max(220, place.clientWidth), height: part.id === "series-loss" ? 290 : 230,
        legend: { show: false }, cursor: { points: { size: 7 }, drag: { x: true, y: false } },
        scales: { x: { time: part.along === "time", ...(single ? { range: [part.positions[0] - 1, part.positions[0] + 1] } : {}) },
          ...Object.fromEntries([...scales].map((scale) => [scale, part.along === "time" ? { range: (_, low, high) => [0, (high || 1) * 1.12] } : {}])) },
        axes,
        series: [{}, ...curves.map((curve) => {
          const line = colour(`${curve.tone}-line`);
          return {
            label: "", scale: curve.scale || "y", stroke: line, width: curve.dots ? 0 : 2, spanGaps: true,
            paths: curve.dots ? () => null : curve.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
            points: { show: curve.dots || single || (!curve.stepped && data[0].length < 40), size: curve.dots ? 5 : 4, stroke: line, fill: line },
          };
        })],
        hooks: { draw: [drawMarks], setCursor: [(plot) => tell(plot.cursor.idx)] },
      };
      const plot = new uPlot(options, data, place);
      plot.root.setAttribute("aria-hidden", "true");
      tell(null);
      return plot;
    };
    const known = { plot: make(), redraw: () => { known.plot.destroy(); known.plot = make(); } };
    charts.set(part.id, known);
    new ResizeObserver(() => {
      const width = Math.max(220, place.clientWidth);
      if (place.isConnected && known.plot.width !== width) known.plot.setSize({ width, height: known.plot.height });
    }).observe(place);
  }

  const lastOf = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };

  // ------------------------------------------------------------ breakdowns, tables

  function breakdown(part) {
    const slices = part.slices || [];
    const bar = el("div", { class: "stack", role: "img", "aria-label": `${part.title}: ${part.summary}` }, slices.filter((slice) => slice.amount > 0).map((slice) => {
      const piece = el("i", { class: `use-${slice.tone}`, title: `${slice.label}: ${slice.cells.join(", ")}` });
      piece.style.flexGrow = String(slice.amount);
      return piece;
    }));
    const rows = slices.map((slice) => el("tr", {},
      el("td", { class: "text" }, el("span", { class: `swatch use-${slice.tone}` }), slice.label, el("span", { class: "note" }, slice.hint)),
      slice.cells.map((text) => el("td", { class: "number" }, text))));
    return el("section", { class: "sheet", id: part.id },
      el("header", {}, el("h2", {}, part.title), el("span", { class: "summary" }, part.summary)),
      slices.length ? [bar, scroll(part, el("table", { class: "breakdown" }, headings(part.columns, part.columns.map((_, i) => i).slice(1)), el("tbody", {}, rows)))]
        : el("p", { class: "empty" }, part.empty || "nothing yet"));
  }

  function headings(columns, numbers) {
    return el("thead", {}, el("tr", {}, columns.map((name, i) => {
      const attributes = { scope: "col", class: numbers.includes(i) ? "number" : null };
      return name ? el("th", attributes, name) : el("td", { class: attributes.class });
    })));
  }

  const scroll = (part, inner, tall) => el("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": part.title }, inner);

  function tableCell(cell, isNumber) {
    const text = words(cell);
    const inner = cell.href ? el("a", { href: cell.href }, text)
      : cell.tone && cell.tone !== "default" && cell.pill ? el("span", { class: `pill ${toned(cell.tone, "on-")}` }, text)
      : el("span", { class: toned(cell.tone, "tone-") }, text);
    return el("td", { class: isNumber ? "number" : cell.at === undefined ? "text" : "time" },
      inner, cell.share === undefined ? null : meter(cell.share, cell.tone, `${Math.round(cell.share * 100)} %`),
      cell.note ? el("span", { class: "note" }, cell.note) : null);
  }

  const wanted = new Map(); // what was typed into a table's field
  function table(part) {
    const numbers = part.numbers || [];
    const rows = (part.rows || []).map((row) => el("tr", {}, row.map((cell, i) => tableCell(cell, numbers.includes(i)))));
    const body = el("tbody", {}, rows);
    const hide = () => {
      const typed = (wanted.get(part.id) || "").toLowerCase();
      for (const row of rows) row.hidden = typed !== "" && !row.textContent.toLowerCase().includes(typed);
    };
    const field = part.find && rows.length ? el("input", {
      type: "search", placeholder: "filter", "aria-label": `filter ${part.title}`, value: wanted.get(part.id) || "",
      on: { input: (event) => { wanted.set(part.id, event.target.value); hide(); } },
    }) : null;
    hide();
    const content = [
      rows.length ? scroll(part, el("table", { class: part.id }, headings(part.columns, numbers), body), rows.length > 14 && part.id !== "runs")
        : el("p", { class: "empty" }, part.empty || "nothing yet"),
      part.note ? el("p", { class: "note" }, part.note) : null];
    const title = el("h2", {}, part.title);
    if (part.folded) return el("details", { class: "sheet", id: part.id }, el("summary", {}, title), content);
    return el("section", { class: "sheet", id: part.id }, el("header", {}, title, field), content);
  }

  // ------------------------------------------------------------ the page, and what changes of it

  const liveness = el("span", { class: "live", role: "status" }, "connecting");

  function place(id, part, make, parent, before) {
    const json = JSON.stringify(part);
    const known = shown.get(id);
    if (known && known.json === json) return known.node;
    const node = make(part);
    if (known) {
      if (known.node.tagName === "DETAILS") node.open = known.node.open;
      const field = known.node.contains(document.activeElement) && document.activeElement.type === "search";
      const old = known.node.querySelector(".scroll");
      const at = old ? [old.scrollLeft, old.scrollTop] : null;
      const button = known.node.contains(document.activeElement) ? document.activeElement.id : "";
      known.node.replaceWith(node);
      if (at && node.querySelector(".scroll")) [node.querySelector(".scroll").scrollLeft, node.querySelector(".scroll").scrollTop] = at;
      if (field) node.querySelector("input[type=search]")?.focus();
      else if (button) document.getElementById(button)?.focus();
    } else parent.insertBefore(node, before || null);
    shown.set(id, { json, node });
    return node;
  }

  const top_ = el("div");
  const drawn = el("div", { class: "grid" });
  const below = el("main");
  function render(page) {
    document.title = `${page.title} · spotguard`;
    place("head", [page.title, page.subtitle, page.state, page.actions], () => head(page), top_);
    place("notices", [page.banner, page.warnings, page.error], () => notices(page), below);
    place("cards", page.cards || [], cards, below);
    if (!drawn.isConnected) below.append(drawn);
    for (const part of page.charts || []) place(`chart-${part.id}`, part, chart, drawn);
    for (const part of page.breakdowns || []) place(`parts-${part.id}`, part, breakdown, drawn);
    drawn.hidden = drawn.childElementCount === 0;
    for (const part of page.tables || []) place(`table-${part.id}`, part, table, below);
    place("foot", [page.version, page.kind === "report" ? page.made_at : 0], () => el("footer", {},
      `spotguard ${page.version || ""}`, page.kind === "report" && page.made_at ? ` · made ${when(page.made_at)}` : "",
      ...(page.footer || []).map((text) => ` · ${text}`)), foot);
    drawWaiting();
  }

  // ------------------------------------------------------------ asking

  function ask(action, page) {
    const result = el("p", { role: "status" });
    const fields = action === "resume" ? [
      el("label", {}, "New budget for the whole run, in USD (left empty: as it was)", el("input", { name: "budget", inputmode: "decimal", autocomplete: "off" })),
      el("label", {}, "New deadline from now on, such as 12h (left empty: as it was)", el("input", { name: "deadline", autocomplete: "off" })),
    ] : [];
    const what = action === "stop" ? "Its state is saved, then its nodes are released. Resume goes on from there."
      : "It goes on from its last save, under a new controller. This may cost money.";
    const yes = el("button", { type: "submit", class: action === "stop" ? "danger" : "strong", id: "confirm" }, action === "stop" ? "Save and stop" : "Resume");
    const no = el("button", { type: "button", on: { click: () => box.close() } }, "Cancel");
    const form = el("form", { method: "dialog", on: { submit: async (event) => {
      event.preventDefault();
      yes.disabled = true;
      const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value.trim() !== ""));
      try {
        const answer = await fetch(`/runs/${encodeURIComponent(page.run_id)}/${action}`, {
          method: "POST", credentials: "same-origin", body: JSON.stringify(values),
          headers: { "content-type": "application/json", "x-spotguard": "1" },
        });
        const body = await answer.json();
        result.textContent = body.message;
        if (answer.ok) window.setTimeout(() => box.close(), 900); else yes.disabled = false;
      } catch (_) { result.textContent = "The dashboard does not answer."; yes.disabled = false; }
    } } }, el("h2", {}, `${action === "stop" ? "Stop" : "Resume"} ${page.run_id}?`), el("p", {}, what), fields, result, el("div", { class: "buttons" }, no, yes));
    const box = el("dialog", { "aria-label": `${action} ${page.run_id}`, on: { close: () => box.remove() } }, form);
    document.body.append(box);
    box.showModal();
  }

  // ------------------------------------------------------------ living on

  function follow(page) {
    // A browser keeps six connections to a server: pages that nobody sees let go of theirs.
    let events = null;
    const say = (text, on) => { if (liveness.textContent !== text) { liveness.textContent = text; liveness.title = ""; } liveness.classList.toggle("on", on); };
    const listen = () => {
      if (document.visibilityState === "hidden") {
        if (events) { events.close(); events = null; say("paused", false); }
        return;
      }
      if (events) return;
      events = new EventSource(page.run_id ? `/events/${encodeURIComponent(page.run_id)}` : "/events");
      events.addEventListener("open", () => say("live", true));
      events.addEventListener("page", (event) => { say("live", true); render(JSON.parse(event.data)); });
      events.addEventListener("trouble", (event) => { say("cannot be read now", false); liveness.title = JSON.parse(event.data); });
      events.addEventListener("error", () => say("reconnecting", false));
    };
    document.addEventListener("visibilitychange", listen);
    listen();
  }

  applyTheme();
  const foot = el("div");
  root.replaceChildren(top_, below, foot);
  const first = JSON.parse(document.getElementById("data").textContent);
  render(first);
  if (first.kind !== "report") follow(first);
})();
