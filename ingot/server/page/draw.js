// Elements, numbers as text, and charts.
import {buckets, difference} from "/ui/metrics.js";

export function make(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "text", "line", "g", "title"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map((child) => child ?? ""));
  return element;
}

export function count(value) {
  if (value == null) return "–";
  return value.toLocaleString("en", {maximumFractionDigits: value < 10 ? 1 : 0});
}

export function time(seconds) {
  if (seconds == null) return "–";
  const [value, unit] = seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  return `${value.toPrecision(value < 10 ? 2 : 3)} ${unit}`;
}

const WIDTH = 260, HEIGHT = 72, KEPT = 120;

export function chart(title, value, lines, shown) {
  const most = Math.max(1e-9, ...lines.flat().map((point) => point ?? 0)) * 1.1;
  const x = (index, length) => WIDTH * (KEPT - length + index) / (KEPT - 1), y = (point) => HEIGHT - HEIGHT * point / most;
  const svg = make("svg", {viewBox: `0 -4 ${WIDTH} ${HEIGHT + 8}`, role: "img", "aria-label": `${title}: ${value}`},
    make("line", {class: "rule", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT}));
  lines.forEach((line, number) => {
    let path = "", open = false;
    line.forEach((point, index) => {
      if (point != null) path += `${open ? "L" : "M"}${x(index, line.length).toFixed(1)} ${y(point).toFixed(1)}`;
      open = point != null;
    });
    svg.append(make("path", {class: number ? "line second" : "line", d: path}));
  });
  if (most > 1e-6) svg.append(make("text", {x: 0, y: 8}, shown(most / 1.1))); // without values there is no scale
  return make("section", {class: "card chart", "data-chart": title}, make("h3", {}, title), make("div", {class: "value"}, value), svg);
}

export function bars(now, before, name, labels) {
  const found = buckets(now, before, name, labels), most = Math.max(...found.map(([, value]) => value));
  if (!(most > 0)) return make("p", {class: "soft"}, "No calls in the last 10 seconds.");
  const width = WIDTH / found.length;
  const svg = make("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT + 16}`, role: "img", "aria-label": "engine calls by rows"});
  found.forEach(([bound, value], index) => {
    const height = HEIGHT * value / most, upTo = bound === Infinity ? "more" : bound;
    svg.append(make("rect", {class: "bar", x: index * width + 2, y: HEIGHT - height, width: width - 4, height},
      make("title", {}, `up to ${upTo} rows: ${count(value)} calls`)),
      make("text", {x: (index + 0.5) * width, y: HEIGHT + 13, "text-anchor": "middle"}, bound === Infinity ? ">" : String(bound)));
  });
  return svg;
}

const STAGES = [["queue", "queue"], ["compute_input", "batch: joining inputs"], ["compute_infer", "compute"], ["compute_output", "encode: splitting, encoding"]];

// The mean seconds in which the responses of a model were encoded, by the means of the protocols that it was asked by.
function encoding(now, before, labels) {
  const delta = (name, more) => difference(now, before, name, more);
  let seconds = 0, requests = 0;
  for (const protocol of ["http", "grpc"]) {
    const encoded = delta("ingot_encode_seconds_count", {protocol});
    const answered = delta("ingot_requests_total", {...labels, protocol, code: "ok"});
    requests += answered;
    if (encoded) seconds += answered * delta("ingot_encode_seconds_sum", {protocol}) / encoded;
  }
  return requests ? seconds / requests : 0;
}

export function stages(model, before, now, recent) {
  const mean = (now, then = {ns: 0, count: 0}) => (now.count > then.count ? (now.ns - then.ns) / (now.count - then.count) / 1e9 : 0);
  const means = STAGES.map(([key]) => mean(model.inference_stats[key], before?.inference_stats[key]));
  if (means.some((each) => each)) means[3] += encoding(now, recent, {model: model.name, version: model.version});
  const steps = Object.entries(model.ingot.steps ?? {}).map(([kind, spent]) => [`step: ${kind}`, mean(spent, before?.ingot.steps?.[kind])]);
  const nodes = Object.entries(model.ingot.nodes ?? {}).map(([name, spent]) => [`node: ${name}`, mean(spent, before?.ingot.nodes?.[name])]);
  const parts = [...means.map((each, index) => [STAGES[index][1], each]), ...steps, ...nodes], all = parts.reduce((sum, [, each]) => sum + each, 0);
  if (!all) return make("p", {class: "soft"}, "No requests in the last 10 seconds.");
  const stack = make("div", {class: "stack"}), legend = make("div", {class: "legend"});
  parts.forEach(([name, each], index) => {
    const part = make("div", {class: `s${index % 8}`});
    part.style.width = `${100 * each / all}%`;
    stack.append(part);
    legend.append(make("i", {class: `s${index % 8}`}), make("span", {}, name), make("span", {}, time(each)));
  });
  return make("div", {}, stack, legend);
}
