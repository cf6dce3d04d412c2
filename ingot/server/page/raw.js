// A form for the raw inputs of a model with steps: texts, pairs of texts, pictures, sounds and other files.
import {make} from "/ui/draw.js";
import {pad} from "/ui/pad.js";
import {drawn} from "/ui/answers.js";
import {numpyType} from "/ui/tensors.js";

const SIDE = 56; // pixels of a drawing
const SHOWN = 320; // pixels of the longest side of a picture that is shown

export function rawForm({properties}) {
  const specs = listed(properties.raw_inputs, true).concat(listed(properties.raw_optional_inputs, false));
  const files = JSON.parse(properties.raw_files ?? "{}"), options = JSON.parse(properties.raw_options ?? "{}");
  const outputs = listed(properties.raw_outputs, true), items = [], place = make("div");
  const choices = specs.filter(({name}) => name in options).map((spec) => choice(spec, options[spec.name]));
  const columns = specs.filter(({name}) => !(name in options));
  const add = (first) => {
    const fields = columns.map((spec) => (spec.name in files ? file(spec, files[spec.name], add) : text(spec)));
    const item = {fields, element: make("fieldset", {class: "item"}, ...fields.map((field) => field.element))};
    const less = make("button", {type: "button", class: "plain"}, "remove");
    less.addEventListener("click", () => { items.splice(items.indexOf(item), 1); item.element.remove(); number(); });
    item.element.append(less);
    items.push(item);
    place.append(item.element);
    number();
    if (first) fields.find((field) => field.take)?.take(first);
  };
  const number = () => items.forEach(({fields, element}, index) => {
    fields.forEach((field) => field.called(items.length > 1 ? ` ${index + 1}` : ""));
    element.lastChild.hidden = items.length === 1;
  });
  const more = make("button", {type: "button", class: "plain"}, "add another");
  more.addEventListener("click", () => add());
  for (let count = properties.task === "sentence-similarity" ? 2 : 1; count; count--) add();
  const tensors = () => [...columns.map((spec, index) => column(spec, items.map(({fields}) => fields[index]))), ...choices.map((each) => each.tensor())].filter(Boolean);
  return {
    element: make("div", {}, place, ...(columns.length ? [make("p", {}, more)] : []), ...choices.map((each) => each.element)),
    request: () => encoded(tensors(), outputs),
    fits: (other) => ["raw_inputs", "raw_optional_inputs"].every((name) => other.properties?.[name] === properties[name]),
    curl: (url) => command(url, tensors()),
    python: () => program(tensors()),
    read: decoded,
    draw: (content, other) => drawn(content.outputs, tensors(), other.properties),
  };
}

const DATATYPES = {float: "FP", bfloat: "BF", int: "INT", uint: "UINT"};

// Tensors in the form of `ingot export --input`: name:float32[batch,3].
function listed(text, needed) {
  return (text ? text.split("; ") : []).map((each) => {
    const [, name, type, bits] = /^"?(.*?)"?:([a-z]+)(\d*)\[/.exec(each);
    const bytes = type === "string";
    return {name, bytes, datatype: bytes ? "BYTES" : bits ? DATATYPES[type] + bits : type.toUpperCase(), needed};
  });
}

function text(spec) {
  const box = make("textarea", {rows: 2}), label = make("span", {}, spec.name);
  return {
    element: make("label", {class: "field"}, label, spec.needed ? "" : make("small", {}, " optional"), box),
    called: (suffix) => { label.textContent = spec.name + suffix; },
    value: () => (spec.needed || box.value ? {text: box.value} : null),
  };
}

// One value for all items: a choice, or a box if any value is accepted.
function choice(spec, values) {
  const empty = spec.needed ? "" : "the model's default";
  const field = values.length ? make("select", {}, make("option", {value: ""}, empty), ...values.map((value) => make("option", {value}, value)))
    : make("input", {size: 20, placeholder: empty, ...(spec.bytes ? {} : {inputmode: "decimal"})});
  return {
    element: make("p", {}, make("label", {}, `${spec.name} `, field)),
    tensor: () => (field.value ? {...spec, values: [{text: field.value}]} : null),
  };
}

// A file that is chosen, dropped or, if it is a picture, drawn. Further files become further items.
function file(spec, accept, add) {
  const input = make("input", {type: "file", multiple: "", ...(accept ? {accept} : {})}), label = make("span", {}, spec.name);
  const shown = make("div"), picture = accept === "image/*";
  const element = make("div", {class: "field drop"}, make("label", {}, label, " ", input), make("small", {}, " or drop it here"), shown);
  let value = null;
  const take = async (chosen) => {
    value = {name: chosen.name, bytes: new Uint8Array(await chosen.arrayBuffer())};
    if (picture) value.bitmap = await createImageBitmap(chosen).catch(() => null);
    shown.replaceChildren(value.bitmap ? preview(value) : make("p", {class: "soft"}, `${chosen.name}, ${Math.ceil(chosen.size / 1024)} KiB`));
  };
  const all = (chosen) => [...chosen].forEach((each, index) => (index ? add(each) : take(each)));
  input.addEventListener("change", () => all(input.files));
  element.addEventListener("dragover", (event) => event.preventDefault());
  element.addEventListener("drop", (event) => { event.preventDefault(); all(event.dataTransfer.files); });
  if (picture) {
    const draw = make("button", {type: "button", class: "plain"}, "draw it");
    draw.addEventListener("click", () => {
      input.value = "";
      shown.replaceChildren(pad(spec.name, [SIDE, SIDE], (pixels) => { value = png(pixels); }));
    });
    shown.before(" ", draw);
  }
  return {
    element, take,
    called: (suffix) => { label.textContent = spec.name + suffix; },
    value: () => {
      if (!value && spec.needed) throw new Error(`${label.textContent} has no file. Choose one${picture ? ", or draw it" : ""}.`);
      return value;
    },
  };
}

function preview({bitmap, name}) {
  const scale = Math.min(1, SHOWN / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", {class: "picture", width: Math.max(1, bitmap.width * scale), height: Math.max(1, bitmap.height * scale), role: "img", "aria-label": name});
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

// A drawing as a file: white ink on black.
function png(pixels) {
  const bitmap = make("canvas", {width: SIDE, height: SIDE}), context = bitmap.getContext("2d"), image = context.createImageData(SIDE, SIDE);
  pixels.forEach((value, index) => image.data.set([value * 255, value * 255, value * 255, 255], 4 * index));
  context.putImageData(image, 0, 0);
  return {name: "", bitmap, bytes: Uint8Array.from(atob(bitmap.toDataURL("image/png").split(",")[1]), (each) => each.charCodeAt(0))};
}

// The values of one input; null of an optional one that no item has.
function column(spec, fields) {
  const values = fields.map((field) => field.value());
  if (values.every((value) => value === null)) return null;
  return {...spec, values: values.map((value) => value ?? {text: ""})};
}

const UTF8 = new TextEncoder();
const plain = ({bytes, values}) => values.map(({text}) => (bytes ? text : Number(text)));
const whole = ({values}) => values.some((value) => value.bytes); // files

// Files as binary data, which are not larger than on disk; of the outputs, bytes may be files.
function encoded(tensors, outputs) {
  const blobs = [], inputs = tensors.map((tensor) => {
    const {name, datatype, values} = tensor, entry = {name, datatype, shape: [values.length]};
    if (!whole(tensor)) return {...entry, data: plain(tensor)};
    const parts = values.flatMap(({bytes, text}) => framed(bytes ?? UTF8.encode(text)));
    blobs.push(...parts);
    return {...entry, parameters: {binary_data_size: parts.reduce((sum, part) => sum + part.byteLength, 0)}};
  });
  const wanted = outputs.map(({name, bytes}) => ({name, parameters: {binary_data: bytes}}));
  const header = UTF8.encode(JSON.stringify({inputs, outputs: wanted}));
  return {body: new Blob([header, ...blobs]), headers: {"Inference-Header-Content-Length": String(header.length)}};
}

// An element of BYTES: its length in 4 bytes, little-endian, and its content.
function framed(bytes) {
  const length = new DataView(new ArrayBuffer(4));
  length.setUint32(0, bytes.length, true);
  return [length.buffer, bytes];
}

async function decoded(answer) {
  const body = await answer.arrayBuffer(), size = Number(answer.headers.get("Inference-Header-Content-Length") ?? body.byteLength);
  const content = JSON.parse(new TextDecoder().decode(body.slice(0, size)));
  let at = size;
  for (const output of content.outputs) {
    const length = output.parameters?.binary_data_size;
    if (length === undefined) continue;
    output.data = elements(body, at, at + length);
    at += length;
  }
  return content;
}

function elements(body, at, end) {
  const view = new DataView(body), found = [];
  while (at < end) {
    const size = view.getUint32(at, true);
    found.push(new Uint8Array(body, at + 4, size));
    at += 4 + size;
  }
  return found;
}

const base64 = (bytes) => btoa(Array.from(bytes, (each) => String.fromCharCode(each)).join(""));
const FILE = "\0file\0"; // where the content of a file goes
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// Files in base64, as JSON has no bytes; printf is part of the shell, and takes arguments of any length.
function command(url, tensors) {
  const inserted = [], inputs = tensors.map((tensor) => {
    const {name, datatype, values} = tensor, data = values.map((value) => {
      if (value.bytes && value.name) inserted.push(`"$(base64 < ${quoted(value.name)} | tr -d '\\n')"`);
      return value.bytes ? (value.name ? FILE : base64(value.bytes)) : value.text;
    });
    return {name, datatype, shape: [values.length], data: whole(tensor) ? data : plain(tensor)};
  });
  const json = JSON.stringify({inputs}), sent = `curl -s '${url}' -H 'Content-Type: application/json' -d`;
  if (!inserted.length) return `${sent} ${quoted(json)}`;
  const format = json.split(JSON.stringify(FILE).slice(1, -1)).map((part) => part.replaceAll("\\", "\\\\").replaceAll("%", "%%")).join("%s");
  return `printf ${quoted(format)} ${inserted.join(" ")} | ${sent} @-`;
}

// The inputs as entries of a dictionary in Python, and what is imported for them.
function program(tensors) {
  const read = (value) => (value.name ? `Path(${JSON.stringify(value.name)}).read_bytes()`
    : value.bytes ? `base64.b64decode("${base64(value.bytes)}")` : JSON.stringify(value.text));
  const inputs = tensors.map(({name, bytes, datatype, values}) =>
    `    ${JSON.stringify(name)}: np.array([${values.map(bytes ? read : ({text}) => Number(text)).join(", ")}], ${numpyType(datatype)}),`);
  const imports = [["base64.", "import base64"], ["Path(", "from pathlib import Path"]];
  const used = imports.filter(([part]) => inputs.some((line) => line.includes(part))).map(([, line]) => line);
  return {imports: used.length ? [...used, ""] : [], inputs};
}
