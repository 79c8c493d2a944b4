"use strict";
// Records come as JSON in the page; whatever is text goes through textContent, never through HTML.
const content = JSON.parse(document.getElementById("content").textContent);

// ---------------------------------------------------------------------------------------------------------- colours
// What is no method has colours that no method has: a method's colour never stands for something else.
const others = ["#8B4513", "#006D77", "#A3123A", "#7A7A00", "#3B3B98", "#B23AAA", "#4E7D2D", "#5F8096"];
const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down"];
const APART = 36; // the least distance of two colours of one figure, in steps of red, green and blue

let isPrinting = false;
const onPaper = { ink: "#000000", muted: "#444444", line: "#bbbbbb", ground: "#ffffff", panel: "#ffffff" };

function theme() {
  if (isPrinting) return onPaper;
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(Object.keys(onPaper).map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function channels(colour) {
  const n = parseInt(colour.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

function asHex(values) { return `#${values.map((v) => Math.round(v).toString(16).padStart(2, "0")).join("")}`; }

function luminance(colour) {
  const linear = channels(colour).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function contrast(one, other) {
  const [a, b] = [luminance(one), luminance(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}

function hueOf(colour) {
  const [r, g, b] = channels(colour).map((c) => c / 255), most = Math.max(r, g, b), least = Math.min(r, g, b);
  const lightness = (most + least) / 2, span = most - least;
  if (!span) return [0, 0, lightness];
  const hue = most === r ? ((g - b) / span + 6) % 6 : most === g ? (b - r) / span + 2 : (r - g) / span + 4;
  return [60 * hue, span / (1 - Math.abs(2 * lightness - 1)), lightness];
}

function ofHue([hue, saturation, lightness]) {
  const part = saturation * Math.min(lightness, 1 - lightness);
  const one = (n) => { const k = (n + hue / 30) % 12; return 255 * (lightness - part * Math.max(-1, Math.min(k - 3, 9 - k, 1))); };
  return asHex([one(0), one(8), one(4)]);
}

// The same hue, so much darker (or on a dark page lighter) that it can be seen. Black and greys turn round on a dark
// page: they stay apart from each other that way.
function readable(colour, colours) {
  const isDark = luminance(colours.ground) < 0.2;
  let [hue, saturation, lightness] = hueOf(colour);
  if (isDark && saturation < 0.08) lightness = 1 - lightness;
  let made = ofHue([hue, saturation, lightness]);
  while (contrast(made, colours.panel) < (isDark ? 4.5 : 3) && lightness > 0 && lightness < 1) {
    lightness += isDark ? 0.01 : -0.01;
    made = ofHue([hue, saturation, Math.min(1, Math.max(0, lightness))]);
  }
  return made;
}

function mixed(one, other, part) {
  const to = channels(other);
  return asHex(channels(one).map((c, i) => c + part * (to[i] - c)));
}

function distance(one, other) {
  const to = channels(other);
  return Math.hypot(...channels(one).map((c, i) => c - to[i]));
}

function tinted(colour, alpha) { return `rgba(${channels(colour).join(", ")}, ${alpha})`; }

// What is no method is numbered by the name, so that it looks the same in all figures of an exhibit.
content.sections.forEach(({ figures }) => {
  const numbers = new Map();
  figures.flatMap((figure) => figure.series).filter((one) => !content.styles[one.method]).forEach((one) => {
    if (!numbers.has(one.name)) numbers.set(one.name, numbers.size);
    one.number = numbers.get(one.name);
  });
});

// How every series of a figure is drawn. The first of a method has the method's colour, further ones a shade of it.
function stylesOf(figure, colours) {
  const firsts = new Map(), counts = new Map(), taken = [];
  figure.series.forEach((one) => {
    const own = content.styles[one.method];
    if (own && !firsts.has(one.method)) { firsts.set(one.method, readable(own.colour, colours)); taken.push(firsts.get(one.method)); }
  });
  return figure.series.map((one) => {
    const own = content.styles[one.method], number = own ? counts.get(one.method) || 0 : one.number || 0;
    if (own) counts.set(one.method, number + 1);
    const base = own ? firsts.get(one.method) : readable(others[number % others.length], colours);
    let colour = base;
    if (!own || number > 0) {
      const shades = [...(own ? [] : [base]), ...[0.4, 0.65].map((part) => mixed(base, colours.ink, part)), ...others.map((each) => readable(each, colours)), mixed(base, colours.ink, 0.85)];
      colour = shades.find((each) => taken.every((other) => distance(each, other) >= APART)) || shades[shades.length - 1];
      taken.push(colour);
    }
    const isVariant = Boolean(own) && number > 0;
    const symbol = own ? own.symbol : symbols[number % symbols.length];
    // A method has its own dash everywhere; a dashed series beside a plain one of the same method is told apart by it.
    const siblings = figure.series.filter((other) => own && other.method === one.method);
    const differs = siblings.some((other) => other.is_dashed !== one.is_dashed);
    const dash = !own ? (one.is_dashed ? "dash" : "solid") : differs && one.is_dashed ? (own.dash === "solid" ? "dash" : "longdashdot") : own.dash;
    const isHollow = one.is_hollow || (isVariant && figure.kind === "lines");
    return { colour, dash, symbol: isHollow ? `${symbol}-open` : symbol, width: own ? own.width : one.is_dashed ? 1.8 : 2.4 };
  });
}

// ------------------------------------------------------------------------------------------------------------- axes
function isNarrow() { return !isPrinting && window.innerWidth < 640; }

function numbers(lists) { return lists.flat().filter((v) => typeof v === "number" && Number.isFinite(v)); }

function valuesOf(figure, name) {
  const ranged = figure.kind === "dots" ? "x" : "y";
  return numbers(figure.series.flatMap((one) => (name === ranged ? [one[name], one.low, one.high] : [one[name]])));
}

// Into lines of about so many letters.
function wrapped(text, letters) {
  const lines = [""];
  text.split(" ").forEach((word) => {
    const last = lines[lines.length - 1];
    if (last && last.length + word.length + 1 > letters) lines.push(word); else lines[lines.length - 1] = last ? `${last} ${word}` : word;
  });
  return lines;
}

const sizeTicks = [0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1];

function isSize(spec) { return spec.is_log && /^(MACs|parameters)/.test(spec.label); }

// 1, 2 and 5 of every decade where there are few of them, else whole decades, all in the same format.
function logTicks(low, high) {
  const decades = Math.log10(high / low), first = Math.floor(Math.log10(low)) - 1, last = Math.ceil(Math.log10(high)) + 1;
  const steps = decades < 0.7 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : decades < 2.2 ? [1, 2, 5] : [1];
  const stride = steps.length > 1 ? 1 : Math.ceil(decades / 7), found = [];
  for (let power = first; power <= last; power += 1) {
    if (power % stride === 0) steps.forEach((step) => found.push([step, power]));
  }
  const shown = found.filter(([step, power]) => step * 10 ** power >= low * 0.9 && step * 10 ** power <= high * 1.1);
  const isPlain = shown.every(([, power]) => power >= -3 && power < 4);
  const text = ([step, power]) => (isPlain ? String(Number((step * 10 ** power).toPrecision(6))) : `${step === 1 ? "" : `${step}·`}10<sup>${power < 0 ? "−" : ""}${Math.abs(power)}</sup>`);
  return { tickvals: shown.map(([step, power]) => step * 10 ** power), ticktext: shown.map(text) };
}

function axis(spec, values, colours, letters) {
  const made = {
    title: { text: wrapped(spec.label, letters).join("<br>"), font: { size: 13, color: colours.muted }, standoff: 8 },
    type: spec.is_log ? "log" : "linear", gridcolor: colours.line, linecolor: colours.line, zerolinecolor: colours.line,
    tickfont: { color: colours.muted, size: 12 }, fixedrange: true,
  };
  const positive = spec.is_log ? values.filter((v) => v > 0) : values;
  if (!positive.length) return made;
  const low = Math.min(...positive), high = Math.max(...positive);
  if (spec.is_log) {
    const pad = 0.04 * Math.log10(high / low) + 0.02;
    made.range = [Math.log10(low) - pad, Math.log10(high) + pad];
    made.minor = { showgrid: false };
    Object.assign(made, isSize(spec) ? { tickvals: sizeTicks, ticktext: sizeTicks.map(String) } : logTicks(low, high));
  } else if (/^(layer|epoch)/.test(spec.label) && high - low <= 12) {
    made.dtick = 1; made.tick0 = 0; made.tickformat = "d";
  }
  return made;
}

// Far below everybody's best there is nothing to compare: it would flatten all else. Of every line two points stay.
function axisEnd(figure) {
  if (figure.kind !== "lines" || figure.x.label === "epoch" || !figure.y.label.includes("accuracy")) return null;
  const sorted = figure.series.map((one) => numbers([one.y]).sort((a, b) => b - a)).filter((each) => each.length);
  if (!sorted.length) return null;
  const all = valuesOf(figure, "y"), lowest = Math.min(...all), highest = Math.max(...all);
  const end = Math.floor(Math.min(Math.min(...sorted.map((each) => each[0])) - 14, ...sorted.map((each) => each[Math.min(1, each.length - 1)] - 1)));
  return end > lowest && highest - end < 0.7 * (highest - lowest) ? end : null;
}

// ---------------------------------------------------------------------------------------------------------- figures
// Everything below the axis is laid out in pixels: letters are about this wide.
const LETTER = 6.6;

function legendRows(names, width) {
  if (names.length < 2) return 0;
  const widest = 50 + LETTER * Math.max(...names.map((name) => name.length));
  return Math.ceil(names.length / Math.max(1, Math.floor(width / widest)));
}

function layout(figure, colours, width, isWhole) {
  const letters = Math.max(20, Math.floor((width - 70) / LETTER)), isDots = figure.kind === "dots";
  const made = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", width, dragmode: false,
    font: { family: "system-ui, sans-serif", color: colours.ink, size: 13 },
    hovermode: "closest", hoverlabel: { font: { size: 12 }, align: "left" }, barmode: "group", bargap: 0.25,
    xaxis: axis(figure.x, valuesOf(figure, "x"), colours, letters), yaxis: axis(figure.y, valuesOf(figure, "y"), colours, 44),
    showlegend: figure.series.length > 1,
  };
  made.yaxis.automargin = true;
  let below = 26 + (figure.x.label ? 12 + 17 * wrapped(figure.x.label, letters).length : 0);
  const longest = Math.max(0, ...figure.categories.map((name) => name.length));
  if (isDots) {
    const labels = figure.categories.map((name) => wrapped(name, width < 640 ? 20 : 44).join("<br>"));
    Object.assign(made.yaxis, { tickvals: labels.map((_, i) => i), ticktext: labels, range: [labels.length - 0.5, -0.5], zeroline: false, type: "linear" });
  } else if (figure.categories.length) {
    const isTight = (longest * LETTER + 8) * figure.categories.length > width - 80;
    Object.assign(made.xaxis, { tickvals: figure.categories.map((_, i) => i), ticktext: figure.categories, tickangle: isTight ? -45 : 0, dtick: undefined, tickformat: undefined });
    if (isTight) { below += Math.min(120, 0.72 * LETTER * longest); made.xaxis.title.standoff = 4; made.xaxis.automargin = true; }
  }
  const end = isWhole ? null : axisEnd(figure);
  if (end !== null) {
    const high = Math.max(...valuesOf(figure, "y"));
    made.yaxis.range = [end, high + 0.05 * (high - end)];
  }
  const plot = isDots ? 30 + (isPrinting ? 24 : 36) * figure.categories.length : isPrinting ? 215 : isNarrow() ? 270 : 320;
  const legend = 20 * legendRows(figure.series.map((one) => one.name), width - 80);
  made.margin = { l: isNarrow() ? 46 : 64, r: 16, t: 10, b: below + legend + 6 };
  made.height = plot + 10 + made.margin.b;
  made.legend = { orientation: "h", x: 0, y: -(below + 2) / plot, yanchor: "top", font: { size: isNarrow() ? 11 : 12.5 }, itemwidth: 30 };
  return { made, end };
}

function shown(value) { return typeof value === "number" ? String(Number(value.toPrecision(4))) : "–"; }

// What is said of a point: both values with their units, and its range.
function said(figure, one, k) {
  const named = (spec, value, extra) => {
    const unit = /\((%|ms|s|×)\)/.exec(spec.label), name = spec.label.replace(/\s*\(.*\)|,.*$/g, "");
    const space = unit && /[a-z]/.test(unit[1]) ? " " : "";
    return `${name ? `${name}: ` : ""}${value}${unit ? space + unit[1] : isSize(spec) ? "×" : ""}${extra}`;
  };
  const range = one.low.length && typeof one.low[k] === "number" && one.low[k] !== one.high[k] ? ` (${shown(one.low[k])} to ${shown(one.high[k])}${figure.spread ? ` ${figure.spread}` : ""})` : "";
  const of = (place) => figure.categories[place] ?? shown(place);
  const lines = figure.kind === "dots"
    ? [of(one.y[k]), named(figure.x, shown(one.x[k]), range)]
    : [named(figure.x, figure.categories.length ? of(one.x[k]) : shown(one.x[k]), ""), named(figure.y, shown(one.y[k]), range)];
  return [one.name, ...lines].join("<br>");
}

function bars(one, values, colour) {
  if (!one.low.length) return undefined;
  const reach = (ends, sign) => ends.map((end, k) => (typeof end === "number" && typeof values[k] === "number" ? Math.max(0, sign * (end - values[k])) : 0));
  return { type: "data", symmetric: false, array: reach(one.high, 1), arrayminus: reach(one.low, -1), color: colour, thickness: 1.5, width: 4 };
}

function traces(figure, colours) {
  const styles = stylesOf(figure, colours), made = [], count = figure.series.length, isDark = luminance(colours.ground) < 0.2;
  figure.series.forEach((one, i) => {
    const style = styles[i], hover = { hovertext: one.x.map((_, k) => said(figure, one, k)), hoverinfo: "text" };
    if (figure.kind === "bars") {
      made.push({ type: "bar", name: one.name, x: one.x, y: one.y, marker: { color: style.colour }, error_y: bars(one, one.y, colours.ink), ...hover });
      return;
    }
    const marker = { color: style.colour, size: one.is_points || figure.kind === "dots" ? 11 : 7, symbol: style.symbol, line: { color: style.colour, width: style.symbol.endsWith("-open") ? 2 : 0 } };
    if (figure.kind === "dots") {
      const shift = count > 1 ? 0.24 * (i / (count - 1) - 0.5) : 0; // beside each other in their row
      made.push({ type: "scatter", mode: "markers", name: one.name, x: one.x, y: one.y.map((v) => v + shift), marker, error_x: bars(one, one.x, style.colour), ...hover });
      return;
    }
    const isAlone = one.is_points || one.x.length < 2; // a band of one point could not be seen
    if (one.low.length && !isAlone) {
      const kept = one.x.map((_, k) => k).filter((k) => typeof one.low[k] === "number" && typeof one.high[k] === "number");
      const back = [...kept].reverse();
      made.push({ x: [...kept, ...back].map((k) => one.x[k]), y: [...kept.map((k) => one.high[k]), ...back.map((k) => one.low[k])], type: "scatter", mode: "lines",
        fill: "toself", fillcolor: tinted(style.colour, isDark ? 0.3 : 0.18), line: { width: 0, color: style.colour }, hoverinfo: "skip", showlegend: false, name: one.name, meta: "band" });
    }
    made.push({
      type: "scatter", name: one.name, x: one.x, y: one.y, mode: isAlone ? "markers" : one.x.length > 40 ? "lines" : "lines+markers", marker: { ...marker, size: isAlone ? 11 : 7 },
      line: { color: style.colour, width: style.width, dash: style.dash }, error_y: isAlone ? bars(one, one.y, style.colour) : undefined, ...hover,
    });
  });
  return made;
}

// Nothing is zoomed by accident: a finger that passes over a figure scrolls the page.
const options = { displayModeBar: false, responsive: false, doubleClick: false };
const PAPER = 680; // pixels, between the margins of a page

function widthOf(place) {
  if (isPrinting) return place.closest(".charts") ? PAPER / 2 - 30 : PAPER;
  return place.clientWidth;
}

// Below a figure whose axis does not begin where the lines end, it is said, and all can be seen.
function sayEnd(place, figure, end) {
  let note = place.nextElementSibling;
  if (!note || !note.classList.contains("end")) {
    if (end === null && !place.dataset.whole) return;
    note = document.createElement("p");
    note.className = "end note";
    note.append(document.createElement("span"), document.createElement("button"));
    note.lastChild.type = "button";
    note.lastChild.addEventListener("click", () => { place.dataset.whole = place.dataset.whole ? "" : "yes"; draw(place, figure); });
    place.after(note);
  }
  note.firstChild.textContent = end === null ? "All of every line is shown. " : `The axis ends at ${end}%; some lines go on below it. `;
  note.lastChild.textContent = end === null ? "Show the upper part only" : "Show all";
}

function draw(place, figure) {
  const colours = theme(), { made, end } = layout(figure, colours, widthOf(place), Boolean(place.dataset.whole));
  place.style.height = `${made.height}px`;
  Plotly.react(place, traces(figure, colours), made, options);
  sayEnd(place, figure, end);
}

function drawAll() {
  document.querySelectorAll("[data-figure]").forEach((place) => {
    const [section, number] = place.dataset.figure.split("/");
    draw(place, content.sections[Number(section)].figures[Number(number)]);
  });
  document.querySelectorAll(".explorer").forEach((place) => place.update && place.update());
}

// ----------------------------------------------------------------------------------------------------------- slider
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
  const line = (name, x, y) => ({ name, x, y, low: [], high: [], method: "", is_dashed: false, is_points: x.length < 2, is_hollow: false });
  const put = (chart, drawn, figure, colours, change) => {
    const { made } = layout(figure, colours, widthOf(chart), true);
    made.showlegend = false; change(made);
    made.height = isPrinting ? 220 : 280; made.margin.b = made.xaxis.automargin ? 74 : 52;
    chart.style.height = `${made.height}px`;
    Plotly.react(chart, drawn, made, options);
  };
  place.update = () => {
    const at = network.sizes[Number(slider.value)], colours = theme(), text = `${at.size.toFixed(3)} of the MACs`;
    const [own, chosen] = [others[1], others[2]].map((each) => readable(each, colours));
    say("size", `${at.size.toFixed(3)}×`); say("accuracy", at.accuracy === null ? "–" : `${at.accuracy.toFixed(1)}%`);
    say("macs", counted(at.macs)); say("params", counted(at.params));
    slider.setAttribute("aria-valuetext", at.accuracy === null ? text : `${text}, accuracy ${at.accuracy.toFixed(1)} percent`);
    if (network.measured.length) {
      const curve = { kind: "lines", categories: [], x: { label: "MACs, as a fraction", is_log: true }, y: { label: "test accuracy (%)", is_log: false },
        series: [line("measured", network.measured.map((m) => m[0]), network.measured.map((m) => m[1])), line("chosen", [at.size], [at.accuracy])] };
      const drawn = traces(curve, colours);
      drawn[0].line.color = own; drawn[0].marker.color = own;
      drawn[1].marker = { size: 15, color: chosen, symbol: "circle", line: { width: 2, color: colours.ground } };
      put(charts[0], drawn, curve, colours, () => {});
    } else charts[0].hidden = true;
    const ranks = { kind: "bars", categories: network.layers, x: { label: "", is_log: false }, y: { label: "part of the full rank", is_log: false }, series: [] };
    const drawn = [{ type: "bar", x: network.layers.map((_, i) => i), y: at.ranks.map((rank, i) => rank / network.full_ranks[i]), hoverinfo: "text",
      marker: { color: own, pattern: { shape: at.dense.map((d) => (d ? "/" : "")), fgcolor: own, bgcolor: colours.panel, fillmode: "overlay", size: 7 } },
      hovertext: at.ranks.map((r, i) => `${network.layers[i]}: rank ${r} of ${network.full_ranks[i]}${at.dense[i] ? ", dense" : ""}`) }];
    put(charts[1], drawn, ranks, colours, (made) => { made.yaxis.range = [0, 1.04]; });
  };
  slider.addEventListener("input", place.update);
}

document.querySelectorAll(".explorer").forEach((place) => explore(place, content.explorers[Number(place.dataset.explorer)]));
drawAll();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = window.innerWidth, waiting = 0;
window.addEventListener("resize", () => {
  if (width === window.innerWidth || isPrinting) return; // a phone's address bar changes the height alone
  width = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 150);
});
// Paper is white, and what is folded away cannot be opened on it.
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((each) => { each.open = true; });
  isPrinting = true; drawAll();
});
window.addEventListener("afterprint", () => { folded.forEach((each) => { each.open = false; }); isPrinting = false; drawAll(); });
document.documentElement.dataset.ready = "yes";
