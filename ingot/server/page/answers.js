// The answers of models with steps, drawn by what they hold: bars, boxes, masks, marked texts, similarities.
import {make} from "/ui/draw.js";

const WIDEST = 640; // pixels of a picture with boxes or masks
const COLOURS = ["#e6492d", "#3564d4", "#18794e", "#b86e00", "#8a5cd1", "#0f8a8a", "#c2337f", "#6b7a00"];
const UTF8 = new TextDecoder();
const words = (bytes) => UTF8.decode(bytes);

// Returns elements. Outputs have flat data, BYTES as Uint8Array; inputs have a list of values with text, or with bytes and bitmap.
export async function drawn(outputs, inputs, properties) {
  const by = Object.fromEntries(outputs.map((each) => [each.name, each])), found = [];
  const form = FORMS[properties.answer_form] ?? vectors(by, properties) ?? scores(by) ?? {reads: []};
  const left = outputs.filter(({name}) => ![...form.reads, ...COUNTS].includes(name));
  if (form.all) found.push(...form.all(by, inputs, form.reads[0]));
  for (let index = 0; index < (outputs[0]?.shape[0] ?? 0); index++) {
    const item = new Item(by, inputs, index);
    const parts = [...(form.each ? await form.each(item) : []), ...others(item, left), ...lengths(item, properties)];
    if (outputs[0].shape[0] > 1 && parts.length) parts.unshift(make("h4", {}, item.title));
    found.push(make("div", {class: "item"}, ...parts));
  }
  return found;
}

// One item of a request, and its part of the answer.
class Item {
  constructor(outputs, inputs, index) {
    Object.assign(this, {outputs, inputs, index});
    this.values = inputs.map(({name, values}) => ({name, ...(values[index] ?? values[0])}));
  }

  // The values of an output, of which the first `count` are not padding.
  of(name) {
    const {shape, data} = this.outputs[name], size = shape.slice(1).reduce((product, side) => product * side, 1);
    const kept = shape.length > 1 && this.outputs.count ? this.outputs.count.data[this.index] * size / shape[1] : size;
    return data.slice(this.index * size, this.index * size + kept);
  }

  texts(name) {
    return this.of(name).map(words);
  }

  get picture() {
    return this.values.find(({bitmap}) => bitmap)?.bitmap;
  }

  get text() {
    return this.values.find(({text}) => text !== undefined)?.text ?? "";
  }

  get context() {
    return this.values.find(({name}) => name === "context")?.text ?? this.text;
  }

  get title() {
    const title = this.values.map(({text, name, bytes}) => (bytes ? `${this.index + 1}` : text)).filter(Boolean).join(" / ");
    return title.length > 80 ? `${title.slice(0, 80)}…` : title;
  }
}

const number = (value) => (Number.isInteger(value) ? String(value) : value.toPrecision(3));

function bars(labels, scores) {
  const list = make("div", {class: "scores"}), most = Math.max(...scores), least = Math.min(0, ...scores);
  const shares = most <= 1 && least === 0; // probabilities fill their part of the whole bar
  labels.forEach((label, index) => {
    const bar = make("b"), value = scores[index];
    bar.style.width = `${100 * (shares ? value : (value - least) / (most - least || 1))}%`;
    list.append(make("span", {}, label), make("div", value === most ? {class: "top"} : {}, bar), make("span", {}, value.toFixed(3)));
  });
  return list;
}

function classes(item) {
  const labels = item.texts("label"), scores = item.of("score");
  return labels.length ? [make("div", {class: "big"}, labels[0]), bars(labels, scores)] : [make("p", {class: "soft"}, "Nothing found.")];
}

const best = (scores) => scores.indexOf(Math.max(...scores));

function ranking({score}, inputs) {
  const titles = score.data.map((_, index) => inputs.filter(({values}) => values.length === score.data.length).at(-1).values[index].text);
  const order = [...score.data.keys()].sort((one, other) => score.data[other] - score.data[one]);
  return [make("div", {class: "big"}, number(score.data[order[0]])), bars(order.map((index) => titles[index]), order.map((index) => score.data[index]))];
}

// The cosine of each pair of vectors; the best of each row is marked.
function similarities(by, inputs, name) {
  const {shape: [count, size], data} = by[name];
  const rows = Array.from({length: count}, (_, index) => data.slice(index * size, (index + 1) * size));
  const length = rows.map((row) => Math.hypot(...row));
  const cosine = (one, other) => rows[one].reduce((sum, value, at) => sum + value * rows[other][at], 0) / (length[one] * length[other] || 1);
  const described = make("p", {class: "soft"}, `${count} ${count === 1 ? "vector" : "vectors"} of ${size} elements`);
  if (count === 1) {
    return [described, make("code", {}, `[${rows[0].slice(0, 8).map(number).join(", ")}${size > 8 ? ", ..." : ""}]`),
      make("p", {class: "soft"}, "Add another text to compare it.")];
  }
  if (count === 2) return [make("div", {class: "big"}, cosine(0, 1).toFixed(3)), make("p", {class: "soft"}, "the cosine of their angle"), described];
  const texts = inputs.find(({values}) => values.length === count)?.values.map(({text, name}) => text || name) ?? [];
  const cell = (row, column, nearest) => make("td", column === nearest ? {class: "good"} : {}, row === column ? "" : cosine(row, column).toFixed(3));
  const lines = rows.map((_, row) => {
    const nearest = best(rows.map((_, column) => (row === column ? -2 : cosine(row, column))));
    return make("tr", {}, make("th", {scope: "row"}, `${row + 1} ${texts[row] ?? ""}`), ...rows.map((_, column) => cell(row, column, nearest)));
  });
  const head = make("tr", {}, make("th", {}, "cosine"), ...rows.map((_, column) => make("th", {scope: "col"}, String(column + 1))));
  return [make("div", {class: "scroll"}, make("table", {class: "nearest"}, make("thead", {}, head), make("tbody", {}, ...lines))), described];
}

// A canvas with the picture of an item, and by how much it is smaller.
function copied(picture, description) {
  const scale = Math.min(1, WIDEST / Math.max(picture.width, picture.height));
  const canvas = make("canvas", {class: "picture", width: Math.max(1, Math.round(picture.width * scale)), height: Math.max(1, Math.round(picture.height * scale)), role: "img", "aria-label": description});
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return [canvas, context, scale];
}

function legend(labels, scores, colours, more = () => "") {
  if (!labels.length) return make("p", {class: "soft"}, "Nothing found.");
  const list = make("div", {class: "legend"});
  labels.forEach((label, index) => {
    const colour = make("i");
    colour.style.background = colours[index];
    list.append(colour, make("span", {}, `${label} `, make("small", {}, more(index))), make("span", {}, scores ? scores[index].toFixed(3) : ""));
  });
  return list;
}

// A label has one colour.
function coloured(labels) {
  const known = [...new Set(labels)];
  return labels.map((label) => COLOURS[known.indexOf(label) % COLOURS.length]);
}

function boxes(item) {
  const labels = item.texts("label"), scores = item.of("score"), corners = item.of("box"), polygons = item.outputs.polygon && item.of("polygon"), colours = coloured(labels);
  const box = (index) => corners.slice(4 * index, 4 * index + 4), parts = [];
  if (item.picture) {
    const [canvas, context, scale] = copied(item.picture, labels.length ? labels.map((label, index) => `${label} ${scores[index].toFixed(3)}`).join(", ") : "nothing found");
    context.font = "12px system-ui, sans-serif";
    context.lineWidth = 2;
    labels.forEach((label, index) => {
      const [left, top, right, bottom] = box(index).map((side) => side * scale), width = context.measureText(label).width + 8;
      context.strokeStyle = context.fillStyle = colours[index];
      const path = polygons ? polygons.slice(8 * index, 8 * index + 8).map((side) => side * scale) : [left, top, right, top, right, bottom, left, bottom];
      context.beginPath();
      for (let at = 0; at < 8; at += 2) context.lineTo(path[at], path[at + 1]);
      context.closePath();
      context.stroke();
      const above = Math.max(0, top - 16);
      context.fillRect(left - 1, above, width, 16);
      context.fillStyle = "#fff";
      context.fillText(label, left + 3, above + 12);
    });
    parts.push(canvas);
  }
  return [...parts, legend(labels, scores, colours, (index) => box(index).map(Math.round).join(", "))];
}

async function masks(item) {
  const labels = item.texts("label"), files = item.of("mask"), scores = item.outputs.score && item.of("score"), colours = coloured(labels);
  const shown = await Promise.all(files.map((file) => createImageBitmap(new Blob([file]))));
  if (!shown.length) return [legend([])];
  const [canvas, context] = copied(item.picture ?? shown[0], labels.join(", "));
  shown.forEach((mask, index) => context.drawImage(tinted(mask, colours[index], canvas), 0, 0));
  return [canvas, legend(labels, scores, colours)];
}

// The white of a mask in a colour through which the picture shows.
function tinted(mask, colour, {width, height}) {
  const canvas = make("canvas", {width, height}), context = canvas.getContext("2d"), channels = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  context.drawImage(mask, 0, 0, width, height);
  const image = context.getImageData(0, 0, width, height);
  for (let at = 0; at < image.data.length; at += 4) image.data.set([...channels, image.data[at] / 2], at);
  context.putImageData(image, 0, 0);
  return canvas;
}

// The drawn depths of a picture, and the least and the largest; behind its size there is padding.
function depths(item) {
  const [height, width] = [...item.of("original_size")].map(Number), stride = item.outputs.predicted_depth.shape[2], values = item.of("predicted_depth");
  let least = Infinity, most = -Infinity;
  for (let at = 0; at < height * stride; at++) {
    if (at % stride >= width) continue;
    least = Math.min(least, values[at]);
    most = Math.max(most, values[at]);
  }
  return [picture(item.of("depth")[0]), make("p", {class: "soft"}, `from ${number(least)} (black) to ${number(most)} (white)`)];
}

// Offsets count code points, as Python does; JavaScript's strings count UTF-16.
function marked(text, spans) {
  const points = [...text], element = make("p", {class: "marked"});
  let at = 0;
  for (const {start, end, label, colour} of [...spans].sort((one, other) => one.start - other.start)) {
    if (start < at) continue; // overlaps the one before
    const mark = make("mark", {}, points.slice(start, end).join(""), label ? make("small", {}, ` ${label}`) : "");
    mark.style.borderColor = colour;
    element.append(points.slice(at, start).join(""), mark);
    at = end;
  }
  element.append(points.slice(at).join(""));
  return element;
}

function entities(item) {
  const labels = item.texts("entity"), found = item.texts("word"), scores = item.of("score"), starts = item.of("start"), ends = item.of("end"), colours = coloured(labels);
  const spans = labels.map((label, index) => ({label, start: starts[index], end: ends[index], colour: colours[index]}));
  return [marked(item.text, spans), legend(labels, scores, colours, (index) => found[index])];
}

function span(item) {
  const answers = item.texts("answer"), scores = item.of("score"), [start, end] = [item.of("start")[0], item.of("end")[0]];
  return [make("div", {class: "big"}, answers[0] || "no answer"), marked(item.context, end > start ? [{start, end, colour: COLOURS[0]}] : []), bars(answers.map((answer) => answer || "no answer"), scores)];
}

// The words of each missing one, and the text with the best.
function filled(item) {
  const {shape: [, masks, widest]} = item.outputs.score, found = item.outputs.count ? item.outputs.count.data[item.index] : masks;
  const [tokens, scores, texts, ids] = [item.texts("token_str"), item.of("score"), item.texts("sequence"), item.of("token")];
  const size = (at) => ids.slice(at, at + widest).filter((id) => id >= 0).length; // others are padding
  return Array.from({length: found}, (_, mask) => mask * widest).flatMap((at) =>
    [make("p", {class: "transcript"}, texts[at]), bars(tokens.slice(at, at + size(at)), scores.slice(at, at + size(at)))]);
}

const line = (item) => [make("p", {class: "transcript"}, item.texts("text")[0]), make("p", {class: "soft"}, item.of("score")[0].toFixed(3))];

const transcript = (item) => item.texts("text").map((text) => make("p", {class: "transcript"}, text || "no words found"));

// Any other outputs: those with a value for each find as the columns of a table, the rest by name.
function others(item, outputs) {
  const columns = outputs.filter(({shape}) => item.outputs.count && shape.length > 1), finds = item.outputs.count?.data[item.index];
  const parts = outputs.filter((output) => !columns.includes(output)).map(({name, datatype, shape}) =>
    make("div", {}, make("p", {}, `${name} `, make("small", {}, `${datatype} [${shape.join(", ")}]`)), ...shown(item.of(name))));
  if (!columns.length) return parts;
  const head = make("tr", {}, ...columns.map(({name}) => make("th", {scope: "col"}, name)));
  const cells = columns.map(({name}) => item.of(name)), of = (values, row) => values.slice(row * values.length / finds, (row + 1) * values.length / finds);
  const rows = Array.from({length: finds}, (_, row) => make("tr", {}, ...cells.map((values) => make("td", {}, ...shown(of(values, row))))));
  return [...parts, make("div", {class: "scroll"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)))];
}

function shown(values) {
  const first = values[0];
  if (first instanceof Uint8Array) return values.slice(0, 64).map((value) => (isPng(value) ? picture(value) : make("p", {class: "transcript"}, words(value))));
  const text = [...values].slice(0, 64).map(number).join(", ");
  return [make("code", {}, values.length > 64 ? `${text}, ... ${values.length} values` : text)];
}

const isPng = (bytes) => bytes[0] === 0x89 && bytes[1] === 0x50 && bytes[2] === 0x4e && bytes[3] === 0x47;
const picture = (bytes) => make("img", {class: "picture", alt: "", src: `data:image/png;base64,${btoa(Array.from(bytes, (each) => String.fromCharCode(each)).join(""))}`});

const COUNTS = ["count", "tokens", "cut_tokens", "seconds", "cut_seconds"];

// How much of a text or a sound was read, and what was cut off.
function lengths({outputs, index}, {max_tokens: most}) {
  const value = (name) => outputs[name]?.data[index], lines = [];
  if (outputs.tokens) lines.push([most ? `${value("tokens")} of ${most} tokens` : `${value("tokens")} tokens`, value("cut_tokens"), "more were"]);
  if (outputs.seconds) lines.push([`${number(value("seconds"))} s of sound`, value("cut_seconds") && number(value("cut_seconds")), "s at the end were"]);
  return lines.map(([text, cut, what]) =>
    make("p", {class: "soft tokens"}, text, cut ? make("span", {class: "bad"}, `, ${cut} ${what} cut off`) : ""));
}

const vectors = (by, {task}) => {
  const found = /similarity|feature-extraction/.test(task) && Object.values(by).find(({shape, datatype}) => shape.length === 2 && datatype === "FP32");
  return found ? {all: similarities, reads: [found.name]} : null;
};
const scores = (by) => (by.score?.shape.length === 1 && by.score.shape[0] > 1 ? {all: ranking, reads: ["score"]} : null);

// What draws each form of ingot/tasks.py, item by item, and the outputs that it reads.
const FORMS = {
  boxes: {each: boxes, reads: ["label", "score", "box", "polygon"]},
  masks: {each: masks, reads: ["label", "mask", "score"]},
  depths: {each: depths, reads: ["depth", "predicted_depth", "original_size"]},
  entities: {each: entities, reads: ["entity", "word", "score", "start", "end", "index"]},
  spans: {each: span, reads: ["answer", "score", "start", "end"]},
  words: {each: filled, reads: ["token_str", "sequence", "score", "token"]},
  classes: {each: classes, reads: ["label", "score"]},
  transcripts: {each: transcript, reads: ["text"]},
  lines: {each: line, reads: ["text", "score"]},
};
