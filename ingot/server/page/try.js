// The form to ask a model: a drawing for small images, JSON, or a .npy file for each input.
import {get} from "/ui/page.js";
import {make, time} from "/ui/draw.js";

let inputs = [], labels = [];
const KINDS = {f2: "FP16", f4: "FP32", f8: "FP64", i1: "INT8", i2: "INT16", i4: "INT32", i8: "INT64", u1: "UINT8", u2: "UINT16",
  u4: "UINT32", u8: "UINT64", b1: "BOOL"};
const LARGEST = 64; // pixels of a side that can be drawn
const MOST_SCORES = 64, BEST = 10; // of more values than this with names of classes, the largest are shown

export function form(parent, metadata) {
  labels = metadata.labels ?? [];
  inputs = metadata.inputs.map((spec) => field(spec, metadata.properties ?? {}));
  parent.replaceChildren(...inputs.map((input) => input.element));
}

// A tensor of one image in grey, as [height, width]; null if it is something else.
function image({datatype, shape}) {
  const sides = shape.filter((size, index) => size > 1 || (size === -1 && index > 0));
  if (!["FP32", "UINT8", "FP16", "FP64"].includes(datatype) || shape.length < 3 || sides.length !== 2) return null;
  return sides.every((size) => size >= 6 && size <= LARGEST) ? sides : null;
}

// How a picture becomes a tensor: its height and width (-1 for those of the picture), channels, and whether they come last.
function layout({datatype, shape}) {
  if (!["FP32", "UINT8", "FP16", "FP64"].includes(datatype) || ![3, 4].includes(shape.length)) return null;
  const [first, second, third] = shape.slice(-3);
  const last = third === 3 || third === 1, channels = last ? third : first;
  const [height, width] = last ? [first, second] : [second, third];
  return (channels === 3 || channels === 1) && [height, width].every((side) => side === -1 || side >= 6) ? {height, width, channels, last} : null;
}

async function pixels(file, {datatype}, {height, width, channels, last}) {
  const picture = await createImageBitmap(file).catch(() => { throw new Error("This is not a picture that the browser can show."); });
  const scale = Math.min(1, 1024 / Math.max(picture.width, picture.height));
  const rows = height === -1 ? Math.round(picture.height * scale) : height, columns = width === -1 ? Math.round(picture.width * scale) : width;
  const canvas = make("canvas", {width: columns, height: rows, role: "img", "aria-label": file.name}), context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, columns, rows);
  const found = context.getImageData(0, 0, columns, rows).data, size = rows * columns, data = Array(size * channels);
  for (let place = 0; place < size; place++) {
    const colours = [...found.subarray(4 * place, 4 * place + 3)];
    const values = channels === 3 ? colours : [0.299 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]];
    values.forEach((value, channel) => {
      data[last ? place * channels + channel : channel * size + place] = datatype === "UINT8" ? Math.round(value) : Number((value / 255).toFixed(4));
    });
  }
  return {canvas, data, shape: last ? [1, rows, columns, channels] : [1, channels, rows, columns]};
}

function field(spec, properties) {
  const shape = spec.shape.map((size) => (size === -1 ? 1 : size));
  const size = shape.reduce((product, side) => product * side, 1);
  const legend = make("legend", {}, `${spec.name} `, make("small", {}, `${spec.datatype} [${spec.shape.join(", ")}]`));
  const text = make("textarea", {"aria-label": `${spec.name} as JSON`, spellcheck: "false"});
  const empty = spec.datatype === "BYTES" ? "" : spec.datatype === "BOOL" ? false : 0;
  text.value = JSON.stringify(Array(Math.min(size, 4096)).fill(empty));
  const file = make("input", {type: "file", accept: ".npy", "aria-label": `${spec.name} from a .npy file`});
  let loaded = null;
  file.addEventListener("change", async () => {
    try {
      loaded = file.files.length ? read(await file.files[0].arrayBuffer()) : null;
      if (loaded) text.value = JSON.stringify(loaded.data);
      file.setCustomValidity("");
    } catch (error) {
      loaded = null;
      file.setCustomValidity(error.message);
      file.reportValidity();
    }
  });
  text.addEventListener("input", () => { loaded = null; });
  const sides = image(spec), known = sides ? null : layout(spec), shown = make("div");
  const element = make("fieldset", {}, legend);
  if (sides) element.append(drawing(spec, sides, (data) => { loaded = null; text.value = JSON.stringify(data); }));
  if (known) {
    const photo = make("input", {type: "file", accept: "image/*", "aria-label": `${spec.name} from a picture`});
    photo.addEventListener("change", async () => {
      try {
        const found = photo.files.length ? await pixels(photo.files[0], spec, known) : null;
        if (!found) return;
        loaded = {...found, shape: found.shape.slice(-spec.shape.length)};
        text.value = JSON.stringify(found.data);
        shown.replaceChildren(found.canvas);
        photo.setCustomValidity("");
      } catch (error) {
        photo.setCustomValidity(error.message);
        photo.reportValidity();
      }
    });
    const range = spec.datatype === "UINT8" ? "0 to 255" : "0 to 1";
    element.append(make("p", {}, make("label", {}, "a picture ", photo)), shown,
      make("p", {class: "soft"}, `Its pixels become values from ${range}. For a model that expects others, send a .npy file.`));
  }
  element.append(sides || known || size > 256 ? make("details", {}, make("summary", {}, "values"), text) : text, make("p", {}, make("label", {class: "soft"}, "or a .npy file ", file)));
  return {element, tensor() {
    const data = JSON.parse(text.value), measured = loaded?.shape ?? dims(data);
    const shape = measured.length === spec.shape.length ? measured : fitted(spec.shape, count(data));
    return {name: spec.name, datatype: spec.datatype, shape, data};
  }};
}

const dims = (data) => (Array.isArray(data) ? [data.length, ...(Array.isArray(data[0]) ? dims(data[0]) : [])] : []);
const count = (data) => (Array.isArray(data) ? data.reduce((sum, each) => sum + count(each), 0) : 1);

// The shape of flat data: the first free dimension takes what the others leave.
function fitted(shape, size) {
  const fixed = shape.reduce((product, side) => (side === -1 ? product : product * side), 1);
  let free = true;
  return shape.map((side) => {
    if (side !== -1) return side;
    const found = free ? Math.max(1, Math.floor(size / fixed)) : 1;
    free = false;
    return found;
  });
}

function drawing(spec, [height, width], changed) {
  const most = spec.datatype === "UINT8" ? 255 : 1, pixels = new Float32Array(height * width);
  const canvas = make("canvas", {width, height, tabindex: 0, role: "img",
    "aria-label": `draw ${spec.name}: with a pointer, or with the arrow keys and the space bar`});
  const context = canvas.getContext("2d"), cursor = {row: height >> 1, column: width >> 1, shown: false};
  const paint = () => {
    const shown = context.createImageData(width, height);
    pixels.forEach((value, index) => shown.data.set([value * 255, value * 255, value * 255, 255], 4 * index));
    if (cursor.shown) shown.data.set([90, 130, 255, 255], 4 * (cursor.row * width + cursor.column));
    context.putImageData(shown, 0, 0);
    changed([...pixels].map((value) => Number((value * most).toFixed(most === 1 ? 4 : 0))));
  };
  // Ink falls off with the distance, as a pen's does on a scan.
  const ink = (x, y) => {
    const reach = Math.max(0.9, width / 14);
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; column++) {
        const distance = Math.hypot(column + 0.5 - x, row + 0.5 - y) / reach, index = row * width + column;
        pixels[index] = Math.min(1, Math.max(pixels[index], 1.15 - distance));
      }
    }
    paint();
  };
  const move = (event) => {
    if (!event.buttons) return;
    const box = canvas.getBoundingClientRect();
    ink((event.clientX - box.left) * width / box.width, (event.clientY - box.top) * height / box.height);
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); move(event); });
  canvas.addEventListener("pointermove", move);
  const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in steps) && event.key !== " ") return;
    event.preventDefault();
    const [down, right] = steps[event.key] ?? [0, 0];
    cursor.row = (cursor.row + down + height) % height;
    cursor.column = (cursor.column + right + width) % width;
    if (event.key === " ") ink(cursor.column + 0.5, cursor.row + 0.5); else paint();
  });
  for (const [event, shown] of [["focus", true], ["blur", false]]) {
    canvas.addEventListener(event, () => { cursor.shown = shown && canvas.matches(":focus-visible"); paint(); });
  }
  const clear = make("button", {class: "plain", type: "button"}, "clear");
  clear.addEventListener("click", () => { pixels.fill(0); paint(); });
  paint();
  return make("div", {}, canvas, clear);
}

// The .npy format: a magic number, a version, the length of a header in Python's syntax, the header, the values.
function read(buffer) {
  const view = new DataView(buffer), text = new TextDecoder("latin1");
  if (buffer.byteLength < 12 || text.decode(buffer.slice(1, 6)) !== "NUMPY") throw new Error("This is not a .npy file.");
  const long = view.getUint8(6) > 1, start = long ? 12 : 10, size = long ? view.getUint32(8, true) : view.getUint16(8, true);
  const header = text.decode(buffer.slice(start, start + size));
  const kind = /'descr': '[<|]([fiub]\d)'/.exec(header)?.[1], shape = /'shape': \(([^)]*)\)/.exec(header)?.[1];
  if (!KINDS[kind] || shape === undefined) throw new Error("Only numbers and truth values in little-endian order can be read.");
  if (/'fortran_order': True/.test(header)) throw new Error("Write the array in C order: numpy.ascontiguousarray.");
  if (kind === "f2") throw new Error("Write FP16 as float32; the server rounds it.");
  const Values = {f4: Float32Array, f8: Float64Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, i8: BigInt64Array, u1: Uint8Array,
    u2: Uint16Array, u4: Uint32Array, u8: BigUint64Array, b1: Uint8Array}[kind];
  const values = [...new Values(buffer.slice(start + size))];
  const data = kind === "b1" ? values.map(Boolean) : values.map(Number);
  return {data, shape: shape.split(",").map((each) => each.trim()).filter(Boolean).map(Number)};
}

// The request of the form as a command, and as a program.
export function copied(kind, [name, version]) {
  const body = {inputs: inputs.map((input) => input.tensor())}, base = location.origin;
  if (kind === "curl") {
    const path = `/v2/models/${encodeURIComponent(name)}/versions/${encodeURIComponent(version)}/infer`;
    return `curl -s '${base}${path}' -H 'Content-Type: application/json' -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  }
  const kinds = {FP: "float", INT: "int", UINT: "uint"}, literal = (value) => JSON.stringify(value);
  const arrays = body.inputs.map(({name: input, datatype, shape, data}) => {
    const [, kind, bits] = /^(FP|INT|UINT)(\d+)$/.exec(datatype) ?? [], type = kind ? `np.${kinds[kind]}${bits}` : datatype === "BOOL" ? "bool" : "object";
    const values = JSON.stringify(data).replaceAll("true", "True").replaceAll("false", "False");
    return `    ${literal(input)}: np.array(${datatype === "BYTES" ? JSON.stringify(data) : values}, ${type}).reshape(${JSON.stringify(shape)}),`;
  });
  return ["import ingot", "import numpy as np", "", `inputs = {`, ...arrays, "}", `with ingot.Client(${literal(base)}) as client:`,
    `    print(client.infer(${literal(name)}, inputs, version=${literal(version)}))`].join("\n");
}

export async function ask(parent, models) {
  let body;
  try {
    body = JSON.stringify({inputs: inputs.map((input) => input.tensor())});
  } catch (error) {
    parent.replaceChildren(make("p", {class: "bad", role: "alert"}, `The values are not JSON: ${error.message}`));
    return;
  }
  const answers = [];
  for (const [index, [name, version]] of models.entries()) {
    const path = `/v2/models/${encodeURIComponent(name)}/versions/${encodeURIComponent(version)}`;
    const other = index ? await fitting(path) : {labels};
    if (!other) continue;
    const began = performance.now();
    const answer = await get(`${path}/infer`, {method: "POST", body, headers: {"Content-Type": "application/json"}, whole: true})
      .catch((error) => ({ok: false, error}));
    const content = answer.error ? {error: answer.error.message} : await answer.json();
    answers.push(card(`${name}:${version}`, content, (performance.now() - began) / 1000, other.labels ?? []));
  }
  parent.replaceChildren(make("div", {class: "grid"}, ...answers));
}

// The metadata of a model that has the same inputs as the form; null of another.
async function fitting(path) {
  const metadata = await get(path).then((answer) => answer.json()).catch(() => null), own = inputs.map((input) => input.tensor());
  const same = metadata?.inputs.length === own.length && metadata.inputs.every((spec, index) => spec.name === own[index].name
    && spec.datatype === own[index].datatype && spec.shape.length === own[index].shape.length);
  return same ? metadata : null;
}

function card(title, content, seconds, names) {
  const parts = content.error ? [make("p", {class: "bad", role: "alert"}, content.error)] : content.outputs.map((each) => output(each, names));
  return make("section", {class: "card answer"}, make("h3", {}, `${title} `, make("small", {}, `in ${time(seconds)}, network included`)), ...parts);
}

function output({name, datatype, shape, data}, names) {
  const head = make("p", {}, `${name} `, make("small", {}, `${datatype} [${shape.join(", ")}]`));
  const numeric = /^(FP|BF|INT|UINT)/.test(datatype), row = shape.at(-1), named = names.length === row;
  if (!numeric || data.length < 2 || row < 2 || (row > MOST_SCORES && !named) || data.length !== row) {
    const text = data.length > 256 ? `${JSON.stringify(data.slice(0, 256)).slice(0, -1)}, ... ${data.length} values` : JSON.stringify(data);
    return make("div", {}, head, make("code", {}, text));
  }
  const low = Math.min(...data), high = Math.max(...data), top = data.indexOf(high), list = make("div", {class: "scores"});
  const called = (index) => (named ? names[index] : String(index));
  const shown = row > MOST_SCORES ? [...data.keys()].sort((one, other) => data[other] - data[one]).slice(0, BEST) : [...data.keys()];
  shown.forEach((index) => {
    const value = data[index], bar = make("b");
    bar.style.width = `${high > low ? 100 * (value - low) / (high - low) : 0}%`;
    list.append(make("span", {}, called(index)), make("div", index === top ? {class: "top"} : {}, bar), make("span", {}, value.toPrecision(3)));
  });
  return make("div", {}, head, make("div", {class: "big", "data-top": top}, called(top)),
    make("p", {class: "soft"}, `the ${named ? "class" : "index"} of the largest value`), list);
}
