"use strict";
// Records come as JSON in the page; whatever is text goes through textContent, never through HTML.
const content = JSON.parse(document.getElementById("content").textContent);
const dashes = ["solid", "dash", "dot", "dashdot", "longdash"];
const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down"];
// Okabe and Ito's colours, which can be told apart by those who see fewer; black is left out, and orange, yellow and sky
// blue, which are too light on white, are darker or an olive green.
const others = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07500", "#6B8E23", "#8C6BB1", "#7F7F7F"];

let isPrinting = false;
const onPaper = { ink: "#000000", muted: "#444444", line: "#bbbbbb", ground: "#ffffff", accent: "#0b63b0", panel: "#ffffff" };

function theme() {
  if (isPrinting) return onPaper;
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return { ink: read("--ink"), muted: read("--muted"), line: read("--line"), ground: read("--ground"), accent: read("--accent"), panel: read("--panel") };
}

function isNarrow() { return window.innerWidth < 640; }

function axis(spec, colours) {
  return {
    title: { text: spec.label, font: { size: 13, color: colours.muted }, standoff: 10 },
    type: spec.is_log ? "log" : "linear", gridcolor: colours.line, linecolor: colours.line, zerolinecolor: colours.line,
    tickfont: { color: colours.muted, size: 12 }, automargin: true,
  };
}

const sizeTicks = [0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1];

function decades(figure) {
  const values = figure.series.flatMap((one) => one.y).filter((v) => v > 0);
  return values.length ? Math.log10(Math.max(...values) / Math.min(...values)) : 0;
}

function layout(figure, colours, below) {
  const made = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", color: colours.ink, size: 13 },
    margin: { l: isNarrow() ? 46 : 64, r: 14, t: 10, b: 50 }, hovermode: figure.kind === "bars" ? "x unified" : "closest",
    hoverlabel: { font: { size: 12 } }, barmode: "group", bargap: 0.25,
    legend: { orientation: "h", y: below, x: 0, yanchor: "top", font: { size: isNarrow() ? 11 : 12.5 }, itemwidth: 30 },
    xaxis: axis(figure.x, colours), yaxis: axis(figure.y, colours),
  };
  if (figure.x.is_log && figure.x.label.startsWith("MACs")) {
    made.xaxis.tickvals = sizeTicks; made.xaxis.ticktext = sizeTicks.map((t) => String(t));
    made.xaxis.minor = { showgrid: false };
  }
  if (figure.y.is_log) { made.yaxis.exponentformat = "power"; if (decades(figure) > 1.5) made.yaxis.dtick = 1; }
  if (figure.categories.length) {
    made.xaxis.tickvals = figure.categories.map((_, i) => i); made.xaxis.ticktext = figure.categories;
    made.xaxis.tickangle = -45;
  }
  const visible = figure.series.flatMap((one) => one.y).filter((v) => v !== null);
  if (figure.is_cropped !== false && figure.x.label.startsWith("MACs") && figure.y.label.includes("accuracy") && visible.length) {
    // Far below everybody's best there is nothing to compare: it would flatten all else.
    const best = figure.series.map((one) => Math.max(...one.y.filter((v) => v !== null)));
    const low = Math.max(Math.min(...visible), Math.min(...best) - 14), high = Math.max(...visible);
    if (low > Math.min(...visible)) {
      made.annotations = [{ xref: "paper", yref: "paper", x: 1, y: 0, xanchor: "right", yanchor: "bottom", showarrow: false,
        text: `lines go on below ${low.toFixed(0)}%`, font: { size: 11, color: colours.muted } }];
    }
    made.yaxis.range = [low - 0.04 * (high - low) - 0.2, high + 0.06 * (high - low) + 0.2];
  }
  return made;
}

// Where a method's own colour could not be seen on the page's ground, the colour of the text takes its place.
function luminance(colour) {
  const n = parseInt(colour.slice(1), 16);
  const linear = [n >> 16, (n >> 8) & 255, n & 255].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function visible(colour, colours) {
  const [a, b] = [luminance(colour), luminance(colours.ground)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 2.5 ? colours.ink : colour;
}

function tinted(colour, alpha) {
  const n = parseInt(colour.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
}

function traces(figure, colours) {
  const made = [];
  figure.series.forEach((one, i) => {
    const colour = visible(content.colours[one.method] || others[i % others.length], colours);
    if (figure.kind === "bars") {
      made.push({ type: "bar", name: one.name, x: one.x, y: one.y, marker: { color: colour } });
      return;
    }
    if (one.low.length && !one.is_points) {
      const x = [...one.x, ...[...one.x].reverse()], y = [...one.high, ...[...one.low].reverse()];
      made.push({ x, y, fill: "toself", fillcolor: tinted(colour, 0.15), line: { width: 0 }, hoverinfo: "skip", showlegend: false, mode: "lines" });
    }
    const many = one.x.length > 40;
    made.push({
      name: one.name, x: one.x, y: one.y, mode: one.is_points ? "markers" : many ? "lines" : "lines+markers",
      line: { color: colour, width: one.is_dashed ? 1.8 : 2.8, dash: one.is_dashed ? dashes[1 + (i % 4)] : "solid" },
      marker: { color: colour, size: one.is_points ? 11 : 7, symbol: symbols[i % symbols.length] },
      error_y: one.is_points && one.low.length ? { type: "data", symmetric: false, array: one.high.map((h, k) => h - one.y[k]), arrayminus: one.low.map((l, k) => one.y[k] - l), color: colour } : undefined,
      hovertemplate: `%{fullData.name}<br>%{x:.3g}: %{y:.4g}<extra></extra>`,
    });
  });
  return made;
}

const options = { displayModeBar: false, responsive: true };

function rows(figure) { return Math.ceil(figure.series.length / (isNarrow() ? 1 : 3)); }

function draw(place, figure) {
  const height = (figure.kind === "bars" ? 330 : 370) + 22 * rows(figure) + (figure.categories.length ? 60 : 0);
  place.style.height = `${height}px`;
  Plotly.react(place, traces(figure, theme()), layout(figure, theme(), figure.categories.length ? -0.42 : -0.17), options);
}

function drawAll() {
  document.querySelectorAll("[data-figure]").forEach((place) => {
    const [section, number] = place.dataset.figure.split("/");
    draw(place, content.sections[Number(section)].figures[Number(number)]);
  });
  document.querySelectorAll(".explorer").forEach((place) => place.update && place.update());
}

function counted(number) {
  if (number === null || number === undefined) return "–";
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "K"]]) {
    if (number >= unit) return `${(number / unit).toPrecision(3)} ${name}`;
  }
  return String(number);
}

function explore(place, network) {
  const slider = place.querySelector("input"), charts = place.querySelectorAll(".figure");
  const say = (name, text) => { place.querySelector(`[data-reading=${name}]`).textContent = text; };
  place.update = () => {
    const at = network.sizes[Number(slider.value)], colours = theme();
    const text = `${at.size.toFixed(3)} of the MACs`;
    say("size", `${at.size.toFixed(3)}×`); say("accuracy", at.accuracy === null ? "–" : `${at.accuracy.toFixed(1)}%`);
    say("macs", counted(at.macs)); say("params", counted(at.params));
    slider.setAttribute("aria-valuetext", at.accuracy === null ? text : `${text}, accuracy ${at.accuracy.toFixed(1)} percent`);
    const curve = { kind: "lines", categories: [], is_cropped: false, x: { label: "MACs, as a fraction", is_log: true }, y: { label: "test accuracy (%)", is_log: false },
      series: [{ name: "accuracy", x: network.measured.map((m) => m[0]), y: network.measured.map((m) => m[1]), low: [], high: [], method: "", is_dashed: false, is_points: false },
        { name: "chosen", x: [at.size], y: [at.accuracy], low: [], high: [], method: "", is_dashed: false, is_points: true }] };
    const first = layout(curve, colours, -0.2); first.showlegend = false;
    const made = traces(curve, colours); made[made.length - 1].marker = { size: 15, color: "#D55E00", symbol: "circle", line: { width: 2, color: colours.ground } };
    if (network.measured.length) Plotly.react(charts[0], made, first, options); else charts[0].hidden = true;
    const parts = at.ranks.map((rank, i) => rank / network.full_ranks[i]);
    const bars = { kind: "bars", categories: network.layers, x: { label: "", is_log: false }, y: { label: "rank, as a part of the full rank", is_log: false }, series: [] };
    const second = layout(bars, colours, -0.3); second.showlegend = false; second.yaxis.range = [0, 1.04]; second.hovermode = "closest";
    Plotly.react(charts[1], [{ type: "bar", x: network.layers.map((_, i) => i), y: parts, marker: { color: at.dense.map((d) => (d ? "#7F7F7F" : "#0072B2")) },
      text: at.ranks.map((r, i) => `${network.layers[i]}: rank ${r} of ${network.full_ranks[i]}${at.dense[i] ? ", dense" : ""}`), textposition: "none", hovertemplate: "%{text}<extra></extra>" }], second, options);
  };
  slider.addEventListener("input", place.update);
}

document.querySelectorAll(".explorer").forEach((place) => explore(place, content.explorers[Number(place.dataset.explorer)]));
drawAll();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let narrow = isNarrow();
window.addEventListener("resize", () => { if (narrow !== isNarrow()) { narrow = isNarrow(); drawAll(); } });
// Paper is white, and what is folded away cannot be opened on it.
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((each) => { each.open = true; });
  isPrinting = true; drawAll();
});
window.addEventListener("afterprint", () => { folded.forEach((each) => { each.open = false; }); isPrinting = false; drawAll(); });
document.documentElement.dataset.ready = "yes";
